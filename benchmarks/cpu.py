"""The same as `saobp bench cpu`, from a checkout: python benchmarks/cpu.py --help"""

import typer

from saobp.commands.bench import cpu

if __name__ == "__main__":
    typer.run(cpu)
