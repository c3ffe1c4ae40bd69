# Everything from a bare Python 3.11: `make demo`, `make test`. Each target first sets up what it needs, once.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv$(TORCH:%=-torch-%)
RANKS  ?= 2
JOBS   ?= 2
PARTS  ?= 1
ARGS   ?=

# Without TORCH it is the torch of constraints.txt; each other one has an environment of its own.
RELEASES := 2.11 2.12 2.13 2.14 2.15
ifneq ($(filter-out $(RELEASES:%=%.%),$(TORCH)),)
    $(error zcompile runs on torch $(firstword $(RELEASES)) to $(lastword $(RELEASES)), and TORCH=$(TORCH) is none of these: give one in full, such as TORCH=2.14.1)
endif
PIN    := $(if $(TORCH),torch==$(TORCH),--constraint constraints.txt torch)

BIN    := $(VENV)/bin
QUIET  := --quiet --quiet --disable-pip-version-check
PIP    := $(BIN)/python -m pip $(QUIET)
HAS_TORCH := $(VENV)/.torch-installed
READY  := $(VENV)/.project-installed
TRITON := .triton/.installed
LIBRARIES := .venv-integrations
LIBRARIES_READY := $(LIBRARIES)/.installed
BENCH  := .venv-bench
BENCH_READY := $(BENCH)/.installed
COPY   := $(abspath $(VENV))/typecheck

# One thread a rank: several ranks share the cores of one machine, here and in the tests.
export OMP_NUM_THREADS := 1

.PHONY: help
help: ## Show this help
	@echo 'Usage: make TARGET [PYTHON=python3] [TORCH=2.14.1] [VENV=.venv] [RANKS=2] [JOBS=2] [ARGS="options of the command"]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(READY) ## Train a small GPT on RANKS processes; ARGS goes to examples/train_gpt.py
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

.PHONY: test
test: $(READY) ## Run the quick tests, JOBS at a time; ARGS goes to pytest
	$(BIN)/pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

.PHONY: test-all
test-all: $(READY) ## Run the slow tests, too; ARGS goes to pytest
	$(BIN)/pytest --numprocesses $(JOBS) --dist worksteal -m "not nightly" $(ARGS)

.PHONY: test-nightly
test-nightly: $(READY) test-integrations ## Run what test-all leaves out, or a part of it, PARTS=8, that is another one for each commit
	$(BIN)/pytest --numprocesses $(JOBS) --dist worksteal -m nightly --part $$(git rev-list --count HEAD)/$(PARTS) $(ARGS)

.PHONY: test-integrations
test-integrations: $(LIBRARIES_READY) ## Run the tests with Transformers, Accelerate, Lightning, trl and Ray, in an environment of their own
	$(LIBRARIES)/bin/pytest --numprocesses $(JOBS) --dist worksteal -m "" tests/integrations $(ARGS)

.PHONY: browser
browser: $(READY) ## Install what tests of pages want: playwright, Sphinx, and, as root on Debian, Chromium and graphviz
	@$(PIP) install --editable '.[browser,docs]'
	@command -v chromium >/dev/null && command -v dot >/dev/null || \
	    { apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes chromium graphviz; } >/dev/null

.PHONY: docs
docs: $(READY) ## Build the documentation as a site, in site/
	@$(PIP) install --editable '.[docs]'
	@rm -rf zcompile.egg-info
	$(BIN)/sphinx-build -q -W --keep-going -b html docs site

.PHONY: bench
bench: $(BENCH_READY) ## Measure training steps beside DDP, FSDP2 and DeepSpeed, about two hours; ARGS=--help for less
	$(BENCH)/bin/python -m benchmarks.speed $(ARGS)

.PHONY: bench-memory
bench-memory: $(BENCH_READY) ## Measure peak memory beside the same, a quarter of an hour; ARGS=--help for less
	$(BENCH)/bin/python -m benchmarks.memory $(ARGS)

