# make demo: train a small GPT four ways and check every claim. make test: lint and tests.
# Both make .venv first; the stamp makes the second run quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test slow lint format bench conformance coverage consistency clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m tests.run -m "not slow"

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/shard_map.py --check
	$(BIN)/python benchmarks/layouts.py --check
	$(BIN)/python benchmarks/planner.py --check
	$(BIN)/python benchmarks/rng.py --check
	$(BIN)/python benchmarks/fsdp.py --check
	$(BIN)/python benchmarks/muon_balance.py --check
	$(BIN)/python benchmarks/adamw_8bit.py --check
	$(BIN)/python benchmarks/checkpoint.py --check
	$(BIN)/python benchmarks/lanes.py

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test,demo]'
	touch $@

conformance: $(STAMP)
	$(BIN)/python -m docs.make_placements

coverage: $(STAMP)
	$(BIN)/python -m docs.make_op_coverage

consistency: $(STAMP)
	$(BIN)/python -m docs.make_consistency

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .ruff_cache .hypothesis
