"""What was spent goes where the weights go, also when layers are used in another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tf_labeldp.accounting import Charge, PrivacyBudget, dp_sgd_charge
from tf_labeldp.accounting.budget import compose_charges
from tf_labeldp.data import poisson_batches
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer
from tf_labeldp.vault import PrivateLabels

N = 40
DELTA = 1e-3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 3)).astype("f"), rng.integers(0, 2, N)


def compiled(model: LabelDPModel) -> LabelDPModel:
    model.compile(LabelDPOptimizer("sgd", 1.0, 8.0), loss=LOSS)
    return model


def trained(labels: Any = None) -> LabelDPModel:
    x, y = data()
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")(inputs)
    model = compiled(LabelDPModel(inputs, keras.layers.Dense(2, name="scores")(hidden)))
    batches = poisson_batches(x, y if labels is None else labels, sampling_probability=0.3, steps=2)
    model.fit(batches, verbose=0)
    return model


def test_weights_that_are_loaded_before_compiling_bring_their_history(tmp_path: Path) -> None:
    model = trained()
    spent = model.guarantee(DELTA).epsilon
    model.save(tmp_path / "whole.keras")
    model.save_weights(tmp_path / "some.weights.h5")
    found = [
        keras.models.load_model(tmp_path / "whole.keras"),
        compiled(keras.models.load_model(tmp_path / "whole.keras", compile=False)),
    ]
    fresh = LabelDPModel.from_config(model.get_config())
    fresh.load_weights(tmp_path / "some.weights.h5")
    found.append(compiled(fresh))
    assert spent > 0
    assert [one.guarantee(DELTA).epsilon for one in found] == [spent] * 3


def test_layers_bring_their_history_into_other_models() -> None:
    model = trained()
    spent = model.guarantee(DELTA).epsilon
    again = compiled(LabelDPModel.from_model(keras.Model(model.input, model.output)))
    tuned = compiled(
        LabelDPModel(model.input, keras.layers.Dense(2)(model.get_layer("hidden").output))
    )
    assert again.guarantee(DELTA).epsilon == tuned.guarantee(DELTA).epsilon == spent
    inputs = keras.Input((3,))
    untouched = compiled(LabelDPModel(inputs, keras.layers.Dense(2)(inputs)))
    assert untouched.guarantee(DELTA).epsilon == 0.0


def test_models_that_share_layers_add_up_whichever_is_trained_last() -> None:
    x, y = data()
    base = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    both = [compiled(LabelDPModel.from_model(base)) for _ in range(2)]
    alone = []
    for model in both:
        batches = poisson_batches(x, y, sampling_probability=0.3, steps=2)
        model.fit(batches, verbose=0)
        alone.append(model.guarantee(DELTA).epsilon)
    first, second = (model.guarantee(DELTA).epsilon for model in both)
    assert first == second == alone[1] > alone[0]


def sum_of(*charges: Charge) -> Any:
    return pytest.approx(compose_charges(charges, DELTA).epsilon, rel=1e-9)


@pytest.mark.parametrize("with_vault", [True, False])
def test_a_head_on_a_trained_model_counts_its_training(with_vault: bool) -> None:
    x, y = data()
    labels = PrivateLabels(y, num_classes=2, budget=PrivacyBudget(9.0, DELTA))
    model = trained(labels if with_vault else None)
    steps = dp_sgd_charge(8.0, 0.3, 2, DELTA)
    assert labels.guarantee().epsilon == (steps.epsilon if with_vault else 0.0)
    encoder = keras.Model(model.input, model.get_layer("hidden").output)
    head = PrivateRidge(epsilon=0.5, delta=DELTA / 2, encoder=encoder).fit(x, labels)
    [release] = [one for one in head.receipts_ if one.kind == "release"]
    assert head.guarantee(DELTA).epsilon == sum_of(steps, release.charge)
    # Labels that no vault held may be those of this one, which then counts them.
    assert labels.guarantee().epsilon == sum_of(steps, release.charge)


@pytest.mark.parametrize("clip", [1e-19, 1e19])
def test_a_clip_that_single_precision_does_not_hold_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match="l2_norm_clip must be in"):
        LabelDPOptimizer("sgd", clip, 1.0)
