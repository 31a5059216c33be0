"""Quieter logging: Transformers' progress bars and load reports would break ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import transformers


def quiet_transformers() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def only_errors() -> Iterator[None]:
    """Context in which the package logs errors only."""
    logger = logging.getLogger("saobp")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
