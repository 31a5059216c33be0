"""The same as `saobp bench model`, from a checkout: python benchmarks/model.py --help"""

import typer

from saobp.commands.bench import model

if __name__ == "__main__":
    typer.run(model)
