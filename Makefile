# make bench     verify fused attention, then time it against torch: on the GPU when torch sees one,
#                else on the CPU. FULL=1: the long sweep. SAVE=1: write bench/results/<device>.json
# make test      the fast tests: on this machine, then Triton's kernels in its interpreter
# make test-slow the slow ones, but for triples of arguments and GPU kernels, which have commands:
# make test-triples   calls with every triple of arguments and properties, on every instruction set
# make mutants   plant 100 faults, drawn by rules and a seed, and report which of them `make test` does
#                not detect: hours. ARGS="--count 10 --seed 1 --only csrc/cpu/mask", ARGS=--list
# make test-torch   test a wheel with several versions of torch, each in an environment of its own:
#                VERSIONS="2.8 2.10", PYTHONS="python3.10 python3.13", SAVE=1 writes the table
# make test-transformers   the tests of models with several versions of transformers, each in an
#                environment beside: VERSIONS=5.24, else all supported; SAVE=1 writes the table
# make test-engines   the tests of the plugins for vLLM and SGLang in these engines, each in an
#                environment of its own in build/engines: 4 GB, 20 minutes
# make test-gpu  run only the tests marked gpu;  make test-interpreter  all of the interpreter's
# make test-cuda run only the tests of the CUDA kernels: on the emulator, and what nvcc makes of them;
#                needs nvcc, and builds them whether there is a GPU or not
# make test-ptx  run only the tests of compiled GPU kernels, all of them: nvcc's and Triton's PTX, on the
#                emulator; and every seeded fault of GPU kernels. Needs nvcc for its part
# make fuzz      random calls against the float64 oracle, on every instruction set; prints how to
#                repeat what fails, and exits with 1. MINUTES=2 by default. ARGS="--seed 5"
# make gpu       all work that needs a GPU: build, python -m fastattn check and tune, experiments, timings
#                beside torch's kernels, sanitizers, tests; leaves a JSON and a page in bench/results/gpu.
#                With none, a rehearsal
# make wheels    build a wheel that installs without a compiler, and the sdist, into dist/; check both.
#                ARCH=aarch64: the wheel for 64-bit Arm, cross-compiled, and tried under qemu.
#                ARCH=win_amd64: that for Windows, by mingw, and tried under wine, if that is here
# make hub       lay the wheel in dist/ out as a kernel repository of Hugging Face, in build/hub/; load
#                it by the package kernels, and check it. Uploads nothing
# make sanitize  run the CUDA kernels on a GPU under each tool of compute-sanitizer
# make sanitize-cpu   run random calls of the CPU kernels, and of the CUDA kernels on the emulator,
#                under GCC's address, undefined behaviour and thread sanitizers. Ends within 20 minutes,
#                builds included; MINUTES=60: in so many. ARGS=--case ...: one call again
# make aot       compile every GPU kernel of the tuning tables with no GPU, with the newest Triton and
#                the oldest; fails on spilled registers, too much shared memory, or no wgmma
# make instructions   count what the CPU kernels execute, under valgrind; fails where that is more
#                than recorded. ARGS=--accept: record it
# make test-arm  cross-compile the CPU kernels for 64-bit Arm and run a slice of the tests on them under
#                qemu, with torch's wheel for aarch64. ARGS="--tests tests/semantics/test_decode.py"
# make instructions-arm   count what those execute, beside torch's kernel for Arm; as make instructions
# make compilers compile the CPU kernels by Clang with libc++, for Arm, and for Windows; nothing is run
# make ledger    count what the main loops of the GPU kernels issue, with no GPU; fails where that
#                is more than recorded. ARGS=--accept: record it
# make docs      build the documentation into build/docs; warnings are errors
# make test-docs   build it, then run its code, follow its links, and look at it with Chromium, if it
#                is here
# make docs-update   run the examples for the pictures of the documentation, and its notebooks for
#                their outputs. ARGS="serve": of this example;  ARGS=notebooks
# make lint, make format, make types    check with ruff, ruff format and clang-format, and ty
# ARGS="..."     goes to pytest or to the module of bench
#
# Each first does what set-up is due, in the virtual environment that is active, else in .venv.
#   VENV=path    in another one
#   VENV=        in the python3 on PATH as it is: only fastattn is installed, nothing is fetched
#   FASTATTN_CUDA=on, off    compile the CUDA kernels, or not; else (auto) where there are nvcc and
#                a GPU. CUDAARCHS="80-real;120": for these, not sm_80 and 90
#   FASTATTN_ISAS=avx2       build these CPU instruction sets, and generic; all: every one. Else what
#                the target needs: `make bench` what this machine runs best and decodes best with,
#                `make test` the model of AMX's tiles too, `make test-slow` every one

