# Everything a newcomer needs: `make quickstart` and `make test`. Both set the project up first.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Waiting threads sleep instead of spinning: much faster where the cores are shared with other work.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup quickstart test lock clean

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "saobp needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	@echo "setting up $(VENV): a few minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $(READY)

quickstart: $(READY)
	@$(BIN)/saobp quickstart

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

lock: $(READY)
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude saobp --exclude pip \
	  | sed -e 's/+cpu$$//' -e "s/^triton==.*/&; sys_platform == 'linux'/" > requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
