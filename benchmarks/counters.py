"""The same as `saobp bench counters`, from a checkout: python benchmarks/counters.py --help"""

import typer

from saobp.commands.bench import counters

if __name__ == "__main__":
    typer.run(counters)
