# make run    install what is needed and serve serve_config.yaml on 127.0.0.1:8000 (CONFIG=other.yaml)
# make test   install what is needed and check everything
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= serve_config.yaml
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: run test lint format bench clean

run: .venv/installed-run
	@$(BIN)/python -m serve_app run $(CONFIG)

test: lint
	$(BIN)/python -m pytest

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-test
	$(BIN)/python -m benchmarks.serve

clean:
	rm -rf .venv

.venv/bin/python:
	@echo "installing into .venv: a few minutes, about 2 GB"
	@$(PYTHON) -m venv .venv

.venv/installed-run: .venv/bin/python pyproject.toml constraints.txt
	@$(INSTALL) '.[demo]'
	@touch $@

.venv/installed-test: .venv/bin/python pyproject.toml constraints.txt
	@$(INSTALL) '.[demo,redis,test]'
	@touch $@ .venv/installed-run
