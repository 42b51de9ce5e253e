# Needs python3 (3.11 or later), pip, gcc and make; everything else is put into .venv. The lines that begin with two signs
# are what `make help` shows; tests/project/test_make.py compares them with README and CONTRIBUTING.
#
## build       set up .venv and compile the native library; again after every change of a C file
## demo        the main job: real programs over kernel TCP and over sidestep, in one table and one picture
##
## check       lint of changed files, pure rooms, one setting of each device
## test        check, every scene once in a row of conditions that rotates, the simulator, redis, nginx, one row of the
##             matrix of real programs, kills with one seed
## ci          lint, test and the rotating rest: scenes in 4 of 12 pairwise rows, ASan and UBSan over all scenes, TSan
##             where threads matter, the matrix as a rotating square in which every server and client appears, chaos,
##             two hosts
## test-full   everything, fuzzers with kept corpora
##
## coverage    which lines of C and Python the tests in COVERAGE_PATHS run, by file; tests/mutants works with what it keeps
## lint        ruff, mypy, pyright, clang-format, clang-tidy; the compiler's warnings are errors in every build
## format      ruff and clang-format put all files in order
## analyze     the compiler's own analysis of the native library, gcc -fanalyzer; part of ci
## bench       the speed table, kept in build/bench.json; docs/guides/performance.md says how that becomes the page
## soak        the servers and clients of tests/apps/test_matrix.py at random, for SOAK_MINUTES (60)
## docs        the documentation site in build/site and man pages in build/man; schemas and scoreboard, which are kept
##
## wheel       a wheel in dist/, by the compiler of this machine
## wheels      wheels in dist/ for every Linux on x86-64 and aarch64, by a compiler that pip brings
## deb         Debian packages in dist/, of these wheels
## release     wheels, Debian packages, checksums and the notes of this version, in dist/
## lock        requirements.lock: the versions of all Python packages that are installed here
## clean       remove build, dist, .venv and what was compiled
##
## test-lab    the tests against the kernel's RDMA drivers in a guest; skipped without it (tests/interop/README.md)
## test-fresh  builds wheels and packages, runs them on aarch64, emulated, in a fresh Debian and in containers; Ray; slow

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := src/sidestep/native
LIB    := $(NATIVE)/libsidestep.so $(NATIVE)/sidestep-loader
EXTS   := $(NATIVE)/_channel.abi3.so $(NATIVE)/_framing.abi3.so $(NATIVE)/_engine.abi3.so
LOCK   ?= requirements.lock
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export PIP_NO_COMPILE := 1
export CCACHE_DIR ?= $(CURDIR)/build/ccache

.DEFAULT_GOAL := help
.PHONY: help needs build build-locked library dev demo demo-programs setup-test setup-ci programs-core programs-all \
	packages-ci check test ci ci-tests test-full test-lab test-fresh coverage soak lint format analyze \
	bench wheel wheels deb release docs lock clean

help:
	@echo "make TARGET:"
	@sed -n 's/^## \{0,1\}/  /p' $(firstword $(MAKEFILE_LIST))

needs:
	@.ci/needs $(PYTHON)

# The lock lets several make runs meet in one tree.
build: needs
	@mkdir -p build && flock build/.lock $(MAKE) --no-print-directory build-locked

# What `make test`, and what `make ci` and `make test-full` need. Programs and Python's packages come at a time. The library
# comes after both: programs bring the Python headers, without which the extensions are left out.
setup-test: needs
	@mkdir -p build && flock build/.lock $(MAKE) --no-print-directory -j2 programs-core $(VENV)/.dependencies
	@flock build/.lock $(MAKE) --no-print-directory library

setup-ci: needs
	@mkdir -p build && flock build/.lock $(MAKE) --no-print-directory -j2 programs-all packages-ci
	@flock build/.lock $(MAKE) --no-print-directory library

programs-core programs-all: programs-%:
	@tests/setup --$* $(PYTHON)

# One after the other: pip does not share an environment with another pip.
packages-ci:
	@$(MAKE) --no-print-directory $(VENV)/.servers
	@$(MAKE) --no-print-directory $(VENV)/.lint

# Dependencies first, so that a C file that does not compile leaves a usable .venv.
build-locked: $(VENV)/.dependencies library

# meson asks for the ninja that stands here.
library: export PATH := $(CURDIR)/$(BIN):$(PATH)
library: $(VENV)/.installed
	@test -f build/native/build.ninja || $(BIN)/meson setup build/native >/dev/null
	@$(BIN)/ninja -C build/native --quiet
# By renaming: programs that run have the old ones mapped.
	@for made in $(EXTS) $(LIB); do \
		if [ -f build/native/$$made ] && ! cmp -s build/native/$$made $$made; then \
			cp build/native/$$made $$made.new && mv $$made.new $$made || exit 1; fi; done

