"""``python -m saobp``, which also serves ``accelerate launch -m saobp``."""

from saobp.cli import app

app()
