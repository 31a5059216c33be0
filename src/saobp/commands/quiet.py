"""Less talk from Transformers, whose progress bars and load reports would break ours."""

from __future__ import annotations

import transformers


def quiet_transformers() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
