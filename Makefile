# Every target makes what it needs: Python 3.10-3.13 and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each target installs the extra of its name into the one environment, and no other.
EXTRAS := $(addprefix $(VENV)/.,plots test docs lint mutants)
TFP_VENV := .venv-tf-privacy
TFP_BIN := $(TFP_VENV)/bin
TFP_STAMP := $(TFP_VENV)/.installed
BEAM_VENV := .venv-beam
SPARK_VENV := .venv-spark
TFX_VENV := .venv-tfx
TORCH_VENV := .venv-torch
# Its CPU build is enough, where an index has one: make test-torch TORCH=torch==2.13.0+cpu
TORCH ?= torch
# TFX 1.16 needs Python 3.10 (or 3.9, which is too old for us).
TFX_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python) $(shell command -v python3.10))
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

.PHONY: demo test test-without-onednn docs mutants test-slow test-tf-privacy test-beam test-spark test-tfx test-torch lint bench bazel wheel wheel-test clean

demo: $(VENV)/.plots
	$(BIN)/python -m tf_labeldp.cli demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2 -m slow

# TensorFlow leaves oneDNN off on some CPUs, where it then has fewer kernels of convolutions: all
# per-example gradients, and what else trains models with convolutions.
test-without-onednn: $(VENV)/.test
	TF_ENABLE_ONEDNN_OPTS=0 $(BIN)/python -m pytest -q -n 2 tests/gradients \
	  tests/training/test_make_private.py tests/heads/test_bootstrapped_head.py

# Against TF Privacy and Keras 2, in an environment of their own.
test-tf-privacy: $(TFP_STAMP)
	$(TFP_BIN)/python -m pytest -q -m tf_privacy

# Each engine of tf_labeldp.scale in an environment of its own.
test-beam: $(BEAM_VENV)/.installed
	$(BEAM_VENV)/bin/python -m pytest -q tests/scale/test_beam.py

test-spark: $(SPARK_VENV)/.installed
	@command -v java >/dev/null || { echo "make test-spark: there is no Java." \
	  "On Debian or Ubuntu: apt-get install default-jre-headless" >&2; exit 1; }
	$(SPARK_VENV)/bin/python -m pytest -q tests/scale/test_spark.py

test-tfx: $(TFX_VENV)/.installed
	$(TFX_VENV)/bin/python -m pytest -q tests/scale/test_tfx.py

# Another backend of Keras. JAX is tested by `make test` and `make test-slow`.
test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/python -m pytest -q -m "slow or not slow" -k torch tests/backends tests/learners/test_backends.py

# The site of these pages and of the docstrings: build/site/docs/index.html, without a network.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -E -W --keep-going -q -c docs . build/site

# 200 changes of single places in the privacy core, each of which a fast test should see; an hour or
# two. Not a part of .ci/run.
mutants: $(VENV)/.test $(VENV)/.mutants
	$(BIN)/python tests/mutants.py

# Phrases that read as translated.
BANNED_WORDS := anew|so many|as a rule|none of ours|whoever|handed out|held against|but for

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	! grep -rniE '\b($(BANNED_WORDS))\b' --include='*.md' --include='*.py' \
	  README.md CONTRIBUTING.md docs tf_labeldp keras_layers examples benchmarks tests

bench: $(VENV)/.test
	@set -e; for script in $(sort $(wildcard benchmarks/bench_*.py)); do \
	  echo "== $$script"; $(BIN)/python $$script; \
	done

# The wheel is built from the source archive, so that both are complete and nothing stale is in.
wheel: $(VENV)/.test
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
	@$(MAKE) --no-print-directory $(VENV)/.test
	$(BAZEL) query --config=debian //...
	PATH=$(abspath $(BIN)):$$PATH $(BAZEL) build --config=debian //...
	PATH=$(abspath $(BIN)):$$PATH $(BAZEL) test --config=debian $(BAZEL_TESTS)

# Everything that is made here, except demo-output/: those are a person's results.
clean:
	rm -rf $(VENV) $(TFP_VENV) $(BEAM_VENV) $(SPARK_VENV) $(TFX_VENV) $(TORCH_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(EXTRAS): $(VENV)/.%: pyproject.toml setup.py | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[$*]'
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

$(BEAM_VENV)/.installed $(SPARK_VENV)/.installed: .venv-%/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q --upgrade pip
	.venv-$*/bin/python -m pip install -q -e '.[$*,test]'
	@touch $@

# Its 260 packages take pip's resolver more than an hour, and uv's some seconds.
$(TFX_VENV)/.installed: pyproject.toml setup.py
	@test -n "$(TFX_PYTHON)" || { echo "make test-tfx: there is no Python 3.10, which TFX needs." \
	  "Name one: make test-tfx TFX_PYTHON=/path/to/python3.10" >&2; exit 1; }
	$(TFX_PYTHON) -m venv $(TFX_VENV)
	$(TFX_VENV)/bin/python -m pip install -q --upgrade pip uv
	$(TFX_VENV)/bin/uv pip install -q --python $(TFX_VENV)/bin/python -e '.[tfx]' 'pytest>=8.2'
	@touch $@

$(TORCH_VENV)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install -q --upgrade pip
	$(TORCH_VENV)/bin/python -m pip install -q -e '.[test]' '$(TORCH)'
	@touch $@
