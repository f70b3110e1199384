# Thin targets; continuous integration runs the same ones. Python 3.11+ and make are all that is needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt

.PHONY: env demo test lint check bench clean
env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test]'
	touch $@

test: env lint
	$(BIN)/python -m pytest

lint: env
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist
