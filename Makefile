# Everything a contributor runs. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# What the tests, the examples and the tutorial need of other projects.
EXTRAS := cli,arrays,state,plot,gguf,redis,obstore,crypto,zmq,prometheus,serve

# Of `make fuzz`: other seeds are other calls and programs. INTERRUPTS is how often Ctrl-C comes in each program.
SEED ?= 1
CALLS ?= 20000
INTERRUPTS ?= 2000

# What the compiled layer is made of: a change of any of these rebuilds it, a change of a .py does not.
NATIVE := CMakeLists.txt $(wildcard cmake/*) vendor/llama.cpp.lock vendor/fetch.py \
          $(filter %.pyx %.pxd %.pxi %.h %.c %.cpp %.cmake %.txt,$(wildcard src/pykvcache/_native/* src/pykvcache/_native/*/*)) $(wildcard models/*.gguf)

# Where it is set, every process compiles every module anew: half of what collecting the tests takes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: FORCE help venv demo docs test test-all test-real fuzz test-arrays test-device test-plain test-wheel asan lint format wheel bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

venv: $(VENV)/.dev $(VENV)/.built ## make .venv: tools, extras and the package, editable

demo: $(VENV)/.built ## show what it does, on the model that ships with it
	$(BIN)/python -m pykvcache demo
	@echo
	@echo "To go on from here:  . $(BIN)/activate"
	@echo "Then, for example:   pykvcache chat --session chat.kv"

# One more than there are cores: some tests wait for processes and clocks.
WORKERS := $(shell echo $$(($$(nproc 2>/dev/null || sysctl -n hw.ncpu) + 1)))

test: lint ## lint, types, stubs, then every test (not those marked slow)
	$(BIN)/python -m pytest -n $(WORKERS)

test-all: $(VENV)/.dev $(VENV)/.built ## the tests of `make test` on every test model, and those marked slow: an hour
	PYKVCACHE_EVERY_MODEL=1 $(BIN)/python -m pytest -n auto -m ""

test-peers: $(VENV)/.peers $(VENV)/.built ## the tests beside transformers, mlx-lm and llama-server, which others skip
	$(BIN)/python -m pytest -n auto tests/arrays/mlx/test_mlx_lm.py tests/binding/test_chat_template.py \
	  tests/state/test_llama_peer.py

test-real: $(VENV)/.real $(VENV)/.built ## the tests on real models, which others skip: installs one of 250 MB, takes minutes
	$(BIN)/python -m pytest -v -m "" tests/real_models

fuzz: $(VENV)/.dev $(VENV)/.built ## hostile calls, damaged models, random programs, an hour of them (SEED=1 CALLS=20000; longer: CALLS=100000; shorter: CALLS=2000 INTERRUPTS=200)
	@echo "make fuzz SEED=$(SEED) CALLS=$(CALLS) INTERRUPTS=$(INTERRUPTS)"
	PYKVCACHE_EVERY_MODEL=1 PYKVCACHE_FUZZ_SEED=$(SEED) PYKVCACHE_FUZZ_CALLS=$(CALLS) PYKVCACHE_FUZZ_SECONDS=60 \
	PYKVCACHE_FUZZ_INTERRUPTS=$(INTERRUPTS) \
	  $(BIN)/python -m pytest -n auto -v --hypothesis-profile=fuzz tests/binding/test_hostile.py \
	  tests/arrays/test_arrays_hostile.py tests/memory/test_random_programs.py tests/binding/test_damaged.py tests/binding/test_words.py \
	  tests/state/test_raw.py tests/test_ctrl_c.py \
	  tests/generate/test_mixed.py tests/state/test_partial_programs.py tests/arrays/ollama/test_ollama_causal_properties.py \
	  tests/arrays/ollama/test_ollama_recurrent.py tests/arrays/ollama/test_ollama_input_cache.py tests/arrays/mlx/test_mlx_properties.py \
	  tests/sequence/test_shifted.py tests/prefix/test_programs.py \
	  tests/binding/test_threads.py::test_two_threads_hammer_one_context_without_a_wrong_result

# Two at a time; the long ones first.
LINT := lint-types lint-stubs lint-cython lint-ruff lint-spelling
.PHONY: $(LINT)

lint: $(VENV)/.dev $(VENV)/.built ## ruff, mypy, cython-lint, codespell, stubtest
	+@$(MAKE) --no-print-directory -j2 $(LINT)

lint-ruff:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-cython:
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cython-lint src

lint-spelling:
	$(BIN)/codespell

lint-types:
	$(BIN)/mypy

lint-stubs:
	$(BIN)/python tests/stubs.py

format: $(VENV)/.dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Where there is no compiler: a second environment that never sees the compiled layer.
test-arrays: $(VENV)-arrays/.ready ## the array caches alone, without the compiled layer
	PYTHONPATH=src $(VENV)-arrays/bin/python -m pytest tests/arrays -W "ignore:pykvcache is not built:RuntimeWarning"

# A build with Vulkan where its tools are here: Mesa's software device will do. Its shaders are compiled without the
# optimiser (GLSLC=/usr/bin/glslc has it, and takes an hour).
GLSLC ?= $(abspath tests/devices/glslc)
VULKAN_INCLUDE ?= /usr/include
HAS_VULKAN := $(shell command -v glslc >/dev/null && \
                grep -qs 'VERSION_COMPLETE.*0, 1, 4,' $(VULKAN_INCLUDE)/vulkan/vulkan_core.h && echo ON)
DEVICE_ARGS := --config-settings=build-dir=build/device \
               $(if $(HAS_VULKAN),--config-settings=cmake.define.GGML_VULKAN=ON \
               --config-settings=cmake.define.Vulkan_INCLUDE_DIR=$(VULKAN_INCLUDE) \
               --config-settings=cmake.define.Vulkan_GLSLC_EXECUTABLE=$(GLSLC))
# All but those of the array caches, which never see the compiled layer. Mesa's device is slow.
DEVICE_TESTS ?= tests --ignore tests/arrays --ignore tests/packaging
VULKAN_TESTS ?= tests/devices

test-device: $(VENV)-device/.built ## every test with all layers in another process (RPC), and on Vulkan what is of devices
	$(VENV)-device/bin/python -m pytest -n auto --device rpc $(DEVICE_TESTS)
ifeq ($(HAS_VULKAN),ON)
	GGML_VK_VISIBLE_DEVICES=0 $(VENV)-device/bin/python -m pytest -n auto --device own $(VULKAN_TESTS)
else
	@echo "Vulkan is left out: apt-get install mesa-vulkan-drivers libvulkan-dev glslc spirv-headers (Vulkan 1.4;"
	@echo "newer headers elsewhere: VULKAN_INCLUDE=folder), and make clean"
endif

# What the sanitizers are told: see docs/guarantees.md. PYTHONMALLOC: Python's objects are watched too.
SANITIZED = LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
            ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64 \
            UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:suppressions=$(abspath tests/ubsan.supp) \
            PYTHONMALLOC=malloc OMP_WAIT_POLICY=passive
# Captured by Python alone: a finding ends a worker of pytest, and what was captured of it with it.
ASAN_TESTS ?= -n auto --capture=sys --ignore tests/packaging --ignore tests/arrays

asan: $(VENV)-asan/.built ## the tests under AddressSanitizer and UBSan, in a build of their own
	$(SANITIZED) $(VENV)-asan/bin/python -m pytest $(ASAN_TESTS)

# All but those of the array caches, which never see the compiled layer.
PLAIN_TESTS ?= tests --ignore tests/arrays

test-plain: $(VENV)-plain/.built ## every test on llama.cpp's own functions, without fast/, in a build of its own
	$(VENV)-plain/bin/python -m pytest -n auto $(PLAIN_TESTS)

# For others' machines: on x86-64 Linux ggml's CPU code once per instruction set (docs/building.md).
PLATFORM := $(shell uname -s)-$(shell uname -m)
# In a build folder of its own: CMake remembers such an option, and the next `make venv` would be portable too.
PORTABLE := -C cmake.define.$(if $(filter Linux-x86_64,$(PLATFORM)),PYKVCACHE_CPU_COPIES=ON,GGML_NATIVE=OFF) \
            -C build-dir=build/portable-{wheel_tag}

wheel: $(VENV)/.dev $(VENV)/.build-tools ## build sdist and portable wheel into dist/, install and try each away from here
	rm -rf dist
	$(BIN)/python -m build $(PORTABLE)
ifneq ($(filter Linux-%,$(PLATFORM)),)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
endif
	$(BIN)/python -m pytest --noconftest -m slow -v tests/packaging/test_artefacts.py tests/packaging/test_configure.py

WHEEL_TESTS ?= tests

test-wheel: $(VENV)-wheel/.built ## the tests on the portable wheel, installed (PYTHON=python3.12 VENV=.venv-3.12)
	$(VENV)-wheel/bin/python -m pytest -n auto $(WHEEL_TESTS)

bench: $(VENV)/.bench $(VENV)/.built ## everything side by side with C and the peers, into docs/
	$(BIN)/python -m benchmarks

docs: $(VENV)/.docs $(VENV)/.built ## the documentation site, into build/site; stops at any warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

clean: ## remove what was built (.venv, build, dist, the fetched llama.cpp)
	rm -rf $(VENV) $(VENV)-arrays $(VENV)-asan $(VENV)-device $(VENV)-plain $(VENV)-wheel build dist vendor/llama.cpp vendor/llama.cpp.partial
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Stamps: each says that the step above it in the chain was done since its inputs changed.
$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.build-tools: pyproject.toml | $(VENV)/.venv
	$(PIP) install --quiet --group build
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.venv
	$(PIP) install --quiet --group test --group lint --group package
	@touch $@

$(VENV)/.peers: pyproject.toml $(VENV)/.dev
	$(PIP) install --quiet --group peers
	@touch $@

$(VENV)/.real: pyproject.toml $(VENV)/.dev
	$(PIP) install --quiet --group real
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.venv
	$(PIP) install --quiet --group bench
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.venv
	$(PIP) install --quiet --group docs
	@touch $@

# An editable install knows the modules that were there when it was made.
$(VENV)/.modules: FORCE | $(VENV)/.venv
	@find src -name '*.py' | sort | cmp -s - $@ || find src -name '*.py' | sort > $@

$(VENV)/.built: $(VENV)/.build-tools $(VENV)/.modules $(NATIVE)
	$(if $(filter $(NATIVE),$?),@echo "Compiling llama.cpp: about 4 minutes on two cores the first time. There is no output until it is done.")
	$(PIP) install --quiet --no-build-isolation --editable ".[$(EXTRAS)]"
	@touch $@

$(VENV)-asan/.built: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)-asan
	$(VENV)-asan/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)-asan/bin/python -m pip install --quiet --group build --group test
	$(VENV)-asan/bin/python -m pip install --quiet --no-build-isolation --editable ".[cli,arrays,state]" \
	    --config-settings=build-dir=build/asan --config-settings=cmake.define.PYKVCACHE_SANITIZE=ON \
	    --config-settings=install.strip=false
	@touch $@

$(VENV)-plain/.built: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)-plain
	$(VENV)-plain/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)-plain/bin/python -m pip install --quiet --group build --group test
	$(VENV)-plain/bin/python -m pip install --quiet --no-build-isolation --editable ".[$(EXTRAS)]" \
	    --config-settings=build-dir=build/plain --config-settings=cmake.define.PYKVCACHE_PLAIN=ON
	@touch $@

# Installed, not editable: of Python files, too.
$(VENV)-wheel/.built: pyproject.toml $(NATIVE) $(shell find src -name "*.py" -o -name "*.pyi")
	rm -rf $(VENV)-wheel
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)-wheel/bin/python -m pip install --quiet --group build --group test --group package
	PATH="$(abspath $(VENV)-wheel/bin):$$PATH" $(VENV)-wheel/bin/python -m pip wheel --quiet \
	    --no-build-isolation --no-deps --wheel-dir $(VENV)-wheel/dist . $(PORTABLE)
	$(VENV)-wheel/bin/python -m pip install --quiet \
	    "pykvcache[$(EXTRAS)] @ file://$$(ls $(abspath $(VENV)-wheel)/dist/*.whl)"
	@touch $@

$(VENV)-device/.built: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)-device
	$(VENV)-device/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)-device/bin/python -m pip install --quiet --group build --group test --group package
	PATH="$(abspath $(VENV)-device/bin):$$PATH" $(VENV)-device/bin/python -m pip install --quiet \
	    --no-build-isolation --editable ".[$(EXTRAS)]" $(DEVICE_ARGS)
	@touch $@

$(VENV)-arrays/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-arrays
	$(VENV)-arrays/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)-arrays/bin/python -m pip install --quiet --group arrays-test
	@touch $@
