# Every target makes what it needs: Python 3.10-3.13 and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TFP_VENV := .venv-tf-privacy
TFP_BIN := $(TFP_VENV)/bin
TFP_STAMP := $(TFP_VENV)/.installed
BAZEL ?= bazel
BAZEL_TESTS ?= //:test_accounting //:test_mechanisms //:test_estimation

export TF_CPP_MIN_LOG_LEVEL ?= 2

# Real data sets, for the tests and benchmarks that want them; unset where there are none.
LABELDP_DATA_DIR ?= ../shared/data
override LABELDP_DATA_DIR := $(abspath $(wildcard $(LABELDP_DATA_DIR)))
ifneq ($(LABELDP_DATA_DIR),)
export LABELDP_DATA_DIR
else
unexport LABELDP_DATA_DIR
endif

.PHONY: demo test test-slow test-tf-privacy lint bench bazel wheel wheel-test clean

demo: $(STAMP)
	$(BIN)/python -m tf_labeldp.cli demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 -m slow

# Against TF Privacy and Keras 2, in an environment of their own.
test-tf-privacy: $(TFP_STAMP)
	$(TFP_BIN)/python -m pytest -q -m tf_privacy

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	@set -e; for script in $(sort $(wildcard tests/benchmarks/bench_*.py)); do \
	  echo "== $$script"; $(BIN)/python $$script; \
	done

# The wheel is built from the source archive, so that both are complete and nothing stale is in.
wheel: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# The wheel with its dependencies in an empty environment, used from another folder.
wheel-test: wheel
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PYTHON) -m venv "$$tmp/venv"; \
	"$$tmp/venv/bin/python" -m pip install -q dist/*.whl; \
	smoke=$(abspath tests/layout/wheel_smoke.py); \
	cd "$$tmp" && venv/bin/python -I "$$smoke" "$$tmp/venv" && venv/bin/tf-labeldp --help >/dev/null
	@echo "wheel-test: the wheel works in an empty environment"

# Bazel's Python rules take the `python3` of the PATH: the one that has the dependencies.
bazel:
	@command -v $(BAZEL) >/dev/null || { echo "make bazel: there is no '$(BAZEL)' on the PATH." \
	  "On Debian or Ubuntu: apt-get install bazel-bootstrap bazel-rules-java bazel-platforms" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(STAMP)
	$(BAZEL) query --config=debian //...
	PATH=$(abspath $(BIN)):$$PATH $(BAZEL) build --config=debian //...
	PATH=$(abspath $(BIN)):$$PATH $(BAZEL) test --config=debian $(BAZEL_TESTS)

# Everything that is made here, except demo-output/: those are a person's results.
clean:
	rm -rf $(VENV) $(TFP_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e '.[plots,test,lint]'
	@touch $@

# What tensorflow-privacy asks for would replace TensorFlow and numpy by old versions; the three
# packages beside it are what its queries and models do need. Keras 2 comes in the version of
# TensorFlow.
$(TFP_STAMP): pyproject.toml setup.py
	$(PYTHON) -m venv $(TFP_VENV)
	$(TFP_BIN)/python -m pip install -q --upgrade pip
	$(TFP_BIN)/python -m pip install -q -e '.[test]'
	$(TFP_BIN)/python -m pip install -q absl-py dm-tree packaging
	$(TFP_BIN)/python -m pip install -q --no-deps --ignore-requires-python tensorflow-privacy==0.9.0
	version=$$($(TFP_BIN)/python -c 'from importlib import metadata; print(metadata.version("tensorflow"))') \
	  && $(TFP_BIN)/python -m pip install -q --no-deps "tf-keras~=$${version%.*}.0"
	@touch $@
