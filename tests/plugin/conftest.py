"""Plug-in tests run on one thread: the models are tiny, and threads would only wait for each other."""

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="session")
def _quiet_single_thread():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
