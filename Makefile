# `make quickstart` and `make test` do all the set-up that they need, in .venv.
#
# pip takes torch from its usual index; on a machine without a GPU this fetches the small build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make quickstart

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PRODUCT := .venv/.product
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
SECOND := $(wildcard tests/many/*_benchmark.py) $(patsubst %,tests/many/test_%.py,check inside launch pages) tests/one tests/thinking tests/faults tests/gpu

.PHONY: setup browser quickstart test test-all test-faults lint docs bench

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# What opens pages in tests/many/test_pages.py, which are left out where there is none.
browser:
	@command -v chromium > /dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq chromium > /dev/null; } || echo "no chromium"

# Of the product's dependencies only; what tests and plots want besides comes with `make setup`.
$(PRODUCT): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

quickstart: $(PRODUCT)
	$(BIN)/longshift train examples/quickstart.yaml save.dir=$(RUN)
	@command -v longshift > /dev/null || echo "shell   source .venv/bin/activate   # then longshift is a command here"

# Two processes side by side, of as much work: what runs in worlds of ranks, without some of it, and that with the rest.
test: setup
	@export OMP_NUM_THREADS=1; $(BIN)/python -m pytest -m 'not long' tests/many $(addprefix --ignore=,$(SECOND)) > .venv/many.log 2>&1 & many=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not long' $(SECOND); rest=$$?; \
	wait $$many; found=$$?; cat .venv/many.log; exit $$((rest + found))

test-all: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Everything that is read, spoiled in ten thousand ways and more; disks that fail and kills, at each file operation (an hour); JSON=out.json
# keeps the figures.
test-faults: setup
	@export OMP_NUM_THREADS=1 JSON=$(JSON); $(BIN)/python -m pytest tests/faults/test_disks.py > .venv/disks.log 2>&1 & disks=$$!; \
	$(BIN)/python -m pytest tests/faults --ignore=tests/faults/test_disks.py; rest=$$?; \
	wait $$disks; found=$$?; cat .venv/disks.log; exit $$((rest + found))

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# The site, in site/; fails where a link leads nowhere.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: setup
	@for name in parity ledger static switch_plan hot_switch switch_cost machine_profile; do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done
