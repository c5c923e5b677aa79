# `make` lists the targets. Every target prepares .venv first, once.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
SEED ?= 0

python := .venv/bin/python
# Tests and the quickstart run many small processes on few cores: one thread each.
export OMP_NUM_THREADS ?= 1
quickstart := runs/quickstart

.PHONY: help setup warm-start quickstart compare test test-all test-gpu lint clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/setup-done ## prepare .venv for the CPU (PYTHON=python3.11)
	@:

.venv/setup-done: requirements/cpu.txt requirements/setup.sh setup.py csrc/compile.py $(wildcard csrc/*.cpp csrc/*.h)
	@PYTHON='$(PYTHON)' requirements/setup.sh
	@touch $@

warm-start: setup ## make the arithmetic task and a model that was warm-started on noisy demonstrations (SEED=0)
	@rm -rf $(quickstart)
	$(python) -m megarl make-task arithmetic --output-dir $(quickstart)/task --seed $(SEED)
	$(python) -m megarl sft configs/quickstart_sft.yaml trainer.seed=$(SEED)

compare: warm-start ## PPO, GRPO, RLOO, REINFORCE++, OnlineDPO and a learned reward from one warm start: runs/compare
	$(python) benchmarks/compare.py --overrides trainer.seed=$(SEED)

quickstart: warm-start ## train a small model with GRPO on two CPU cores, about 6 minutes (SEED=0)
	$(python) -m megarl train configs/quickstart.yaml trainer.seed=$(SEED)

test: setup ## the tests of CI: no GPU, no network, two cores
	$(python) -m pytest -q -m "not gpu and not slow and not slurm"

test-all: setup ## the tests of CI, the full matrices and the kill tests
	$(python) -m pytest -q -m "not gpu and not slurm"

test-gpu: setup ## the tests that need a CUDA device (PYTHON_GPU: the interpreter of a GPU install)
	$(or $(PYTHON_GPU),$(python)) -m pytest -q -m gpu

lint: setup ## ruff: rules and line length
	$(python) -m ruff check .

clean: ## remove .venv, runs/ and caches
	rm -rf .venv runs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find megarl csrc tests -name __pycache__ -type d -prune -exec rm -rf {} +
