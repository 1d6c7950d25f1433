PYTHON ?= python3
VENV ?= .venv
# threads that wait spin briefly, then sleep: endless spinning made a shared machine up to 100 times slower
export GOMP_SPINCOUNT ?= 10000

BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-slow lint format clean

demo: $(READY)  ## the whole path on the embedded default: target, data, features, head, decoding, export
	$(BIN)/python recipes/tiny/demo.py

test test-slow: export OMP_NUM_THREADS = 1  # models this small run faster on one thread

test: $(READY)  ## everything that is fast
	$(BIN)/python -m pytest

test-slow: $(READY)  ## what takes longer
	$(BIN)/python -m pytest -m "slow and not engine"

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and pinned, so that nothing else may pull another build of it
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
