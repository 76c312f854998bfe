# Everything from a fresh clone: the first target that needs it creates .venv and installs the versions in constraints.txt.
# PYTHON chooses the interpreter (3.11 or newer), JAVA_HOME the Java runtime (17 or newer).

PYTHON ?= $(shell scripts/find-python)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest --durations=30 --durations-min=5
# What `make coverage` runs.
COVERED ?= tests/unit tests/integration
# Repeated through PgBouncer in transaction mode: the command line, and the service.
POOLED := tests/e2e/test_cli.py tests/e2e/test_cli_refresh.py tests/e2e/test_cli_operate.py tests/integration/test_service.py

export PYSPARK_PYTHON := $(abspath $(BIN)/python)
export PYSPARK_DRIVER_PYTHON := $(PYSPARK_PYTHON)

.DEFAULT_GOAL := help
.PHONY: help demo check test test-long coverage lint bench docs lock dist clean java

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@scripts/find-python --check "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

java:
	@scripts/check-java

demo: $(STAMP) java ## Run the demonstration: embedded PostgreSQL, Spark, a minute of changes
	$(BIN)/pgtrickle demo

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint docs ## Check style, types and links, and run the tests that need no server: within a minute
	$(BIN)/python -m pytest -q tests/unit

# Spark's classes in a file, and no second compilation of what runs for seconds: a start takes a third of the processor time.
$(VENV)/.prepared: $(STAMP)
	$(BIN)/pgtrickle prepare
	@touch $@

test test-long coverage $(VENV)/.prepared: export XDG_CACHE_HOME := $(abspath $(VENV)/cache)
test test-long coverage: export SPARK_SUBMIT_OPTS := -XX:TieredStopAtLevel=1

test: lint java $(VENV)/.prepared ## Check style and types, then run all tests that take seconds, on PostgreSQL 18, 16 and 15
	scripts/install-pgbouncer
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(PYTEST) -n $(WORKERS) --dist loadfile --pooler $(POOLED)
	scripts/test-versions $(PYTEST) -n $(WORKERS) --dist loadfile

test-long: $(STAMP) java $(VENV)/.prepared ## Run the tests that take minutes
	$(PYTEST) -m long -n $(WORKERS) --dist load

coverage: $(STAMP) java $(VENV)/.prepared ## Measure what the unit and integration tests cover (others: COVERED=tests/unit)
	rm -rf build/coverage && mkdir -p build/coverage
	$(PYTEST) -n $(WORKERS) --dist loadfile --cov --cov-report= $(COVERED)
	$(BIN)/coverage html --quiet --directory build/coverage/html
	$(BIN)/coverage report

bench: $(STAMP) java ## Measure, print the table, write the plot
	$(BIN)/python -m bench

$(VENV)/.docs: $(STAMP)
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## Build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: ## Take the newest versions that pyproject.toml allows into constraints.txt
	rm -rf build/lock && "$(PYTHON)" -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check '.[dev,docs]'
	{ sed -n 1p constraints.txt; build/lock/bin/python -m pip freeze --exclude pgtrickle; } >build/constraints.txt
	mv build/constraints.txt constraints.txt

dist: $(STAMP) ## Build the wheel and the source distribution in dist/
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .

clean: ## Remove everything that make created
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
