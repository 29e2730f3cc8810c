# Everything a fresh clone needs: `make demo` and `make test` set up .venv first.

PYTHON ?= python3.10
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
EXP ?= configs.stdlib_lm.StdlibLm

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Start-up halves once the packages are byte-compiled, so that must not be switched off.
unexport PYTHONDONTWRITEBYTECODE
# One environment, whatever the caller has activated.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV UV_PROJECT_ENVIRONMENT
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# TensorFlow only reads data here: without this it prints about missing CUDA libraries.
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: help
help:  ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: env
env: $(VENV)/.ready  ## Set up .venv (needs python3.10 with venv and pip; about a minute).

# The stamp is written last, so a build that was interrupted is done again from the start. uv is
# ten times as fast as pip; it is told of pip's index, which is where a mirror is configured.
$(VENV)/.packages: requirements.lock
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import ensurepip, venv' || { \
	  echo 'pax-mpmd needs Python 3.10 with venv and pip, as $(PYTHON). Install it, or name it:' \
	    'make PYTHON=/path/to/python3.10 $(or $(MAKECMDGOALS),env)' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v == (3, 10) else \
	  "pax-mpmd needs Python 3.10 (Pax 1.4.0 has no wheels for another); $(PYTHON) is %d.%d. " \
	  "Name one: make PYTHON=/path/to/python3.10" % v)'
	@echo '[env] creating $(VENV) with $(PYTHON)'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@echo '[env] installing the packages of requirements.lock (2.3 GB on disk)'
	@$(BIN)/python -m pip install --quiet uv==$(UV_VERSION) || true
	@index="$${PIP_INDEX_URL:-$$($(BIN)/python -m pip config get global.index-url 2>/dev/null || true)}"; \
	if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$index}"; fi; \
	with_uv() { $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --compile-bytecode \
	  -r requirements.lock "$$@"; }; \
	with_uv || { echo '[env] again, with the certificates of the system'; with_uv --system-certs; } \
	  || { echo '[env] uv could not do it; now with pip, which takes some minutes'; \
	    $(BIN)/python -m pip install --quiet --no-deps -r requirements.lock; }
	@touch $@

# No build isolation: the build back end is in the lock, so nothing more is downloaded.
$(VENV)/.ready: $(VENV)/.packages pyproject.toml
	@echo '[env] installing pax-mpmd itself, editable'
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
	@echo '[env] ready: $(BIN)/pax-mpmd'

.PHONY: demo
demo: env  ## Train a language model on 4 pipeline stages (at most 4 minutes), then sum it up.
	@$(BIN)/python -m configs.demo --exp=$(EXP) $(DEMO_ARGS)

.PHONY: test
test: env  ## Run the unit tests, then the end-to-end tests.
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests $(PYTEST_ARGS)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest integration $(PYTEST_ARGS)

.PHONY: lint
lint: env  ## Run the linter.
	$(BIN)/ruff check .

.PHONY: bench
bench: env  ## Compare step times with Pax's own SPMD pipelining.
	JAX_PLATFORMS=cpu $(BIN)/python -m integration.bench_vs_spmd

.PHONY: lock
lock: env  ## Resolve pyproject.toml again into requirements.lock (UPGRADE=--upgrade for newer ones).
	$(BIN)/uv pip compile --quiet pyproject.toml --extra dev --group lock \
	  --python $(BIN)/python --no-annotate --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command 'make lock' $(UPGRADE) --output-file requirements.lock

.PHONY: clean
clean:  ## Remove .venv and caches; what was trained (runs/) stays.
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache *.egg-info
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
