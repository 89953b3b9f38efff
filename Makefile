# Two commands do everything on a fresh machine with Python 3.10 or later and a C++ compiler:
#
#   make demo    train a small policy by GRPO on four processes, releasing the world around every rollout
#   make test    lint, type-check, and run the tests that need no CUDA build of torch
#
# Each sets up what it needs in $(VENV). To use another torch: make test TORCH='torch==2.14.1' VENV=.venv-2.14
#
#   make test-nccl        the tests on the real ProcessGroupNCCL, without a GPU, in an environment of its own
#   make soak             a random but seeded mix of all that can happen: make soak SOAK='--seconds 600 --seed 7'
#   make soak-nccl        the same in the environment of test-nccl
#   make test-gpu         in that environment, on real GPUs: the same checks, and what a scope gives and takes
#   make bench            what a scope costs, without a GPU: numbers and pictures in benchmarks/results/
#   make test-torch       torch's own DistributedTest with a cycle after each group that is made (make test has a sample)
#   make test-install     pip install in all ways, in environments of their own
#   make test-ctrl-c      Ctrl-C at every line of a scope, of which make test has a sample
#   make test-sanitizers  the tests that use the extension most, with it under AddressSanitizer and UBSan (needs g++)

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_CUDA ?= torch==2.14.1
MEGATRON ?= megatron-core==0.16.1
SOAK ?= --seconds 600 --seed 1
VENV ?= .venv
VENV_CUDA ?= .venv-nccl
PIP = -m pip --disable-pip-version-check install --quiet
# Without vptr, which wants to know torch's classes; and Python, and torch itself, are not free of leaks.
SANITIZE = -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer
BUILT_FROM = setup.py setup.cfg $(wildcard gpurelease/csrc/*.?pp gpurelease/csrc/nv/*)

.PHONY: demo test lint types test-torch test-install test-ctrl-c test-sanitizers test-nccl test-gpu bench soak soak-nccl beside clean

demo: $(VENV)/ready
	$(VENV)/bin/python -m gpurelease.demo $(DEMO)

test: lint types
	$(VENV)/bin/python -m pytest tests --ignore tests/nccl --ignore tests/gpu --ignore tests/test_install.py \
		--ignore tests/torch_own/test_all.py

lint: $(VENV)/ready
	$(VENV)/bin/ruff check --config .ci/ruff.toml gpurelease tests benchmarks setup.py
	$(VENV)/bin/ruff format --config .ci/ruff.toml --check gpurelease tests benchmarks setup.py

types: $(VENV)/ready
	$(VENV)/bin/mypy

test-torch: $(VENV)/ready
	$(VENV)/bin/python -m pytest tests/torch_own/test_all.py

test-install: $(VENV)/ready
	$(VENV)/bin/python -m pytest tests/test_install.py

test-ctrl-c: $(VENV)/ready
	CTRL_C_EVERYWHERE=1 $(VENV)/bin/python -m pytest tests/scopes/test_ctrl_c.py tests/scopes/test_interrupts.py

# Built and run in a copy, since the extension in the source tree is the one that is imported from there.
test-sanitizers: $(VENV)/ready
	rm -rf $(VENV)/sanitized && mkdir $(VENV)/sanitized
	cp -r gpurelease tests setup.py setup.cfg README.rst LICENSE $(VENV)/sanitized && rm -f $(VENV)/sanitized/gpurelease/*.so
	cd $(VENV)/sanitized && CC=gcc CXX=g++ CFLAGS='$(SANITIZE)' CXXFLAGS='$(SANITIZE)' LDFLAGS='$(SANITIZE)' \
		../bin/python setup.py --quiet build_ext --inplace
	cd $(VENV)/sanitized && ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		../bin/python -m pytest tests/groups tests/transition/test_world.py tests/transition/test_stand_in.py -k "not grows"

test-nccl: beside
	cd $(VENV_CUDA)/beside && ../bin/python -m pytest tests/nccl tests/gpu

test-gpu: beside
	cd $(VENV_CUDA)/beside && ../bin/python -m tests.gpu

# Pictures are drawn where matplotlib is.
bench: beside $(VENV)/ready
	mkdir -p benchmarks/results
	for name in cycle growth handles rollcall; do (cd $(VENV_CUDA)/beside && \
		../bin/python -m benchmarks.$$name --json $(CURDIR)/benchmarks/results/$$name.json) || exit 1; done
	$(VENV)/bin/python -m benchmarks.scale benchmarks/results
	$(VENV)/bin/python -m benchmarks.draw benchmarks/results

soak: $(VENV)/ready
	$(VENV)/bin/python -m tests.soak $(SOAK)

soak-nccl: beside
	cd $(VENV_CUDA)/beside && ../bin/python -m tests.soak --backend nccl $(SOAK)

# The tests run beside the installed package, and not in the source tree, whose extension is for another torch.
beside: $(VENV_CUDA)/ready
	rm -rf $(VENV_CUDA)/beside && mkdir $(VENV_CUDA)/beside && cp -r tests benchmarks setup.cfg $(VENV_CUDA)/beside
	$(VENV_CUDA)/bin/python $(PIP) --no-build-isolation --no-deps --force-reinstall .

$(VENV)/ready: $(BUILT_FROM)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) '$(TORCH)' setuptools wheel
	$(VENV)/bin/python $(PIP) --no-build-isolation --editable '.[test,demo]'
	touch $@

$(VENV_CUDA)/ready:
	$(PYTHON) -m venv $(VENV_CUDA)
	$(VENV_CUDA)/bin/python $(PIP) '$(TORCH_CUDA)' setuptools wheel numpy pytest pytest-mock hypothesis contextlib2
	$(VENV_CUDA)/bin/python $(PIP) --no-deps $(MEGATRON)
	touch $@

clean:
	rm -rf $(VENV) $(VENV_CUDA) build gpurelease.egg-info gpurelease/*.so
