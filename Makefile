# Each target installs what it needs: Python 3.10-3.13, make and a package index are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each target installs the extra of its name into the one environment, and no other.
EXTRAS := $(addprefix $(VENV)/.,plots test docs lint mutants release)
TFP_VENV := .venv-tf-privacy
TFP_BIN := $(TFP_VENV)/bin
TFP_STAMP := $(TFP_VENV)/.installed
BEAM_VENV := .venv-beam
SPARK_VENV := .venv-spark
TFX_VENV := .venv-tfx
TORCH_VENV := .venv-torch
# PyTorch's CPU build is enough, if the index has it: make test-torch TORCH=torch==2.13.0+cpu
TORCH ?= torch
OPACUS_VENV := .venv-opacus
JAX_PRIVACY_VENV := .venv-jax-privacy
# TFX 1.16 needs Python 3.10 (or 3.9, which this package does not support).
TFX_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python) $(shell command -v python3.10))
BAZEL ?= bazel
COMPILE = $(BIN)/uv pip compile pyproject.toml -q --universal --python-version 3.10 --no-header --no-annotate
BAZEL_TESTS ?= //:test_accounting //:test_mechanisms //:test_estimation

export TF_CPP_MIN_LOG_LEVEL ?= 2

# The folder of real data sets, for the tests and benchmarks that need them; unset if it is missing.
LABELDP_DATA_DIR ?= ../shared/data
override LABELDP_DATA_DIR := $(abspath $(wildcard $(LABELDP_DATA_DIR)))
ifneq ($(LABELDP_DATA_DIR),)
export LABELDP_DATA_DIR
else
unexport LABELDP_DATA_DIR
endif

TESTS := test test-slow test-all test-exhaustive test-without-onednn

.PHONY: demo $(TESTS) docs mutants test-tf-privacy test-beam test-spark test-tfx test-torch lint bench bench-nets bench-nets-gpu bazel wheel wheel-test lock clean

demo: $(VENV)/.plots
	$(BIN)/python examples/demo.py

# Workers share two cores: more threads of OpenMP and of TensorFlow's operators would wait for each
# other. The third worker computes while others wait for a disk or another process. Each takes a part
# of the tests in their order, so that hardly a module's fixture is made twice.
$(TESTS): export OMP_NUM_THREADS ?= 1
$(TESTS): export TF_NUM_INTRAOP_THREADS ?= 1
WORKERS := -n 3 --dist worksteal

test: $(VENV)/.test
	$(BIN)/python -m pytest -q $(WORKERS)

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -q $(WORKERS) -m "slow and not exhaustive"

# Both in one run: the workers start, collect and make the shared fixtures once.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest -q $(WORKERS) -m "not exhaustive"

# The rest of matrices, of which `make test-all` has a cell for each pair of values, and of samples.
test-exhaustive: $(VENV)/.test
	$(BIN)/python -m pytest -q $(WORKERS) -m exhaustive

# TensorFlow disables oneDNN on some CPUs, and then has fewer kernels for convolutions, and other
# products of stacked matrices. These tests cover per-example gradients of models with either, and
# the other training of models with convolutions.
OF_KERNELS := onv or channels or groups or Normalization or nested or frozen or vectorized \
  or attention or clipping_privacy or hull or span or operator or make_private or bootstrapped
test-without-onednn: $(VENV)/.test
	TF_ENABLE_ONEDNN_OPTS=0 $(BIN)/python -m pytest -q $(WORKERS) -k "$(OF_KERNELS)" \
	  tests/gradients tests/training/test_make_private.py tests/heads/test_bootstrapped_head.py \
	  --ignore tests/gradients/test_output_masks.py

# TF Privacy needs Keras 2, hence a separate environment.
test-tf-privacy: $(TFP_STAMP)
	$(TFP_BIN)/python -m pytest -q -m tf_privacy

# The engines of tf_labeldp.scale have conflicting dependencies, hence separate environments.
test-beam: $(BEAM_VENV)/.installed
	$(BEAM_VENV)/bin/python -m pytest -q tests/scale/test_beam.py

test-spark: $(SPARK_VENV)/.installed
	@command -v java >/dev/null || { echo "make test-spark: there is no Java." \
	  "On Debian or Ubuntu: apt-get install default-jre-headless" >&2; exit 1; }
	$(SPARK_VENV)/bin/python -m pytest -q tests/scale/test_spark.py

test-tfx: $(TFX_VENV)/.installed
	$(TFX_VENV)/bin/python -m pytest -q tests/scale/test_tfx.py

# Keras on PyTorch. `make test` and `make test-slow` cover JAX.
test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/python -m pytest -q -m "slow or not slow" -k torch tests/backends tests/learners/test_backends.py

# Builds the site of pages and docstrings, build/site/docs/index.html; reading it needs no network.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -E -W --keep-going -q -c docs . build/site

# Changes 200 single places of the privacy core, each of which a fast test should detect. Takes an
# hour or two, so .ci/run leaves it out.
mutants: $(VENV)/.test $(VENV)/.mutants
	$(BIN)/python tests/mutants.py

# Phrases that read as translated, in prose.
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

