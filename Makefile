# One command for each thing to do. `make demo` or `make test` is enough on a machine with nothing but Python and make.
#
#   PYTHON=python3.12   the interpreter for the environment (default: the first of 3.10 to 3.13 found on the PATH)
#   VENV=none           no environment of our own: use PYTHON as it is (a machine without a network, a container)
#   ARGS="-k cache -x"  more arguments for pytest

SHELL := bash
VENV ?= .venv
JOBS ?= 2
DEMO := checkpoints/demo/config.json

SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)
endif

ifeq ($(VENV),none)
RUN := $(or $(PYTHON),python3)
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

# On the CPU, PyTorch's own threads only get in the way of several test processes.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu sanitize bench report lint compat clean

help:
	@echo "make setup     environment in $(VENV), packages, demo checkpoint"
	@echo "make demo      setup, then steps 1 to 3: inspect, validate, generate"
	@echo "make test      setup, then lint and the CPU suite"
	@echo "make test-gpu  the whole suite on the GPU"
	@echo "make sanitize  compute-sanitizer (memcheck, racecheck) over small launches of every kernel, on the GPU"
	@echo "make bench     steps 4 to 7 and the other benchmarks, in the README's order; writes results/"
	@echo "make report    the README's tables and plots from results/"
	@echo "make lint      ruff, and whether the README's tables agree with results/"
	@echo "make compat    the CPU suite under transformers 4.44 to the newest"
	@echo "make clean     remove environments and caches (checkpoints/ and results/ stay)"

setup: $(READY) $(DEMO)

$(VENV)/.installed: requirements.txt requirements-dev.txt constraints.txt
	@$(or $(PYTHON),false) -c '$(SUITABLE)' 2>/dev/null || { \
		echo "error: Python 3.10 to 3.13 with its venv module is needed (tried: $(or $(PYTHON),python3)); install it" \
			"(Debian, Ubuntu: apt-get install python3-venv) or name one: make PYTHON=/path/to/python3.12" >&2; \
		exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -r requirements-dev.txt -c constraints.txt
	@touch $@

$(DEMO): | $(READY)
	$(RUN) model/demo_checkpoint.py

demo: setup
	$(RUN) model/inspect_attention.py
	$(RUN) model/validate_decode_attention_triton.py
	$(RUN) run_baseline.py

test: setup lint
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(ARGS)

test-gpu: $(READY)
	$(PYTEST) -m "not slow" $(ARGS)

# Compiled first: the sanitizer then runs the kernels only.
sanitize: $(READY)
	$(RUN) tests/sanitizer_case.py
	compute-sanitizer --tool memcheck --error-exitcode 1 $(RUN) tests/sanitizer_case.py
	compute-sanitizer --tool racecheck --error-exitcode 1 $(RUN) tests/sanitizer_case.py

bench: $(READY)
	$(RUN) benchmarks/compare_decode_latency.py
	$(RUN) benchmarks/baseline_latency.py
	$(RUN) benchmarks/generate_latency.py
	$(RUN) profiling/decode_profile.py
	$(RUN) benchmarks/decode_ladder.py
	$(RUN) benchmarks/prefill_vs_sdpa.py
	$(RUN) benchmarks/decode_vs_eager.py
	$(RUN) benchmarks/kernel_resources.py
	$(RUN) benchmarks/roofline.py

report: $(READY)
	$(RUN) benchmarks/report.py

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) benchmarks/report.py --check

compat: setup
	$(RUN) tests/compat.py $(ARGS)

clean:
	rm -rf .venv .compat .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
