# `make run` runs the main job, `make test` passes the tests; each installs what it needs, once.
# Only relative paths, so that the checkout may lie in a folder with a space in its name.

PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check --quiet
LCPLAN := .venv/bin/python -m lcplan

.DEFAULT_GOAL := help
.PHONY: help run services test lint format check bench pages pictures docs clean

help: ## Show this help
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed for training; set PYTHON=...")'
	$(PYTHON) -m venv .venv

# torch first and by its exact version: unpinned it is several GB of CUDA libraries
.venv/train.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[train]'
	touch .venv/train.stamp

.venv/test.stamp: .venv/train.stamp
	$(PIP) install -c constraints.txt -e '.[train,quantize,deepspeed,test]'
	touch .venv/test.stamp

.venv/docs.stamp: .venv/bin/python pyproject.toml
	$(PIP) install -e '.[docs]'
	touch .venv/docs.stamp

run: .venv/train.stamp ## Estimate and recommend for the 1M-token preset, then train a tiny model for real
	$(LCPLAN) estimate --preset qwen3-8b-1m
	$(LCPLAN) recommend Qwen/Qwen3-8B --max-length 1048576 --gpu h100-80gb --num-gpus 8
	rm -rf runs/smoke
	$(LCPLAN) run --preset smoke --output-dir runs/smoke

services: ## Install the Debian packages that some tests use, where that can be done
	tools/test_services.sh

test: .venv/test.stamp services lint ## Lint, types, tests, and the formulas against every measured row
	.venv/bin/python -m pytest -n 2 --cov=lcplan.estimators --cov=lcplan.ledger --cov-branch --cov-fail-under=100 --cov-report=
	$(LCPLAN) check --tolerance 1%

lint: .venv/test.stamp ## Lint and types
	.venv/bin/python -m ruff check lcplan tests benchmarks tools
	.venv/bin/python -m ruff format --check lcplan tests benchmarks tools
	.venv/bin/python -m mypy

format: .venv/test.stamp ## Format the code
	.venv/bin/python -m ruff format lcplan tests benchmarks tools

check: .venv/train.stamp ## Hold the formulas against every measured row
	$(LCPLAN) check

bench: .venv/train.stamp ## Speed of the command line and of the estimator, as ratios in one run
	.venv/bin/python benchmarks/speed.py

pages: .venv/test.stamp ## Write the pages of docs/ that are made from code and data
	.venv/bin/python -m tools.pages
	.venv/bin/python tools/trap_table.py

pictures: .venv/test.stamp ## Draw the pictures of docs/pictures
	.venv/bin/python -m tools.pictures

docs: .venv/docs.stamp ## Build the documents into site/
	.venv/bin/python -m mkdocs build --strict --quiet

clean: ## Remove the environment and runs
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache
