# Everything runs in .venv, which is brought up to date when pyproject.toml or constraints.txt change.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
RAY_STAMP := $(VENV)/.stamp-ray
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install
TORCH := $(shell sed -n 's/^\(torch==[^ ;\#]*\).*/\1/p' constraints.txt)

BROWSERS := chromium chromium-browser google-chrome google-chrome-stable

# The interpreter that makes the environment; `make PYTHON=...` chooses another.
new_enough = $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
PYTHON ?= $(shell for python in python3.11 python3; do if $(call new_enough,$$python); then echo $$python; break; fi; done)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help env native ray run test matrix explore test-cuda races lint types browser launchers networks bench bench-cuda memory hostile reference sim kills fuzz sanitize soak oracle dist docs format clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-9s %s\n' "$$name" "$$text"; done

env: $(STAMP) native ## Create or update .venv, and compile the native core

# This takes 50 ms if the core is there. Without a compiler it prints one line, and Backhaul runs without the core.
native: $(STAMP) ## Compile the native core, if there is a C++ compiler
	@$(BIN)/python src/backhaul/_native/build.py --quiet

# torch goes first and alone, by its exact version: unpinned, pip takes the newest build there is, which
# may bring gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(if $(shell $(call new_enough,$(or $(PYTHON),false)) && echo yes),,$(error backhaul needs Python 3.11 or newer; name one with `make PYTHON=...`))
	@echo "Setting up $(VENV); the first time this takes a few minutes."
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) -c constraints.txt '$(TORCH)'
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

# Ray is large, so it is installed where it is asked for: for its tests, and for `make run ARGS="--on ray"`.
$(RAY_STAMP): $(STAMP)
	@echo "Installing Ray."
	@$(PIP) -c constraints.txt -e '.[ray]' 'ray[tune]'
	@touch $@

ray: $(RAY_STAMP) ## Install Ray, for its tests and its example

run: env $(if $(filter ray --on=ray,$(ARGS)),$(RAY_STAMP)) ## Train a model split over workers; ARGS go to examples/train_transformer.py
	@$(BIN)/python examples/train_transformer.py $(ARGS)

# A file's tests run in one process, in their order; several files at a time. Many tests start processes that import the
# package, so its bytecode is worth keeping even where the environment says otherwise.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# These run without the native core too. `make matrix` runs all tests without it.
WITHOUT_CORE := tests/unit/wire tests/native tests/rref tests/cluster/test_calls.py tests/autograd/test_contexts.py \
	tests/autograd/test_kinds.py tests/plain/test_features.py
test: export PYTHONDONTWRITEBYTECODE :=
test: lint types browser launchers networks ray ## Check everything: lint, types, tests; ARGS go to pytest
	$(PYTEST) $(ARGS)
	$(if $(ARGS),,BACKHAUL_NATIVE=0 $(PYTEST) -q $(WITHOUT_CORE))

matrix: env ## Run the tests with each supported torch and Python; ARGS such as 2.15/3.12, --keep, --tests "tests/jit -x"
	@$(BIN)/python tools/matrix.py $(ARGS)

explore: env ## Run the property tests on inputs drawn anew; ARGS go to pytest
	$(BIN)/pytest -m hypothesis --hypothesis-profile explore -n auto --maxprocesses 8 $(ARGS)

# Where there is no device these are skipped, and say so.
races: env ## Compare steps with kernels that take long, drawn by lot, with plain autograd on a CUDA device; ROUNDS=1000
	@$(BIN)/python -m tests.cuda.races $(ROUNDS)

test-cuda: env ## Run the tests that need a CUDA device; ARGS go to pytest
	$(BIN)/pytest -m cuda -rs tests/cuda tests/reference $(ARGS)

lint: env ## Check style, formatting and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: env ## Check types
	$(BIN)/mypy

# Nothing fails where it cannot be installed: the tests that need it are skipped then, and say so. The fonts are
# because Chromium does not start without any.
browser: ## Install Chromium for the tests of reports, where apt-get can
	@for name in $(BROWSERS); do command -v $$name >/dev/null && exit 0; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "Installing Chromium for the tests of reports."; \
		export DEBIAN_FRONTEND=noninteractive; \
		timeout 300 apt-get -qq update >/dev/null 2>&1; \
		timeout 600 apt-get -qq install -y --no-install-recommends chromium fonts-liberation >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "There is no Chromium: the tests that need it are skipped."