dev: build

# Debian splits venv off python3; without it virtualenv, brought by pip, makes the same thing. Until the first packages are
# all there, a failure takes the whole environment away.
$(BIN)/python:
	@mkdir -p build
	@.ci/step build/venv.log "making $(VENV)" sh -c '$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		$(PYTHON) -m pip install --quiet --target build/virtualenv virtualenv && \
		PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv --quiet $(VENV); }' && \
		touch $(VENV)/.unfinished || { rm -rf $(VENV) 2>/dev/null; exit 1; }

# The package's own requirements, and those of some extras.
define install-extras
	@mkdir -p build
	@$(BIN)/python -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *(line for extra in sys.argv[1:] for line in p["optional-dependencies"][extra]), \
		sep="\n")' $(1) > build/requirements$(@F)
	@.ci/step build/pip$(@F).log "installing $$(wc -l < build/requirements$(@F)) Python packages and what they need, for $(1)" \
		$(BIN)/pip install --progress-bar off $(if $(LOCK),-c $(LOCK)) -r build/requirements$(@F) || { \
		if [ -e $(VENV)/.unfinished ]; then rm -rf $(VENV) 2>/dev/null; fi; exit 1; }
	@touch $@
endef

$(VENV)/.core: pyproject.toml $(LOCK) | $(BIN)/python
	$(call install-extras,build)

$(VENV)/.dependencies: $(VENV)/.core
	$(call install-extras,top metrics capture test check)
	@rm -f $(VENV)/.unfinished

# The installed package brings the metadata and the `sidestep` command; the .pth line puts the sources before the
# installed copy, so that a change takes effect at once and build/native, compiled here, is the library in use.
$(VENV)/.installed: $(VENV)/.core pyproject.toml
	@.ci/step build/library.log "compiling the native library" $(BIN)/pip install --progress-bar off --no-deps \
		--force-reinstall --no-build-isolation --config-settings=build-dir=build/native .
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))') && \
		echo 'import sys; sys.path.insert(0, "$(CURDIR)/src")' > $$site/sidestep-source.pth
	@touch $@

# What few need comes when it is asked for.
$(VENV)/.servers $(VENV)/.lint $(VENV)/.wheels $(VENV)/.docs $(VENV)/.large: $(VENV)/.%: $(VENV)/.dependencies
	$(call install-extras,$*)

# Two things at a time, on a fresh machine: programs, and Python's packages. Without the programs the rest is shown.
demo: needs
	@mkdir -p build
	@flock build/.lock $(MAKE) --no-print-directory -j2 demo-programs $(VENV)/.core
	@rm -f $(VENV)/.unfinished
	@flock build/.lock $(MAKE) --no-print-directory library
	@$(BIN)/sidestep demo --picture build/demo.svg

demo-programs:
	@.ci/step build/setup.log "looking for redis and nginx, which the demo runs" tests/setup --demo $(PYTHON) || true

# A run takes a set of tests (tests/sets.toml) and a row of conditions: `make ci ROW=7` repeats a row, else the commit
# decides it. Tests that others may stand beside come first, then those that want the machine for themselves; both
# take place whatever one finds. The C of the tests, and what pytest makes of each file, is compiled once for all workers.
ROW     ?=
WORKERS ?= 6
LAB     := $(if $(SIDESTEP_LAB),,-m 'not lab')
CHOSEN   = --set=$(1) $(if $(ROW),--row=$(ROW)) $(LAB)
define run-tests
	@.ci/step build/prepare.log "compiling the tests" $(BIN)/pytest tests $(call CHOSEN,$(1)) --collect-only -qq
	@rm -f build/twice.json build/junit-*.xml build/failures.txt; failed=0; \
	ended() { echo "the part $$2 ended with $$1" >>build/failures.txt; failed=1; }; \
	$(BIN)/pytest tests $(call CHOSEN,$(1)) --part=beside -n $(WORKERS) --junitxml=build/junit-beside.xml \
		$(PYTEST_ARGS) || ended $$? beside; \
	$(BIN)/pytest tests $(call CHOSEN,$(1)) --part=alone -n 1 --junitxml=build/junit-alone.xml $(PYTEST_ARGS) || \
		ended $$? alone; \
	$(BIN)/python tests/support/budget.py $(1) "$(ROW)" || failed=1; \
	if [ -e build/failures.txt ]; then echo "failed in row $(or $(ROW),of the commit):"; cat build/failures.txt; fi; \
	exit $$failed
endef
# Hundreds of providers start: they share what Python compiles, also where it should write nothing.
check test ci-tests test-full: export PYTHONDONTWRITEBYTECODE :=
check test ci-tests test-full: export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache

check: build lint-changed
	$(BIN)/pytest tests --set=check $(if $(ROW),--row=$(ROW)) -n 3 -q $(PYTEST_ARGS)