VENV ?= $(or $(VIRTUAL_ENV),.venv)
PYTHON := $(if $(VENV),$(VENV)/bin/python,python3)
PIP := $(PYTHON) -m pip --disable-pip-version-check

# Eight compilers at a time fit a small machine's memory, whatever its number of cores.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

on = $(filter-out 0,$($(1)))

# The oldest Triton that is supported, in a folder that goes before the newest on the path.
OLDEST := build/triton-3.6.0

# torchvision, and what imports it, for tests of models: beside a torch of another build (the CPU's
# beside PyPI's torchvision) it cannot be imported, and where it is installed transformers cannot.
VISION := build/vision-0.28.0

# Sphinx, its theme, and what reads notebooks.
DOCS := build/docs-tools
DOCUMENT = PYTHONPATH=$(CURDIR)/$(DOCS) JUPYTER_PATH=$(CURDIR)/$(DOCS)/share/jupyter $(PYTHON)

.PHONY: help docs test-docs docs-update bench test test-slow mutants test-interpreter test-torch test-transformers test-engines test-arm test-gpu test-cuda test-ptx fuzz gpu wheels hub sanitize sanitize-cpu aot instructions instructions-arm compilers ledger lint format types setup
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(MAKEFILE_LIST)

bench: setup
	@$(PYTHON) -m bench $(if $(call on,FULL),--full) $(if $(call on,SAVE),--save) $(ARGS)

# Tests run in two processes, where pytest-xdist is. The interpreter is chosen when Triton is
# imported: a run of its own, of the files that have its mark. Status 5, no test collected, is no
# failure there: ARGS may name tests that have nothing to interpret.
WORKERS ?= 2
XDIST = $$($(PYTHON) -c 'import importlib.util as u; \
	print("-n$(WORKERS) --dist=worksteal" * bool(u.find_spec("xdist")))')
PYTEST = $(PYTHON) -m pytest $(XDIST) --durations=20
INTERPRETED = $(shell grep -rl --include='test_*.py' 'mark\.interpreter' tests)
INTERPRET = TRITON_INTERPRET=1 $(PYTEST) -m

# The mark `slow` says which tests are not fast: tests/README.md. Those of some folders have commands.
OWN_COMMAND := tests/features tests/cuda tests/gpu_emulation tests/triton/test_aot.py
test test-slow: setup $(if $(VENV),$(VISION))
test:
	@$(PYTEST) $(ARGS)
	@$(INTERPRET) "interpreter and not slow" $(or $(ARGS),$(INTERPRETED)) || [ $$? -eq 5 ]

test-slow:
	@$(PYTEST) -m slow $(OWN_COMMAND:%=--ignore=%) $(ARGS)

test-triples: setup
	@$(PYTEST) -m slow tests/features $(ARGS)

test-interpreter: setup
	@$(INTERPRET) interpreter $(ARGS) || [ $$? -eq 5 ]

VERSIONED = --workers $(WORKERS) $(if $(call on,SAVE),--save) $(ARGS)
test-torch: setup
	@$(PYTHON) -m tests.torch_versions $(or $(VERSIONS),2.8 2.10 2.13) \
		$(if $(PYTHONS),--pythons $(PYTHONS)) $(VERSIONED)

