"""No object that was made from an array of true labels shows them in a pickle, a copy or a text.

The public arguments that take such an array are found by introspection; each has a case here.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import cloudpickle
import joblib
import keras
import numpy as np
import pytest
import tensorflow as tf
from _entry_points import TRAINING, arguments
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp import audit, data, heads, mechanisms
from tf_labeldp.heads import PrivatePoissonRegression

N, DELTA = 96, 1e-3
RNG = np.random.default_rng(12)
Y = RNG.integers(0, 2, N)
X = RNG.normal(size=(N, 3)).astype(np.float32)
HALF = np.full((N, 2), 0.5)
RR = mechanisms.RandomizedResponse(1.0, 2)
KIND = {"num_classes": 2}


def network(kind: Any = keras.Model) -> Any:
    inputs = keras.Input((3,))
    return kind(inputs, keras.layers.Dense(2)(inputs))


def batches(labels: Any = Y) -> Any:
    return data.poisson_batches(X, labels, sampling_probability=0.5, steps=1)


def trained() -> Any:
    model = network(ldp.LabelDPModel)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ldp.LabelDPOptimizer("sgd", 1.0, 4.0), loss)
    model.fit(batches(), verbose=0)
    return model


def private() -> Any:
    return ldp.make_private(network(), epsilon=1.0, x=X, labels=vault(), epochs=1, batch_size=16)


def vault() -> Any:
    return ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0, DELTA))


ESTIMATORS: dict[str, Callable[[], Any]] = {
    "heads.NoiseCluster": lambda: heads.NoiseCluster(3, 1.0, **KIND),
    "heads.PrivateRidge": lambda: ldp.PrivateRidge(1.0, DELTA, **KIND),
    "heads.PrivateLogisticRegression": lambda: ldp.PrivateLogisticRegression(1.0, DELTA, **KIND),
    "heads.PrivatePoissonRegression": lambda: PrivatePoissonRegression(1.0, DELTA, low=0, high=2),
    "boosting.PrivateBoosting": lambda: ldp.PrivateBoosting(2.0, max_trees=2, **KIND),
    "front_door.PrivateClassifier": lambda: ldp.PrivateClassifier(
        2.0, DELTA, method="head", budget_for_evaluation=0.5, **KIND
    ),
    "front_door.PrivateRegressor": lambda: ldp.PrivateRegressor(
        2.0, DELTA, method="head", low=0, high=1
    ),
}
"""Estimators that take an array of labels."""

OF_VAULTS: dict[str, Callable[[Any], Any]] = {
    "heads.BootstrappedHead": lambda y: heads.BootstrappedHead(2.0, DELTA, network()).fit(X, y),
    "front_door.PrivateSearchCV": lambda y: ldp.PrivateSearchCV(
        ldp.PrivateRidge(1.0, DELTA), {"penalty": [1.0, 2.0]}, 2.0
    ).fit(X, y),
    "vault.select": lambda y: ldp.select([Y, 1 - Y], y, 1.0),
    "vault.conformal": lambda y: ldp.conformal(lambda x: HALF, (X, y), 0.1, 1.0),
    "training.make_private": lambda y: ldp.make_private(
        network(), epsilon=1.0, x=X, labels=y, epochs=1, batch_size=16
    ),
    "training.MultiStageTraining": lambda y: ldp.MultiStageTraining(
        X, y, epsilon=1.0, fractions=(0.5, 0.5), epochs_per_stage=1
    ),
}
"""Other doors that take an epsilon and labels."""


def fitted(name: str) -> Callable[[], Any]:
    return lambda: ESTIMATORS[name]().fit(X, Y)


CASES: dict[str, Callable[[], Any]] = {
    **{f"{name}.fit": fitted(name) for name in ESTIMATORS},
    "vault.PrivateLabels": vault,
    "vault.PrivateLabels.extend": lambda: vault().extend(Y),
    "vault.select": lambda: ldp.select([Y, 1 - Y], vault(), 1.0),
    "data.poisson_batches": lambda: [batches(), batches().map(tf.identity)],
    "training.LabelDPModel.fit": trained,
    "training.make_private": private,
    "audit.audit_mechanism": lambda: audit.audit_mechanism(RR, Y, draws=2000, seed=0),
    "audit.audit_training": lambda: audit.audit_training(
        lambda labels: np.eye(2)[labels], Y, 2, canaries=N
    ),
    "audit.audit_model": lambda: audit.audit_model(HALF, Y, HALF),
    "audit.label_inference": lambda: audit.label_inference(HALF, Y, HALF),
}


def joblib_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    joblib.dump(value, file)
    return file.getvalue()


DUMPS: list[Callable[[Any], bytes]] = [pickle.dumps, cloudpickle.dumps, joblib_bytes]


def shows_labels(content: bytes) -> bool:
    """Whether bytes have the labels, as an array of any type or as a list."""
    types = ("?", "i1", "u1", "i2", "i4", "i8", "f4", "f8")
    forms = [Y.astype(kind).tobytes() for kind in types]
    forms += [b"".join(b"K" + bytes([label]) for label in Y.tolist())]
    forms += [repr(Y.tolist()).encode(), repr(tuple(Y.tolist())).encode()]
    return any(form in content for form in forms)


def test_labels_are_found_where_they_are() -> None:
    for shown in (Y, Y.tolist(), {"labels": Y.astype(np.float32)}, tf.constant(Y).numpy()):
        assert all(shows_labels(dumps(shown)) for dumps in DUMPS)
    assert not any(shows_labels(dumps(1 - Y)) for dumps in DUMPS)


def test_every_door_for_an_array_has_a_case() -> None:
    found = {
        argument.place
        for argument in arguments()
        if argument.kind == "private" and "Any" in str(argument.annotation)
        if argument.can_be_stated
    }
    assert found == set(CASES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "place", with_slow(CASES, {name for name in CASES if name.partition(".")[0] in TRAINING})
)
def test_what_was_made_from_labels_does_not_show_them(place: str) -> None:
    made = CASES[place]()
    for part in made if isinstance(made, (list, tuple)) else [made]:
        assert not shows_labels(f"{part!r} {part}".encode())
        for dumps in DUMPS:
            try:
                content = dumps(part)
            except TypeError as error:
                assert "true labels" in str(error)
            else:
                assert not shows_labels(content)


@pytest.mark.parametrize("labels", [Y, (Y, Y)], ids=["one", "two"])
def test_batches_of_an_array_can_be_neither_pickled_nor_copied(labels: Any) -> None:
    for leak in (*DUMPS, copy.copy, copy.deepcopy, list):
        with pytest.raises(TypeError, match="can't be iterated, pickled or copied"):
            leak(batches(labels))
    assert batches(labels).num_examples == N


def test_an_audit_names_no_label_of_its_caller() -> None:
    secret = [1234567, 7654321]
    found = audit.audit_mechanism(
        lambda labels, rng: labels == secret[0], secret, draws=2000, seed=0
    )
    shown = f"{found!r} {found} {vars(found)}"
    assert not any(str(label) in shown for label in secret)
    assert "two of the given labels" in shown
    with pytest.raises(ValueError, match="two or more different labels to compare, got 1") as error:
        audit.audit_mechanism(lambda labels, rng: labels, secret[:1])
    assert str(secret[0]) not in str(error.value)
    own = audit.audit_mechanism(RR, draws=2000, seed=0)
    assert re.search("labels [01] and [01]", str(own))


def test_every_door_with_an_epsilon_is_tried() -> None:
    listed = arguments()
    of_epsilon = {argument.place for argument in listed if argument.name == "epsilon"}
    takes_labels = {
        argument.place.removesuffix(".fit")
        for argument in listed
        if argument.name in ("y", "labels", "held_out")
    }
    # Mechanisms, and randomizers that vaults take, have no labels of their own.
    assert of_epsilon & takes_labels == {*ESTIMATORS, *OF_VAULTS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [*ESTIMATORS, *OF_VAULTS])
def test_an_epsilon_is_not_ignored_next_to_a_draw_of_another(place: str) -> None:
    noisy = vault().randomize(mechanisms.RandomizedResponse(0.5, 2))
    with pytest.raises((TypeError, ValueError), match=r"expected|must be"):
        if place in OF_VAULTS:
            OF_VAULTS[place](noisy)
        else:
            ESTIMATORS[place]().fit(X, noisy)


def test_boosting_takes_the_epsilon_of_the_draw() -> None:
    noisy = vault().randomize(mechanisms.RandomizedResponse(1.0, 2))
    for epsilon in (None, 1.0):
        with pytest.warns(UserWarning, match="hardly more than noise"):
            model = ldp.PrivateBoosting(epsilon, max_trees=1).fit(X, noisy)
        assert model.guarantee().epsilon == 1.0
    with pytest.raises(ValueError, match=r"no epsilon with NoisyLabels.* at 1, got 2"):
        ldp.PrivateBoosting(2.0, max_trees=1).fit(X, noisy)
