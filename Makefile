# GradSync on one machine: `make compare` shows what it does, `make test` and `make check` whether it is right.

PYTHON ?= python3
BIN := .venv/bin
PACKAGES := benchmarks collective common ps

unexport PYTHONDONTWRITEBYTECODE # the tests start thousands of processes, and each would compile our packages anew

.PHONY: help setup compare test test-long coverage fuzz faults mutants check docs figures dist results format proto clean

help:                ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

setup: .venv/ready   ## a virtual environment in .venv with everything the rest needs

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,dev]'
	@touch $@

compare: setup       ## prove that both schemes compute the same, measure them, write out/compare/report.html
	$(BIN)/python -m benchmarks compare $(ARGS)

results: setup       ## list the committed results in out/results.md
	$(BIN)/python -m benchmarks results

# ARGS=ps stands for the unit tests and the contracts of ps; anything else goes to pytest as it is.
WORKERS ?= $(shell nproc)
TESTS = $(foreach arg,$(ARGS),$(if $(wildcard tests/unit/$(arg)),$(wildcard tests/unit/$(arg) tests/contracts/$(arg)),$(arg)))
PYTEST_OPTIONS = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PYTEST = $(BIN)/python -m pytest $(PYTEST_OPTIONS)
TEST_LIMIT_S ?= 420

test: setup          ## the tests, 6 minutes on 2 cores; a part of them with ARGS=ps, ARGS="-k name", ...
	GRADSYNC_TEST_LIMIT_S=$(TEST_LIMIT_S) $(PYTEST) $(TESTS)

CONTRACTS = $(if $(filter all,$(GRADSYNC_LONG_TESTS)), or contract)# of implementations that `make test` leaves out
test-long: setup     ## what `make test` leaves out: other combinations, thousands of random cases, more real processes
	GRADSYNC_LONG_TESTS=$(or $(GRADSYNC_LONG_TESTS),1) $(PYTEST) -m "long or longest or again$(CONTRACTS)" $(TESTS)

COVERAGE := out/coverage
coverage: setup      ## the lines and branches of ps, collective and common that the tests run, in all their processes
	rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	GRADSYNC_CACHE_DIR=$(CURDIR)/$(COVERAGE)/cache $(BIN)/coverage run -m pytest $(PYTEST_OPTIONS) $(TESTS); result=$$?; \
	  $(BIN)/coverage report > $(COVERAGE)/report.txt; tail -1 $(COVERAGE)/report.txt; exit $$result

fuzz: setup          ## 100,000 inputs for every parser of what others send; some ten minutes; ARGS="--inputs 1000 objects" for less
	$(BIN)/python -m tests.fuzz $(ARGS)

TIMES ?= 1
faults: setup        ## kills, wrong ranks, strangers, hostile bytes, real processes: some 15 minutes; TIMES=20 in a row, ARGS=14 for one row
	$(BIN)/python -m tests.faults --times $(TIMES) --workers $(WORKERS) $(ARGS)

mutants: setup       ## change the core on purpose, one change at a time, and see what the quick tests notice; about an hour
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[mutants]'
	$(BIN)/mutmut run --max-children $(WORKERS)
	$(BIN)/mutmut results

check: setup         ## formatting, lint, types, which way imports point, figures, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_imports.py tests/unit/test_lengths.py tests/unit/docs
	$(BIN)/python -m docs.tools.figures
	$(BIN)/python -m docs.tools.charts --check
	$(BIN)/python -m docs.tools.names --check
	@$(MAKE) --no-print-directory proto PROTO_OUT=$$(mktemp -d) CHECK=1

PROTO_OUT ?= common/network
proto: setup         ## write common/network/gradsync_pb2.py from proto/gradsync.proto
	$(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) proto/gradsync.proto
	@if [ -n "$(CHECK)" ]; then \
	  for f in gradsync_pb2.py gradsync_pb2.pyi; do \
	    cmp $(PROTO_OUT)/$$f common/network/$$f || { echo "common/network/$$f is not current; run 'make proto'"; exit 1; }; \
	  done; rm -r $(PROTO_OUT); fi

docs: .venv/docs     ## the pages in English and Chinese, as a site with search in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m docs.tools.offline out/site

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,dev,docs]'
	@touch $@

figures: setup       ## draw the charts of docs/ from the committed results, and print every figure that pages may quote
	$(BIN)/python -m docs.tools.charts
	$(BIN)/python -m docs.tools.names
	$(BIN)/python -m docs.tools.figures --list

dist: setup          ## wheel and sdist in dist/
	$(BIN)/python -m build --outdir dist .

format: setup        ## format and sort imports
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

clean:               ## remove what can be made again
	rm -rf .venv out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
