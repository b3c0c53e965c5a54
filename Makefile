# The two commands of the README, and a few for people who work on anychip. Each of them first makes a
# virtual environment with exactly what constraints.txt says; a second call finds it made.

PYTHON ?= python3
VENV ?= .venv
# Native code: AUTO builds what it can, ON insists, OFF leaves it out. The CUDA kernels take minutes to
# compile, so that here they are built only where a device is.
ANYCHIP_CPU ?= AUTO
ANYCHIP_CUDA ?= $(if $(wildcard /dev/nvidiactl),AUTO,OFF)
ANYCHIP_BRIDGE ?= AUTO
# Passed on: make train ARGS='--steps 50', make test ARGS='-k rms_norm'
ARGS ?=
JOBS ?= 2

# Compilations are kept by what they are made of and found again, in every checkout, where ccache is;
# relative to which directory, CMakeLists.txt says.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
export CCACHE_NOHASHDIR ?= 1
endif

# What is imported is compiled once, and not anew in each of some hundred processes.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Of torch's 2,000 modules some hundreds are imported, and compiled then.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints.txt
OPTIONS := $(foreach option,ANYCHIP_CPU ANYCHIP_CUDA ANYCHIP_BRIDGE,\
	-Ccmake.define.$(option)=$($(option)))

# Stamps carry a hash of what they stand for. Python code is installed in place, file by file: of it
# only the names count.
SOURCES := pyproject.toml CMakeLists.txt core/anychip/__init__.py $(shell find csrc -type f)
MODULES := $(sort $(shell find core backends -name '*.py'))
hash = $(shell ($(1)) | cksum | cut -d ' ' -f 1)
ENVIRONMENT := $(VENV)/made-$(call hash,command -v $(PYTHON); cat constraints.txt)
INSTALLED := $(VENV)/installed-$(call hash,echo $(OPTIONS) $(MODULES); cat $(sort $(SOURCES)))

.DEFAULT_GOAL := help
.PHONY: help train test test-all mutants red-team cuda-emulator test-cuda cann-emulator test-npu lint docs screenshots native wheels dev bench-env clean

help:
	@echo 'make train    train a small GPT, about a minute on two cores; ARGS go to `anychip train`'
	@echo 'make test     the tests and the conformance suite of the cpu backend, of large grids a thirty-seventh, of long'
	@echo '              tests and operators a sixth; with ARGS, the tests that pytest chooses by them'
	@echo 'make test-all every test there is: all of test, test-cuda, test-npu, mutants and red-team; hours'
	@echo 'make mutants  600 generated mistakes, which the conformance suite must find; docs/mutants.md'
	@echo 'make red-team 500 generated wrong backends, right but for some calls; docs/red-team.md'
	@echo 'make test-cuda  the CUDA kernels on the host: tests in three orders of threads, sanitizers,'
	@echo '              seeded mistakes, the conformance suite, and with nvcc the machine code; no GPU'
	@echo 'make test-npu the npu backend on the real torch_npu and an emulated CANN, without an Ascend device,'
	@echo '              in an environment of its own (build/npu_env-*); make cann-emulator builds both'
	@echo 'make lint     formatting, types and spelling'
	@echo 'make docs     the site, in build/site: open index.html there; a broken link is an error'
	@echo 'make screenshots  the pictures of pages in docs, by a browser'
	@echo 'make native   the C++ kernels alone, with their own tests (plain CMake)'
	@echo 'make wheels   in dist: an sdist, and a wheel for the Python of $(VENV); docs/installing.md'
	@echo 'make dev      only the environment, with every tool, in $(VENV)'
	@echo 'make bench-env  the same with DeepSpeed, a peer of python -m benchmarks.record'
	@echo 'make clean    removes $(VENV), build and caches; keeps runs'
	@echo 'settings      PYTHON=$(PYTHON) VENV=$(VENV) ANYCHIP_CPU=$(ANYCHIP_CPU) (AUTO, ON or OFF)'

train: $(INSTALLED)
	$(BIN)/anychip train $(ARGS)

test: $(INSTALLED)-test
	$(BIN)/python -m tests --jobs $(JOBS) $(ARGS)

# Nothing is left to other commits (tests/slices.py).
test-all: export ANYCHIP_SLICE = all
test-all:
	@for part in test test-cuda test-npu mutants red-team; do $(MAKE) --no-print-directory $$part || exit 1; done

mutants: $(INSTALLED)-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --jobs $(JOBS) $(ARGS)

red-team: $(INSTALLED)-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.red_team --jobs $(JOBS) $(ARGS)

# The CUDA kernels, compiled for the host: the same sources, once plain and once per sanitizer.
EMULATED := tests/cuda_emulated/anychip_cuda_emulated
CONFIGURE_EMULATED = $(BIN)/cmake -G Ninja -S . -DANYCHIP_CPU=OFF -DANYCHIP_CUDA=OFF -DANYCHIP_BRIDGE=OFF \
	-DANYCHIP_CUDA_EMULATOR=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