# Step times of seven nets beside jax_privacy and Opacus, which have environments of their own.
bench-nets: $(VENV)/.test $(OPACUS_VENV)/.installed $(JAX_PRIVACY_VENV)/.installed
	$(BIN)/python benchmarks/bench_nets.py

# The same on a GPU, with the builds for CUDA.
bench-nets-gpu: $(VENV)/.test $(OPACUS_VENV)/.installed $(JAX_PRIVACY_VENV)/.installed
	$(BIN)/python -m pip install -q 'tensorflow[and-cuda]'
	$(JAX_PRIVACY_VENV)/bin/python -m pip install -q 'jax[cuda12]'
	$(BIN)/python benchmarks/bench_nets.py --gpu $(BENCH)

# Builds the wheel from the source archive, so that both are complete and contain nothing stale.
# With the date of the commit, two wheels of a commit have the same bytes. The bill of materials
# (CycloneDX) lists what the wheel installs, in the versions of today.
wheel: $(VENV)/.test $(VENV)/.release
	rm -rf dist
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(BIN)/python -m build --outdir dist
	$(COMPILE) | $(BIN)/cyclonedx-py requirements - --pyproject pyproject.toml --output-reproducible \
	  --output-file dist/sbom.cdx.json

# Writes the versions that CI tests, with the SHA-256 of their files. Install them by
# `uv pip install -c tested-versions.txt tf-labeldp`, or by `pip install --require-hashes -r
# tested-versions.txt` and then `pip install --no-deps tf-labeldp`.
lock: $(VENV)/.release
	$(COMPILE) --upgrade --extra test --generate-hashes --output-file tested-versions.txt >/dev/null

# Tries the wheel in an empty environment, from another folder.
wheel-test: wheel
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PYTHON) -m venv "$$tmp/venv"; \
	"$$tmp/venv/bin/python" -m pip install -q dist/*.whl; \
	smoke=$(abspath tests/layout/wheel_smoke.py); \
	cd "$$tmp" && venv/bin/python -I "$$smoke" "$$tmp/venv" && venv/bin/tf-labeldp --help >/dev/null
	@echo "wheel-test: the wheel works in an empty environment"

# Bazel's Python rules use the `python3` of the PATH, so the PATH starts with the environment.
bazel:
	@command -v $(BAZEL) >/dev/null || { echo "make bazel: there is no '$(BAZEL)' on the PATH." \
	  "On Debian or Ubuntu: apt-get install bazel-bootstrap bazel-rules-java bazel-platforms" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(VENV)/.test
	$(BAZEL) query --config=debian //...
	PATH=$(abspath $(BIN)):$$PATH $(BAZEL) build --config=debian //...
	PATH=$(abspath $(BIN)):$$PATH $(BAZEL) test --config=debian $(BAZEL_TESTS)

# Removes all outputs except demo-output/, which has a user's results.
clean:
	rm -rf $(VENV) $(TFP_VENV) $(BEAM_VENV) $(SPARK_VENV) $(TFX_VENV) $(TORCH_VENV) $(OPACUS_VENV) $(JAX_PRIVACY_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(EXTRAS): $(VENV)/.%: pyproject.toml setup.py | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[$*]'
	@touch $@

# The dependencies of tensorflow-privacy would replace TensorFlow and numpy by old versions, so only
# the three that its queries and models need are installed. Keras 2 has to match TensorFlow's version.
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

# TFX has 260 dependencies: pip resolves them in more than an hour, uv in seconds. Its versions for
# systems without glibc 2.39 need an older pyarrow than this package admits.
TFX_OVERRIDES := .ci/tfx-overrides.txt
$(TFX_VENV)/.installed: pyproject.toml setup.py $(TFX_OVERRIDES)
	@test -n "$(TFX_PYTHON)" || { echo "make test-tfx: there is no Python 3.10, which TFX needs." \
	  "Name one: make test-tfx TFX_PYTHON=/path/to/python3.10" >&2; exit 1; }
	$(TFX_PYTHON) -m venv $(TFX_VENV)
	$(TFX_VENV)/bin/python -m pip install -q --upgrade pip uv
	$(TFX_VENV)/bin/uv pip install -q --python $(TFX_VENV)/bin/python --override $(TFX_OVERRIDES) -e '.[tfx]' 'pytest>=8.2'
	@touch $@

$(TORCH_VENV)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install -q --upgrade pip
	$(TORCH_VENV)/bin/python -m pip install -q -e '.[test]' '$(TORCH)'
	@touch $@

# Keras counts the weights of the nets, and gives them the same data.
$(OPACUS_VENV)/.installed:
	$(PYTHON) -m venv $(OPACUS_VENV)
	$(OPACUS_VENV)/bin/python -m pip install -q --upgrade pip
	$(OPACUS_VENV)/bin/python -m pip install -q 'opacus>=1.6' keras '$(TORCH)'
	@touch $@

$(JAX_PRIVACY_VENV)/.installed:
	$(PYTHON) -m venv $(JAX_PRIVACY_VENV)
	$(JAX_PRIVACY_VENV)/bin/python -m pip install -q --upgrade pip
	$(JAX_PRIVACY_VENV)/bin/python -m pip install -q 'jax-privacy>=2.0' keras
	@touch $@