test-transformers: setup
	@$(PYTHON) -m tests.torch_versions --transformers $(VERSIONS) $(VERSIONED)

ENGINES := build/engines/vllm-engine/complete build/engines/sglang-engine/complete
test-engines: $(ENGINES)
	@$(PYTHON) -m pytest -m "" $(wildcard tests/integrations/test_vllm.py tests/integrations/test_sglang.py) $(ARGS)

test-gpu: setup
	@$(PYTHON) -m pytest -m gpu $(ARGS)

test-cuda: setup
	@FASTATTN_CUDA=on $(PYTHON) -m pytest -m "" tests/cuda \
		$(wildcard tests/gpu_emulation/tests/test_emulator*.py) tests/gpu_emulation/tests/test_probe.py $(ARGS)

test-ptx: setup
	@$(PYTEST) -m "" $(wildcard tests/gpu_emulation/tests/test_ptx_*.py) tests/gpu_emulation/faults $(ARGS)

mutants: setup
	@nice $(PYTHON) -m tests.mutants --workers $(WORKERS) $(ARGS)

fuzz: setup
	@$(PYTHON) -m tests.fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

# Kernels that do not build are a part that fails; the others have what else there is.
gpu:
	@$(MAKE) setup || $(MAKE) setup FASTATTN_CUDA=off
	@$(PYTHON) -m bench gpu $(ARGS)

wheels: setup
	@$(PYTHON) .ci/wheels.py $(if $(ARCH),--arch $(ARCH))

hub: setup
	@$(PYTHON) .ci/hub.py

# The features, small: a thousand times slower, they still take minutes. torch's own allocator would
# hide what lies beyond a tensor.
sanitize: setup
	@$(PYTHON) -c 'import fastattn, sys; sys.exit(fastattn.available_backends()["cuda"])'
	@for tool in memcheck initcheck synccheck racecheck; do echo "== $$tool"; \
		PATH="$$PATH:/usr/local/cuda/bin" PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(PYTHON) -m pytest -m gpu -k cuda-00 tests/gpu/test_gpu_rows.py $(ARGS) || exit 1; \
	done

sanitize-cpu: setup
	@nice $(PYTHON) -m tests.sanitize_cpu $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

aot: setup $(OLDEST)
	@$(PYTHON) -m bench.static_gpu.aot $(ARGS)
	@PYTHONPATH=$(CURDIR)/$(OLDEST) $(PYTHON) -m bench.static_gpu.aot $(ARGS)

instructions: setup
	@$(PYTHON) -m bench instructions $(ARGS)

test-arm: setup
	@nice $(PYTHON) -m tests.arm $(ARGS)

instructions-arm: setup
	@$(PYTHON) -m bench instructions --arm $(ARGS)

compilers:
	@python3 .ci/compilers.py

ledger: setup
	@$(PYTHON) -m bench instructions --gpu $(ARGS)

# Always whole: pages that did not change would not repeat their warnings.
docs: setup $(if $(VENV),$(DOCS))
	@rm -rf build/docs build/docs-trees
	@$(DOCUMENT) -m sphinx -d build/docs-trees --fail-on-warning --keep-going --quiet --jobs 2 $(ARGS) docs build/docs
	@echo "build/docs/index.html"

test-docs: docs
	@$(PYTHON) -m pytest -m "" tests/docs

docs-update: setup $(if $(VENV),$(DOCS))
	@$(DOCUMENT) docs/update.py $(ARGS)

lint: setup
	$(PYTHON) -m ruff check
	$(PYTHON) -m tests.support.plain_words

format: setup
	$(PYTHON) -m ruff format --check
	git ls-files csrc | grep -E '[.](h|cpp|cu|cuh)$$' | xargs $(if $(VENV),$(VENV)/bin/)clang-format --dry-run --Werror

types: setup
	$(PYTHON) -m ty check --python $(PYTHON)

# ------------------------------------------------------------------------------------------ set-up

$(OLDEST): | setup
	$(PIP) install --no-deps --target $@.part triton==$(@:build/triton-%=%)
	@mv $@.part $@

