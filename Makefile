# Everything a newcomer needs: `make quickstart` and `make test`. Both set the project up first.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Waiting threads sleep instead of spinning: much faster where the cores are shared with other work.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup quickstart test test-gpu soak chromium docs package lock clean

setup: $(READY)

$(READY): $(wildcard requirements*.lock) pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "saobp needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	@echo "setting up $(VENV): a few minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-compile --no-deps --require-hashes -r requirements-cpu.lock >/dev/null 2>&1 || true  # where pip finds it
	@$(PIP) install --no-compile --no-deps --require-hashes -r requirements.lock  # complete; lm_eval asks for more, for metrics not called here
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib src || true  # pip takes one core; some templates are not Python
	@$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install --no-deps --require-hashes -r requirements-cuda.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $(READY)

quickstart: $(READY)
	@$(BIN)/saobp quickstart

test: $(READY) chromium
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2
	$(BIN)/lint-imports --no-logo
	$(BIN)/oxlint --deny-warnings src/saobp/report/page
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# The tests that use a GPU where there is one; processes share it, each with tests that stand together, which share kernels. The last
# line is the one to record; GPU_OUTCOMES has a line about each test as it ends, for a run that is stopped. GPU_PYTHON is any Python
# with the package's dependencies, pytest, pytest-xdist and hypothesis.
GPU_PYTHON ?= $(BIN)/python
GPU_PROCESSES ?= 14
GPU_OUTCOMES ?= runs/gpu-outcomes.txt
GPU_TESTS := $(filter-out %test_compilation.py %test_quick_interpreter.py,$(wildcard tests/kernels/test_*.py)) \
  tests/training/test_graphed_step.py tests/tasks/test_captured_finetuning.py tests/training/test_pretraining.py tests/metrics/test_refined_products.py \
  tests/operation/test_row_gradients.py::test_compiled_gradients_are_the_same_every_time tests/portable/test_hub_kernel.py
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	@nvidia-cuda-mps-control -d 2>/dev/null && mine=yes; \
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -vv -n $(GPU_PROCESSES) --dist worksteal --tb=short -rfE \
	  --durations=30 -o faulthandler_timeout=180 -p outcomes --outcomes $(GPU_OUTCOMES) $(GPU_TESTS); \
	found=$$?; if test "$$mine" = yes; then echo quit | nvidia-cuda-mps-control; fi; exit $$found

# Random kills, damaged files, calls and generations; one table at the end. About an hour on one core.
SOAK_TABLE ?= runs/soak.md
soak: $(READY)
	@mkdir -p $(dir $(SOAK_TABLE))
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/soak -p no:cacheprovider --show-capture=no --tb=line --soak-seed 1 \
	  --kills 1000 --files 1000 --calls 10000 --generations 600 --soak-table $(SOAK_TABLE)

# The page is tested in Debian's Chromium. Without it, and without the means to install it, those tests are skipped.
chromium:
	@if ! command -v chromium >/dev/null 2>&1 && test "$$(id -u)" = 0 && command -v apt-get >/dev/null 2>&1; then \
	  echo "installing chromium, for the tests of the page"; \
	  { timeout 120 apt-get -qq update; timeout 240 apt-get -qq install -y --no-install-recommends chromium; } \
	    >/dev/null 2>&1 || true; \
	fi
	@command -v chromium >/dev/null 2>&1 || \
	  echo "there is no chromium and it could not be installed: tests that open the page in a browser are skipped"

# The documentation as a site in site/; any warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html, or serve it: $(BIN)/python -m http.server --directory site"

# Wheel and source package in dist/, tried in an empty environment, for which pip needs the network.
package: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tools/try_wheel.py dist/*.whl

lock: $(READY)
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
