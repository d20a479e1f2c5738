"""The table of checks, crossed with each door: a mistake in a cell is refused, or a warning."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp._checks import CHECKS
from tf_labeldp.cli import main
from tf_labeldp.heads import BootstrappedHead
from tf_labeldp.keras_layers import ForwardCorrectedLoss, LabelWeightedLoss
from tf_labeldp.vault import Numbers

N = 600
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype(np.float32)
Y = (X[:, 1] + RNG.normal(size=N) > 0).astype(int)
RR = ldp.RandomizedResponse(3.0, 2)
CHANNEL = RR.transition_matrix()


def vault() -> ldp.PrivateLabels:
    return ldp.PrivateLabels(Y, num_classes=2, budget=ldp.PrivacyBudget(9.0, 1e-4))


def network(loss, activation=None) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation)])
    model.compile("sgd", loss)
    return model


def rows(from_logits=True):
    return keras.losses.CategoricalCrossentropy(from_logits=from_logits)


def codes(from_logits=True):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)


def fit(loss, targets, activation=None, mechanism=RR):
    ldp.fit(network(loss, activation), X, vault().randomize(mechanism), targets=targets, verbose=0)


def stages(activation, from_logits):
    labels = vault()
    settings = {"epsilon": 3.0, "fractions": (0.6, 0.4), "epochs_per_stage": 1, "verbose": 0}
    run = ldp.MultiStageTraining(X, labels, **settings)
    model = network(rows(from_logits), activation)
    model.fit(run.dataset(), epochs=2, callbacks=[run], verbose=0)


def private_model(activation, from_logits):
    inputs = keras.Input((4,))
    model = ldp.LabelDPModel(inputs, keras.layers.Dense(2, activation)(inputs))
    model.compile(ldp.LabelDPOptimizer("sgd", 1.0, 4.0), codes(from_logits))


LOSSES_AT_DOORS = {
    "ldp.fit, posterior": lambda a, logits: fit(rows(logits), "posterior", a),
    "ldp.fit, values": lambda a, logits: fit(codes(logits), "values", a),
    "ldp.fit, corrected": lambda a, logits: fit(ForwardCorrectedLoss(CHANNEL, logits), "values", a),
    "ldp.fit, debiased": lambda a, logits: fit(
        LabelWeightedLoss(from_logits=logits), "debiased", a
    ),
    "LabelDPModel": private_model,
    "make_private": lambda a, logits: ldp.make_private(
        network(codes(logits), a), x=X, labels=vault(), epsilon=1.0, epochs=1, batch_size=60
    ),
    "stages": stages,
}


@pytest.mark.parametrize("door", LOSSES_AT_DOORS)
def test_logits_for_probabilities_and_the_reverse(door):
    with pytest.raises(ValueError, match="a softmax, and the loss takes logits"):
        LOSSES_AT_DOORS[door]("softmax", True)
    with pytest.raises(ValueError, match="from_logits=True"):
        LOSSES_AT_DOORS[door](None, False)
    with pytest.raises(
        ValueError, match=r"a relu, and the loss takes probabilities|expected probab"
    ):
        LOSSES_AT_DOORS[door]("relu", False)


def test_a_network_of_probabilities_is_refused_before_a_release():
    labels = vault()
    network_ = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Softmax()])
    with pytest.raises(ValueError, match="apply the softmax twice"):
        BootstrappedHead(1.0, 1e-5, network_, verbose=0).fit(X, labels)
    assert labels.guarantee().epsilon == 0.0


@pytest.mark.parametrize(
    ("matrix", "targets", "message"),
    [
        (ldp.RandomizedResponse(1.0, 2).transition_matrix(), "values", "of another mechanism"),
        (np.eye(2), "values", "the identity, which corrects nothing"),
        (CHANNEL, "posterior", "corrected already. Give targets='values'"),
        (CHANNEL, "debiased", "corrected already. Give targets='values'"),
    ],
)
def test_a_loss_that_does_not_fit_the_draw(matrix, targets, message):
    loss = ForwardCorrectedLoss(matrix, from_logits=True)
    for form in (loss, [loss]):
        with pytest.raises(ValueError, match=message):
            fit(form, targets)
    if targets != "debiased":
        views = {"weak": keras.layers.GaussianNoise(0.1), "strong": keras.layers.GaussianNoise(0.2)}
        model = ldp.semi_supervised.FixMatch(network(None), **views)
        model.compile("sgd", loss)
        with pytest.raises(ValueError, match=message):
            model.fit(X, vault().randomize(RR), targets=targets, verbose=0)


def test_losses_that_fit_the_draw(recwarn):
    fit(ForwardCorrectedLoss(CHANNEL.astype(np.float32), from_logits=True), "values")
    # The channel of a draw with priors differs by example, and is not compared.
    noisy = vault().randomize(ldp.RRWithPrior(3.0, 2), priors=[0.4, 0.6])
    assert noisy.channel is None
    model = network(ForwardCorrectedLoss(CHANNEL, from_logits=True))
    ldp.fit(model, X, noisy, targets="values", verbose=0)
    fit(LabelWeightedLoss(from_logits=True), "debiased")
    assert not [each for each in recwarn if "targets" in str(each.message)]


@pytest.mark.parametrize("loss", [rows(), "kl_divergence"])
def test_signed_targets_in_another_loss(loss):
    with pytest.warns(UserWarning, match=r"negative entries.*LabelWeightedLoss"):
        fit(loss, "debiased", "softmax" if loss == "kl_divergence" else None)


def test_debiased_numbers_in_a_loss_of_other_means(recwarn):
    noisy = numbers().randomize(ldp.LabelRandomizer(4.0))
    for loss in ("mse", "mae"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", loss)
        ldp.fit(model, X, noisy, targets="debiased", verbose=0)
    found = [str(each.message) for each in recwarn if "on average" in str(each.message)]
    assert len(found) == 1 and "'mean_absolute_error'" in found[0] and "Squared" in found[0]


def test_a_corrected_loss_has_no_place_in_stages_and_private_steps():
    loss = ForwardCorrectedLoss(CHANNEL, from_logits=True)
    run = ldp.MultiStageTraining(
        X, vault(), epsilon=3.0, fractions=(0.6, 0.4), epochs_per_stage=1, verbose=0
    )
    with pytest.raises(ValueError, match="labels of one channel"):
        network(loss).fit(run.dataset(), epochs=2, callbacks=[run], verbose=0)
    with pytest.warns(UserWarning, match="steps on true labels need no correction"):
        ldp.make_private(network(loss), x=X, labels=vault(), epsilon=1.0, epochs=1, batch_size=60)


# --- The cross ---------------------------------------------------------------------------------
IMAGES = RNG.integers(0, 256, (N, 8, 8)).astype(np.float32)
IMAGES[:, :4] *= (0.2 + 0.8 * Y)[:, np.newaxis, np.newaxis]
FIRST = RNG.random((N, 3, 8, 8)).astype(np.float32)
COPY = np.where(np.arange(4) == 2, Y[:, np.newaxis], X).astype(np.float32)
IDS = np.where(np.arange(4) == 2, np.arange(N)[:, np.newaxis], X).astype(np.float64)
FAR = np.where((np.arange(4) == 2) & (np.arange(N) == 9)[:, np.newaxis], 1e8, X)
NUMBERS = RNG.uniform(-3.0, 3.0, N)
COPY_OF_NUMBERS = {"2": NUMBERS, "job": np.where(X[:, 0] > 0, "nurse", "smith")}
TEXTS = {"a": X[:, 0], "number": np.array(["k.A.", *map(str, X[1:, 1])])}


def numbers() -> ldp.PrivateLabels:
    return ldp.PrivateLabels(NUMBERS, Numbers(-3, 3), budget=ldp.PrivacyBudget(9.0, 1e-4))


def empty() -> ldp.PrivateLabels:
    none = np.zeros(0, int)
    return ldp.PrivateLabels(none, num_classes=2, budget=ldp.PrivacyBudget(9.0, 1e-4))


def network_for(x, loss) -> keras.Model:
    layers = [keras.Input(np.shape(x)[1:] or (4,)), keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("sgd", loss)
    return model


def noisy_fit(x, labels):
    drawn = labels.randomize(RR)
    ldp.fit(network_for(x, rows()), x, drawn, verbose=0)


def batches(x, labels):
    model = ldp.LabelDPModel.from_model(network_for(x, None))
    model.compile(ldp.LabelDPOptimizer(keras.optimizers.SGD(5.0), 1.0, 6.0), codes())
    data = ldp.data.poisson_batches(
        x, labels, sampling_probability=0.5, steps=30 if x is COPY else 1
    )
    model.fit(data, epochs=1, verbose=0)


def made_private(x, labels):
    settings = {"epsilon": 3.0, "epochs": 1, "batch_size": 60}
    ldp.make_private(network_for(x, codes()), x=x, labels=labels, **settings)


def staged(x, labels):
    settings = {"epsilon": 3.0, "fractions": (0.6, 0.4), "epochs_per_stage": 1, "verbose": 0}
    run = ldp.MultiStageTraining(x, labels, **settings)
    run.dataset()


def learner(x, labels):
    views = {"weak": keras.layers.GaussianNoise(0.1), "strong": keras.layers.GaussianNoise(0.2)}
    model = ldp.semi_supervised.FixMatch(network_for(x, None), **views)
    model.compile("sgd")
    drawn = labels.randomize(ldp.RandomizedResponse(4.0, 2))
    model.fit(x, drawn, batch_size=64, steps_per_epoch=1, verbose=0)


def command(x, labels):
    """Writes a table, and trains on it; an error of the command is raised."""
    names = list(x) if isinstance(x, dict) else [f"c{place}" for place in range(x.shape[1])]
    columns = list(x.values()) if isinstance(x, dict) else list(np.asarray(x).T)
    lines = [",".join([*names, "y"])]
    lines += [",".join(map(str, [*row, y])) for *row, y in zip(*columns, Y, strict=True)]
    Path("data.csv").write_text("\n".join(lines))
    del labels
    words = ["--label", "y", "--num-classes", "2", "--epsilon", "8", "--method", "head"]
    assert main(["train", "data.csv", *words]) == 0


FITS: dict[str, Callable[[Any, Any], Any]] = {
    "PrivateClassifier": lambda x, y: ldp.PrivateClassifier(8.0, 1e-5, method="head").fit(x, y),
    "PrivateRegressor": lambda x, y: ldp.PrivateRegressor(8.0, 1e-5, method="head").fit(x, y),
    "heads": lambda x, y: ldp.PrivateRidge(8.0, 1e-5).fit(x, y),
    "boosting": lambda x, y: ldp.PrivateBoosting(8.0, max_trees=20).fit(x, y),
    "ldp.fit": noisy_fit,
    "poisson_batches": batches,
    "make_private": made_private,
    "stages": staged,
    "learners": learner,
    "command": command,
}
"""The doors, each from features and labels to a fit."""

REFUSED, WARNED = "is refused", "is a warning"
NONE = "has no such input"
TEXTS_REFUSED = "refuses texts"
ALL = dict.fromkeys(FITS, WARNED)
CROSS: dict[str, dict[str, str]] = {
    "numbers as texts": ALL
    | dict.fromkeys(
        ("heads", "ldp.fit", "poisson_batches", "make_private", "stages", "learners"),
        TEXTS_REFUSED,
    ),
    "a column of ids": ALL,
    "numbers far from all others": dict.fromkeys(FITS, "takes what a network takes")
    | dict.fromkeys(("PrivateClassifier", "PrivateRegressor", "command"), "winsorizes")
    | {"boosting": "splits anywhere", "heads": WARNED},
    "a copy of the label, by a released model": ALL
    | dict.fromkeys(("ldp.fit", "make_private", "stages", "learners"), "by noisy labels, or later"),
    "a copy of the label, by noisy labels": dict.fromkeys(FITS, "by the released model")
    | dict.fromkeys(("ldp.fit", "stages", "learners"), WARNED),
    "a generator": dict.fromkeys(FITS, REFUSED) | {"command": NONE},
    "channels-first images": dict.fromkeys(FITS, "takes networks of any format")
    | {"PrivateClassifier": REFUSED, "PrivateRegressor": REFUSED}
    | {"heads": "takes rows of numbers", "boosting": "takes rows of numbers", "command": NONE},
    "channels-first inputs of a network": dict.fromkeys(FITS, "reads images itself, or none")
    | dict.fromkeys(("ldp.fit", "poisson_batches", "make_private", "stages", "learners"), WARNED),
    "numbers of another range than in fit": dict.fromkeys(FITS, "Keras predicts")
    | dict.fromkeys(("PrivateClassifier", "PrivateRegressor", "heads", "boosting"), REFUSED)
    | {"command": "predicts tables"},
    "no labels": dict.fromkeys(FITS, REFUSED) | {"command": "test_bad_input.py has it"},
    "classes for numbers, or the reverse": dict.fromkeys(FITS, "takes both, or one kind alone")
    | {"PrivateClassifier": REFUSED, "PrivateRegressor": REFUSED},
    "logits for probabilities, or the reverse": dict.fromkeys(FITS, "has no loss")
    | dict.fromkeys(("ldp.fit", "poisson_batches", "make_private", "stages"), REFUSED)
    | {"learners": "contradicts from_logits: tests/learners/test_contract.py"},
    "targets that are corrected twice": dict.fromkeys(FITS, "makes its own targets")
    | {"ldp.fit": REFUSED, "learners": REFUSED},
    "a loss for another draw": dict.fromkeys(FITS, "makes its own targets")
    | {"ldp.fit": REFUSED, "learners": REFUSED},
    "signed targets in another loss": dict.fromkeys(FITS, "makes its own targets")
    | {"ldp.fit": WARNED},
    "a corrected loss of true labels": dict.fromkeys(
        FITS, "makes its own loss, or has noisy labels"
    )
    | {"poisson_batches": WARNED, "make_private": WARNED},
}
"""Each check at each door: whether its mistake is refused or a warning, or why it is neither."""
INPUTS: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "numbers as texts": (TEXTS, vault, "column number is text: 599 of 600 cells are numbers"),
    "a column of ids": (IDS, vault, "column c?2 has 600 different values in 600 rows, like an id"),
    "numbers far from all others": (FAR, vault, "column 2 has 1 number far from all others"),
    "a copy of the label, by a released model": (COPY, vault, "model, the column c?2 alone predic"),
    "a copy of the label, by noisy labels": (COPY, vault, "labels, the column 2 alone predicts"),
    "a generator": (None, vault, "more than once, got a generator"),
    "channels-first images": (FIRST, vault, "np.moveaxis"),
    "channels-first inputs of a network": (FIRST, vault, "np.moveaxis"),
    "no labels": (X[:0], empty, "at least one label|hold no rows|at most 0 labels"),
}
"""A mistake, its labels, and what the message has to name; tests of their own have the others."""
CELLS = [
    (name, door)
    for name in INPUTS
    for door, outcome in CROSS[name].items()
    if outcome in (REFUSED, WARNED)
]


def test_every_check_has_a_cell_at_every_door_and_a_test():
    assert {check.name for check in CHECKS} == set(CROSS)
    assert all(set(cells) == set(FITS) for cells in CROSS.values())
    own = {
        "numbers of another range than in fit",
        "classes for numbers, or the reverse",
        "logits for probabilities, or the reverse",
        "targets that are corrected twice",
        "a loss for another draw",
        "signed targets in another loss",
        "a corrected loss of true labels",
    }
    assert set(INPUTS) | own == set(CROSS)
    severities = {check.name: check.severity for check in CHECKS}
    for name, cells in CROSS.items():
        expected = REFUSED if severities[name] == "refuse" else WARNED
        assert {REFUSED, WARNED} & set(cells.values()) == {expected}


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("name", "door"), CELLS)
def test_a_cell(name, door, tmp_path, monkeypatch, capsys, recwarn):
    monkeypatch.chdir(tmp_path)
    x, make, words = INPUTS[name]
    x = (row for row in X) if x is None else x
    labels = numbers() if door == "PrivateRegressor" and make is vault else make()
    if x is COPY and door == "PrivateRegressor":
        x = COPY_OF_NUMBERS
    if CROSS[name][door] == REFUSED:
        with pytest.raises((TypeError, ValueError), match=words):
            FITS[door](x, labels)
        # Noisy labels are drawn before a model or a learner reads its features.
        assert door in ("ldp.fit", "learners") or labels.guarantee().epsilon == 0.0
        return
    FITS[door](x, labels)
    lines = [str(each.message) for each in recwarn]
    lines += capsys.readouterr().err.splitlines()
    assert sum(bool(re.search(words, line)) for line in lines) == 1


def test_numbers_of_another_range_than_in_fit():
    flat = IMAGES.reshape(N, -1)
    for door, x in (("PrivateClassifier", IMAGES), ("heads", flat), ("boosting", flat)):
        model = FITS[door](x, vault())
        with pytest.raises(ValueError, match="pixels of 0 to 255, as in fit, got 0 to 1"):
            model.score(x / 255.0, Y)
        # One dark image has whole numbers.
        assert model.predict(np.minimum(x[:1], 1.0)).shape == (1,)
        model.predict(x[:5])
    model = FITS["heads"](flat / 255.0, vault())
    with pytest.raises(ValueError, match="pixels of 0 to 1, as in fit, got 0 to 255"):
        model.predict(flat)


def test_classes_for_numbers_and_the_reverse():
    labels, other = vault(), numbers()
    with pytest.raises(ValueError, match="PrivateRegressor expected numbers, got 2 classes"):
        ldp.PrivateRegressor(1.0).fit(X, labels)
    with pytest.raises(ValueError, match=r"PrivateClassifier expected classes.*PrivateRegressor"):
        ldp.PrivateClassifier(1.0).fit(X, other)
    assert labels.guarantee().epsilon == other.guarantee().epsilon == 0.0


def test_a_copy_of_numbers_in_keras():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    noisy = numbers().randomize(ldp.LabelRandomizer(8.0))
    x = np.where(np.arange(4) == 2, NUMBERS[:, np.newaxis], X).astype(np.float32)
    with pytest.warns(UserWarning, match="model, the column 2 alone predicts nearly all labels"):
        ldp.fit(model, x, noisy, targets="posterior", epochs=12, verbose=0)


def test_what_is_no_mistake_is_no_warning(recwarn):
    """Days in order, texts of a few codes, a column that only leans to the label."""
    table = {
        "day": np.datetime64("2020-01-01") + np.arange(N),
        "code": np.array([str(place % 7) for place in range(N)]),
        "trend": X[:, 1],
    }
    ldp.PrivateClassifier(8.0, 1e-5, method="head").fit(table, vault())
    ldp.fit(network_for(X, rows()), X, vault().randomize(RR), verbose=0)
    assert not [each for each in recwarn if "column" in str(each.message)]


def test_texts_of_whole_numbers_that_differ_are_ids():
    table = {"id": np.array([f"{place:06d}" for place in range(N)]), "b": X[:, 0]}
    with pytest.warns(UserWarning, match=r"the column id has 600 different values.*columns='id'"):
        ldp.PrivateBoosting(8.0, max_trees=5).fit(table, vault())
    table["id"] = np.array([f"{number:.3f}" for number in X[:, 1]])
    with pytest.warns(UserWarning, match=r"600 of 600 cells are numbers. Unless they are codes"):
        ldp.PrivateBoosting(8.0, max_trees=5).fit(table, vault())


def test_amounts_dates_and_counts_are_no_ids():
    """Their whole numbers differ in nearly each row, too."""
    rng, rows = np.random.default_rng(0), 2000
    days = np.datetime64("2015-01-01") + np.arange(rows)
    year_month_day = np.array([int(str(day).replace("-", "")) for day in days])
    good = {
        "income": rng.lognormal(10.5, 0.8, rows).astype(int),
        "amount": rng.integers(10**4, 10**8, rows),
        "price": rng.uniform(0.0, 1e6, rows),
        "zip": rng.integers(501, 99_951, rows),
        "second": np.sort(rng.integers(15 * 10**8, 17 * 10**8, rows)),
        "day": year_month_day,
        "count": rng.poisson(3000, rows),
        "text of amounts": rng.integers(10**4, 10**8, rows).astype(str),
        "days as numbers": days.astype(np.float64),
        "infinite": np.where(np.arange(rows) == 7, np.inf, rng.uniform(1e5, 1e6, rows)),
    }
    small = {"year": np.arange(1960, 2024), "month": year_month_day[:730:30] // 100}
    small["day of a year"] = year_month_day[:365]
    ids = {
        "row": np.arange(rows),
        "customer": rng.permutation(rows) + 100_000,
        "random": rng.choice(9 * 10**8, rows, replace=False) + 10**8,
        "long": rng.integers(10**17, 10**18, rows).astype(np.float64),
        "text": np.array([f"c{row}" for row in range(rows)]),
        "digits": rng.permutation(rows).astype(str),
        "many digits": np.array([f"{10**19 + row**3}" for row in range(rows)]),
    }
    [check] = [each for each in CHECKS if each.name == "a column of ids"]
    assert not list(check.find({**good, **small}, 1))
    assert len(list(check.find(ids, 1))) == len(ids)


def test_long_tails_are_not_far_from_all_others():
    rng = np.random.default_rng(0)
    tails = {
        "lognormal": rng.lognormal(0.0, 1.5, 2000),
        "pareto": rng.pareto(1.5, 2000),
        "campaign": np.where(np.arange(2000) == 3, 56, rng.poisson(1.5, 2000)),
        "days": np.where(np.arange(2000) % 20 == 3, rng.integers(0, 28, 2000), 999),
    }
    [check] = [each for each in CHECKS if each.name == "numbers far from all others"]
    assert not list(check.find(tails))
