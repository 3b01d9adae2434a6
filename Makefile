# Both commands set up .venv themselves. Override the torch that is installed with TORCH (a requirement, a wheel file
# or an address), and anything about the package index with pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...).
PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q -c $(VENV)/constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test ascend-ladder check protos dist bench bench-check clean

help:
	@echo "make demo    set up, serve the demo model, recommend for real users, print metrics"
	@echo "make test    set up, run all checks and tests"
	@echo "make ascend-ladder  set up, show what can be shown of the Ascend backend without an NPU"
	@echo "make check   ruff, format and mypy only"
	@echo "make bench   the CPU benchmarks of the catalogue and of the selection"
	@echo "make bench-check  on an H200: measure one row of the engine benchmark again, within 15 % of the committed one"
	@echo "make protos  generate the gRPC stubs anew"
	@echo "make dist    build the wheel and the sdist into dist/"
	@echo "make clean   remove .venv and everything built"

# The stamp depends on what is installed, so a second run needs no network; another TORCH installs again.
# A TORCH of your own also lifts the pin of constraints.txt.
ifneq ($(origin TORCH),file)
ifneq ($(TORCH),$(shell cat $(VENV)/.torch 2>/dev/null || echo "$(TORCH)"))
.PHONY: $(VENV)/.installed
endif
endif

$(VENV)/.installed: pyproject.toml setup.py constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	grep -v "$(if $(filter torch,$(TORCH)),^#,^torch==)" constraints.txt > $(VENV)/constraints.txt
	$(PIP) "$(TORCH)" numpy setuptools
	$(PIP) --no-build-isolation -e ".[test]"
	$(PIP) --no-deps recbole
	@echo "$(TORCH)" > $(VENV)/.torch
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/xgr demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

# Further environments lie in .ladder; they are made anew when what they hold changes.
ascend-ladder: $(VENV)/.installed
	$(BIN)/python tools/ascend_ladder.py

check: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python tools/bench_catalog.py
	$(BIN)/python tools/bench_select.py

bench-check: $(VENV)/.installed
	$(BIN)/python tools/bench_check.py

protos: $(VENV)/.installed
	$(BIN)/python tools/make_protos.py

dist: $(VENV)/.installed
	$(BIN)/python tools/build_dist.py

clean:
	rm -rf $(VENV) build dist *.egg-info .demo demo-report.json .ladder ascend-ladder.json
