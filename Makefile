# make demo: train a small model on this machine.  make test: run the tests.  Both install what they need into .venv.
PYTHON ?= python3
.DELETE_ON_ERROR:

.PHONY: demo test test-slow lint
demo: .venv/installed
	.venv/bin/python -m scripts.demo

test: .venv/installed
	.venv/bin/python -m pytest

test-slow: .venv/installed
	.venv/bin/python -m pytest -m "slow or not slow"

lint: .venv/installed
	.venv/bin/ruff check .
	if ls deploy/*.sh >/dev/null 2>&1; then .venv/bin/shellcheck -x deploy/*.sh deploy/lib/*.sh; fi

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
	  { echo "Python 3.10 to 3.13 is needed, $(PYTHON) is $$($(PYTHON) --version): set PYTHON=python3.11"; exit 2; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --progress-bar off --editable '.[tpu,dev]'
	touch $@
