"""Plug-in tests run on one thread: the models are tiny, and threads would only wait for each other."""

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="session")
def _quiet_single_thread():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def pytest_configure(config):
    """Marks that Transformers' own tests carry."""
    marks = "accelerate_tests flash_attn_test flash_attn_3_test flash_attn_4_test generate torch_compile_test"
    for mark in f"{marks} torch_export_test".split():
        config.addinivalue_line("markers", f"{mark}: from Transformers")
