"""Receipts travel with the weights, also when layers are used in another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from label_dp_cases import (
    DELTA,
    LOSS,
    SIGMA,
    K,
    after,
    batches,
    codes,
    composed,
    features,
    network,
    optimizer,
    vault,
)

from tf_labeldp.accounting import Charge, dp_sgd_charge
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.training import LabelDPModel


def compiled(model: LabelDPModel) -> LabelDPModel:
    model.compile(optimizer(), loss=LOSS)
    return model


def trained(labels: Any = None) -> LabelDPModel:
    model = compiled(network(keras.layers.Dense(4, activation="tanh", name="hidden")))
    model.fit(batches(codes() if labels is None else labels), verbose=0)
    return model


def test_weights_that_are_loaded_before_compiling_bring_their_history(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path / "whole.keras")
    model.save_weights(tmp_path / "some.weights.h5")
    found = [
        keras.models.load_model(tmp_path / "whole.keras"),
        compiled(keras.models.load_model(tmp_path / "whole.keras", compile=False)),
    ]
    fresh = LabelDPModel.from_config(model.get_config())
    fresh.load_weights(tmp_path / "some.weights.h5")
    found.append(compiled(fresh))
    assert [loaded.guarantee(DELTA).epsilon for loaded in found] == [after(1)] * 3


def test_layers_bring_their_history_into_other_models() -> None:
    model = trained()
    again = compiled(LabelDPModel.from_model(keras.Model(model.input, model.output)))
    tuned = compiled(
        LabelDPModel(model.input, keras.layers.Dense(K)(model.get_layer("hidden").output))
    )
    assert again.guarantee(DELTA).epsilon == tuned.guarantee(DELTA).epsilon == after(1)
    assert compiled(network()).guarantee(DELTA).headline == "no record of any label"


def test_models_that_share_layers_add_up_whichever_is_trained_last() -> None:
    base = keras.Sequential([keras.Input((3,)), keras.layers.Dense(K)])
    both = [compiled(LabelDPModel.from_model(base)) for _ in range(2)]
    for number, model in enumerate(both, start=1):
        model.fit(batches(codes()), verbose=0)
        assert model.guarantee(DELTA).epsilon > 0.99 * after(number)
    first, second = (model.guarantee(DELTA).epsilon for model in both)
    assert first == second > after(1)


def sum_of(*charges: Charge) -> Any:
    return pytest.approx(composed(*charges), rel=1e-9)


@pytest.mark.parametrize("with_vault", [True, False])
def test_a_head_on_a_trained_model_counts_its_training(with_vault: bool) -> None:
    labels = vault(epsilon=9.0)
    model = trained(labels if with_vault else None)
    steps = dp_sgd_charge(SIGMA, 0.1, 3, DELTA)
    assert labels.guarantee().epsilon == (steps.epsilon if with_vault else 0.0)
    encoder = keras.Model(model.input, model.get_layer("hidden").output)
    head = PrivateRidge(epsilon=0.5, delta=DELTA / 2, encoder=encoder).fit(features(), labels)
    [release] = [receipt for receipt in head.receipts_ if receipt.kind == "release"]
    assert head.guarantee(DELTA).epsilon == sum_of(steps, release.charge)
    # Labels without a vault may be those of this vault, which then counts them.
    assert labels.guarantee().epsilon == sum_of(steps, release.charge)
