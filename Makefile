# Two commands on a bare machine with Python, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2

.PHONY: demo test test-fast faults chaos fuzz lint docs pictures clean

demo: $(VENV)/.installed-train  ## compare samplers on 8x8 digits, and write a report (one seed, 50 s a method)
	rm -rf out/demo
	$(BIN)/noisewise compare --preset digits --samplers uniform,minsnr,adaptive:warmup=100 --seeds 1 --budget 50s --images 500 --out out/demo

test: $(VENV)/.installed-dev  ## the whole suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-fast: $(VENV)/.installed-dev  ## without the slow tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

faults: $(VENV)/.installed-dev  ## kill training processes 200 times, and compare with an uninterrupted run bit for bit
	NOISEWISE_KILLS=200 $(BIN)/python -m pytest tests/training/test_faults.py -k random

chaos: $(VENV)/.installed-dev  ## fail at every call that changes a file of a run: kills, full disks, faults, power cuts
	$(BIN)/python -m tests.training.chaos

fuzz: $(VENV)/.installed-dev  ## 2,000 made-up specs, 300 configurations, 450 poisoned batches
	$(BIN)/python -m tests.fuzz specs --count 2000
	$(BIN)/python -m tests.fuzz configurations --count 300
	$(BIN)/python -m tests.fuzz batches --count 450

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs  ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: demo $(VENV)/.installed-dev  ## all pictures of the pages, with the demo and the analyses behind them: 40 minutes on two cores
	$(BIN)/python docs/make_pictures.py all

clean:
	rm -rf $(VENV) site out

$(VENV)/.installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[$*]'
	touch $@
