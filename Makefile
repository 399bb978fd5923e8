PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin
JOBS ?= logical
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo dev check test test-all soak bench fmt lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/ready ## make the virtual environment with the locked dependencies

demo: setup ## install, start everything, play a conversation through it
	$(RUN)/turnstream demo $(ARGS)

dev: setup ## start everything in one process, data in .turnstream
	$(RUN)/turnstream dev $(ARGS)

check: setup ## style, types, floors of the architecture
	$(RUN)/ruff check && $(RUN)/ruff format --check
	$(RUN)/pyright --pythonpath $(RUN)/python
	$(RUN)/lint-imports

test: setup ## the tests, without the slow ones; JOBS=<n> at once, else one for each processor
	$(RUN)/python -m pytest -m 'not slow' -n $(JOBS) --dist loadfile $(ARGS)

test-all: setup ## every test
	$(RUN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

soak: setup ## everything at once, at random, for FOR seconds (600)
	SOAK=$(or $(FOR),600) $(RUN)/python -m pytest tests/system/test_race.py $(ARGS)

bench: setup ## measure; BENCH_JSON=<file> keeps the figures
	$(RUN)/python -m tests.bench $(ARGS)

fmt: setup ## format and sort imports
	$(RUN)/ruff check --fix && $(RUN)/ruff format

lock: setup ## resolve the dependencies anew
	$(RUN)/uv pip compile --quiet --upgrade --universal --generate-hashes --all-extras --group dev --no-header \
		pyproject.toml --output-file requirements.lock

clean: ## remove what setup made
	rm -rf $(VENV)

$(VENV)/ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Turnstream needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check uv
	$(RUN)/uv pip sync --quiet --python $(RUN)/python requirements.lock
	$(RUN)/uv pip install --quiet --python $(RUN)/python --no-deps --no-build-isolation --editable .
	@touch $@
