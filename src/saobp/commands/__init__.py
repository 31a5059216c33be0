"""Subcommands of ``saobp``, one per file."""
