"""Fixtures of the vault's tests."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.mechanisms import RandomizedResponse, RRTopK, RRWithPrior
from tf_labeldp.vault import PrivateLabels

LABELS = np.random.default_rng(31).integers(0, 5, 200)


@pytest.fixture
def labels():
    return LABELS.copy()


@pytest.fixture
def make(labels):
    """Makes a vault of 200 labels of 5 classes; keywords replace its arguments."""

    def vault(epsilon=1.0, delta=0.0, **arguments):
        default = {} if "kind" in arguments else {"num_classes": 5}
        arguments = {"labels": labels, **default, **arguments}
        return PrivateLabels(budget=PrivacyBudget(epsilon, delta), **arguments)

    return vault


@pytest.fixture
def response():
    """Randomized response over the five classes at this epsilon."""
    return lambda epsilon=1.0: RandomizedResponse(epsilon, 5)


@pytest.fixture
def no_new_randomness(monkeypatch):
    """A call makes any later use of the operating system's random bits an error."""

    def forbid():
        def refuse(size):
            raise AssertionError(f"{size} random bytes were drawn")

        monkeypatch.setattr(os, "urandom", refuse)

    return forbid


@pytest.fixture
def store(tmp_path):
    """The path of a store that does not exist yet."""
    return tmp_path / "new" / "store"


@pytest.fixture
def priors():
    """A prior for each of the 200 labels."""
    return np.random.default_rng(51).dirichlet(np.ones(5), 200)


@pytest.fixture
def three_draws(response, priors):
    """Draws from a vault: epsilon 1 and 0.5 on the first 80 labels, 1.5 on the rest."""
    part, rest = np.arange(0, 80), np.arange(80, 200)

    def draw(vault):
        return [
            vault.randomize(response(1.0), part),
            vault.randomize(RRWithPrior(1.5, 5), rest, priors[rest], key="stage-2"),
            vault.randomize(RRTopK(0.5, 5, 2), part[::-1], priors[0]),
        ]

    return draw


@pytest.fixture
def filled(make, store, three_draws):
    """A store of these three draws: (vault, draws)."""
    vault = make(epsilon=2.0, store=store)
    return vault, three_draws(vault)


@pytest.fixture(scope="session")
def run_writers(tmp_path_factory):
    """Runs a script of this folder; returns its working folder and its output."""

    def run(name, *arguments):
        if not hasattr(os, "fork"):
            pytest.skip("needs os.fork")
        root = tmp_path_factory.mktemp(name)
        script = pathlib.Path(__file__).with_name(f"{name}_writers.py")
        done = subprocess.run(
            [sys.executable, os.fspath(script), os.fspath(root), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        return root, done.stdout

    return run
