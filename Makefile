# Two commands build and test everything: `make book` and `make test`.  `make help` lists the rest.
PYTHON ?=
VENV ?= .venv
PORT ?= 8000
PYTEST_ARGS ?=
NBVAL ?=
WORKERS ?= 3
EVERY ?=
STAND_IN ?= all
PAGES ?= 1
LAB ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_BOOK := $(VENV)/.installed-book
INSTALLED_DEV := $(VENV)/.installed-dev
# Module fixtures are shared, so a worker takes a whole file; tests/costs.py puts the dear ones first.
# Three workers for two cores: a test and its ranks wait for each other a third of the time.
SHARED = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Kernels are forked from a process that has imported torch; learners and graders get ordinary ones.
FORKED = JUPYTER_DEFAULT_PROVISIONER_NAME=forked
# One notebook's cells belong to one kernel, so the workers share out files; conftest.py has nbval's options.
REPLAY = $(FORKED) $(BIN)/python -m pytest -q --nbval -n $(WORKERS) --dist loadfile
SOURCES := conftest.py dualpipe_lab dualpipe_course dualpipe_ours solutions tests benchmarks tools _ext

.DEFAULT_GOAL := help
.PHONY: help book pdf test test-book test-stand-in lab fresh serve exercises grade lint format measure bench pairs lock release clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Settings: PYTHON=python3.11  VENV=.venv  PORT=8000  WORKERS=3  PAGES=1  LAB=--no-browser  PYTEST_ARGS='-k gpipe'"

# A stamp is older than its lock, or than the package's entry points, exactly when the environment has to be renewed.
$(INSTALLED): requirements.txt requirements.lock pyproject.toml
	@tools/install.sh $(VENV) requirements.lock $(PYTHON)
	@touch $@

$(INSTALLED_BOOK): requirements-book.lock $(INSTALLED)
	@tools/install.sh $(VENV) requirements-book.lock $(PYTHON)
	@touch $@

$(INSTALLED_DEV): requirements-dev.lock $(INSTALLED_BOOK)
	@tools/install.sh $(VENV) requirements-dev.lock $(PYTHON)
	@touch $@

book: $(INSTALLED_BOOK) ## run every chapter and build the HTML into _build/html
	@echo "==> building the book (chapters whose code and imports are unchanged come from the cache)"
	@# A failed page is not read again by the next build, which would then pass: forget what was read.
	@$(FORKED) PAGES_AT_ONCE=$(PAGES) $(BIN)/jupyter-book build . -W -n --keep-going || { rm -rf _build/.doctrees; exit 1; }
	@echo "==> the book: file://$(CURDIR)/_build/html/index.html   (make serve: http://127.0.0.1:$(PORT)/)"

test: $(INSTALLED_DEV) ## run all tests without the built book, and all solutions (12 minutes; EVERY=1: every case, an hour or more)
	@echo "==> tests"
	@$(BIN)/python -m pytest $(SHARED) -m "not browser" --ignore=tests/repository $(if $(EVERY),--every) $(PYTEST_ARGS)
	@echo "==> solutions, cell by cell against their stored outputs"
	@$(REPLAY) solutions

test-book: $(INSTALLED_DEV) ## run the tests that open the built book in Chromium (4 minutes, after make book)
	@test -f _build/html/index.html || { echo "error: there is no book yet"; echo "  remedy: make book"; exit 1; } >&2
	@$(BIN)/python -m pytest $(SHARED) -m browser tests $(PYTEST_ARGS)

test-stand-in: $(INSTALLED_DEV) ## run the tests of dp, tp, cp, pp and ep on the stand-in for NCCL (STAND_IN=drawn: one of every third file)
	@echo "==> tests on the stand-in for NCCL ($(STAND_IN))"
	@$(BIN)/python -m pytest -q $(SHARED) --stand-in=$(STAND_IN) $(PYTEST_ARGS) $(addprefix tests/,dp tp cp pp ep)

lab: $(INSTALLED) ## make or renew your copies of the notebooks in my-course, and open JupyterLab on them
	@$(BIN)/python -m dualpipe_lab lab $(LAB)

fresh: $(INSTALLED) ## give a chapter out again and keep yours: make fresh chapter=gpipe
	@$(BIN)/python -m dualpipe_lab fresh $(or $(chapter),$(error name the chapter: make fresh chapter=gpipe))

pdf: $(INSTALLED_DEV) ## print the built book as _build/dualpipe-lab.pdf, with contents and page numbers (Chromium)
	@test -f _build/html/index.html || { echo "error: there is no book yet"; echo "  remedy: make book"; exit 1; } >&2
	@$(BIN)/python tools/pdf.py

serve: ## serve the built book on 127.0.0.1:PORT
	@test -f _build/html/index.html || { echo "error: there is no book yet"; echo "  remedy: make book"; exit 1; } >&2
	@echo "==> http://127.0.0.1:$(PORT)/   (Ctrl+C stops it; another port: make serve PORT=8001)"
	@$(or $(wildcard $(BIN)/python),python3) -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

exercises: $(INSTALLED_BOOK) ## write the exercises anew from the solutions, and run the solutions
	@$(BIN)/python tools/make_exercises.py
	@$(BIN)/python tools/make_exercises.py --run

grade: $(INSTALLED) ## grade the notebooks in SUBMISSIONS=folder; NBVAL=1 runs each and compares its outputs
	@$(BIN)/python -m dualpipe_lab grade $(if $(NBVAL),--nbval) $(or $(SUBMISSIONS),$(error name the folder: make grade SUBMISSIONS=folder))

lint: $(INSTALLED_DEV) ## check style, format, types, and the pages, lists and locks of the repository (1 minute)
	@echo "==> ruff check" && $(BIN)/ruff check $(SOURCES)
	@echo "==> ruff format" && $(BIN)/ruff format --check $(SOURCES)
	@echo "==> mypy" && $(BIN)/mypy
	@echo "==> pages, exercises, lists and locks" && $(BIN)/python -m pytest -q tests/repository

format: $(INSTALLED_DEV) ## put the code into the house format
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

measure: $(INSTALLED_DEV) ## write anew what each test costs, and the budgets of the directories (on a quiet machine, with the book built)
	@$(BIN)/python -m pytest $(SHARED) -m "not browser" --ignore=tests/repository --allowance=8 --costs=write
	@$(BIN)/python -m pytest $(SHARED) -m browser tests --costs=cases

bench: $(INSTALLED_DEV) ## run every benchmark and print its table; LONG=1: every plan, also beside transformers (some hours, resumable)
ifdef LONG
	@$(BIN)/python benchmarks/plans.py --all
	@$(BIN)/python benchmarks/pretrained_plans.py --all
else
	@for file in benchmarks/[a-z]*.py; do echo "==> $$file"; $(BIN)/python $$file || exit 1; done
endif

pairs: $(INSTALLED_BOOK) ## write each page's .ipynb anew from its .md, and the exercises from the solutions
	@$(BIN)/python tools/install_cell.py
	@$(BIN)/python tools/make_exercises.py
	@$(BIN)/jupytext --quiet --to ipynb --update $$($(BIN)/python tools/check_pairs.py --list)

lock: $(INSTALLED_DEV) ## renew requirements.txt and the locks from pyproject.toml
	@$(BIN)/python tools/lock.py --upgrade

release: $(INSTALLED) ## write the wheel, the exercises and the built book as one archive into dist
	@$(BIN)/python tools/release.py

clean: ## remove what was built (the environment stays: rm -rf .venv removes it)
	@rm -rf _build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@echo "==> removed _build and the tools' caches"
