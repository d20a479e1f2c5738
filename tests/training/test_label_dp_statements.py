"""The statements of ``LabelDPModel``: the epsilon of its steps, for each way to draw batches."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import (
    DELTA,
    LOSS,
    SIGMA,
    D,
    K,
    N,
    after,
    batches,
    codes,
    features,
    network,
    optimizer,
    private_model,
    unchanged,
    vault,
)

from tf_labeldp.accounting import (
    PrivacyBudget,
    PrivacyGuarantee,
    dp_sgd_charge,
    dp_sgd_guarantee,
)
from tf_labeldp.training import GaussianNoise, LabelDPModel, SelfSpan
from tf_labeldp.vault import PrivateLabels, Rows

WEIGHTS_ASSUMED = (
    "The weights that training began with, and any that were set since, were made without these "
    "labels, except for the uses counted here."
)
NO_VAULT = "No vault tracks the uses of these labels: all of them are steps of this model."


def same(
    found: PrivacyGuarantee, expected: PrivacyGuarantee, q: float, *, with_vault: bool = False
) -> bool:
    # The statement composes one receipt per epoch.
    rests_on = set(found.assumptions) == {
        *dp_sgd_charge(SIGMA, q, 3, DELTA).assumptions,
        *GaussianNoise(1.0).assumptions(),
        *([] if with_vault else [NO_VAULT]),
        WEIGHTS_ASSUMED,
        "The mechanisms and the number of their uses were fixed in advance"
        + (
            ". If some were chosen after seeing earlier outputs, the statement is "
            f"({found.adaptive[0]:g}, {DELTA:g})-label-DP, the budget, which a privacy filter "
            "keeps."
            if found.adaptive
            else ", not chosen after seeing earlier noisy labels."
        ),
        "The features are public, and each person has one example.",
        "The true labels reach training and tuning through the uses counted here alone.",
        "The operating system's random generator and OpenSSL's, which it seeds, are secure.",
    }
    assert (found.adaptive is not None) == with_vault
    numbers = (found.epsilon, found.delta, found.unit, found.relation)
    return rests_on and numbers == (
        expected.epsilon,
        expected.delta,
        expected.unit,
        expected.relation,
    )


def test_arrays_are_used_once_an_epoch_without_amplification() -> None:
    model = private_model()
    model.fit(features(), codes(), epochs=3, batch_size=8, verbose=0)
    expected = dp_sgd_guarantee(SIGMA, 1.0, 3, N**-1.1)
    assert same(model.guarantee(), expected, 1.0)
    assert same(model.guarantee(DELTA), dp_sgd_guarantee(SIGMA, 1.0, 3, DELTA), 1.0)
    assert model.guarantee().num_units == N


@pytest.mark.parametrize("with_vault", [True, False])
def test_poisson_batches_are_stated_as_sampled(with_vault: bool) -> None:
    model = private_model()
    model.fit(batches(vault() if with_vault else codes()), epochs=2, verbose=0)
    found = model.guarantee() if with_vault else model.guarantee(DELTA)
    assert same(found, dp_sgd_guarantee(SIGMA, 0.1, 6, DELTA), 0.1, with_vault=with_vault)
    assert found.is_private


def test_denoisers_that_reveal_the_batch_are_stated_by_passes() -> None:
    labels = vault(epsilon=50.0)
    model = private_model(denoiser=SelfSpan(max_products=4))
    # 25 examples a batch, 4 batches a pass: an epoch of 6 steps uses an example twice at most.
    model.fit(batches(labels, q=0.25, steps=6), epochs=2, verbose=0)
    expected = dp_sgd_guarantee(SIGMA, 1.0, 4, DELTA)
    assert same(model.guarantee(), expected, 1.0, with_vault=True)
    assert labels.guarantee().epsilon == model.guarantee().epsilon


def test_a_declared_history_counts_from_then_on() -> None:
    plain = keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])
    plain.compile("sgd", LOSS)
    plain.fit(features(), codes(), verbose=0)
    model, labels = LabelDPModel.from_model(plain), vault()  # of delta 1e-3
    model.compile(optimizer(), loss=LOSS)
    assert model.guarantee().epsilon == math.inf
    assert model.guarantee().headline == "NOT PRIVATE: nothing is promised"
    assert model.guarantee().assumptions[0].code == "not-promised"
    stated = model.declare("its author knows the cost", epsilon=0.5, delta=1e-4)
    assert stated == model.guarantee()
    assert (stated.epsilon, stated.delta) == (0.5, 1e-4)
    assert stated.assumptions[0] == "Declared by its author, not checked: its author knows the cost"
    model.fit(batches(labels), verbose=0)
    assert after(1) < labels.guarantee().epsilon <= after(1) + 0.51
    assert model.guarantee().epsilon == labels.guarantee().epsilon


@pytest.mark.parametrize("seeded", ["noise", "batches", "neither"])
def test_seeds_are_not_private(seeded: str) -> None:
    model = private_model(insecure_seed=1 if seeded == "noise" else None)
    model.fit(batches(codes(), insecure_seed=1 if seeded == "batches" else None), verbose=0)
    assert model.guarantee().seeded is (seeded != "neither")
    assert ("NOT PRIVATE: seeded" in str(model.guarantee())) is (seeded != "neither")


def test_a_model_compiled_anew_remembers_what_it_has_spent() -> None:
    model = private_model()
    model.fit(features(), codes(), verbose=0)
    once = model.guarantee(DELTA)
    model.compile(optimizer(), loss=LOSS)
    assert model.guarantee(DELTA) == once
    model.fit(features(), codes(), verbose=0)
    assert model.guarantee(DELTA).epsilon == dp_sgd_guarantee(SIGMA, 1.0, 2, DELTA).epsilon


@pytest.mark.parametrize(
    ("devices", "rounds", "named"), [(["a"], True, True), (["a"], False, False)]
)
def test_products_that_a_gpu_rounds_are_named(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], rounds: bool, named: bool
) -> None:
    labels, model = vault(), private_model()
    known = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind=None: devices if kind == "GPU" else known(kind),
    )
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: rounds)
    model.fit(batches(labels), verbose=0)
    for found in (model.guarantee(), labels.guarantee()):
        assert any("TensorFloat-32" in text for text in found.assumptions) is named


def rows_model(units: int) -> LabelDPModel:
    model = network(units=units)
    model.compile(optimizer(), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def rows_vault() -> PrivateLabels:
    rows = np.stack([codes() % 2, codes() // 2, codes() == 0], axis=1).astype(int)
    return PrivateLabels(rows, Rows(3), budget=PrivacyBudget(3.0, DELTA))


def test_rows_of_labels_are_protected_as_a_whole() -> None:
    labels, model = rows_vault(), rows_model(3)
    model.fit(batches(labels), epochs=2, verbose=0)
    for found in (model.guarantee(), labels.guarantee()):
        assert found.epsilon == after(2)
        assert found.unit == "the whole row of labels of one training example"


def test_rows_of_labels_need_an_output_each() -> None:
    labels, model = rows_vault(), rows_model(4)
    before = model.get_weights()
    with pytest.raises(ValueError, match="rows of 3, but the model has 4 outputs"):
        model.fit(batches(labels), verbose=0)
    assert unchanged(model, before)
    assert labels.guarantee().epsilon == 0.0


def test_nothing_is_charged_for_nothing() -> None:
    labels = vault()
    stated = private_model().guarantee()
    assert stated.headline == "no record of any label" and stated.epsilon == np.inf
    assert [note.code for note in stated.assumptions] == ["no-record", "initial-weights"]
    assert labels.guarantee().epsilon == 0.0 and labels.receipts == ()