test: setup-test lint-changed
	$(call run-tests,test)

# All of it takes place whatever one part finds.
ci: setup-ci
	@failed=0; \
	$(MAKE) --no-print-directory lint analyze || failed=1; \
	$(MAKE) --no-print-directory ci-tests || failed=1; \
	exit $$failed

ci-tests:
	$(call run-tests,ci)

test-full: setup-ci
	$(call run-tests,full)

test-lab: build
	$(BIN)/pytest tests/interop $(PYTEST_ARGS)

test-fresh: build deb
	$(BIN)/pytest tests/fresh $(PYTEST_ARGS)

# On a copy of the tree with instrumented code. What each item runs is added to build/coverage, so that folders can be
# done one by one; what a test ran that failed there counts all the same.
COVERAGE_PATHS ?= $(addprefix tests/,policy switch sdp net observe provider native/test_channel.py \
	native/test_channel_module.py native/test_framing_module.py native/test_engine_module.py)
COVERAGE_ARGS ?= -n 2 --set=test
coverage: build
	@failed=0; $(BIN)/python tests/mutants/cover.py run $(COVERAGE_PATHS) -- $(COVERAGE_ARGS) || failed=1; \
	$(BIN)/python tests/mutants/cover.py report && exit $$failed

SOAK_MINUTES ?= 60
SOAK_ARGS ?=
soak: setup-ci
	$(BIN)/python tests/apps/soak.py --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

OTHER_MACHINE = $(if $(filter x86_64,$(shell uname -m)),aarch64,x86_64)
C_FILES = $(shell git ls-files '*.c' '*.h')
# Findings are errors, as all warnings. Left out: a struct that is returned with fields not set yet is a copy, no use of
# them (call_of in shim_call.h), which gcc 12 takes for one.
ANALYZER := -fanalyzer -Wno-analyzer-use-of-uninitialized-value
lint: build $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@for place in bench docs/reference examples packaging tests/conftest.py tests/*/; do \
		if [ -f $$place ] || ls $$place/*.py >/dev/null 2>&1; then \
			echo "mypy $$place"; $(BIN)/mypy $$place || exit 1; fi; done
	$(BIN)/pyright
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	@echo "clang-tidy of the native library"
	@printf '%s\n' $(filter-out %_$(OTHER_MACHINE).c,$(filter $(NATIVE)/%.c,$(C_FILES))) | \
		xargs -P $$(nproc) -n 1 $(BIN)/clang-tidy -p build/native --quiet
	$(BIN)/python docs/reference/make.py --check

# What git knows as changed since the last commit, or by the last commit where nothing is.
CHANGED = $(shell { git diff --name-only --diff-filter=d HEAD; git ls-files -o --exclude-standard; } | grep . || \
	git diff --name-only --diff-filter=d HEAD~1 HEAD)
lint-changed: PY = $(filter %.py,$(CHANGED))
lint-changed: C = $(filter %.c %.h,$(CHANGED))
lint-changed: build
	@$(if $(PY),$(BIN)/ruff check -q $(PY) && $(BIN)/ruff format -q --check $(PY))
	@$(if $(filter src/%,$(PY)),$(BIN)/mypy)
	@$(if $(C),$(BIN)/clang-format --dry-run -Werror $(C))

format: build
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

# In a build folder of its own, so that what has not changed is not analysed again.
analyze: export PATH := $(CURDIR)/$(BIN):$(PATH)
analyze: build
	@test -f build/analyze/build.ninja || $(BIN)/meson setup build/analyze >/dev/null
	@$(BIN)/meson configure build/analyze "-Dc_args=$(ANALYZER)"
	@.ci/step build/analyze.log "analysing the native library" $(BIN)/ninja -C build/analyze || \
		{ grep -v '^\[' build/analyze.log >&2; exit 1; }

lock: build
	$(BIN)/python packaging/lock.py

bench: build $(if $(LARGE),$(VENV)/.large)
	$(BIN)/python bench/run.py --save build/bench.json

docs: build $(VENV)/.docs
	$(BIN)/python docs/reference/make.py
	$(BIN)/python docs/reference/make_scoreboard.py
	$(BIN)/python docs/reference/make_man.py build/man
	$(BIN)/python docs/reference/make_site.py

wheel: $(BIN)/python
	$(BIN)/pip wheel --quiet --no-deps -w dist .

wheels: $(VENV)/.wheels
	$(BIN)/python packaging/wheels.py

deb: build wheels
	$(BIN)/python packaging/deb.py

# The changelog is read first: compiling takes minutes.
release: build
	$(BIN)/python packaging/release.py --check
	@$(MAKE) --no-print-directory deb
	$(BIN)/python packaging/release.py

clean:
	rm -rf build dist $(VENV) $(LIB) $(EXTS)
