# `make demo` and `make test` do all their own set-up: a virtual environment in .venv with the
# versions of constraints.txt, what the demo needs or what the tests need. The second run skips it.

# The first Python on this machine that is new enough; `make PYTHON=/usr/bin/python3.12 test` to choose.
ifndef PYTHON
PYTHON := $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))) python3)
endif

VENV := .venv
BENCH_VENV := .venv-bench
CAN_RUN := $(VENV)/.can-run
CAN_TEST := $(VENV)/.can-test
CAN_BENCH := $(BENCH_VENV)/.can-bench
BUILD_INPUTS := pyproject.toml $(wildcard setup.py src/tessera/crypto/kernel/*.[ch])
BENCHMARKS = $(shell grep -l '^if __name__ == ' benchmarks/*.py)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo deploy-demo test test-slow campaigns sanitize docs bench bench-env clean

help:  ## what can be made (this list)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CAN_RUN)  ## one recommender under every scheme, side by side, and a page about it
	@$(VENV)/bin/tessera demo

deploy-demo: $(CAN_TEST)  ## leader, helper and ten clients as processes over TLS, with kills
	@$(VENV)/bin/python examples/deploy/demo.py

test: $(CAN_TEST)  ## format, lint, types, and the tests that are not slow
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy --strict src papers
	$(VENV)/bin/pytest -m 'not slow and not campaign' -n 2 -q -rs

test-slow: $(CAN_TEST)  ## the tests marked slow
	$(VENV)/bin/pytest -m 'slow and not campaign' -n 2 -q -rs

campaigns: $(CAN_TEST)  ## attacks and faults at full size, with their figures; short versions are in the two above
	$(VENV)/bin/pytest -m campaign -n 2 -q -rsP

docs: $(CAN_TEST)  ## the documentation as a site, in build/docs
	@$(VENV)/bin/python scripts/build_docs.py

sanitize: $(CAN_TEST)  ## the C code under address and undefined-behaviour sanitizers
	$(VENV)/bin/pytest -q -rs -k sanitizers tests/crypto

bench: $(CAN_BENCH)  ## every benchmark beside its baseline (an environment of its own)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BENCH_VENV)/bin/python $$script || exit 1; done

bench-env: $(CAN_BENCH)  ## only the environment that the benchmarks run in

clean:  ## remove environments, builds and caches; the next `make` starts afresh
	rm -rf $(VENV) $(BENCH_VENV) build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard src papers tests benchmarks examples) \( -name '__pycache__' -o -name '_native*.so' \) -prune -exec rm -rf {} +

# $(1): folder, $(2): what to install, $(3): constraints
define set_up
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: tessera needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)" >&2; \
		echo "hint: install one, then \`make PYTHON=/path/to/it $(MAKECMDGOALS)\`" >&2; exit 1; }
	@echo "setting up $(1) with $$($(PYTHON) --version), once; this takes a minute or two" >&2
	@$(PYTHON) -m venv $(1) || { \
		echo "error: '$(PYTHON) -m venv' failed" >&2; \
		echo "hint: on Debian and Ubuntu, \`apt-get install python3-venv\`" >&2; exit 1; }
	@$(1)/bin/pip install --quiet --constraint $(3) --editable '$(2)'
endef

$(CAN_RUN): $(BUILD_INPUTS) constraints.txt
	$(call set_up,$(VENV),.[train],constraints.txt)
	@touch $@

$(CAN_TEST): $(BUILD_INPUTS) constraints.txt
	$(call set_up,$(VENV),.[dev],constraints.txt)
	@touch $(CAN_RUN) $@

$(CAN_BENCH): $(BUILD_INPUTS) constraints-bench.txt
	$(call set_up,$(BENCH_VENV),.[bench],constraints-bench.txt)
	@touch $@
