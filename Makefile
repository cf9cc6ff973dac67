# Everything runs in .venv, made on first use from pinned requirements and kept until they change.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input

.PHONY: help plan test lint bench clean
.DELETE_ON_ERROR:

help:
	@echo 'make plan   install, then plan Llama-2-7B on an RTX A6000'
	@echo 'make test   linters, types, import direction and tests'
	@echo 'make lint   the same without the tests'
	@echo 'make bench  time kvsim itself'
	@echo 'make clean  remove .venv and everything built'
	@echo 'PYTHON=...  the interpreter to build .venv with: Python 3.11 or newer [$(PYTHON)]'

plan: .venv/runtime.stamp
	$(BIN)/kvsim plan --model llama2-7b --gpu a6000

test: lint
	$(BIN)/python -Im pytest -n 2

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/runtime.stamp
	@set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.venv/runtime.stamp: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvsim needs Python 3.11 or newer, and '$(PYTHON)' is not one;" \
	    "name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo 'making .venv (first run only)' >&2; $(PYTHON) -m venv --clear .venv; }
	$(PIP) install --requirement requirements.txt
	$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

.venv/test.stamp: .venv/runtime.stamp requirements-test.txt
	$(PIP) install --requirement requirements-test.txt
	@touch $@
