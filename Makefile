# `make help` lists the targets. Everything runs from the checkout's own .venv.
SHELL := /bin/bash
PY ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install up down test check fuzz soak e2e bench proto mutants
.DEFAULT_GOAL := help

help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "creating .venv"; $(PY) -m venv .venv; }
	@echo "installing into .venv: two to seven minutes and 2.6 GB (torch is the large one; see README for CPU-only builds)"
	@$(BIN)/pip install --progress-bar on -c constraints.txt -e '.[all,dev]'
	@touch $@

install: .venv/.installed ## Create .venv with all services and the development tools

up: install ## Start NATS and all eight services with the default model; stops with Ctrl-C, or: make up ARGS=--detach
	@$(BIN)/fathom up $(ARGS)

down: install ## Stop what `make up` started
	@$(BIN)/fathom down

test: install ## Every test: unit, integration and whole-suite (six to twelve minutes on two cores)
	@$(BIN)/python -m tools.run_tests $(ARGS)

check: install ## Lint, types, import contracts, size ceilings, fresh stubs, fast tests that changes can have touched (ARGS=--all: all of them)
	@$(BIN)/python -m tools.check $(ARGS)

fuzz: install ## The tests of the API that take many minutes: all seeds, all bodies, a clean installation
	@$(BIN)/python -m pytest -m long services/recipe e2e tools/tests/test_torch_free.py $(ARGS)

soak: install ## The tests of engines, stores and kernels that take many minutes: all lengths, kills, leaks, a Ceph cluster
	@$(BIN)/python -m pytest -m long kernels services bench tools/tests/test_ceph_cluster.py --ignore=services/recipe $(ARGS)

e2e: install ## Only the whole-suite tests
	@$(BIN)/python -m pytest e2e $(ARGS)

bench: install ## The figures of README's speed table, one JSON line each
	@$(BIN)/python -m bench $(ARGS)

proto: install ## Regenerate the stubs beside proto/*.proto
	@$(BIN)/python -m tools.stubs

mutants: install ## Break each promise with a small patch and require its test to fail
	@$(BIN)/python -m tools.mutants $(ARGS)
