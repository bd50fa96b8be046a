# Every target makes the environment it needs in .venv; see README.md.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

# The interpreter that .venv is made with, 3.11 or newer.
PYTHON ?= python3
# A torch wheel, or a version such as 2.13.0+cpu, where pip by itself would fetch a build you do not want.
TORCH ?=
# How many tests run at once. Files stay whole, for what their tests share.
TEST_JOBS ?= 2
PAGEKEEPER_HOME ?= $(HOME)/.cache/pagekeeper
export PAGEKEEPER_HOME

VENV := .venv
BIN := $(VENV)/bin
RUN_ENV := $(VENV)/.run-installed
TEST_ENV := $(VENV)/.test-installed
DEMO_MODEL := $(PAGEKEEPER_HOME)/models/smollm2-135m-instruct/config.json
PROTOS := $(sort $(wildcard protos/pagekeeper/v1/*.proto))
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos
STUBS_IN = --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1)

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# ---- use -----------------------------------------------------------------------------------------

.PHONY: demo
demo: $(RUN_ENV) $(DEMO_MODEL) ## Install, fetch the demo model, ask it a question, print cache statistics
	$(BIN)/python -m pagekeeper.cli.demo

.PHONY: up
up: $(RUN_ENV) $(DEMO_MODEL) ## Serve the demo model until Ctrl-C
	$(BIN)/pagekeeper up

# ---- develop -------------------------------------------------------------------------------------

.PHONY: test
test: check $(DEMO_MODEL) ## Everything that needs no GPU: make check, all tests, the kernels compiled for sm_90
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not docker and not peer" --numprocesses $(TEST_JOBS) --dist loadfile
	$(BIN)/python -m bench.gpu_compile --capability 90
	$(if $(DOCKER_ENGINE),$(MAKE) compose-test,@echo "compose-test was not run: DOCKER_ENGINE names no command that starts a Docker engine")

# The image gets the torch that the environment has, over the host's network: what make can reach, the build can reach.
.PHONY: compose-test
compose-test: $(TEST_ENV) $(DEMO_MODEL) ## Run compose.yaml in a Docker engine, started by the command in DOCKER_ENGINE if need be
	@docker info >/dev/null 2>&1 || $${DOCKER_ENGINE:-false} || { echo "compose-test was not run: no Docker engine runs;" \
		"start one, or name a command that does in DOCKER_ENGINE" >&2; exit 1; }
	docker build --network host --tag pagekeeper --build-arg PIP_EXTRA_INDEX_URL="$${PIP_EXTRA_INDEX_URL:-}" \
		--build-arg TORCH="$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')" .
	$(BIN)/python -m pytest -m docker tests/docker

.PHONY: check
check: lint types imports protos-check cases-check ## Format, lint, types, import contracts, protos, spelling, case list

.PHONY: lint types imports protos-check cases-check
lint: $(TEST_ENV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

types: $(TEST_ENV)
	$(BIN)/mypy

imports: $(TEST_ENV)
	$(BIN)/lint-imports

protos-check: $(TEST_ENV)
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	rm -rf build/stubs && mkdir -p build/stubs
	$(PROTOC) $(call STUBS_IN,build/stubs) $(PROTOS)
	diff -r --exclude=__init__.py --exclude=__pycache__ build/stubs/pagekeeper/v1 pagekeeper/v1 \
		|| { echo "pagekeeper/v1 is not what protos/ describes: run make protos"; exit 1; }

# A reported fault that has a test keeps it: tests/cases.txt lists them.
cases-check:
	diff <(cut -d' ' -f1 tests/cases.txt) \
		<(grep -rhoE 'def test_case_[0-9]{2}' --include='*.py' tests | grep -oE '[0-9]{2}$$' | sort -u) \
		|| { echo "tests/cases.txt (<) and the tests named test_case_NN (>) differ"; exit 1; }

.PHONY: protos
protos: $(TEST_ENV) ## Generate pagekeeper/v1 from protos/
	$(PROTOC) $(call STUBS_IN,.) $(PROTOS)

.PHONY: accept
accept: $(TEST_ENV) $(DEMO_MODEL) ## Measure every promise and print promise, figure, bound, pass or fail
	$(BIN)/python -m bench.accept

.PHONY: chaos
chaos: $(TEST_ENV) $(DEMO_MODEL) ## Kill and stop real processes hundreds of times and keep the score; an hour and a half
	$(BIN)/python -m bench.chaos --full --json build/chaos.json --logs build/chaos $(ARGS)

.PHONY: bench
bench: $(TEST_ENV) $(DEMO_MODEL) ## Tokens per second against transformers, in one run
	$(BIN)/python -m bench.throughput

.PHONY: gpu-compile
gpu-compile: $(TEST_ENV) ## Compile every kernel for sm_80, sm_90 and sm_100 without a GPU; fail on spills and the like
	$(BIN)/python -m bench.gpu_compile

# PYTHON, if you name one, is used as it is: for a machine without a network. WHEELS: see docs/gpu/README.md.
.PHONY: gpu-check
gpu-check: $(if $(filter file,$(origin PYTHON)),$(TEST_ENV)) ## Prove on a GPU what only a GPU can show, within 6 minutes; without one, a dry run
ifeq ($(origin PYTHON),file)
	$(if $(shell command -v nvidia-smi),$(BIN)/python -m pip install --quiet --editable ".[cuda]")
	$(BIN)/python -m bench.gpu_check $(ARGS)
else
	$(PYTHON) -m bench.gpu_check $(ARGS)
endif

.PHONY: clean
clean: ## Remove the environment and everything generated
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- environment ---------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pagekeeper needs Python 3.11 or newer: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)

# INSTALL is given the extras in brackets; a torch that was asked for comes first, so pip keeps it.
define INSTALL
	$(if $(TORCH),$(BIN)/python -m pip install "$(if $(wildcard $(TORCH)),$(TORCH),torch==$(TORCH))")
	$(BIN)/python -m pip install --quiet --editable ".$(1)"
	touch $@
endef

$(RUN_ENV): pyproject.toml | $(BIN)/python
	$(call INSTALL)

$(TEST_ENV): pyproject.toml | $(BIN)/python
	$(call INSTALL,[test])
	touch $(RUN_ENV)

$(DEMO_MODEL): | $(RUN_ENV)
	$(BIN)/pagekeeper model fetch smollm2
