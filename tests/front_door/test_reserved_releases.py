"""Verbs of several releases: another handle of the store spends in between, and changes nothing."""

from __future__ import annotations

import contextlib
import gc

import keras
import numpy as np
import pytest
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget, dp_sgd_charge
from tf_labeldp.heads import BootstrappedHead, HeadPriorRandomizer, HeadResidualRandomizer
from tf_labeldp.mechanisms import HistogramMechanism, LaplaceMechanism, RandomizedResponse
from tf_labeldp.vault import LabelKind, PrivateLabels

N, DELTA = 1200, 1e-5
Y = np.arange(N) % 2
X = (3.0 * np.eye(4)[Y] + np.random.default_rng(0).normal(size=(N, 4))).astype(np.float32)
NUMBERS = np.random.default_rng(1).uniform(0.0, 10.0, N)


def network():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    )


def bootstrapped(labels):
    head = BootstrappedHead(3.0, DELTA, network(), epochs=1, draw_share=0.5, verbose=0)
    head.fit(X, labels)


def in_stages(labels):
    stages = ldp.MultiStageTraining(
        X, labels, epsilon=2.0, fractions=(0.5, 0.5), epochs_per_stage=1, batch_size=200, verbose=0
    )
    model = network()
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
    arguments = {"epochs": stages.epochs, "callbacks": [stages], "shuffle": False, "verbose": 0}
    model.fit(stages.dataset(), **arguments)


def searched(labels):
    heads = ldp.PrivateRidge(1.0, DELTA), {"spread": [False, "half"], "penalty": [1.0, 2.0]}
    ldp.PrivateSearchCV(*heads, 2.0, DELTA).fit(X, labels)


def searched_boosting(labels):
    arguments = {"loss": ["squared_error", "poisson"]}
    ldp.PrivateSearchCV(ldp.PrivateBoosting(1.0), arguments, 4.0).fit(X, labels)


def reserved(labels):
    charge = dp_sgd_charge(20.0, 0.1, 5, DELTA)
    uses = {"a": RandomizedResponse(0.5, 2), "b": HistogramMechanism(0.5, 2), "c": [charge] * 2}
    with labels.reserve(uses):
        labels.randomize(uses["a"], key="a")
        labels.release(uses["b"], key="b")
        for _ in range(2):
            labels.charge(charge, what="an epoch")


CLUSTERS = ldp.ClusterRandomizedResponse.for_epsilon(1.0, 2)
HEAD_PRIOR = HeadPriorRandomizer(4.0, DELTA)
EVALUATED = {"budget_for_evaluation": 1.0, "delta": DELTA}
# For each verb: what it does with a vault, of classes or of numbers, and the classes it is about.
VERBS = {
    "LabelRandomizer": (lambda labels: labels.randomize(ldp.LabelRandomizer(1.0)), "numbers"),
    "clusters": (lambda labels: labels.randomize(CLUSTERS, clusters=np.arange(N) % 3), "classes"),
    "HeadPriorRandomizer": (lambda labels: labels.randomize(HEAD_PRIOR, features=X), "classes"),
    "HeadResidualRandomizer": (
        lambda labels: labels.randomize(HeadResidualRandomizer(4.0, DELTA), features=X),
        "numbers",
    ),
    "BootstrappedHead": (bootstrapped, "classes"),
    "MultiStageTraining": (in_stages, "classes"),
    "PrivateSearchCV": (searched, "classes"),
    "search over boosting": (searched_boosting, "numbers"),
    "PrivateBoosting": (lambda labels: ldp.PrivateBoosting(2.0).fit(X, labels), "numbers"),
    "PrivateClassifier": (
        lambda labels: ldp.PrivateClassifier(1.0, **EVALUATED).fit(X, labels),
        "classes",
    ),
    "PrivateClassifier, with a network": (
        lambda labels: ldp.PrivateClassifier(2.0, model=network(), epochs=1, **EVALUATED).fit(
            X, labels
        ),
        "classes",
    ),
    "PrivateRegressor": (
        lambda labels: ldp.PrivateRegressor(1.0, **EVALUATED).fit(X, labels),
        "numbers",
    ),
    "reserve": (reserved, "classes"),
}


