# `make demo` and `make test` are all a newcomer needs: both make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-slow test-gpu lint format clean

demo: $(VENV)/train
	$(BIN)/steelyard demo

test: $(VENV)/dev
	$(BIN)/python -m pytest

test-slow: $(VENV)/dev
	$(BIN)/python -m pytest -m slow

test-gpu: $(VENV)/dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each stamp says which extras .venv has; it is older than what it was made from when that changes.
$(VENV)/train: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("steelyard needs Python 3.11 or later; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/dev: $(VENV)/train
	$(PIP) --editable '.[train,dev]'
	touch $@

clean:
	rm -rf $(VENV) runs data build
