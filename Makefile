# make breakout   set up .venv and run the comparison on Breakout
# make test       set up .venv and run the tests
# make check      all that CI runs: format, lint, types, tests (slow ones too), SB3's own tests with our classes
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: breakout test check format lint types slow conformance benchmark clean

breakout: $(VENV)/examples
	$(BIN)/python examples/breakout.py $(ARGS)

test: $(VENV)/dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

check: lint types test slow conformance

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

conformance: $(VENV)/dev
	$(BIN)/python tests/conformance/run.py

benchmark: $(VENV)/examples
	$(BIN)/python examples/benchmark_targets.py
	$(BIN)/python examples/benchmark_a2c.py
	$(BIN)/python examples/benchmark_envs.py
	$(BIN)/python examples/benchmark_throughput.py

# One virtual environment; a stamp for each set of extras that is in it
$(VENV)/%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit( \
		"sb3_nstep needs Python 3.10 or newer, $(PYTHON) is %d.%d: name a newer one, as in make PYTHON=python3.11" \
		% sys.version_info[:2])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) .conformance
