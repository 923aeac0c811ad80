# `make help` lists the targets. Everything runs in .venv, which the first target builds from pinned
# versions. PYTHON=python3.12 chooses the interpreter; TORCH_INDEX=https://download.pytorch.org/whl/cpu
# takes torch's small CPU build; COMPOSE=... is the container engine's compose command.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
COMPOSE ?= docker compose
SEEDS ?= 200
SEED ?=
FIRST ?= 0
ROUNDS ?= 3
KIND ?=
CHAOS ?=
TORCH_INDEX ?=
export COMPOSE
# Bytecode is kept, whatever the environment says: tests start hundreds of interpreters, and each would compile our
# code again.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
READY := .venv/ready
# Without bytecode, which Python makes of what is imported: all of it takes a minute.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# In the order in which they begin: the files that take long first, so that no core idles at the end.
FAST_TESTS := $(wildcard $(addprefix tests/,integration combinations device idioms property sim contract unit tidy))
# Tests wait for processes of their own more than they compute, so three files run beside each other for every
# two cores, and no more than four, each of which may have a cluster running. A file is never divided: its tests
# share what they started, and those that measure run one after the other.
TEST_JOBS := $(shell cores=$$(getconf _NPROCESSORS_ONLN || echo 2); jobs=$$(( (cores * 3 + 1) / 2 )); echo $$(( jobs < 4 ? jobs : 4 )))
PARALLEL := -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
# A machine with a GPU may have no network to build .venv with: then its own Python serves, with what it
# has installed, whose warnings are not ours to heed. A PYTHON given on the command line goes before both.
GPU_PYTHON = $(if $(filter command,$(firstword $(origin PYTHON)))$(if $(wildcard $(BIN)/python),,none),$(PYTHON),$(BIN)/python)

.PHONY: help demo test thorough check checked-tests checked-seeds images protos protos-check reference image-lock lint format fuzz sim sim-seldom sim-mutants core-mutants combinations chaos chaos-mixed bench bench-check checkpoint-check lanes-check gpu-check system-deps test-system pods-check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pushpull needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) has no ensurepip, so it cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --no-deps --extra-index-url $(TORCH_INDEX) torch)
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

demo: $(READY) ## Train a CNN on handwritten digits: 1 scheduler, 2 servers, 2 workers, test accuracy >= 97 %
	$(BIN)/pushpull train examples/digits_cnn.py --workers 2 --servers 2

test: $(READY) ## Run the quick tests, which need pip packages only, on up to four cores
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not thorough' $(FAST_TESTS)

thorough: $(READY) ## Run the tests that take longest, which `make check` leaves out, on up to four cores
	$(BIN)/python -m pytest $(PARALLEL) -m thorough $(FAST_TESTS)
	$(MAKE) images
	$(BIN)/python -m pytest $(PARALLEL) -m thorough tests/system

# One after the other, but for the images: `make --jobs=2 check` builds them beside the installation and lint.
check: lint checked-tests checked-seeds demo system-deps test-system ## All that CI runs: lint, the tests but for the longest, the simulator's seeds, demo, system tests

CHECKED := $(filter check,$(MAKECMDGOALS))
checked-tests: $(READY) | lint
	$(BIN)/python -m pytest $(PARALLEL) -m 'not thorough' $(filter-out tests/sim,$(FAST_TESTS)) tests/sim/test_mutants.py

checked-seeds: $(READY) | checked-tests
	$(MAKE) sim SEEDS=5

demo: | $(if $(CHECKED),checked-seeds)
system-deps: | $(if $(CHECKED),demo)
test-system: | $(if $(CHECKED),system-deps)

images: ## Build the container images
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; echo "building the container images"; \
	SERVERS=1 WORKERS=1 $(COMPOSE) build >"$$log" 2>&1 || { cat "$$log" >&2; exit 1; }

