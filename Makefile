# The first target lists the others: `make` is the newcomer's first command.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WARM := $(VENV)/.warm
export PYTHONUNBUFFERED := 1
# Compiled modules are kept, here and whatever the shell says: else every process of a test or job compiles what it imports.
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run run-kafka test test-full check bench chaos docs servers lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(WARM)  ## make .venv with everything, from the lock file

$(STAMP): requirements/dev.lock pyproject.toml
	@echo "setting up $(VENV) (once, a minute or so: Spark is large)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$$(cat requirements/uv.version)"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/dev.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	@touch $@

$(WARM): $(STAMP) $(shell find src/cutwater -name '*kernels.py') src/cutwater/state/kernels.py
	@$(BIN)/cutwater warm
	@touch $@

run: setup  ## exactly-once demo: real flights on Spark, one worker killed, result checked by Spark SQL
	@$(BIN)/python examples/flights.py

run-kafka: setup  ## exactly-once demo: Kafka to Kafka and Delta, checkpoints in a bucket; each of them is killed
	@$(BIN)/python examples/kafka_clicks.py

test: setup  ## the test suite (under 10 minutes on 2 cores)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --session-timeout=1800 --durations=15 -rR -m "not chaos and not full"

test-full: setup  ## also the slow tests
	@$(BIN)/python -m pytest -m "not chaos"

check: setup  ## style, types, structure
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

bench: setup  ## keyed count against Flink, Bytewax and bare kernels (installs the peers for it)
	@$(BIN)/python -m benchmarks.compare

chaos: setup  ## 850 SIGKILLs of workers, executors, drivers and servers: each scope, protocol and sink (an hour or two)
	@$(BIN)/python -m pytest -m chaos -s

servers: setup  ## fetch the servers that tests start (Kafka; once)
	@$(BIN)/python -m servers

lock:  ## write the lock file anew from pyproject.toml
	@$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --generate-hashes --no-emit-index-url \
	  --python-version 3.11 --all-extras --group dev -o requirements/dev.lock pyproject.toml

clean:  ## remove what was made here
	rm -rf $(VENV) .peers .servers out build dist
