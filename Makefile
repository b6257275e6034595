# Each target does its own set-up: a virtual environment in .venv, installed once for each content of
# pyproject.toml and setup.py.
#
# Environment variables that the set-up reads:
#   TORCH_INDEX  index that torch is taken from, such as https://download.pytorch.org/whl/cpu
#   PIP_ARGS     further arguments of pip install
#   PYTHON       the interpreter (default: the first of the usual names that is Python 3.11 or later)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(shell cat pyproject.toml setup.py | cksum | tr ' ' '-')
# One process per core, each with one thread; the tests of a file share what it has trained.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11 python

.PHONY: help train setup test lint types coverage nightly benchmark clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## this list
	@echo "make train domain=forecasting key=value …   train, test, print the table"
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12 | sed 's/^/make /'

# ---- make train: the key=value words of this command line, checked before anything runs --------------------
# Make itself drops repeated words, turns += into =, reorders words and expands dollars. So the words are looked at
# twice, unexpanded behind MAKEOVERRIDES (which holds nothing of the environment) and as typed; what make would
# change is refused.
ifneq ($(filter train,$(MAKECMDGOALS)),)
WORDS := $(value -*-command-variables-*-)
define NEWLINE


endef
given = printf '%s' '$(subst ','\'',$(subst $(NEWLINE),!,$(WORDS)))' | tr ' ' '\n'
typed = { tr '\n\0' '!\n' < /proc/$$PPID/cmdline || ps -o args= -p $$PPID | tr ' ' '\n'; } 2>/dev/null | grep '^[^-].*='
PLAIN := [a-z][A-Za-z0-9_.]*=[A-Za-z0-9_.,/:=@%+-]*
REFUSED := $(filter-out train,$(MAKECMDGOALS)) $(shell { $(given); echo; $(typed); } | LC_ALL=C grep -vxE '$(PLAIN)|')
REPEATED := $(shell $(typed) | cut -d= -f1 | sort | uniq -d)
ADVICE := give everything else to $(BIN)/python -m zoo.train
$(if $(strip $(REFUSED)),$(error make train takes plain key=value words, not: $(sort $(REFUSED)); $(ADVICE)))
$(if $(REPEATED),$(error make train takes each key once, not twice: $(REPEATED); $(ADVICE)))
endif

train: setup
	@$(BIN)/python -m zoo.train $(WORDS)

# ---- set-up ------------------------------------------------------------------------------------------------
setup: $(STAMP) ## install what the other targets need (they do it themselves)

# No bytecode at install: compiling the parts of torch that are never imported takes longer than the rest.
$(STAMP):
	@for python in $(PYTHON); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; \
	done; \
	[ -n "$$python" ] || { echo "error: no Python 3.11 or later among: $(PYTHON); set PYTHON=…" >&2; exit 2; }; \
	[ -x $(BIN)/python ] || "$$python" -m venv $(VENV)
	@echo "Installing into $(VENV), once: a few minutes, about 6 GB with PyPI's CUDA build of torch."
ifneq ($(TORCH_INDEX),)
	@$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) torch torchvision --index-url "$(TORCH_INDEX)"
endif
	@$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -e '.[dev]'
	@rm -f $(VENV)/installed-* && touch $@

# ---- checks ------------------------------------------------------------------------------------------------
test: lint types coverage ## lint, types, then the tests with their coverage

lint: setup ## ruff and spelling
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell

# Type checkers do not follow package_dir, so they read the folders as one package through links.
types: setup ## mypy over zoo, zoo.domains and zoo.data
	@rm -rf .types && mkdir -p .types/zoo
	@cd .types/zoo && ln -s ../../zoo/* ../../domains ../../data ../../configs .
	@$(BIN)/mypy

coverage: setup ## the tests with their coverage, without lint and types
	@$(PYTEST) --cov --cov-report=term

nightly: setup ## the slow tests
	@$(PYTEST) -m "slow and not gpu and not network"

benchmark: setup ## every script in benchmarks/, results into runs/benchmarks/
	@$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -e '.[bench]'
	@mkdir -p runs/benchmarks
	@set -e; for script in benchmarks/*.py; do \
	  $(BIN)/python "$$script" --json "runs/benchmarks/$$(basename "$$script" .py).json"; \
	done

clean: ## remove everything that git ignores but the environment and the runs
	@git clean -fdXq -e '!.venv' -e '!runs'
