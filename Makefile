# Needs python3 (3.11 or later), pip, gcc and make; everything else is put into .venv.
#
#   make build   set up .venv and compile the native library (also after every change of a C file)
#   make demo    the main job: real programs over kernel TCP and over sidestep, in one table and one picture; sets up
#                no more than that takes, and as root installs redis and nginx
#   make test    all tests, real server programs included
#   make test-lab  the tests against the kernel's RDMA drivers in a guest; skipped without it (tests/interop/README.md)
#   make test-fresh  builds wheels and packages, runs them on aarch64, emulated, in a fresh Debian and in containers; Ray; slow
#   make coverage  which lines of C and Python the tests in COVERAGE_PATHS run, by file; tests/mutants works with what it keeps
#   make lint    ruff, mypy, pyright; the compiler's warnings are errors in every build
#   make soak    the servers and clients of tests/apps/test_matrix.py at random, for SOAK_MINUTES (60)
#   make bench   the speed table, kept in build/bench.json; docs/guides/performance.md says how that becomes the page
#   make docs    the reference pages that are made from the code
#   make wheel   a wheel in dist/, by the compiler of this machine
#   make wheels  wheels in dist/ for every Linux on x86-64 and aarch64, by a compiler that pip brings
#   make deb     Debian packages in dist/, of these wheels

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := src/sidestep/native
LIB    := $(NATIVE)/libsidestep.so $(NATIVE)/sidestep-loader
EXTS   := $(NATIVE)/_channel.abi3.so $(NATIVE)/_framing.abi3.so $(NATIVE)/_engine.abi3.so
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: build build-locked library dev demo demo-programs test test-lab test-fresh coverage soak lint bench wheel wheels deb \
	docs clean setup-apps

# The lock lets several make runs meet in one tree.
build:
	@mkdir -p build && flock build/.lock $(MAKE) --no-print-directory build-locked

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

# Debian splits venv off python3; without it virtualenv, brought by pip, makes the same thing.
$(BIN)/python:
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		$(PYTHON) -m pip install --quiet --target build/virtualenv virtualenv; \
		PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv --quiet $(VENV); }

# The package's own requirements, and those of some extras.
define install-extras
	@mkdir -p build
	@$(BIN)/python -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *(line for extra in sys.argv[1:] for line in p["optional-dependencies"][extra]), \
		sep="\n")' $(1) > build/requirements$(@F)
	$(BIN)/pip install --quiet -r build/requirements$(@F)
	@touch $@
endef

$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(call install-extras,build)

$(VENV)/.dependencies: pyproject.toml $(VENV)/.core
	$(call install-extras,top metrics capture dev test)

# The installed package brings the metadata and the `sidestep` command; the .pth line puts the sources before the
# installed copy, so that a change takes effect at once and build/native, compiled here, is the library in use.
$(VENV)/.installed: $(VENV)/.core pyproject.toml
	@echo "compiling the native library"
	@$(BIN)/pip install --quiet --no-deps --force-reinstall --no-build-isolation \
		--config-settings=build-dir=build/native .
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))') && \
		echo 'import sys; sys.path.insert(0, "$(CURDIR)/src")' > $$site/sidestep-source.pth
	@touch $@

# What few need comes when it is asked for.
$(VENV)/.lint $(VENV)/.wheels: $(VENV)/.%: pyproject.toml $(VENV)/.dependencies
	$(call install-extras,$*)

# Two things at a time, on a fresh machine: programs, and Python's packages. Without the programs the rest is shown.
demo:
	@mkdir -p build
	@flock build/.lock $(MAKE) --no-print-directory -j2 demo-programs $(VENV)/.core
	@flock build/.lock $(MAKE) --no-print-directory library
	@$(BIN)/sidestep demo --picture build/demo.svg

demo-programs:
	@tests/setup --demo $(PYTHON) > build/setup.log 2>&1 || tail -n 3 build/setup.log >&2

# Before the build: it brings the Python headers, without which the extension is left out.
setup-apps:
	@tests/setup $(PYTHON)

# Those that need a guest with the kernel's RDMA drivers take part if SIDESTEP_LAB names it.
LAB := $(if $(SIDESTEP_LAB),,-m 'not lab')
# The scenes of tests/shim mostly wait for each other, so many run at a time, and a few of those with little to do; the
# matrix has a load beside it, which its workers share. Hosts have network namespaces of their own, real programs
# directories and ports. What is killed or compared with the kernel runs alone. All runs take place whatever one finds.
MATRIX   := tests/apps/test_matrix.py
AT_ONCE  := $(addprefix tests/,sim system api cli demo net observe policy project provider rdma sdp sdp_model switch)
HOSTS    := tests/remote tests/native tests/loader
PROGRAMS := tests/apps tests/cpython
ALONE    := $(patsubst %,--ignore=%,tests/shim tests/fresh $(AT_ONCE) $(HOSTS) $(PROGRAMS))
# Many workers and hundreds of providers start: they share what Python compiles, also where it should write nothing.
test: export PYTHONDONTWRITEBYTECODE :=
test: export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
test: setup-apps build
	@failed=0; \
	$(BIN)/pytest tests/shim -n 8 $(PYTEST_ARGS) || failed=1; \
	$(BIN)/pytest $(MATRIX) -n 8 $(PYTEST_ARGS) || failed=1; \
	$(BIN)/pytest $(AT_ONCE) -n 4 $(PYTEST_ARGS) || failed=1; \
	$(BIN)/pytest $(HOSTS) -n 2 $(PYTEST_ARGS) || failed=1; \
	$(BIN)/pytest $(PROGRAMS) --ignore=$(MATRIX) -n 2 $(PYTEST_ARGS) || failed=1; \
	$(BIN)/pytest $(ALONE) $(LAB) $(PYTEST_ARGS) || failed=1; \
	exit $$failed

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
soak: setup-apps build
	$(BIN)/python tests/apps/soak.py --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

lint: build $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@for place in bench docs/reference examples packaging tests/conftest.py tests/*/; do \
		if [ -f $$place ] || ls $$place/*.py >/dev/null 2>&1; then \
			echo "mypy $$place"; $(BIN)/mypy $$place || exit 1; fi; done
	$(BIN)/pyright
	$(BIN)/python docs/reference/make.py --check

bench: build
	$(BIN)/python bench/run.py --save build/bench.json

docs: build
	$(BIN)/python docs/reference/make.py
	$(BIN)/python docs/reference/make_scoreboard.py

wheel: $(BIN)/python
	$(BIN)/pip wheel --quiet --no-deps -w dist .

wheels: $(VENV)/.wheels
	$(BIN)/python packaging/wheels.py

deb: build wheels
	$(BIN)/python packaging/deb.py

clean:
	rm -rf build dist $(VENV) $(LIB) $(EXTS)
