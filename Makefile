PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test lint docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/.train ## trigrid with its trainer, in .venv

demo: install ## train the tiny model on eight processes, cut three ways; needs no GPU
	$(BIN)/trigrid train examples/tiny-3d.toml

# Two at once, file by file: many wait, for a time limit or for processes that start.
test: $(VENV)/.test ## every test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/.test ## style and types
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/mypy src/trigrid

docs: $(VENV)/.docs ## the documents as a site, in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what these commands made, except .venv and runs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# The stamps make a second call quick: pip runs again only when pyproject.toml has changed.
$(VENV)/.train $(VENV)/.test $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --editable '.[$*]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'trigrid needs Python 3.11 or later, and "$(PYTHON)" is not: try  make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