class Store:
    """Two handles of one store, and a hook after each release of the first one."""

    def __init__(self, path, kind, epsilon, monkeypatch):
        self.kind = {"num_classes": 2} if kind == "classes" else {"low": 0.0, "high": 10.0}
        self.y = Y if kind == "classes" else NUMBERS
        budget = PrivacyBudget(epsilon, 10 * DELTA)
        self.labels = PrivateLabels(self.y, LabelKind.of(**self.kind), budget=budget, store=path)
        self.other = PrivateLabels(self.y, LabelKind.of(**self.kind), store=path)
        self.spent, self.after, self.busy = 0, lambda: None, False
        for name in ("randomize", "release", "charge"):
            monkeypatch.setattr(PrivateLabels, name, self._hooked(getattr(PrivateLabels, name)))

    def _hooked(self, method):
        def call(vault, *arguments, **keywords):
            found = method(vault, *arguments, **keywords)
            if not self.busy:
                self.busy = True
                try:
                    self.after()
                finally:
                    self.busy = False
            return found

        return call

    def spend(self, epsilon=None):
        """The other handle spends what is left."""
        epsilon = self.other.remaining() if epsilon is None else epsilon
        if epsilon > 0.05:  # A rest of less is a rest of composition by privacy losses.
            epsilon *= 0.98
            mechanism = (
                RandomizedResponse(epsilon, 2)
                if self.y is Y
                else LaplaceMechanism(epsilon, 0.0, 10.0)
            )
            self.other.randomize(mechanism, key=f"other-{self.spent}")
            self.spent += 1

    def keys(self):
        return sorted(
            receipt.key for receipt in self.other.receipts if not receipt.key.startswith("other")
        )


@pytest.fixture
def store_of(tmp_path, monkeypatch):
    def make(kind, epsilon, name="s"):
        monkeypatch.undo()
        keras.utils.set_random_seed(0)
        return Store(tmp_path / name, kind, epsilon, monkeypatch)

    return make


def test_the_cases_include_all_randomizers():
    [randomizer] = HeadPriorRandomizer.__bases__
    ours = [
        kind for kind in randomizer.__subclasses__() if kind.__module__.startswith("tf_labeldp")
    ]
    assert {kind.__name__ for kind in ours} == {
        "LabelRandomizer",
        "ClusterRandomizedResponse",
        "HeadPriorRandomizer",
        "HeadResidualRandomizer",
    }


SLOW = {"BootstrappedHead", "MultiStageTraining", "PrivateClassifier, with a network"}
CASES = with_slow(VERBS, SLOW)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
class TestReleasesOfOneVerb:
    def test_another_handle_spends_the_rest_in_between(self, store_of, name):
        verb, kind = VERBS[name]
        alone = store_of(kind, 8.0, "alone")
        verb(alone.labels)
        store = store_of(kind, 8.0)
        store.after = store.spend
        verb(store.labels)
        assert store.spent
        assert store.keys() == alone.keys() and len(alone.keys()) > 1
        assert store.other.budget.allows(store.other.guarantee())
        plans = {
            receipt.plan for receipt in store.other.receipts if not receipt.key.startswith("other")
        }
        assert len(plans) == 1 and "" not in plans

    def test_nothing_is_drawn_if_all_do_not_fit(self, store_of, name):
        verb, kind = VERBS[name]
        store = store_of(kind, 8.0)
        store.spend(7.5)
        with pytest.raises(BudgetExceededError):
            verb(store.labels)
        assert store.keys() == [] and len(store.other.history()) == 1

    def test_the_rest_is_given_back_after_an_error(self, store_of, name):
        verb, kind = VERBS[name]
        store = store_of(kind, 8.0)

        def fail():
            raise OverflowError

        store.after = fail
        with contextlib.suppress(OverflowError):
            verb(store.labels)
        gc.collect()
        assert len(store.keys()) == 1
        history = store.other.history()
        assert [use.key for use in history if use.what.endswith("reserved")] == []
        store.busy = True
        store.spend()
        assert store.spent and store.other.budget.allows(store.other.guarantee())
