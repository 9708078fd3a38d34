# Archipelago. `make` alone lists what can be done.
#
# Everything works from a clean clone with python3.11, git and make: each target that needs the virtual environment
# depends on its stamp, and the stamp depends on the locks, so a changed lock reinstalls by itself.

PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# torch is in no lock: which build is right depends on the machine. Where there is no GPU, point pip at a CPU build
# (`make venv TORCH_ARGS="--index-url ..."` or pip's own configuration); a plain install works everywhere but is larger.
TORCH      ?= torch==2.13.0
TORCH_ARGS ?=

export DJANGO_SETTINGS_MODULE ?= marketplace.settings

PIP     := $(BIN)/python -m pip --disable-pip-version-check
PYTEST  ?= $(BIN)/python -m pytest
ARGS    ?=
NAME    ?= *

.DEFAULT_GOAL := help
.PHONY: help venv demo dev test prove mutants check bench lock lock-check schema screenshots format clean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make the virtual environment and install the locked dependencies (CPU torch first)

$(STAMP): requirements/dev.txt requirements/trainer.txt worker_agent/pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11, or name one with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --require-hashes -r requirements/trainer.txt
	$(PIP) install --quiet $(TORCH_ARGS) $(TORCH)
	$(PIP) install --quiet --require-hashes -r requirements/dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable ./worker_agent
	@touch $@

demo: $(STAMP) ## The main job end to end: a model trained on islands that come and go, and every cent of it checked
	$(BIN)/python manage.py demo $(ARGS)

dev: $(STAMP) ## Run the whole stack on this machine and stay up (Ctrl-C stops it)
	$(BIN)/python manage.py dev $(ARGS)

test: $(STAMP) ## Every test but the slow proofs (ARGS="-k name" passes options on)
	$(PYTEST) -m "not prove" $(ARGS)

prove: $(STAMP) ## The slow proofs: kills, races and whole runs
	$(PYTEST) -m prove $(ARGS)

mutants: $(STAMP) ## Bugs put into the ledger on purpose: each must fail its tests
	$(BIN)/python -m tests.mutants.ledger

check: $(STAMP) ## Format, lint, types, import contracts, migrations, deployment checks, locks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python manage.py makemigrations --check --dry-run
	$(BIN)/python -m marketplace.devstack.deploycheck
	$(MAKE) --no-print-directory lock-check

format: $(STAMP) ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run the benchmarks (NAME=training runs one, ARGS=--quick passes options on)
	@for file in benchmarks/$(NAME).py; do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done

# Extras stay in the locks: a pip that reads hashes refuses `name[extra]` of a package whose pin does not name the extra,
# once a newer release of it is out.
UV_COMPILE = $(BIN)/uv pip compile --quiet --universal --no-strip-extras --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

lock: $(STAMP) ## Resolve requirements/*.in into the locks (ARGS=--upgrade takes newer releases)
	$(UV_COMPILE) $(ARGS) requirements/dev.in -o requirements/dev.txt
	@for name in base embedded trainer; do \
		$(UV_COMPILE) -c requirements/dev.txt requirements/$$name.in -o requirements/$$name.txt || exit 1; done

schema: $(STAMP) ## Write the API's description, docs/openapi.yaml, as the code gives it
	$(BIN)/python manage.py spectacular --file docs/openapi.yaml --validate --fail-on-warn

screenshots: $(STAMP) ## Take the pictures in docs/images anew, of a demo's pages in a real browser
	$(BIN)/python manage.py demo --port 0 --state .archipelago/pictures --pictures docs/images

lock-check: $(STAMP) ## Fail when a lock no longer says what its .in file asks for
	$(BIN)/python -m marketplace.devstack.lockcheck

clean: ## Remove the embedded stack's state and caches (the virtual environment stays)
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m marketplace.devstack.forget; fi
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis htmlcov .coverage build
