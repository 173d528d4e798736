# make demo: train a small model on this machine.  make test: run the tests; make test-all: the slow ones too.
# Each installs what it needs into .venv.
PYTHON ?= python3
.DELETE_ON_ERROR:

# TEST_PROCESSES run tests at the same time. Two cores keep four busy, because many tests wait; the slow ones need memory.
PYTEST = .venv/bin/python -m pytest --dist=loadgroup --no-loadscope-reorder

.PHONY: demo test test-all lint
demo: .venv/installed
	.venv/bin/python -m scripts.demo

test: .venv/installed
	$(PYTEST) -n $(or $(TEST_PROCESSES),4)

test-all: .venv/installed
	$(PYTEST) -n $(or $(TEST_PROCESSES),3) -m "slow or not slow"

lint: .venv/installed
	.venv/bin/ruff check .
	if ls deploy/*.sh >/dev/null 2>&1; then .venv/bin/shellcheck -x deploy/*.sh deploy/lib/*.sh; fi

.venv/installed: SHELL := bash
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' || \
	  { echo "Python 3.10 to 3.12 is needed, $(PYTHON) is $$($(PYTHON) --version): set PYTHON=python3.11"; exit 2; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "9 GB go into .venv: torch, libtpu and jax, and half of it CUDA libraries that torch asks for"
	@set -o pipefail; \
	  (while sleep 20 >/dev/null 2>&1; do du -sh .venv | sed 's/[[:space:]].*/ of 9 GB are in .venv/'; done) & says=$$!; \
	  trap "kill $$says" EXIT; \
	  .venv/bin/python -m pip install --progress-bar off --editable '.[tpu,dev]' | \
	    { grep --line-buffered -E '^(Installing|Success)|\([0-9]{2,}\.[0-9] MB\)' | cut -c 1-100 || true; }
	touch $@
