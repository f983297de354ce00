# `make train` and `make test` are all that a fresh clone needs: each makes the virtual environment .venv, once.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
# More options for the job behind a target: make train ARGS="--algo ppo --seed 1", make test ARGS="tests/transport -x"
ARGS ?=
# Processes that run tests side by side, each whole files: most tests wait for processes to start. 0: in one process.
JOBS ?= 2

.PHONY: help train test check format bench clean

help:  ## Say what there is.
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(INSTALLED)  ## Train CartPole with 2 learners and 2 env runners: a live display, then a summary and a picture in runs/.
	$(BIN)/python -m lgroup.train --env CartPole-v1 --algo impala --num-learners 2 --num-env-runners 2 $(ARGS)

test: $(INSTALLED)  ## Run all tests.
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

check: $(INSTALLED)  ## Lint, formatting, types, and which package may import which.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p lgroup
	$(BIN)/mypy --strict tests/typing
	$(BIN)/python -m pytest -q tests/test_import_direction.py

format: $(INSTALLED)  ## Let ruff format the code and sort the imports.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## Measure lgroup against the bare loop (minutes; leave the machine alone meanwhile).
	$(BIN)/python -m tools.bench $(ARGS)

clean:  ## Remove the environment, build products and caches; runs/ stays.
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip and setuptools come first and the build is not isolated, so that the pins hold for building too.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lgroup's pinned environment needs Python 3.11 or newer: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) pip setuptools
	$(PIP) --no-build-isolation --editable '.[rl,train,dev]'
	touch $@
