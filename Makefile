# Needs python3 (3.11 or later), pip, gcc and make; everything else is put into .venv.
#
#   make build   set up .venv and compile the native library (also after every change of a C file)
#   make demo    the main job: real programs over kernel TCP and over sidestep, in one table
#   make test    all tests, real server programs included
#   make test-lab  the tests against the kernel's RDMA drivers in a guest; skipped without it (tests/interop/README.md)
#   make lint    ruff, mypy; the compiler's warnings are errors in every build
#   make soak    the servers and clients of tests/apps/test_matrix.py at random, for SOAK_MINUTES (60)
#   make bench   the speed table
#   make docs    the reference pages that are made from the code
#   make wheel   a wheel in dist/

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := src/sidestep/native
LIB    := $(NATIVE)/libsidestep.so
EXTS   := $(NATIVE)/_channel.abi3.so $(NATIVE)/_ring.abi3.so $(NATIVE)/_framing.abi3.so
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: build build-locked dev demo test test-lab soak lint bench wheel docs clean setup-apps

# The lock lets several make runs meet in one tree.
build:
	@mkdir -p build && flock build/.lock $(MAKE) --no-print-directory build-locked

build-locked: $(VENV)/.installed
	@test -f build/native/build.ninja || PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/meson setup build/native >/dev/null
	@$(BIN)/ninja -C build/native --quiet
	@for ext in $(EXTS); do \
		if [ -f build/native/$$ext ]; then cmp -s build/native/$$ext $$ext || cp build/native/$$ext $$ext; fi; done
	@cmp -s build/native/$(LIB) $(LIB) || { cp build/native/$(LIB) $(LIB).new && mv $(LIB).new $(LIB); }

dev: build

# Debian splits venv off python3; without it virtualenv, brought by pip, makes the same thing.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		$(PYTHON) -m pip install --quiet --target build/virtualenv virtualenv; \
		PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv --quiet $(VENV); }

# Dependencies first, so that a C file that does not compile leaves a usable .venv.
$(VENV)/.dependencies: pyproject.toml | $(BIN)/python
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *p["optional-dependencies"]["dev"], \
		*p["optional-dependencies"]["test"], sep="\n")' > build/requirements.txt
	$(BIN)/pip install --quiet -r build/requirements.txt
	@touch $@

# The installed package brings the metadata and the `sidestep` command; the .pth line puts the sources before the
# installed copy, so that a change takes effect at once and build/native is the library in use.
$(VENV)/.installed: $(VENV)/.dependencies pyproject.toml
	$(BIN)/pip install --quiet --no-deps --force-reinstall .
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))') && \
		echo 'import sys; sys.path.insert(0, "$(CURDIR)/src")' > $$site/sidestep-source.pth
	@touch $@

demo: build
	@$(BIN)/sidestep demo

# Before the build: it brings the Python headers, without which the extension is left out.
setup-apps:
	@tests/setup $(PYTHON)

# Those that need a guest with the kernel's RDMA drivers take part if SIDESTEP_LAB names it.
LAB := $(if $(SIDESTEP_LAB),,-m 'not lab')
# The scenes of tests/shim mostly wait for each other, so many run at a time, and a few of those with little to do; the
# matrix has a load beside it, which its workers share. Programs that are killed or wait to be promoted, CPython's own
# tests, and hosts in network namespaces run alone. All runs take place whatever the first one finds.
MATRIX  := tests/apps/test_matrix.py
AT_ONCE := $(addprefix tests/,api cli net observe policy project provider rdma sdp sdp_model sim switch system)
ALONE   := $(patsubst %,--ignore=%,tests/shim $(MATRIX) $(AT_ONCE))
# Many workers and hundreds of providers start: they share what Python compiles, also where it should write nothing.
test: export PYTHONDONTWRITEBYTECODE :=
test: export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
test: setup-apps build
	@failed=0; \
	$(BIN)/pytest tests/shim -n 8 $(PYTEST_ARGS) || failed=1; \
	$(BIN)/pytest $(MATRIX) -n 8 $(PYTEST_ARGS) || failed=1; \
	$(BIN)/pytest $(AT_ONCE) -n 4 $(PYTEST_ARGS) || failed=1; \
	$(BIN)/pytest $(ALONE) $(LAB) $(PYTEST_ARGS) || failed=1; \
	exit $$failed

test-lab: build
	$(BIN)/pytest tests/interop $(PYTEST_ARGS)

SOAK_MINUTES ?= 60
SOAK_ARGS ?=
soak: setup-apps build
	$(BIN)/python tests/apps/soak.py --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@for place in bench docs/reference examples tests/conftest.py tests/*/; do \
		if [ -f $$place ] || ls $$place/*.py >/dev/null 2>&1; then \
			echo "mypy $$place"; $(BIN)/mypy $$place || exit 1; fi; done
	$(BIN)/python docs/reference/make.py --check

bench: build
	$(BIN)/python bench/run.py

docs: build
	$(BIN)/python docs/reference/make.py
	$(BIN)/python docs/reference/make_scoreboard.py

wheel: $(BIN)/python
	$(BIN)/pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf build dist $(VENV) $(LIB) $(EXTS)