cuda-emulator: $(INSTALLED)-test
	$(CONFIGURE_EMULATED) -B build/cuda_emulator
	$(BIN)/cmake --build build/cuda_emulator --parallel $(JOBS)
	cp build/cuda_emulator/csrc/cuda/_emu.*.so $(EMULATED)
	$(PIP) --quiet --no-build-isolation --no-deps --editable tests/cuda_emulated

# It leaves the environment without the test backend, which the tests of plugins do not expect.
test-cuda: cuda-emulator
	$(BIN)/python -m tests.cuda_emulated --jobs $(JOBS) $(ARGS)
	$(BIN)/python -m pip --disable-pip-version-check --quiet uninstall --yes anychip-cuda-emulated

# torch_npu stays out of $(VENV): where it is, `import torch` loads it, and fails without CANN.
cann-emulator: $(INSTALLED)-test
	$(BIN)/python -m tests.npu --jobs $(JOBS) --only

test-npu: $(INSTALLED)-test
	$(BIN)/python -m tests.npu --jobs $(JOBS) $(ARGS)

lint: $(INSTALLED)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	find csrc tests/native -name '*.h' -o -name '*.c' -o -name '*.cc' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \
		| xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/codespell

# The hook of the site says where its pages come from; docs/README.md, how versions are published.
docs: $(INSTALLED)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

screenshots: $(INSTALLED)
	$(BIN)/python docs/site/screenshots.py

native: $(INSTALLED)
	$(BIN)/cmake -S . -B build/native -DANYCHIP_CPU=$(ANYCHIP_CPU) -DANYCHIP_CUDA=OFF -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-DANYCHIP_AVX512_EMULATOR=$(abspath tests/native/emulated_avx512.h)
	$(BIN)/cmake --build build/native --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/native --output-on-failure --no-tests=error

# With everything that can be built here, CUDA kernels too. ARCH=aarch64: by a cross compiler.
DIST ?= dist
ARCH ?=
wheels: $(INSTALLED)-dev
	@rm -rf build/wheels
	$(if $(ARCH),_PYTHON_HOST_PLATFORM=linux-$(ARCH)) $(BIN)/python -m build --no-isolation \
		--outdir build/wheels $(ARGS) $(if $(ARCH),-Ccmake.define.ANYCHIP_CUDA=OFF \
		-Ccmake.define.CMAKE_TOOLCHAIN_FILE=$(abspath cmake/$(ARCH).cmake)) .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir $(DIST) build/wheels/*.whl
	mv build/wheels/*.tar.gz $(DIST)

dev: $(INSTALLED)-dev

bench-env: $(INSTALLED)-bench

$(INSTALLED): $(ENVIRONMENT)
	@echo '== anychip: installing it and what it needs'
	@rm -f $(VENV)/installed-*
	$(PIP) --no-build-isolation $(OPTIONS) --editable .
	@touch $@

# anychip itself is there by now, so that these add what the extra names and nothing else.
$(INSTALLED)-test $(INSTALLED)-dev $(INSTALLED)-bench $(INSTALLED)-docs: $(INSTALLED)-%: $(INSTALLED)
	$(PIP) --quiet 'anychip[$*]'
	@touch $@

# The build tools too: once and pinned, where an isolated build would fetch its own every time.
$(ENVIRONMENT):
	$(CHECK_PYTHON)
	$(CHECK_COMPILER)
	@echo '== anychip: making $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --quiet --upgrade pip
	$(PIP) --quiet scikit-build-core pybind11 cmake ninja
	@touch $@

define CHECK_PYTHON
@command -v $(PYTHON) > /dev/null || { \
	echo 'anychip needs Python 3.10 to 3.13, and there is no $(PYTHON) here;' \
		'name one: make PYTHON=/path/to/python3'; exit 2; }
@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	echo "anychip needs Python 3.10 to 3.13, and $(PYTHON) is $$($(PYTHON) --version);" \
		'name another: make PYTHON=/path/to/python3'; exit 2; }
@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	echo '$(PYTHON) cannot make virtual environments; on Debian and Ubuntu:' \
		'apt install python3-venv'; exit 2; }
endef

# CMake asks for $CXX, c++, g++ and clang++ too.
define CHECK_COMPILER
@for name in "$$CXX" c++ g++ clang++; do command -v "$$name" > /dev/null && exit 0; done; \
	[ '$(ANYCHIP_CPU)' = OFF ] || { \
	echo 'anychip builds C++ kernels, and there is no C++ compiler here; on Debian and Ubuntu:' \
		'apt install g++ (or do without them: make ANYCHIP_CPU=OFF ...)'; exit 2; }
endef

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find core backends tests examples -name __pycache__ -prune -exec rm -rf {} +
