# `make quickstart` and `make test` do all the set-up that they need, in .venv.
#
# pip takes torch from its usual index; on a machine without a GPU this fetches the small build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make quickstart

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PRODUCT := .venv/.product
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
# Files go to two processes in order, so that cases which fork ranks come before those that start threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

.PHONY: setup browser quickstart test test-all test-mutants test-survey test-faults count lint docs bench

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

# The cases that tests/survey/cases.csv has chosen, on two processes; `make test K=switch`: those of them with that word.
test: setup
	$(PYTEST) -m 'not long and not campaign' $(if $(K),-k '$(K)')

# All cases but the campaigns of test-faults.
test-all: setup
	$(PYTEST) -m 'not campaign' $(if $(K),-k '$(K)')

# Whether each known mistake of the trainer makes a case of `make test` fail.
test-mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/survey/mutant_run.py

# What each case costs and runs, and which mistakes it finds (hours; Python 3.12 or later); then the choice of `make test` anew.
test-survey: setup
	rm -f .venv/survey.jsonl .venv/kills.jsonl
	$(PYTEST) -m 'not campaign' --survey .venv/survey.jsonl --survey-lines
	OMP_NUM_THREADS=1 $(BIN)/python tests/survey/mutant_run.py --search .venv/survey.jsonl --to .venv/kills.jsonl
	$(BIN)/python tests/survey/choose_cases.py .venv/survey.jsonl .venv/kills.jsonl --write

# Everything that is read, spoiled in ten thousand ways and more; disks that fail and kills, at each file operation (an hour); JSON=out.json
# keeps the figures.
test-faults: setup
	JSON=$(JSON) $(PYTEST) tests/faults

# Sizes by room, keys of a config, words of a layout; WORDS=words.py: a script that counts what is hard to read.
count: setup
	@$(BIN)/python benchmarks/count.py
	@$(if $(WORDS),$(BIN)/python $(WORDS) src/longshift)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# The site, in site/; fails where a link leads nowhere.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: setup
	@for name in parity ledger static switch_plan hot_switch switch_cost machine_profile; do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done
