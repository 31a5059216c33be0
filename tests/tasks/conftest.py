"""Made-up tasks and tiny models, written once."""

from pathlib import Path

import pytest

from saobp.lab.synthetic_tasks import write_tasks
from saobp.testing.tiny_models import save_tiny_bert, save_tiny_gpt2


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt2(tmp_path_factory.mktemp("gpt2"), "high:0.5")
