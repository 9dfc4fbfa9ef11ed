# Everything from a bare machine: Python with venv, make, a C++ compiler (inductor calls it).

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# One on-disk cache of compiled kernels for all processes of a run. It may be empty: `make clean` empties it.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/build/inductor

CODE  := callbacks examples benchmarks tests docs/conf.py
PROSE := README.md CHANGELOG.md CONTRIBUTING.md docs

.DEFAULT_GOAL := help
.PHONY: help demo benchmarks test lint format types docs pytest pictures clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/examples.stamp  ## train the two example jobs, print both verdicts
	$(BIN)/python -m examples.demo

benchmarks: $(VENV)/examples.stamp  ## is the speedup true, what does it cost: minutes on a CPU
	$(BIN)/python -m benchmarks.truth
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.regret
	$(BIN)/python -m benchmarks.memory

test: lint types docs pytest  ## everything a change has to pass

lint: $(VENV)/test.stamp  ## ruff, ruff format, codespell
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/codespell $(CODE) $(PROSE)

types: $(VENV)/test.stamp  ## mypy --strict
	$(BIN)/mypy

# Two processes: most tests run on one thread. A file stays in one of them, because what it sets up is dear; a process
# that dies is not replaced, because what was left of its file would be waited for in vain (pytest-xdist 3.8).
pytest: $(VENV)/test.stamp  ## the tests and the doctests
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0

docs: $(VENV)/test.stamp  ## the site with the API reference, in build/site; a warning is an error
	$(BIN)/python -m sphinx -E -W --keep-going -q docs build/site

pictures: $(VENV)/test.stamp  ## take the screenshots in the docs anew: needs Chromium and its driver
	COMPILE_PROFILER_BROWSER=required COMPILE_PROFILER_PICTURES=docs/pictures $(BIN)/python -m pytest tests/test_browser.py

format: $(VENV)/test.stamp  ## let ruff rewrite the code
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:  ## remove the environment and everything built; runs/ stays
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache callbacks/*.egg-info

# A stamp is newer than the files that say what to install: then nothing is installed and no network is needed.
# torch comes first, by exact version: a bare `torch`, pulled in by something else, may be another build.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/examples.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/python -m pip install -c constraints.txt -e ".[examples]"
	@touch $@

# The test extra contains the examples extra, so its stamp stands for both.
$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/python -m pip install -c constraints.txt -e ".[test]"
	@touch $(VENV)/examples.stamp $@
