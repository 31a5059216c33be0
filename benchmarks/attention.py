"""The same as `saobp bench attention`, from a checkout: python benchmarks/attention.py --help"""

import typer

from saobp.commands.bench import attention

if __name__ == "__main__":
    typer.run(attention)
