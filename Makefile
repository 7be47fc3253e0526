# Two commands matter: `make demo` and `make test`. Both make .venv first, and both are cheap to run again.
#   PYTHON=python3.12            the Python that .venv is made from (3.11 or newer)
#   TOKENS=60000                 a shorter demo: this many training tokens, 4,000 to evaluate on, and no comparison
#   TORCH_INDEX=URL              another package index for torch alone, such as PyTorch's own one of CPU builds
PYTHON ?= python3
TOKENS ?=
TORCH_INDEX ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo bench sweep test docs figures lab readme export clean

BIN := .venv/bin
STAMP := .venv/.installed
RUN := data/runs/demo$(if $(TOKENS),-$(TOKENS))
pip = $(BIN)/python -m pip install --disable-pip-version-check --no-compile $(if $(CI),-q) -c constraints.txt

help: ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12
	@sed -n 's/^#   /  /p' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the pinned versions (the other targets do it when it is needed)

$(STAMP): settings.ini setup.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here: install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$($(PYTHON) --version) is too old, routesae needs 3.11 or newer: make PYTHON=python3.12" >&2; exit 2; }
	@if ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "setup: making .venv with $$($(PYTHON) --version)"; rm -rf .venv; \
	  $(PYTHON) -m venv .venv || { echo "make: $(PYTHON) cannot make a virtual environment (Debian and Ubuntu keep that in the package python3-venv)" >&2; exit 2; }; fi
	@echo "setup: installing torch (the largest part), then routesae and the rest, at the versions in constraints.txt"
	@$(pip) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch setuptools wheel
	@$(pip) --no-build-isolation -e '.[dev]'
	@touch $@
	@echo "setup: done, $$(du -sh .venv | cut -f1) in .venv"

demo: setup ## train a RouteSAE and its TopK baseline on a small LM, evaluate both, compare with the expected table
	$(BIN)/routesae fetch
	$(BIN)/routesae train --preset demo --out $(RUN) $(if $(TOKENS),--n-tokens $(TOKENS))
	$(BIN)/routesae evaluate $(RUN) $(if $(TOKENS),--n-tokens 4000,--expect data/results/demo.csv)

bench: setup ## time training steps, the harvest, a sweep of 42 coders and memory; writes data/results/speed.json (about 10 minutes)
	$(BIN)/python -m routesae.bench

sweep: setup ## train and measure all methods of the paper on the demo (about an hour on 2 cores, 13 GB of disk for the states)
	$(BIN)/routesae fetch
	$(BIN)/routesae sweep nbs/paper/sweep.yaml
	$(BIN)/routesae evaluate data/runs/sweep

test: setup ## run every check and every notebook; ONLY=name runs the checks whose name has it
	@$(BIN)/python .ci/check.py $(if $(ONLY),--only $(ONLY))

docs: setup ## build the documentation site in _docs/ (with Quarto where it is installed, else in Python)
	$(BIN)/python .ci/docs.py

figures: setup ## redraw figures/ from the committed tables (runs nbs/paper/fig*.ipynb; no LM needed)
	$(BIN)/python .ci/check.py --run $(wildcard nbs/paper/fig*.ipynb)

lab: setup ## open JupyterLab on the notebooks, with the kernel ready
	$(BIN)/jupyter lab nbs/index.ipynb

readme: setup ## write README.md from nbs/index.ipynb
	$(BIN)/python .ci/readme.py

export: setup ## write routesae/ from the notebooks, clean the notebooks, write README.md
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	$(BIN)/python .ci/readme.py

clean: ## remove what the build made, but for .venv, the fetched demo assets and the runs
	rm -rf _docs _proc build dist *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
