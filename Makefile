# make breakout   set up .venv and run the comparison on Breakout
# make study      set up .venv and run the study: ARGS="minatar --jobs 2"
# make test       set up .venv and run the tests
# make docs       the pages of docs/ as HTML, in docs/_build/html
# make compat     the tests with the oldest Stable-Baselines3 that is supported
# make package    the wheel and the sdist in dist/, tested outside this tree
# make fuzz       more than 100,000 random streams against their definition
# make soak       two million steps, with all invariants checked on the way, and what memory they leave
# make check      all that CI runs: format, lint, types, docs, tests (slow ones too), SB3's and sb3-contrib's own tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt

.PHONY: breakout study test check format lint types slow conformance docs compat package fuzz soak benchmark clean

breakout: $(VENV)/examples
	$(BIN)/python examples/breakout.py $(ARGS)

study: $(VENV)/study
	$(BIN)/python examples/study.py $(ARGS)

test: $(VENV)/dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

check: lint types docs test slow conformance

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/dev
	$(BIN)/mypy

slow: $(VENV)/dev
	$(BIN)/python -m pytest -m slow $(ARGS)

docs: $(VENV)/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env -b html docs docs/_build/html

conformance: $(VENV)/dev
	$(BIN)/python tests/conformance/run.py

# The tests with the oldest Stable-Baselines3 that pyproject.toml allows. That one warns beside the pandas of today
compat: .compat/constraints.txt
	$(MAKE) test VENV=.compat/venv CONSTRAINTS=$< ARGS="-W default $(ARGS)"

.compat/constraints.txt: constraints.txt pyproject.toml
	mkdir -p .compat
	oldest=$$(sed -n 's/^dependencies.*stable-baselines3>=\([0-9.]*\).*/\1/p' pyproject.toml); \
	sed -E "s/^(stable-baselines3|sb3-contrib)==.*/\1==$$oldest/; s/^gymnasium==/gymnasium<=/" $< > $@

# What people install: the wheel, built from the sdist, passes the tests of the sdist, with no source tree at hand
package: $(VENV)/dev
	rm -rf dist .package
	$(BIN)/python -m build
	mkdir .package
	tar -xzf dist/*.tar.gz -C .package --strip-components 1
	rm -r .package/sb3_nstep
	$(PYTHON) -m venv .package/.venv
	.package/.venv/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo $(CURDIR)/dist/*.whl)[dev]"
	cd .package && .venv/bin/python -m pytest -m "not slow" $(ARGS)

# Seconds since 1970, or the SEED of a run that is to be made again
SEED ?= $(shell date +%s)
fuzz: $(VENV)/dev
	@echo "fuzz: SEED=$(SEED)"
	$(BIN)/python -m pytest tests/test_targets.py tests/test_buffers.py -k "definition or chunks or shortened or carried" \
		--hypothesis-profile fuzz --hypothesis-seed $(SEED) $(ARGS)

soak: $(VENV)/dev
	$(BIN)/python tests/soak.py $(ARGS)

benchmark: $(VENV)/examples
	$(BIN)/python examples/benchmark_targets.py
	$(BIN)/python examples/benchmark_a2c.py
	$(BIN)/python examples/benchmark_envs.py
	$(BIN)/python examples/benchmark_throughput.py
	$(BIN)/python examples/benchmark_distributed.py

# One virtual environment; a stamp for each set of extras that is in it
$(VENV)/%: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit( \
		"sb3_nstep needs Python 3.10 or newer, $(PYTHON) is %d.%d: name a newer one, as in make PYTHON=python3.11" \
		% sys.version_info[:2])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) .conformance .compat .package dist docs/_build
