# Everything a fresh clone needs: `make demo` and `make test` set up .venv first. A second
# environment, .venv-latest, holds the newest JAX: the core runs on both, Pax in the first only.

PYTHON ?= python3.10
VENV := .venv
BIN := $(VENV)/bin
LATEST := .venv-latest
LATEST_LOCK := requirements-core-latest.lock
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
export LATEST_PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# TensorFlow only reads data here: without this it prints about missing CUDA libraries.
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: help
help:  ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: env
env: $(VENV)/.ready  ## Set up .venv (needs python3.10 with venv and pip; about a minute).

# $(call install,ENV,PYTHON,LOCK): a new environment with the packages of a lock file. uv is ten
# times as fast as pip; it is told of pip's index, which is where a mirror is configured.
define install
@rm -rf $(1)
@$(2) -m venv $(1)
@$(1)/bin/python -m pip install --quiet uv==$(UV_VERSION) || true
@index="$${PIP_INDEX_URL:-$$($(1)/bin/python -m pip config get global.index-url 2>/dev/null || true)}"; \
if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$index}"; fi; \
with_uv() { $(1)/bin/uv pip install --quiet --python $(1)/bin/python --no-deps \
  --compile-bytecode -r $(3) "$$@"; }; \
with_uv || { echo '[env] again, with the certificates of the system'; with_uv --system-certs; } \
  || { echo '[env] uv could not do it; now with pip, which takes some minutes'; \
    $(1)/bin/python -m pip install --quiet --no-deps -r $(3); }
endef

# No build isolation: the build back end is in the lock, so nothing more is downloaded.
define install_self
@$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
endef

# Stamps are written last, so a build that was interrupted is done again from the start.
$(VENV)/.packages: requirements.lock
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import ensurepip, venv' || { \
	  echo 'pax-mpmd needs Python 3.10 with venv and pip, as $(PYTHON). Install it, or name it:' \
	    'make PYTHON=/path/to/python3.10 $(or $(MAKECMDGOALS),env)' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v == (3, 10) else \
	  "pax-mpmd needs Python 3.10 (Pax 1.4.0 has no wheels for another); $(PYTHON) is %d.%d. " \
	  "Name one: make PYTHON=/path/to/python3.10" % v)'
	@echo '[env] creating $(VENV) with $(PYTHON)'
	@echo '[env] installing the packages of requirements.lock (2.3 GB on disk)'
	$(call install,$(VENV),$(PYTHON),requirements.lock)
	@touch $@

$(VENV)/.ready: $(VENV)/.packages pyproject.toml
	@echo '[env] installing pax-mpmd itself, editable'
	$(call install_self,$(VENV))
	@touch $@
	@echo '[env] ready: $(BIN)/pax-mpmd'

.PHONY: env-latest
env-latest: $(LATEST)/.ready  ## Set up .venv-latest: the core, the newest JAX, no Pax.

$(LATEST)/.packages: $(LATEST_LOCK)
	@python="$$(.ci/latest_python)" && echo "[env] creating $(LATEST) with $$python"
	$(call install,$(LATEST),"$$(.ci/latest_python)",$(LATEST_LOCK))
	@touch $@

$(LATEST)/.ready: $(LATEST)/.packages pyproject.toml
	$(call install_self,$(LATEST))
	@touch $@

.PHONY: demo
demo: env  ## Train a language model on 4 pipeline stages (at most 4 minutes), then sum it up.
	@$(BIN)/python -m configs.demo --exp=$(EXP) $(DEMO_ARGS)

# The core: all of pax_mpmd but pax_mpmd/pax.
CORE_TESTS := tests/schedules tests/plan tests/timeline tests/compile tests/core tests/runtime \
  tests/test_layers.py tests/test_without_pax.py
PAX_TESTS := tests/pax tests/configs tests/test_package.py
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: test
test: test-core test-pax test-latest-if-found test-integration  ## Run all tests (make -j2: two at a time).

.PHONY: test-core
test-core: env  ## Run the tests of the core, which needs no Pax.
	$(PYTEST) $(CORE_TESTS)

.PHONY: test-pax
test-pax: env  ## Run the unit tests of what runs Pax, and of the example experiments.
	$(PYTEST) $(PAX_TESTS)

.PHONY: test-integration
test-integration: env  ## Run the end-to-end tests: command lines against stock Pax.
	$(PYTEST) integration

.PHONY: test-core-latest
test-core-latest: env-latest  ## Run the tests of the core on the newest JAX (needs python3.11 or later).
	JAX_PLATFORMS=cpu $(LATEST)/bin/python -m pytest -o cache_dir=$(LATEST)/.pytest_cache \
	  $(PYTEST_ARGS) $(CORE_TESTS)

.PHONY: test-latest-if-found
test-latest-if-found:
	@if .ci/latest_python >/dev/null; then $(MAKE) --no-print-directory test-core-latest; \
	else echo 'The tests of the core on the newest JAX were left out.'; fi

.PHONY: lint
lint: env  ## Run the linter.
	$(BIN)/ruff check .

.PHONY: bench
bench: env  ## Compare step times with Pax's SPMD pipelining and with jax.jit (20 minutes, idle machine).
	JAX_PLATFORMS=cpu $(BIN)/python -m integration.bench $(BENCH_ARGS)

.PHONY: bench-size
bench-size: env  ## Time the planning of large steps: up to 64 stages, 16 actors, 256 microbatches.
	JAX_PLATFORMS=cpu $(BIN)/python -m integration.bench_size

# The second lock is for any Python from 3.11 on; which JAX is the newest depends on it.
LOCK := $(BIN)/uv pip compile --quiet pyproject.toml --extra dev --no-annotate \
  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' $(UPGRADE)

.PHONY: lock
lock: env  ## Resolve pyproject.toml again into the two lock files (UPGRADE=--upgrade for newer ones).
	$(LOCK) --group lock --python $(BIN)/python --output-file requirements.lock
	$(LOCK) --universal --python-version 3.11 --output-file $(LATEST_LOCK)

.PHONY: clean
clean:  ## Remove the environments and caches; what was trained (runs/) stays.
	rm -rf $(VENV) $(LATEST) build dist .pytest_cache .ruff_cache *.egg-info
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