.PHONY: triton
triton: $(READY) $(TRITON) ## Compile regions for an H100 without one, a quarter of an hour; ARGS=--help for less
	$(BIN)/python -m tests.kernels $(ARGS)

.PHONY: gpu
gpu: $(READY) ## Test and measure on this machine's GPUs within ten minutes, and write one report; ARGS=--help
	$(BIN)/python -m benchmarks.gpu.check $(ARGS)

.PHONY: check
check: lint types ## Check lint, format and types; change nothing

.PHONY: lint
lint: $(READY) ## Check lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The three folders are one package only when installed, and a build in place would leave build/ and an egg-info behind that
# later builds read again. So a copy is installed, and mypy's paths are turned back into those of the checkout.
.PHONY: types
types: $(READY) ## Check types, strictly, on an installed copy
	@rm -rf $(COPY) && mkdir -p $(COPY)/source
	@cp -R pyproject.toml $(wildcard LICENSE README.md) zcompile passes runtime $(COPY)/source
	@$(PIP) install --no-deps --no-build-isolation --target $(COPY)/site $(COPY)/source
	@rm -rf $(COPY)/source
	@cp -R benchmarks examples $(COPY)/site
	@cp docs/printed.py $(COPY)/site/docs_printed.py
	cd $(COPY)/site && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p zcompile -p benchmarks \
	    -m docs_printed \
	    | sed -E 's#^zcompile/(passes|runtime)/#\1/#'

.PHONY: format
format: $(READY) ## Format the code and fix what ruff can fix by itself
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## Remove caches, build outputs and dumps; the virtual environment stays
	rm -rf build dist site *.egg-info zcompile_dump .mypy_cache .pytest_cache .ruff_cache .hypothesis $(COPY)
	find . \( -path ./.git -o -path './$(VENV)' -o -path './.venv*' \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

$(HAS_TORCH): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"zcompile needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}: make PYTHON=...")'
	@echo "Setting up $(VENV): torch"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PIP) install $(PIN)
	@touch $@

# setuptools is named for `make types`, which builds without isolation. An editable install reads nothing from the egg-info.
$(READY): $(HAS_TORCH) pyproject.toml
	@echo "Setting up $(VENV): zcompile and its tools"
	@$(PIP) install $(PIN) 'setuptools>=77.0.3' --editable '.[dev]'
	@rm -rf zcompile.egg-info build
	@touch $@

# In a folder that no other target has on its path: Inductor behaves otherwise wherever Triton can be imported.
$(TRITON): constraints.txt | $(READY)
	@echo "Setting up $(@D)"
	@$(PIP) install --no-deps --upgrade --constraint constraints.txt --target $(@D) triton
	@touch $@

# Trainers of others bring dozens of packages that the project itself never needs.
$(LIBRARIES_READY): constraints.txt pyproject.toml
	@echo "Setting up $(LIBRARIES): torch, zcompile and the libraries that it works within"
	@$(LIBRARIES)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(LIBRARIES)
	@$(LIBRARIES)/bin/python -m pip install $(QUIET) --constraint constraints.txt torch
	@$(LIBRARIES)/bin/python -m pip install $(QUIET) --constraint constraints.txt 'setuptools>=77.0.3' --editable '.[integrations]'
	@rm -rf zcompile.egg-info build
	@touch $@

# The peers are in an environment of their own: DeepSpeed brings a dozen packages that the project itself never needs.
$(BENCH_READY): constraints.txt pyproject.toml benchmarks/requirements.txt
	@echo "Setting up $(BENCH): torch, zcompile and the peers"
	@$(BENCH)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python -m pip install $(QUIET) --constraint constraints.txt torch
	@$(BENCH)/bin/python -m pip install $(QUIET) --constraint constraints.txt 'setuptools>=77.0.3' --editable .
	@DS_BUILD_OPS=0 $(BENCH)/bin/python -m pip install $(QUIET) --constraint constraints.txt --requirement benchmarks/requirements.txt
	@rm -rf zcompile.egg-info build
	@touch $@
