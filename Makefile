# Every target sets up its own environment. `make` without a target lists them.
SHELL := bash
VENV ?= .venv
PYTHON_OF_VENV := $(VENV)/bin/python
PYTEST_ARGS ?=
# Tests that neither measure time nor keep both cores busy by themselves.
TWO_AT_A_TIME := tests/unit tests/architecture tests/change_it tests/gpu_without_gpu
# Tests of several ranks, without tests that measure time: one test leaves a third of two cores idle.
RANKS_TWICE := $(filter-out %/pipeline_parallel %/quickstart %/__pycache__,$(wildcard tests/distributed/*)) \
               $(addprefix tests/distributed/pipeline_parallel/,test_executor.py test_p2p_communication.py) \
               tests/faults/test_faults.py tests/parity
# Each free worker of two runs the next file, the longest first: `tests/harness/order.py`.
TWICE := -n 2 --dist loadfile --no-loadscope-reorder
GPU_ARGS ?=
# No target calls make again: `make -n` would run that line.
LINT = (status=0; \
	for check in "ruff format --check --quiet ." "ruff check --quiet ." "mypy" \
	             "lint-imports --no-logo" "codespell" \
	             "proselint check README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs" \
	             "python -m tests.architecture.prose --check"; do \
	    echo "== $$check"; $$check || status=1; \
	done; exit $$status)
export PATH := $(abspath $(VENV))/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint checks parity bench lowest engine bridge triton like-the-gpu-machine gpu \
	gpu-wheels schemas docs venv clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 22

quickstart: ## pretrain a GPT on Shakespeare with TP 2 x PP 2, in under ten minutes
	@examples/quickstart/run.sh

test: venv ## the checks and the whole CPU suite
	@status=0; lint=$$(mktemp); \
	$(LINT) >"$$lint" 2>&1 & linter=$$!; \
	$(PYTHON_OF_VENV) -m pytest -q $(TWICE) $(TWO_AT_A_TIME) $(RANKS_TWICE) $(PYTEST_ARGS) || status=1; \
	wait $$linter || status=1; cat "$$lint"; rm "$$lint"; \
	$(PYTHON_OF_VENV) -m pytest -q $(addprefix --ignore=,$(TWO_AT_A_TIME) $(RANKS_TWICE)) $(PYTEST_ARGS) || status=1; \
	exit $$status

lint: venv ## format, lint, types, architecture
	@$(LINT)

checks: venv ## lint and the tests that can run two at a time: six minutes
	@status=0; \
	$(LINT) || status=1; \
	$(PYTHON_OF_VENV) -m pytest -q $(TWICE) $(TWO_AT_A_TIME) $(PYTEST_ARGS) || status=1; \
	exit $$status

parity: venv ## every layout against one process: the table of maximum errors
	@$(PYTHON_OF_VENV) -m tests.parity.table

bench: venv ## step time against plain PyTorch and Hugging Face; cost of two ranks
	@$(PYTHON_OF_VENV) -m benchmarks.single_device
	@$(PYTHON_OF_VENV) -m benchmarks.two_ranks

lowest: ## the tests of optional libraries, with the lowest versions that are allowed
	@tools/test_lowest.sh $(PYTEST_ARGS)

engine: ## models with Transformer Engine's layers, in its own Python code, on the CPU
	@tools/test_engine.sh $(PYTEST_ARGS)

bridge: ## weights and recipes through the published megatron-bridge, on the CPU
	@tools/test_bridge.sh $(PYTEST_ARGS)

triton: ## our Triton kernels, in Triton's interpreter and compiler, on the CPU
	@tools/test_triton.sh $(PYTEST_ARGS)

like-the-gpu-machine: ## rehearse the GPU checks on the CPU, with the packages of a GPU machine
	@tools/like_the_gpu_machine.sh $(PYTEST_ARGS)

gpu: ## every check that needs a GPU, on the GPUs of this machine: correctness and speed
	@tools/test_gpu.sh $(GPU_ARGS)

gpu-wheels: ## download the packages for a GPU machine without a network, into .whl/
	@tools/gpu_wheels.sh

schemas: ## the cluster files, read by the packages that publish their schemas
	@tools/test_schemas.sh

docs: venv ## build the pages of docs/ as a site, into site/; fails on a broken link
	@$(PYTHON_OF_VENV) -m pip install --quiet -e '.[docs]' -c constraints.txt
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_OF_VENV) -m mkdocs build --quiet --strict

venv: ## make or refresh the virtual environment .venv
	@tools/make_venv.sh "$(VENV)" dev

clean: ## remove environments, outputs and caches
	tools/make_venv.sh --remove "$(VENV)"
	tools/make_venv.sh --remove .venv-lowest
	tools/make_venv.sh --remove .venv-engine
	tools/make_venv.sh --remove .venv-bridge
	tools/make_venv.sh --remove .venv-triton
	tools/make_venv.sh --remove .venv-like-gpu
	tools/make_venv.sh --remove .venv-gpu
	tools/make_venv.sh --remove .venv-schemas
	rm -rf quickstart gpu_report site .whl build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
	    .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
