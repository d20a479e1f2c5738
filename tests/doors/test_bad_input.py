"""Bad input at every door: a clear error, before anything is charged, and no label in it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.cli import main
from tf_labeldp.vault import LabelKind, Numbers

N = 120
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype(np.float32)
Y = RNG.integers(0, 3, N)
TABLE = {"age": np.arange(N) % 70, "job": np.array(["nurse", "smith", "baker"])[Y]}
FLAGS = RNG.integers(0, 2, (N, 2))
SECRET = 7_713
LONGEST = 420
"""Characters of a message: two or three sentences with their figures."""
NAN = np.where(np.arange(N) == 5, np.nan, X[:, 0])
HOLE = np.where(np.arange(N)[:, None] == 5, np.nan, X).astype(np.float32)


class Vaults:
    """Makes vaults, and knows what all of them have spent."""

    def __init__(self) -> None:
        self._all: list[ldp.PrivateLabels] = []

    def __call__(
        self,
        labels: Any = Y,
        epsilon: float = 9.0,
        delta: float = 1e-4,
        unlabelled: Any = None,
        **kind: Any,
    ):
        of_kind = LabelKind.of(**(kind or {"num_classes": 3}))
        budget = ldp.PrivacyBudget(epsilon, delta)
        vault = ldp.PrivateLabels(labels, of_kind, budget=budget, unlabelled=unlabelled)
        self._all.append(vault)
        return vault

    def numbers(self) -> ldp.PrivateLabels:
        return self(X[:, 0], low=-5.0, high=5.0)

    def noisy(self, vault: Any = None) -> ldp.NoisyLabels:
        """Noisy labels of a vault that is not counted."""
        vault = vault or Vaults()()
        return vault.randomize(ldp.RandomizedResponse(1.0, 3))

    def noisy_numbers(self) -> ldp.NoisyLabels:
        vault = ldp.PrivateLabels(X[:, 0], Numbers(-5, 5), budget=ldp.PrivacyBudget(1.0))
        return vault.randomize(ldp.LabelRandomizer(1.0))

    def spent(self) -> float:
        return max((vault.guarantee().epsilon for vault in self._all), default=0.0)


@dataclasses.dataclass(frozen=True)
class Case:
    door: str
    name: str
    call: Callable[[Vaults], Any] = dataclasses.field(repr=False)
    error: type[Exception]
    words: str
    """A pattern of what the message has to name."""


def frame(**columns: Any) -> Any:
    import pandas

    return pandas.DataFrame({"age": TABLE["age"]} | columns)


CASES: list[Case] = []


def case(door: str, name: str, error: Any, words: str, call: Callable[[Vaults], Any]) -> None:
    CASES.append(Case(door, name, call, error, words))


def network(units: int = 3, loss: Any = None, width: int = 4, **compiled: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(units)])
    loss = loss or keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, **compiled)
    return model


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> np.ndarray:
        return X[60 * index : 60 * index + 60]


def sparse() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def rr(epsilon: Any = 1.0, num_classes: Any = 3) -> ldp.RandomizedResponse:
    return ldp.RandomizedResponse(epsilon, num_classes)


# --- The vault -------------------------------------------------------------------------------
vault = functools.partial(case, "vault")
vault("labels outside the classes", ValueError, "1 of 120", lambda v: v([SECRET, *Y[1:]]))
vault(
    "numbers outside the range",
    ValueError,
    "range",
    lambda v: v(np.r_[SECRET, X[1:, 0]], low=-5, high=5),
)
vault(
    "a missing label",
    ValueError,
    "missing|NaN",
    lambda v: v(np.r_[np.nan, X[1:, 0]], low=-5, high=5),
)
vault(
    "texts without classes",
    (TypeError, ValueError),
    "classes",
    lambda v: v(np.array(["a", "b"] * 60)),
)
vault(
    "an unknown text",
    ValueError,
    "1 of 120",
    lambda v: v(["SECRET", *["a", "b"] * 59, "a"], classes=["a", "b"]),
)
vault(
    "no kind",
    (TypeError, ValueError),
    "num_classes",
    lambda v: ldp.PrivateLabels(Y, budget=ldp.PrivacyBudget(1.0)),
)
vault("two kinds", ValueError, "num_classes", lambda v: v(num_classes=3, low=0, high=3))
vault("low alone", ValueError, "high", lambda v: v(X[:, 0], low=-5))
vault("low above high", ValueError, "low", lambda v: v(X[:, 0], low=5, high=-5))
vault("one class", ValueError, "num_classes", lambda v: v(num_classes=1))
vault("classes as a number", (TypeError, ValueError), "num_classes", lambda v: v(num_classes=2.5))
vault("a class twice", ValueError, "classes", lambda v: v(["a"] * N, classes=["a", "a"]))
vault("one-hot rows as classes", ValueError, "argmax|shape", lambda v: v(np.eye(3)[Y]))
vault("a column of labels", ValueError, "shape", lambda v: v(Y[:, None]))
vault(
    "a budget as a number",
    TypeError,
    "PrivacyBudget",
    lambda v: ldp.PrivateLabels(Y, num_classes=3, budget=1.0),
)
vault("epsilon of zero", ValueError, "epsilon", lambda v: ldp.PrivacyBudget(0.0))
vault("an infinite epsilon", ValueError, "epsilon", lambda v: ldp.PrivacyBudget(np.inf))
vault("epsilon as text", TypeError, "epsilon", lambda v: ldp.PrivacyBudget("1"))
vault("delta of one", ValueError, "delta", lambda v: ldp.PrivacyBudget(1.0, 1.0))
vault(
    "a budget too small",
    ldp.accounting.BudgetExceededError,
    "budget",
    lambda v: v(epsilon=0.5).randomize(rr()),
)
vault("a mechanism of other classes", ValueError, "4", lambda v: v().randomize(rr(num_classes=4)))
vault(
    "a mechanism of numbers",
    (TypeError, ValueError),
    "RandomizedResponse",
    lambda v: v().randomize(ldp.LabelRandomizer(1.0)),
)
vault(
    "classes drawn as numbers",
    (TypeError, ValueError),
    "for numbers",
    lambda v: v.numbers().randomize(rr()),
)
vault("no mechanism", TypeError, "echanism", lambda v: v().randomize(1.0))
vault(
    "priors of another length",
    ValueError,
    "prior",
    lambda v: v().randomize(ldp.RRWithPrior(1.0, 3), priors=np.full((7, 3), 1 / 3)),
)
vault(
    "priors that sum to two",
    ValueError,
    "sum",
    lambda v: v().randomize(ldp.RRWithPrior(1.0, 3), priors=[1.0, 0.5, 0.5]),
)
vault("a split of nothing", ValueError, "held_out|\\(0, 1\\)", lambda v: v().split(0.0))
vault(
    "predictions of another length",
    ValueError,
    "prediction",
    lambda v: v().evaluate(Y[:7], "accuracy", 1.0),
)
vault("an unknown metric", ValueError, "metric", lambda v: v().evaluate(Y, "acc", 1.0))
vault(
    "AUC of class values",
    ValueError,
    "for 'auc' must be probabilities",
    lambda v: v(FLAGS[:, 0], num_classes=2).evaluate(
        np.array(["no", "yes"])[FLAGS[:, 0]], "auc", 1.0
    ),
)
vault("an epsilon below zero", ValueError, "epsilon", lambda v: v().evaluate(Y, "accuracy", -1.0))
vault(
    "None among labels",
    (TypeError, ValueError),
    "1 of 120 labels are missing",
    lambda v: v([None, *Y[1:].tolist()]),
)
vault("nothing more", ValueError, "at least one", lambda v: v().extend([]))
vault("later labels outside the classes", ValueError, "1 of 2", lambda v: v().extend([0, SECRET]))
vault("later labels of a part", ValueError, "whole vault", lambda v: v().split(0.5)[0].extend([0]))
vault("a label for the second time", ValueError, "given once", lambda v: v().extend([0], rows=[3]))
vault(
    "an unlabelled row outside",
    (IndexError, ValueError),
    "0..119",
    lambda v: v(unlabelled=[500], num_classes=3),
)
vault("a generator", TypeError, "list, got a generator", lambda v: v(label for label in Y))
vault("a set of classes", TypeError, "list", lambda v: v(["a"] * N, classes={"a", "b"}))

# --- Mechanisms ------------------------------------------------------------------------------
mechanism = functools.partial(case, "mechanism")


def channel(probabilities: np.ndarray) -> Any:
    return ldp.mechanisms.ChannelMechanism(1.0, (0.0, 1.0), (0.0, 1.0), probabilities)


mechanism("epsilon of zero", ValueError, "epsilon", lambda v: rr(0.0))
mechanism("epsilon not a number", TypeError, "epsilon", lambda v: rr(None))
mechanism("NaN", ValueError, "epsilon", lambda v: rr(float("nan")))
mechanism("one class", ValueError, "num_classes", lambda v: rr(num_classes=1))
mechanism("k above the classes", ValueError, "k", lambda v: ldp.RRTopK(1.0, 3, k=5))
mechanism(
    "edges out of order",
    ValueError,
    "increasing",
    lambda v: ldp.RROnBins(1.0, (50.0, 0.0), (10.0, 40.0), (0, 1)),
)
mechanism(
    "bins without a prior",
    (TypeError, ValueError),
    "at least one",
    lambda v: ldp.optimal_bins([], [], 1.0),
)
mechanism(
    "a matrix that sums to two", ValueError, "sum to one", lambda v: channel(np.full((2, 2), 1.0))
)
mechanism("a zero probability", ValueError, "larger epsilon", lambda v: channel(np.eye(2)))

# --- Noisy labels in Keras -------------------------------------------------------------------
fit = functools.partial(case, "ldp.fit")
fit("true labels", TypeError, "randomize", lambda v: ldp.fit(network(), X, Y, targets="posterior"))
fit("a vault", TypeError, "randomize", lambda v: ldp.fit(network(), X, v(), targets="posterior"))
fit(
    "other lengths",
    ValueError,
    "120",
    lambda v: ldp.fit(network(), X[:7], v.noisy(), targets="posterior"),
)
fit(
    "unknown targets",
    ValueError,
    "posterior",
    lambda v: ldp.fit(network(), X, v.noisy(), targets="clean"),
)
fit(
    "an uncompiled model",
    (ValueError, RuntimeError),
    "compile",
    lambda v: ldp.fit(keras.Sequential([keras.layers.Dense(3)]), X, v.noisy(), targets="posterior"),
)
fit(
    "a model of two outputs",
    ValueError,
    "3",
    lambda v: ldp.fit(network(2), X, v.noisy(), targets="posterior"),
)
fit(
    "a loss of codes",
    ValueError,
    "CategoricalCrossentropy",
    lambda v: ldp.fit(network(loss=sparse()), X, v.noisy(), targets="posterior"),
)
fit(
    "noisy labels as y of Keras",
    AttributeError,
    "ldp.fit|tf_labeldp.fit",
    lambda v: network().fit(X, v.noisy(), verbose=0),
)
fit(
    "no Keras model",
    TypeError,
    "keras",
    lambda v: ldp.fit(object(), X, v.noisy(), targets="posterior"),
)
fit(
    "batches of Keras",
    TypeError,
    "more than once, got a Batches",
    lambda v: ldp.fit(network(), Batches(), v.noisy()),
)
fit("a callback of true labels", ValueError, "randomize", lambda v: ldp.RecordReceipts(Y))
fit(
    "features with a hole",
    ValueError,
    "finite",
    lambda v: ldp.fit(network(), HOLE, v.noisy(), targets="posterior"),
)
fit(
    "texts as features",
    (TypeError, ValueError),
    "[Ee]ncode",
    lambda v: ldp.fit(network(width=1), TABLE["job"], v.noisy(), targets="posterior"),
)
fit("a posterior of an unknown kind", ValueError, "uniform", lambda v: v.noisy().posterior("even"))
fit(
    "a weight that is missing",
    ValueError,
    "sample_weight",
    lambda v: ldp.fit(network(), X, v.noisy(), sample_weight=NAN),
)
fit(
    "balanced weights",
    ValueError,
    "posterior",
    lambda v: ldp.fit(network(), X, v.noisy(), class_weight="balanced"),
)


# --- Stages ----------------------------------------------------------------------------------
def stages(v: Vaults, x: Any = X, labels: Any = None, **settings: Any) -> ldp.MultiStageTraining:
    settings = {
        "epsilon": 1.0,
        "fractions": (0.6, 0.4),
        "epochs_per_stage": 1,
        "verbose": 0,
    } | settings
    return ldp.MultiStageTraining(x, v() if labels is None else labels, **settings)


def run_stages(v: Vaults, model: keras.Model, x: Any = X, **fit_settings: Any) -> Any:
    names = {name: fit_settings.pop(name) for name in ("output",) if name in fit_settings}
    run = stages(v, x, **names)
    settings = {"epochs": run.epochs, "callbacks": [run], "verbose": 0} | fit_settings
    return model.fit(run.dataset(), **settings)


def examples() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(X)


stage = functools.partial(case, "stages")
stage("an array of labels", TypeError, "PrivateLabels", lambda v: stages(v, labels=Y))
stage("numbers", ValueError, "classes", lambda v: stages(v, labels=v.numbers()))
stage("other lengths", ValueError, "120", lambda v: stages(v, X[:7]))
stage(
    "fractions that sum to two", ValueError, "fractions", lambda v: stages(v, fractions=(1.0, 1.0))
)
stage(
    "epochs of other stages",
    ValueError,
    "epochs_per_stage",
    lambda v: stages(v, epochs_per_stage=(1, 1, 1)),
)
stage("temperature of zero", ValueError, "temperature", lambda v: stages(v, temperature=0.0))
stage(
    "mixup of integers",
    ValueError,
    "mixup_alpha",
    lambda v: stages(v, np.arange(N)[:, None], mixup_alpha=0.4),
)
stage("a key with a slash", ValueError, "key", lambda v: stages(v, key="a/b"))
stage(
    "a budget too small",
    ldp.accounting.BudgetExceededError,
    "budget",
    lambda v: (lambda run: network().fit(run.dataset(), epochs=2, callbacks=[run], verbose=0))(
        stages(v, labels=v(epsilon=0.1))
    ),
)
stage("a model of two outputs", ValueError, "3", lambda v: run_stages(v, network(2)))
stage(
    "a loss of codes",
    ValueError,
    "CategoricalCrossentropy",
    lambda v: run_stages(v, network(loss=sparse())),
)
stage("too few epochs", ValueError, "epochs", lambda v: run_stages(v, network(), epochs=1))
stage(
    "texts as features",
    (TypeError, ValueError),
    "[Ee]ncode",
    lambda v: run_stages(v, network(width=1), TABLE["job"]),
)
stage(
    "a data frame with texts",
    (TypeError, ValueError),
    "[Ee]ncode",
    lambda v: stages(v, frame(job=TABLE["job"])),
)
stage("a hole in the features", ValueError, "finite", lambda v: run_stages(v, network(), HOLE))
stage(
    "an output that the model lacks",
    ValueError,
    "kind",
    lambda v: run_stages(v, network(), output="kind"),
)
stage(
    "weights of another length",
    ValueError,
    "sample_weight",
    lambda v: stages(v, sample_weight=np.ones(7)),
)
stage(
    "weights of an unknown class", ValueError, "class", lambda v: stages(v, class_weight={7: 2.0})
)
stage("a shuffled data set", ValueError, "shuffle", lambda v: stages(v, examples().shuffle(N)))


# --- DP-SGD ----------------------------------------------------------------------------------
def private(units: int = 3, loss: Any = None, layers: Any = (), **optimizer: Any) -> Any:
    inputs = keras.Input((4,))
    rows = inputs
    for layer in layers:
        rows = layer(rows)
    model = ldp.LabelDPModel(inputs, keras.layers.Dense(units)(rows))
    settings = {"noise_multiplier": 20.0} | optimizer
    model.compile(
        ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, **settings), loss or sparse()
    )
    return model


def batches(v: Vaults, x: Any = X, labels: Any = None, **settings: Any) -> Any:
    settings = {"sampling_probability": 0.1, "steps": 2} | settings
    return ldp.data.poisson_batches(x, v() if labels is None else labels, **settings)


def make_private(
    v: Vaults, model: Any = None, x: Any = X, labels: Any = None, **settings: Any
) -> Any:
    settings = {"epsilon": 1.0, "epochs": 2, "batch_size": 16} | settings
    return ldp.make_private(
        model or network(loss=sparse()), x=x, labels=v() if labels is None else labels, **settings
    )


sgd = functools.partial(case, "DP-SGD")
sgd(
    "a plain optimizer",
    TypeError,
    "LabelDPOptimizer",
    lambda v: ldp.LabelDPModel.from_model(network()).compile("sgd", sparse()),
)
sgd(
    "batch normalization",
    ValueError,
    "GroupNormalization|LayerNormalization",
    lambda v: private(layers=[keras.layers.BatchNormalization()]),
)
sgd(
    "a loss of one-hot rows",
    ValueError,
    "SparseCategoricalCrossentropy",
    lambda v: private(loss=keras.losses.CategoricalCrossentropy(from_logits=True)).fit(
        batches(v), verbose=0
    ),
)
sgd(
    "a model of two outputs",
    ValueError,
    "3 classes",
    lambda v: private(2).fit(batches(v), verbose=0),
)
sgd(
    "a clip of zero",
    ValueError,
    "l2_norm_clip",
    lambda v: ldp.LabelDPOptimizer(keras.optimizers.SGD(), 0.0, noise_multiplier=1.0),
)
sgd(
    "noise of zero",
    ValueError,
    "noise_multiplier",
    lambda v: ldp.LabelDPOptimizer(keras.optimizers.SGD(), 1.0, noise_multiplier=0.0),
)
sgd(
    "a plain data set",
    ValueError,
    "poisson_batches",
    lambda v: private().fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), verbose=0),
)
sgd("a vault as y", TypeError, "poisson_batches", lambda v: private().fit(X, v(), verbose=0))
sgd(
    "batch_size with batches",
    ValueError,
    "batch_size",
    lambda v: private().fit(batches(v), batch_size=8, verbose=0),
)
sgd(
    "a validation split",
    ValueError,
    "validation_data",
    lambda v: private().fit(X, Y, validation_split=0.1, verbose=0),
)
sgd(
    "private validation",
    TypeError,
    "validation_data",
    lambda v: private().fit(batches(v), validation_data=batches(v), verbose=0),
)
sgd(
    "a probability above one",
    ValueError,
    "sampling_probability",
    lambda v: batches(v, sampling_probability=2.0),
)
sgd("a batch of one", ValueError, "two|2", lambda v: batches(v, sampling_probability=0.001))
sgd("no steps", ValueError, "steps", lambda v: batches(v, steps=0))
sgd("other lengths", ValueError, "120", lambda v: batches(v, X[:50]))
sgd("users alone", ValueError, "max_examples_per_user", lambda v: batches(v, users=np.arange(N)))
sgd(
    "users of other lengths",
    ValueError,
    "users",
    lambda v: batches(v, users=np.arange(7), max_examples_per_user=1),
)
sgd("reading the batches", TypeError, "LabelDPModel.fit", lambda v: next(iter(batches(v))))
sgd("a train_on_batch", RuntimeError, "fit", lambda v: private().train_on_batch(X, Y))
sgd(
    "texts as features",
    (TypeError, ValueError),
    "[Ee]ncode",
    lambda v: private().fit(batches(v, TABLE["job"]), verbose=0),
)
sgd("make_private, epsilon of zero", ValueError, "epsilon", lambda v: make_private(v, epsilon=0.0))
sgd("make_private, an array", TypeError, "PrivateLabels", lambda v: make_private(v, labels=Y))
sgd(
    "make_private, a batch above n",
    ValueError,
    "batch_size",
    lambda v: make_private(v, batch_size=500),
)
sgd(
    "features of another width",
    ValueError,
    "shape",
    lambda v: private().fit(batches(v, X[:, :2]), verbose=0),
)
sgd(
    "balanced class weights",
    ValueError,
    "balanced",
    lambda v: private().fit(batches(v), class_weight="balanced", verbose=0),
)
sgd("make_private, two outputs", ValueError, "3", lambda v: make_private(v, network(2, sparse())))
sgd(
    "a hole in the features",
    (ValueError, FloatingPointError),
    "finite",
    lambda v: private().fit(batches(v, HOLE), verbose=0),
)
sgd("a vault and an array", TypeError, "both", lambda v: batches(v, labels={"a": v(), "b": Y}))
sgd(
    "labels for unknown outputs",
    ValueError,
    "outputs",
    lambda v: private().fit(batches(v, labels={"a": v(), "b": v()}), verbose=0),
)
sgd(
    "a column outside the rows",
    ValueError,
    "0..1",
    lambda v: batches(v, labels=v(FLAGS, num_labels=2), columns={"a": 0, "b": 7}),
)
sgd(
    "weights of another length",
    ValueError,
    "sample_weight",
    lambda v: batches(v, sample_weight=np.ones(7)),
)
sgd(
    "a weight below zero",
    ValueError,
    "class_weight",
    lambda v: private().fit(batches(v, class_weight={0: -1.0}), verbose=0),
)
sgd(
    "weights of an unknown class",
    ValueError,
    "class_weight",
    lambda v: private().fit(batches(v, class_weight={7: 2.0}), verbose=0),
)
sgd("a shuffled data set", ValueError, "shuffle", lambda v: batches(v, examples().shuffle(N)))
sgd("an endless data set", ValueError, "endless", lambda v: batches(v, examples().repeat()))
sgd(
    "labels in the features",
    ValueError,
    "features alone|labels",
    lambda v: batches(v, tf.data.Dataset.from_tensor_slices((X, Y))),
)


# --- Heads and front door --------------------------------------------------------------------
def head(x: Any = X, y: Any = Y, kind: Any = None, **arguments: Any) -> Any:
    arguments = {"epsilon": 1.0, "delta": 1e-5, "num_classes": 3} | arguments
    return (kind or ldp.PrivateLogisticRegression)(**arguments).fit(x, y)


heads = functools.partial(case, "heads")
heads("no kind of labels", (TypeError, ValueError), "num_classes", lambda v: head(num_classes=None))
heads("a range for classes", ValueError, "numbers in", lambda v: head(y=v.numbers()))
heads("epsilon of zero", ValueError, "epsilon", lambda v: head(epsilon=0.0))
heads("other lengths", ValueError, "120", lambda v: head(X[:7], v()))
heads("a hole in the features", ValueError, "finite", lambda v: head(HOLE, v()))
heads(
    "an infinite feature",
    ValueError,
    "finite",
    lambda v: head(np.where(np.isnan(HOLE), np.inf, X), v()),
)
heads("images without an encoder", ValueError, "encoder", lambda v: head(np.zeros((N, 8, 8)), v()))
heads("one feature as a vector", ValueError, "newaxis", lambda v: head(X[:, 0], v()))
heads("texts", (TypeError, ValueError), "Encode", lambda v: head(TABLE["job"][:, None], v()))
heads("a table with texts", (TypeError, ValueError), "[Ee]ncode", lambda v: head(TABLE, v()))
heads(
    "columns missing in predict",
    ValueError,
    "age",
    lambda v: head({"age": X[:, 0], "pay": X[:, 1]}).predict({"pay": X[:, 1]}),
)
heads("a width other than in fit", ValueError, "4", lambda v: head().predict(X[:, :2]))
heads(
    "not fitted", ValueError, "fit", lambda v: ldp.PrivateRidge(1.0, 1e-5, num_classes=3).predict(X)
)
heads("labels outside the classes", ValueError, "1 of 120", lambda v: head(y=np.r_[SECRET, Y[1:]]))
heads("noisy labels", TypeError, "NoisyLabels", lambda v: head(y=v.noisy()))
heads("an empty table", ValueError, "no rows", lambda v: head(X[:0], Y[:0]))
heads(
    "counts below zero",
    ValueError,
    "zero or more",
    lambda v: ldp.heads.PrivatePoissonRegression(1.0, 1e-5, low=-5, high=5).fit(X, X[:, 0]),
)
heads(
    "an unfitted encoder",
    ValueError,
    "fit",
    lambda v: head(TABLE, v(), encoder=ldp.features.RandomFourierFeatures()),
)
heads(
    "weights below zero",
    ValueError,
    "sample_weight",
    lambda v: ldp.PrivateLogisticRegression(1.0, 1e-5, num_classes=3).fit(
        X, v(), sample_weight=-np.ones(N)
    ),
)
heads(
    "weights of another length",
    ValueError,
    "sample_weight",
    lambda v: ldp.PrivateLogisticRegression(1.0, 1e-5, num_classes=3).fit(
        X, v(), sample_weight=np.ones(7)
    ),
)


def door(x: Any = X, y: Any = Y, numbers: bool = False, **arguments: Any) -> Any:
    if numbers:
        return ldp.PrivateRegressor(**{"epsilon": 1.0, "low": -5.0, "high": 5.0} | arguments).fit(
            x, y
        )
    return ldp.PrivateClassifier(**{"epsilon": 1.0, "num_classes": 3} | arguments).fit(x, y)


front = functools.partial(case, "front door")
front("no kind of labels", (TypeError, ValueError), "num_classes", lambda v: door(num_classes=None))
front(
    "no range", (TypeError, ValueError), "low", lambda v: ldp.PrivateRegressor(1.0).fit(X, X[:, 0])
)
front("epsilon of zero", ValueError, "epsilon", lambda v: door(epsilon=0.0))
front("epsilon as text", TypeError, "epsilon", lambda v: door(epsilon="one"))
front("other lengths", ValueError, "120", lambda v: door(X[:7], v()))
front(
    "columns of other lengths",
    ValueError,
    "shape",
    lambda v: door({"a": X[:, 0], "b": X[:7, 0]}, v()),
)
front("no rows", ValueError, "no rows", lambda v: door(X[:0], Y[:0]))
front(
    "complex numbers",
    TypeError,
    "numbers",
    lambda v: door({"z": np.array([1j] * N, dtype=object)}, v()),
)
front(
    "objects in a column",
    TypeError,
    "numbers, text or dates",
    lambda v: door({"z": np.array([{}] * N, dtype=object)}, v()),
)
front("an unknown method", ValueError, "method", lambda v: door(method="trees"))
front(
    "trees on images",
    ValueError,
    "table",
    lambda v: door(np.zeros((N, 8, 8)), v(), method="boosting"),
)
front("noisy labels", TypeError, "NoisyLabels", lambda v: door(y=v.noisy()))
front(
    "a metric without a budget",
    ValueError,
    "budget_for_evaluation",
    lambda v: door(y=v(), evaluation_metric="auc"),
)
front(
    "a metric of numbers",
    ValueError,
    "metric",
    lambda v: door(y=v(), evaluation_metric="mean_squared_error", budget_for_evaluation=0.1),
)
front(
    "labels outside the range",
    ValueError,
    "1 of 120",
    lambda v: door(y=np.r_[SECRET, X[1:, 0]], numbers=True),
)
front("a vault of numbers", (TypeError, ValueError), "numbers in", lambda v: door(y=v.numbers()))
front(
    "a budget too small",
    ldp.accounting.BudgetExceededError,
    "budget",
    lambda v: door(y=v(epsilon=0.1)),
)
front(
    "not fitted", ValueError, "fit", lambda v: ldp.PrivateClassifier(1.0, num_classes=3).predict(X)
)
front(
    "a column missing in predict",
    ValueError,
    "age",
    lambda v: door(TABLE).predict({"job": TABLE["job"]}),
)
front(
    "a model that is not Keras", ValueError, "Keras model", lambda v: door(X, v(), model=object())
)
front(
    "probabilities of a regressor",
    (AttributeError,),
    "predict_proba",
    lambda v: door(y=X[:, 0], numbers=True).predict_proba(X),
)

search = functools.partial(case, "search")
search(
    "an unknown argument",
    ValueError,
    "alpha",
    lambda v: ldp.PrivateSearchCV(ldp.PrivateRidge(1.0, 1e-5), {"alpha": [1.0, 2.0]}, 1.0).fit(
        X, v()
    ),
)
search(
    "epsilon in the grid",
    ValueError,
    "epsilon",
    lambda v: ldp.PrivateSearchCV(ldp.PrivateRidge(1.0, 1e-5), {"epsilon": [1.0, 2.0]}, 1.0).fit(
        X, v()
    ),
)
search(
    "an array of labels",
    TypeError,
    "PrivateLabels",
    lambda v: ldp.PrivateSearchCV(ldp.PrivateRidge(1.0, 1e-5), {"penalty": [1.0, 2.0]}, 1.0).fit(
        X, Y
    ),
)
search(
    "a select without predictions",
    ValueError,
    "at least one model",
    lambda v: ldp.select([], v(), 1.0),
)
search("an unknown kind", ValueError, "kind", lambda v: ldp.recommend(1.0, 1000, "video"))
search("no examples", ValueError, "num_examples", lambda v: ldp.recommend(1.0, 0, "table"))

# --- Sets with coverage ----------------------------------------------------------------------
sets = functools.partial(case, "sets")
ROWS = np.full((N, 3), 1 / 3)


def conformal(v: Vaults, x: Any = X, labels: Any = None, alpha: Any = 0.3, epsilon: Any = 1.0):
    labels = v() if labels is None else labels
    return ldp.conformal(lambda x: ROWS[: len(x)], (x, labels), alpha, epsilon)


sets("alpha below 1/n", ValueError, "at least", lambda v: conformal(v, alpha=0.5 / N))
sets("alpha of one", ValueError, "alpha", lambda v: conformal(v, alpha=1.0))
sets("no epsilon", ValueError, "epsilon, the cost", lambda v: conformal(v, epsilon=None))
sets("epsilon of zero", ValueError, "epsilon", lambda v: conformal(v, epsilon=0.0))
sets("an array of labels", TypeError, "PrivateLabels", lambda v: conformal(v, labels=Y))
sets("rows of other labels", ValueError, "120 held-out", lambda v: conformal(v, x=X[:60]))
sets(
    "no features",
    TypeError,
    r"\(features, labels\)",
    lambda v: ldp.conformal(lambda x: ROWS, v(), 0.3, 1.0),
)
sets(
    "labels of rows",
    TypeError,
    "each column",
    lambda v: conformal(v, labels=v(FLAGS, num_labels=2)),
)
sets(
    "predictions of numbers for classes",
    ValueError,
    "probabilities",
    lambda v: ldp.conformal(lambda x: x[:, 0], (X, v()), 0.3, 1.0),
)
sets(
    "predictions with a hole",
    ValueError,
    "1 of 120 predictions are missing",
    lambda v: ldp.conformal(lambda x: NAN, (X, v.numbers()), 0.3, 1.0),
)
sets(
    "probabilities for numbers",
    ValueError,
    "shape",
    lambda v: conformal(v, labels=v.numbers()),
)
sets(
    "too few noisy labels",
    ValueError,
    "more than",
    lambda v: conformal(v, labels=v.noisy(), alpha=0.1, epsilon=None),
)
sets("a price for noisy labels", ValueError, "no epsilon", lambda v: conformal(v, labels=v.noisy()))
sets(
    "noisy numbers",
    ValueError,
    "one channel",
    lambda v: conformal(v, labels=v.noisy_numbers(), epsilon=None),
)

# --- Trees -----------------------------------------------------------------------------------
trees = functools.partial(case, "boosting")
trees(
    "noisy labels of other lengths",
    ValueError,
    "120",
    lambda v: ldp.PrivateBoosting().fit(X[:60], v.noisy()),
)
trees(
    "classes other than those of noisy labels",
    ValueError,
    "num_classes differs from the NoisyLabels",
    lambda v: ldp.PrivateBoosting(num_classes=5).fit(X, v.noisy()),
)
trees(
    "a range for noisy classes",
    ValueError,
    "low differs from the NoisyLabels",
    lambda v: ldp.PrivateBoosting(low=0, high=2).fit(X, v.noisy()),
)
trees(
    "epsilon of zero",
    ValueError,
    "epsilon",
    lambda v: ldp.PrivateBoosting(0.0, num_classes=3).fit(X, Y),
)
trees(
    "no kind of labels",
    (TypeError, ValueError),
    "num_classes",
    lambda v: ldp.PrivateBoosting(1.0).fit(X, Y),
)
trees(
    "an unknown loss",
    ValueError,
    "loss",
    lambda v: ldp.PrivateBoosting(1.0, low=-5, high=5, loss="hinge").fit(X, X[:, 0]),
)
trees(
    "images",
    TypeError,
    "120, 8, 8",
    lambda v: ldp.PrivateBoosting(1.0, num_classes=3).fit(np.zeros((N, 8, 8)), v()),
)
trees("not fitted", ValueError, "fit", lambda v: ldp.PrivateBoosting(1.0, num_classes=3).predict(X))

# --- Feature maps ----------------------------------------------------------------------------
maps = functools.partial(case, "features")
maps(
    "a vector",
    (TypeError, ValueError),
    "got \\(120",
    lambda v: ldp.features.RandomFourierFeatures().fit(X[:, 0]),
)
maps(
    "an unknown categorical",
    ValueError,
    "colour",
    lambda v: ldp.features.RandomFourierFeatures(categorical=["colour"]).fit(TABLE),
)
maps(
    "not fitted", ValueError, "fit", lambda v: ldp.features.RandomFourierFeatures().transform(TABLE)
)
maps(
    "a column missing",
    ValueError,
    "age",
    lambda v: ldp.features.RandomFourierFeatures().fit(TABLE).transform({"job": TABLE["job"]}),
)
maps(
    "two columns of one name",
    ValueError,
    "age",
    lambda v: ldp.features.RandomFourierFeatures().fit(twice()),
)
maps("no columns", ValueError, "column", lambda v: ldp.features.RandomFourierFeatures().fit({}))
maps(
    "clusters above the rows",
    ValueError,
    "num_clusters|clusters",
    lambda v: ldp.features.find_clusters(X, 500),
)
maps(
    "too few neighbours",
    ValueError,
    "neighbours",
    lambda v: ldp.features.NeighbourSmoothing(num_neighbours=0).fit(X),
)
maps(
    "images too small",
    ValueError,
    "patch_size",
    lambda v: ldp.features.PatchDictionary().fit(np.zeros((20, 2, 2), np.float32)),
)
maps("rows for patches", ValueError, "images must", lambda v: ldp.features.PatchDictionary().fit(X))
maps(
    "inputs of a model, a column missing",
    ValueError,
    "age",
    lambda v: ldp.features.to_inputs(
        frame().drop(columns="age").assign(job="nurse"), door(TABLE).to_keras()
    ),
)


def twice() -> Any:
    import pandas

    return pandas.DataFrame(np.c_[X[:, 0], X[:, 1]], columns=["age", "age"])


front(
    "an object in a data frame",
    TypeError,
    "thing",
    lambda v: door(frame(thing=[object()] * N), v()),
)
front("lists in a data frame", TypeError, "pair", lambda v: door(frame(pair=[[1, 2]] * N), v()))
front(
    "a data frame without columns",
    ValueError,
    "column",
    lambda v: door(frame().drop(columns="age"), v()),
)
front("two columns of one name", ValueError, "age", lambda v: door(twice(), v()))
front(
    "infinite numbers",
    ValueError,
    "finite|infin",
    lambda v: door(frame(pay=np.where(np.isnan(NAN), np.inf, NAN)), v()),
)
front(
    "a text where numbers were",
    (TypeError, ValueError),
    "age",
    lambda v: door(frame(pay=X[:, 0])).predict(frame(pay=X[:, 0]).assign(age="old")),
)
front(
    "noisy labels without a kind",
    TypeError,
    "NoisyLabels",
    lambda v: ldp.PrivateClassifier(1.0).fit(X, v.noisy()),
)
front(
    "a hole in one of several inputs",
    ValueError,
    "finite",
    lambda v: door({"a": HOLE, "b": X}, v(), model=_two_inputs()),
)
front(
    "an input of another width",
    ValueError,
    "shape",
    lambda v: door({"a": X[:, :2], "b": X}, v(), model=_two_inputs()),
)
front(
    "a price as text",
    TypeError,
    "budget_for_evaluation",
    lambda v: door(y=v(), budget_for_evaluation="0.1"),
)


def _two_inputs() -> keras.Model:
    inputs = {name: keras.Input((4,), name=name) for name in ("a", "b")}
    joined = keras.layers.Concatenate()(list(inputs.values()))
    return keras.Model(inputs, keras.layers.Dense(3)(joined))


# --- Learners --------------------------------------------------------------------------------
learners = functools.partial(case, "learners")
IMAGES = np.zeros((N, 8, 8, 1), np.float32)


def conv(units: int = 3) -> keras.Model:
    return keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(units)]
    )


def fix_match(noisy: Any, x: Any = IMAGES, model: Any = None, **settings: Any) -> Any:
    learner = ldp.semi_supervised.FixMatch(model or conv(), **settings)
    learner.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    return learner.fit(x, noisy, epochs=1, verbose=0)


learners("other lengths", ValueError, "120", lambda v: fix_match(v.noisy(), IMAGES[:7]))
learners(
    "a model of two outputs", ValueError, r"0\.\.1", lambda v: fix_match(v.noisy(), model=conv(2))
)
learners(
    "a threshold of two", ValueError, "threshold", lambda v: fix_match(v.noisy(), threshold=2.0)
)


def pate(v: Vaults, x: Any = X, labels: Any = None, **settings: Any) -> Any:
    settings = {"num_teachers": 10, "num_queries": 5} | settings
    teachers = ldp.pate.PATE(1.0, 1e-4, **settings)
    return teachers.answer(x, v() if labels is None else labels)


learners("PATE, an array of labels", TypeError, "PrivateLabels", lambda v: pate(v, labels=Y))
learners("PATE, other lengths", ValueError, "120", lambda v: pate(v, X[:7]))
learners(
    "PATE, more teachers than examples", ValueError, "teachers", lambda v: pate(v, num_teachers=500)
)
learners(
    "PATE, more queries than examples", ValueError, "queries", lambda v: pate(v, num_queries=500)
)
learners("PATE, no teachers", ValueError, "num_teachers", lambda v: pate(v, num_teachers=0))

# --- Files -----------------------------------------------------------------------------------
files = functools.partial(case, "files")
files(
    "a file that is missing",
    (OSError, ValueError),
    "none.keras",
    lambda v: ldp.load_model("none.keras"),
)
files(
    "a text as a model", (OSError, ValueError), "text.keras", lambda v: ldp.load_model("text.keras")
)
files("a statement of a number", TypeError, "got int", lambda v: ldp.guarantee(3))
files(
    "a statement of a missing file",
    (OSError, ValueError),
    "none.keras",
    lambda v: ldp.guarantee("none.keras"),
)
files(
    "noisy labels that are missing",
    (OSError, ValueError),
    "none",
    lambda v: ldp.NoisyLabels.load("none"),
)
files(
    "a store of other labels",
    ldp.LabelStoreError,
    "labels",
    lambda v: (stored(Y), stored((Y + 1) % 3)),
)
files(
    "a report of no store",
    (ldp.LabelStoreError, OSError, ValueError),
    "none",
    lambda v: ldp.report("none"),
)
files("a declaration without a reason", TypeError, "because", lambda v: ldp.declare(network(), ""))
files(
    "a declaration below zero",
    ValueError,
    "epsilon",
    lambda v: ldp.declare(network(), "trained on public data", epsilon=-1.0),
)
files("a table as a model", ValueError, "people.csv", lambda v: ldp.guarantee("people.csv"))
files(
    "a statement of a foreign model",
    TypeError,
    "LogisticRegression",
    lambda v: ldp.guarantee(_foreign()),
)


def _foreign() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression()


def stored(labels: Any) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(labels, num_classes=3, budget=ldp.PrivacyBudget(1.0), store="a-store")


# --- tf.data ---------------------------------------------------------------------------------
data = functools.partial(case, "tf.data")


def randomized(x: Any = X, y: Any = Y, mechanism: Any = None, batch: int = 0) -> Any:
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    rows = rows.batch(batch) if batch else rows
    return rows.apply(ldp.data.randomize_labels(mechanism or rr(), verbose=False))


data("a batched data set", ValueError, "unbatch", lambda v: randomized(batch=8))
data(
    "labels outside the classes",
    ValueError,
    "1 of 120",
    lambda v: randomized(y=np.r_[SECRET, Y[1:]]),
)
data("labels as floats", TypeError, "tf.cast", lambda v: randomized(y=Y * 1.0))
data("no mechanism", TypeError, "echanism", lambda v: randomized(mechanism=1.0))


# --- The command -----------------------------------------------------------------------------
def write_files() -> None:
    rows = [f"{TABLE['age'][i]},{TABLE['job'][i]},{'yes' if Y[i] else 'no'}" for i in range(N)]
    good = "\n".join(["age,job,ill", *rows]) + "\n"
    texts = {
        "people.csv": good,
        "empty.csv": "",
        "header.csv": "age,job,ill\n",
        "ragged.csv": good + "3,nurse\n",
        "missing.csv": good + "3,nurse,\n",
        "twice.csv": good.replace("job", "age", 1),
        "other.csv": good + f"3,nurse,{SECRET}\n",
        "numbers.csv": good.replace("yes", "1")
        .replace("no", "0")
        .replace("nurse", "x")
        .replace("0urse", "x"),
        "labels.txt": good,
        "only.csv": "ill\nyes\nno\n",
        "text.keras": "no model",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("latin.csv").write_bytes(good.replace("smith", "orfèvre").encode("latin-1"))
    Path("semicolons.csv").write_text(good.replace(",", ";"))
    Path("filled").mkdir(exist_ok=True)
    Path("filled/other.txt").write_text("")


command = functools.partial(case, "command")
TRAIN = ("--label", "ill", "--classes", "no", "yes", "--epsilon", "1", "--output", "out")


def tf_labeldp(*words: str) -> Callable[[Vaults], int]:
    def run(vaults: Vaults) -> int:
        del vaults
        try:
            return main(list(words))
        except SystemExit as stop:  # argparse's own errors
            return int(stop.code or 0)

    return run


command("no verb", SystemExit, "verb|required|usage", tf_labeldp())
command("an unknown verb", SystemExit, "invalid choice", tf_labeldp("trane", "people.csv"))
command("a missing file", SystemExit, "none.csv", tf_labeldp("train", "none.csv", *TRAIN))
command("an empty file", SystemExit, "empty.csv", tf_labeldp("train", "empty.csv", *TRAIN))
command("a header alone", SystemExit, "rows", tf_labeldp("train", "header.csv", *TRAIN))
command("a missing label", SystemExit, "missing", tf_labeldp("train", "missing.csv", *TRAIN))
command("two columns of one name", SystemExit, "age", tf_labeldp("train", "twice.csv", *TRAIN))
command(
    "an unknown class", SystemExit, "1 of 121|--classes", tf_labeldp("train", "other.csv", *TRAIN)
)
command(
    "no column of labels",
    SystemExit,
    "--label",
    tf_labeldp("train", "people.csv", "--label", "sick", *TRAIN[2:]),
)
command("no features", SystemExit, "feature", tf_labeldp("train", "only.csv", *TRAIN))
command(
    "epsilon of zero",
    SystemExit,
    "--epsilon|epsilon",
    tf_labeldp("train", "people.csv", *TRAIN[:6], "0", "--output", "out"),
)
command(
    "no kind of labels",
    SystemExit,
    "--classes|--num-classes",
    tf_labeldp("train", "people.csv", "--label", "ill", "--epsilon", "1", "--output", "out"),
)
command(
    "names as numbers",
    SystemExit,
    "--classes",
    tf_labeldp(
        "train",
        "people.csv",
        "--label",
        "ill",
        "--num-classes",
        "2",
        "--epsilon",
        "1",
        "--output",
        "out",
    ),
)
command(
    "an output that is full",
    SystemExit,
    "filled",
    tf_labeldp("train", "people.csv", *TRAIN[:-1], "filled"),
)
command("an unknown ending", SystemExit, "csv|parquet", tf_labeldp("train", "labels.txt", *TRAIN))
command(
    "an unknown column to drop",
    SystemExit,
    "--drop",
    tf_labeldp("train", "people.csv", *TRAIN, "--drop", "colour"),
)
command(
    "an unknown feature",
    SystemExit,
    "--features",
    tf_labeldp("train", "people.csv", *TRAIN, "--features", "colour"),
)
command(
    "the label as a feature",
    SystemExit,
    "--features",
    tf_labeldp("train", "people.csv", *TRAIN, "--features", "age", "ill"),
)
command(
    "a metric of numbers",
    SystemExit,
    "--metric",
    tf_labeldp(
        "train", "people.csv", *TRAIN, "--evaluate", "0.1", "--metric", "mean_squared_error"
    ),
)
command(
    "a metric without a price",
    SystemExit,
    "--evaluate",
    tf_labeldp("train", "people.csv", *TRAIN, "--metric", "auc"),
)
command(
    "randomize without a range",
    SystemExit,
    "--low",
    tf_labeldp(
        "randomize",
        "people.csv",
        "--column",
        "age",
        "--task",
        "regression",
        "--epsilon",
        "1",
        "--output",
        "noisy.csv",
    ),
)
command(
    "randomize an unknown column",
    SystemExit,
    "sick",
    tf_labeldp(
        "randomize",
        "people.csv",
        "--column",
        "sick",
        "--task",
        "classification",
        "--num-classes",
        "2",
        "--epsilon",
        "1",
        "--output",
        "noisy.csv",
    ),
)
command(
    "recommend an unknown kind",
    SystemExit,
    "invalid choice",
    tf_labeldp("recommend", "--epsilon", "1", "--examples", "1000", "--kind", "video"),
)
command("report of no store", SystemExit, "none", tf_labeldp("report", "none", "--output", "page"))
command("verify a missing file", SystemExit, "none.keras", tf_labeldp("verify", "none.keras"))
command("forget without a yes", SystemExit, "--yes", tf_labeldp("forget", "none"))
command(
    "a ragged row", SystemExit, "row 12[12]|line 12[12]", tf_labeldp("train", "ragged.csv", *TRAIN)
)
command(
    "predict without a model",
    SystemExit,
    "none.keras",
    tf_labeldp("predict", "none.keras", "people.csv"),
)
command(
    "predict with no model file",
    SystemExit,
    "text.keras",
    tf_labeldp("predict", "text.keras", "people.csv"),
)
command(
    "predict, a column missing",
    SystemExit,
    "model",
    tf_labeldp("predict", "text.keras", "only.csv"),
)
command(
    "randomize a column of names as numbers",
    SystemExit,
    "ill",
    tf_labeldp(
        "randomize",
        "people.csv",
        "--column",
        "ill",
        "--task",
        "regression",
        "--low",
        "0",
        "--high",
        "1",
        "--epsilon",
        "1",
        "--output",
        "noisy.csv",
    ),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.door}: {case.name}")
def test_the_error_is_clear_and_nothing_is_charged(case, capsys):
    vaults = Vaults()
    if case.error is SystemExit:
        assert case.call(vaults) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        message = captured.err.strip()
        assert message.startswith("tf-labeldp") and "\n" not in message
    else:
        with pytest.raises(case.error) as raised:
            case.call(vaults)
        message = str(raised.value)
    assert re.search(case.words, message)
    assert len(message) <= LONGEST
    assert str(SECRET) not in message and "SECRET" not in message
    # Stage 1 is drawn before the model is known. Its draw is kept: the same stages use it.
    assert vaults.spent() <= (1.0 if case.door == "stages" else 0.0)


def test_the_table_has_150_kinds_over_all_doors():
    assert len({(case.door, case.name) for case in CASES}) == len(CASES) >= 150
    assert len({case.door for case in CASES}) >= 12