$(ENGINES): | setup
	$(PYTHON) -m bench engines --install $(@:build/engines/%/complete=%)

$(VISION): | setup
	@rm -rf $@.part
	$(PIP) install -c .ci/constraints.txt --no-deps --target $@.part \
		torchvision==$(@:build/vision-%=%) timm open-clip-torch ftfy wcwidth \
		&& mv $@.part $@ || echo "without torchvision, tests of its models are skipped"

$(DOCS): docs/requirements.txt | setup
	@rm -rf $@ $@.part
	$(PIP) install -q -c .ci/constraints.txt --target $@.part -r docs/requirements.txt
	@mv $@.part $@ && touch $@

export FASTATTN_CUDA ?=

# What a target needs: `bench` few packages and this machine's best instruction sets, the others the
# packages of development, those of EVERY_SET every set. What a later level has set up serves an
# earlier one.
EVERY_SET := test-slow test-triples fuzz instructions
level := $(if $(filter-out bench,$(MAKECMDGOALS)),dev,bench)
ifeq ($(FASTATTN_ISAS),)
level := $(if $(filter $(EVERY_SET),$(MAKECMDGOALS)),all,$(level))
endif
later-bench := all dev
later-dev := all
isas-bench := native
isas-dev := native,amx_model
isas-all := all

comma := ,
semicolon := ;
stamp = $(subst $() ,,$(or $(VENV),build)/.fastattn-$(1)$(about))
about := $(addprefix -cuda-,$(FASTATTN_CUDA) $(subst $(semicolon),+,$(CUDAARCHS)))
about += $(addprefix -extension-,$(FASTATTN_EXTENSION))$(addprefix -isas-,$(subst $(comma),+,$(FASTATTN_ISAS)))
LEVEL := $(firstword $(foreach l,$(later-$(level)),$(if $(wildcard $(call stamp,$(l))),$(l))) $(level))
STAMP := $(call stamp,$(LEVEL))
SOURCES := pyproject.toml .ci/constraints.txt $(shell find csrc -type f)
BUILD := FASTATTN_ISAS=$(or $(FASTATTN_ISAS),$(isas-$(LEVEL)))

# The stamp says when, pip says what: a stamp is no use when that Python now has another checkout's
# fastattn, or none because the environment was made anew. It bears the time at which set-up began,
# so that a source edited meanwhile is compiled the next time. There is one stamp: what was set up
# otherwise is set up again.
installed := $(shell $(PYTHON) -c 'from importlib.metadata import distribution as d; \
	print(d("fastattn").read_text("direct_url.json"))' 2>/dev/null)
ifeq ($(and $(findstring "file://$(CURDIR)",$(installed)),$(findstring "editable": true,$(installed))),)
.PHONY: $(STAMP)
endif

setup: $(STAMP)

ifneq ($(VENV),)
$(STAMP): $(SOURCES)
	@$(or $(wildcard $(PYTHON)),python3) .ci/preflight.py
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m ensurepip
	@rm -f $(@D)/.fastattn* && touch $@.begun
	$(PIP) install -q -c .ci/constraints.txt scikit-build-core cmake ninja
	@echo "installing torch, and compiling:"
	@$(BUILD) $(PYTHON) .ci/build.py $(PIP) install -q -c .ci/constraints.txt torch
	$(BUILD) $(PIP) install -c .ci/constraints.txt --no-build-isolation -e '.[$(LEVEL:all=dev)]'
	@mv $@.begun $@
else
$(STAMP): $(SOURCES)
	@$(PYTHON) .ci/preflight.py --as-is
	@mkdir -p $(@D) && rm -f $(@D)/.fastattn* && touch $@.begun
	@$(BUILD) $(PYTHON) .ci/build.py
	$(BUILD) PIP_BREAK_SYSTEM_PACKAGES=1 $(PIP) install --no-index --no-deps --no-build-isolation -e .
	@mv $@.begun $@
endif