protos: $(READY) ## Generate the stubs from protos/ again
	cd protos && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --pyi_out=. pushpull/v1/*.proto

protos-check: $(READY) ## Fail if the committed stubs are not what the protos give
	$(BIN)/python -m pytest -q tests/tidy/test_stubs.py

reference: $(READY) ## Write REFERENCE.md, API.md and INVARIANTS.md of docs/reference from the code again
	PYTHONPATH=.:protos $(BIN)/python -m docs.reference
	PYTHONPATH=.:protos $(BIN)/python -m docs.api
	PYTHONPATH=.:protos $(BIN)/python -m docs.invariants

image-lock: $(READY) ## Write deploy/image/*.txt again: versions and hashes of what the image installs
	$(BIN)/python -m deploy.image_lock

lint: $(READY) ## Lint and type-check the code and the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=.:protos $(BIN)/lint-imports --no-cache
	$(BIN)/mypy --num-workers 2
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb

format: $(READY) ## Format the code and apply the lint's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(READY) ## Draw other examples than `make test` has, ROUNDS=3 times; each says its seed (SEED=17: that one alone)
	@for round in $$(seq $(if $(SEED),1,$(ROUNDS))); do seed=$(or $(SEED),$$(( RANDOM * 32768 + RANDOM ))); \
	echo "make fuzz SEED=$$seed"; \
	$(BIN)/python -m pytest $(PARALLEL) -m 'hypothesis or drawn' --hypothesis-profile=fuzz --hypothesis-seed=$$seed $(FAST_TESTS) \
	|| { echo "To see it again: make fuzz SEED=$$seed" >&2; exit 1; }; done

sim: $(READY) ## Run the simulator: SEEDS=200 schedules from FIRST=0, or the one of SEED= with its transcript (KIND=failover: only those)
	PYTHONPATH=.:protos $(BIN)/python -m tests.sim.run $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST)) $(if $(KIND),--kind $(KIND))

sim-seldom: $(READY) ## Run the simulator until what seldom happens has: up to 200 seeds of each kind from FIRST=0 (KIND=failover: only those)
	PYTHONPATH=.:protos $(BIN)/python -m tests.sim.run --seldom --first $(FIRST) $(if $(KIND),--kind $(KIND))

sim-mutants: $(READY) ## Put one deliberate bug after the other into the machines: the simulator must see each
	PYTHONPATH=.:protos $(BIN)/python -m tests.sim.run_mutants

combinations: $(READY) ## Train with features and faults combined at random: the same bits, each step once? SEEDS=20 of each kind from FIRST=0
	PYTHONPATH=.:protos $(BIN)/python -m tests.combinations.run --seeds $(if $(filter file,$(origin SEEDS)),20,$(SEEDS)) --first $(FIRST)

chaos: $(READY) ## Kill, pause and cut off real servers under load, for minutes (CHAOS='--kills 20 --json FILE')
	@PYTHONPATH=.:protos $(BIN)/python -m tests.chaos $(CHAOS)

chaos-mixed: $(READY) ## The same to tables of every kind, with update logs and checkpoints (CHAOS='--seconds 180 --seed 17')
	@PYTHONPATH=.:protos $(BIN)/python -m tests.chaos.mixed $(CHAOS)

core-mutants: export PYTHONPATH := .:protos
core-mutants: $(READY) ## Put small faults into ps_core, one by one: do its tests find 90 % of them?
	@$(BIN)/python -m tests.mutation

bench: $(READY) ## Measure, and print JSON with the environment it was measured in
	@$(BIN)/python -m ps_cli.bench

bench-check: $(READY) ## Run every benchmark quickly: do they work, and give all that their pages promise
	$(BIN)/python -m pytest tests/bench

checkpoint-check: $(READY) ## Test checkpoints further than CI does: every optimizer, S3, servers that die, rows of them
	$(BIN)/python -m pytest $(PARALLEL) tests/checkpoints

lanes-check: $(READY) ## Test failover, update logs and changes of consistency on both lanes; `make check` takes one of each
	$(BIN)/python -m pytest $(PARALLEL) --all-lanes -m second_lane $(FAST_TESTS)

gpu-check: export PYTHONPATH := $(CURDIR):$(CURDIR)/protos$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-check: ## On a machine with a GPU: the CUDA tests, some with torch's sanitizer, then training benchmarks as JSON (PYTHON=python3: no network)
	@$(GPU_PYTHON) -m ps_cli.bench.preflight >&2
	@$(GPU_PYTHON) -m pytest -W default tests/cuda tests/device --device cuda >&2
	@TORCH_CUDA_SANITIZER=1 $(GPU_PYTHON) -m pytest -W default tests/cuda/test_copies.py tests/device --device cuda >&2
	@$(GPU_PYTHON) -m ps_cli bench train --device cuda --json -
	@for size in $$($(GPU_PYTHON) -m ps_cli.bench.preflight --sizes); do \
	  $(GPU_PYTHON) -m ps_cli bench train --device cuda --size-mb $$size --json - || exit; done

system-deps: $(READY) ## Install what tests/system needs beside pip packages (Debian and Ubuntu; needs root)
	tests/system/install-deps

test-system: $(READY) images ## Run the tests that need a container engine, kubectl or Node
	$(BIN)/python -m pytest $(PARALLEL) -m 'not thorough' tests/system

pods-check: $(READY) ## Run the Kubernetes pods as containers: updates, kills, lost nodes, checkpoints, two runs; and measure the image
	$(BIN)/python -m pytest -o faulthandler_timeout=1800 tests/pods

clean: ## Remove .venv and everything generated, but not the committed stubs
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
