"""Code of portable folders is copied to a folder of the tests' own before it is imported."""

import pytest
import torch
import transformers
from transformers import dynamic_module_utils


@pytest.fixture(autouse=True, scope="session")
def _own_modules(tmp_path_factory):
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    before = dynamic_module_utils.HF_MODULES_CACHE
    dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
    yield
    dynamic_module_utils.HF_MODULES_CACHE = before
