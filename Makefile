# Holdfast: `make help` lists what can be made. PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
BENCH_ARGS ?=
CAMPAIGN_ARGS ?=

# pip says only what went wrong, and asks nothing.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt
STAMPS := $(VENV)/.stamps

.DEFAULT_GOAL := help
.PHONY: help quickstart test slow lint format types docs docs-check site serve-site notebooks package picture bench campaign clean

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { \
		echo "Holdfast needs Python 3.11 or newer with venv, and '$(PYTHON)' is not one. Name another:"; \
		echo "    make $(or $(MAKECMDGOALS),quickstart) PYTHON=python3.12"; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: pyproject.toml constraints.txt | $(STAMPS)/venv
	@echo "Installing Holdfast (a few minutes the first time) ..."
	@$(PIP_INSTALL) -e .
	@touch $@

$(STAMPS)/test: pyproject.toml constraints.txt | $(STAMPS)/venv
	@echo "Installing Holdfast and what its tests need ..."
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(STAMPS)/core

# torch by itself and first: then nothing else asks the registry for a build with gigabytes of CUDA.
$(STAMPS)/extras: pyproject.toml constraints.txt | $(STAMPS)/venv
	@echo "Installing Holdfast with its optional packages, for the tests that need them ..."
	@$(PIP_INSTALL) -e '.[test]'
	@$(PIP_INSTALL) torch==2.13.0 && $(PIP_INSTALL) -e '.[test,hf,harness,wandb,tensorboard,mlflow,trackio,slurm,docs,notebooks]' || \
		echo "some optional packages cannot be installed here; tests that need them skip"
	@$(PIP_INSTALL) -e '.[tpu]' || echo "libtpu cannot be installed here; tests that need it skip"
	@touch $@ $(STAMPS)/test $(STAMPS)/core

$(STAMPS)/dev: pyproject.toml constraints.txt | $(STAMPS)/venv
	@echo "Installing Holdfast and what its developers need ..."
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(STAMPS)/test $(STAMPS)/core

$(STAMPS)/site: pyproject.toml constraints.txt | $(STAMPS)/venv
	@echo "Installing Holdfast and what builds its documentation ..."
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $@ $(STAMPS)/core

$(STAMPS)/notebooks: pyproject.toml constraints.txt | $(STAMPS)/venv
	@echo "Installing Holdfast and what runs its notebooks ..."
	@$(PIP_INSTALL) -e '.[notebooks]'
	@touch $@ $(STAMPS)/core

$(STAMPS)/release: pyproject.toml constraints.txt | $(STAMPS)/venv
	@echo "Installing what builds and checks packages ..."
	@$(PIP_INSTALL) build twine
	@touch $@

quickstart: $(STAMPS)/core ## install into .venv, train with and without an anchor, compare; again: resumes
	@$(BIN)/holdfast quickstart

test: $(STAMPS)/test ## run the tests that need nothing but Python
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

slow: $(STAMPS)/extras ## run the long tests (kills, browser, tutorials) and those of optional packages
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow or extra' -rs $(PYTEST_ARGS)

lint: $(STAMPS)/dev ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/dev ## mend style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMPS)/dev ## check types
	$(BIN)/mypy

docs: $(STAMPS)/core ## write docs/configuration.md from the fields of all jobs
	$(BIN)/python tools/configuration_reference.py

docs-check: $(STAMPS)/core ## fail when docs/configuration.md or docs/leaderboard.md is not current
	$(BIN)/python tools/configuration_reference.py --check
	$(BIN)/python tools/leaderboard.py --check

site: $(STAMPS)/site ## build the documentation site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

serve-site: $(STAMPS)/site ## serve the documentation site on this machine, built again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

notebooks: $(STAMPS)/notebooks ## run the notebooks of examples/notebooks; pages of what they show go to build/notebooks
	$(BIN)/python tools/run_notebooks.py build/notebooks

package: $(STAMPS)/release ## build wheel and sdist into dist/ and try the wheel in an environment of its own
	$(BIN)/python tools/check_package.py

picture: $(STAMPS)/core ## make the README's picture of the report of RUN=…, or of a comparison of RUN='… …'; needs chromium
	$(BIN)/python tools/readme_picture.py $(RUN)

bench: $(STAMPS)/core ## measure speed and memory beside peers (half an hour); BENCH_ARGS='--quick' tries the harness
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

campaign: $(STAMPS)/core ## try thousands of faults (hours, goes on where it was); CAMPAIGN_ARGS='kills --minutes 5' tries some
	$(BIN)/python -m benchmarks.campaign $(CAMPAIGN_ARGS)

clean: ## remove the environment and everything that was made; runs stay
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