LAUNCHERS := openmpi-bin mpich slurmctld slurmd slurm-client munge
launchers: ## Install Open MPI, MPICH and Slurm for the tests of launchers, where apt-get can
	@for name in mpirun.openmpi mpiexec.hydra slurmctld slurmd srun munged; do \
		command -v $$name >/dev/null || missing=yes; \
	done; test -z "$$missing" && exit 0; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "Installing Open MPI, MPICH and Slurm for the tests of launchers."; \
		export DEBIAN_FRONTEND=noninteractive; \
		timeout 300 apt-get -qq update >/dev/null 2>&1; \
		timeout 600 apt-get -qq install -y --no-install-recommends $(LAUNCHERS) >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "Open MPI, MPICH or Slurm is missing: the tests that need it are skipped."

NETWORKS := iproute2 iptables openssh-client openssh-server
networks: ## Install iproute2, iptables and OpenSSH for the tests on several hosts, where apt-get can
	@for name in ip iptables ssh ssh-keygen sshd; do PATH=$$PATH:/usr/sbin command -v $$name >/dev/null || missing=yes; done; \
	test -z "$$missing" && exit 0; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "Installing iproute2, iptables and OpenSSH for the tests on several hosts."; \
		export DEBIAN_FRONTEND=noninteractive; \
		timeout 300 apt-get -qq update >/dev/null 2>&1; \
		timeout 600 apt-get -qq install -y --no-install-recommends $(NETWORKS) >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "iproute2, iptables or OpenSSH is missing: the tests that need it are skipped."

bench: env ## Measure programs and calls side by side with torch.distributed; ARGS such as --quick, --rows RNN,echo, --regress
	@$(BIN)/python benchmarks/bench.py $(ARGS)

bench-cuda: env ## Measure tensors on a CUDA device side by side with torch.distributed; ARGS go to benchmarks/on_devices.py
	@$(BIN)/python benchmarks/on_devices.py $(ARGS)

memory: env ## Show that memory stays flat over large echoes; ARGS go to benchmarks/memory.py
	@$(BIN)/python benchmarks/memory.py $(ARGS)

hostile: env ## Show what one hostile message costs a worker with trusted=False; ARGS go to benchmarks/hostile.py
	@$(BIN)/python benchmarks/hostile.py $(ARGS)

reference: env ## Run the reference's own suites against Backhaul; ARGS: parts of names, see tests/reference/run.py
	@$(BIN)/python -m tests.reference.run $(ARGS)

# A part of it runs with the tests; this is for many seeds. SEEDS=7 is one, SEEDS=0:5000 are five thousand.
SEEDS := 0:200
ROUNDS := 1000
STEPS := 20
WORKERS := 8

sim: env ## Run random steps under random faults in simulation; SEEDS, STEPS, WORKERS, ARGS
	@$(BIN)/python -W ignore -m tools.simulation --seeds $(SEEDS) --steps $(STEPS) --workers $(WORKERS) $(ARGS)

# Of these, too, a part runs with the tests.
kills: env ## Kill worker processes at every stage of a step; ARGS such as --count 200, --stop
	@$(BIN)/python -u -W ignore -m tools.kill_tests $(ARGS)

fuzz: env ## Feed broken input to all that reads bytes of others; ARGS such as --inputs 10000000, --minutes 5
	@$(BIN)/python -u -W ignore -m tools.fuzz $(ARGS)

sanitize: env ## Run the native core under sanitizers, with broken input and its tests; ARGS such as --inputs 1000000
	@$(BIN)/python -m tools.sanitize $(ARGS)

soak: env ## Mixed traffic with a kill every few seconds, and what it costs over time; ARGS such as --minutes 10
	@$(BIN)/python -u -W ignore -m tools.soak $(ARGS)

oracle: env ## Compare random programs with plain autograd; ARGS such as --programs 3000 --order 2 --processes --threads 4
	@$(BIN)/python -u -m tools.oracle $(ARGS)

# The metadata gets its URLs, and the README absolute links, from REPOSITORY; see [tool.backhaul] in pyproject.toml.
dist: export BACKHAUL_REPOSITORY := $(REPOSITORY)
dist: env ## Build sdist, wheel and SBOM into dist, and check them; REPOSITORY=<address>; ARGS such as --tag v0.1.0
	@rm -rf dist
	@$(BIN)/python -m tools.release $(ARGS)

docs: env ## Build the documentation site into build/site/html; warnings and links to nowhere are errors
	@$(BIN)/python -m tools.site

format: env ## Fix what can be fixed, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) .matrix build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
