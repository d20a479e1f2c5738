"""`QueryNoise` in a `LabelDPModel`: what is trained, saved and stated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches
from tf_labeldp.tf_privacy import QueryNoise
from tf_labeldp.training import GaussianNoise, LabelDPModel, LabelDPOptimizer

pytestmark = pytest.mark.tf_privacy

CLIP, STDDEV = 0.5, 2.0


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has set no seed: other tests may have."""
    monkeypatch.setattr(context.context(), "_seed", None)


def private_model(noise: Any) -> LabelDPModel:
    inputs = keras.Input((3,))
    model = LabelDPModel(inputs, keras.layers.Dense(2)(inputs))
    optimizer = LabelDPOptimizer(keras.optimizers.SGD(0.1), CLIP, noise=noise)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    return model


def batches(labels: Any) -> Any:
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    return poisson_batches(x, labels, sampling_probability=0.1, steps=4)


def vault() -> ldp.PrivateLabels:
    return ldp.PrivateLabels([0, 1] * 100, 2, budget=ldp.PrivacyBudget(5.0, 1e-4))


def residual_query(tfp: Any) -> Any:
    specs = [tf.TensorSpec((3, 2)), tf.TensorSpec((2,))]
    return tfp.TreeResidualSumQuery.build_l2_gaussian_query(CLIP, 4.0, specs)


def test_training_with_a_gaussian_query_is_stated_as_dp_sgd(tfp: Any) -> None:
    stated = []
    for noise in (QueryNoise(tfp.GaussianSumQuery(CLIP, STDDEV)), GaussianNoise(STDDEV / CLIP)):
        labels = vault()
        model = private_model(noise)
        before = model.get_weights()
        model.fit(batches(labels), epochs=2, verbose=0)
        assert np.abs(model.get_weights()[0] - before[0]).min() > 0.0
        stated.append(model.guarantee())
        assert labels.guarantee().epsilon == pytest.approx(stated[-1].epsilon, rel=1e-3)
    query, own = stated
    assert 0.0 < query.epsilon == pytest.approx(own.epsilon, rel=1e-6)
    assert query.is_private
    assert any("TensorFlow" in text for text in query.assumptions)


def test_training_with_a_seeded_query_is_not_private(tfp: Any) -> None:
    model = private_model(QueryNoise(tfp.GaussianSumQuery(CLIP, STDDEV)))
    tf.random.set_seed(1)
    model.fit(batches(np.arange(200) % 2), verbose=0)
    assert not model.guarantee(1e-4).is_private


def test_a_saved_model_has_the_query_but_no_noise(tfp: Any, tmp_path: Path) -> None:
    noise = QueryNoise(residual_query(tfp))
    model = private_model(noise)
    model.fit(batches(np.arange(200) % 2), verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    again = loaded.optimizer.noise
    assert again.get_config() == noise.get_config()
    shapes = {tuple(variable.shape) for variable in loaded.optimizer.variables}
    assert shapes <= {()}  # counters and rates: nothing of the shape of a gradient
    loaded.fit(batches(np.arange(200) % 2), verbose=0)


def test_another_clip_stops_the_training(tfp: Any) -> None:
    model = private_model(QueryNoise(tfp.GaussianSumQuery(2.0 * CLIP, STDDEV)))
    before = model.get_weights()
    with pytest.raises(ValueError, match="Make both the same"):
        model.fit(batches(np.arange(200) % 2), verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_a_vault_is_not_charged_for_a_tree(tfp: Any) -> None:
    labels = vault()
    model = private_model(QueryNoise(residual_query(tfp)))
    with pytest.raises(ValueError, match="expected noise with a known cost, got QueryNoise"):
        model.fit(batches(labels), verbose=0)
    assert labels.guarantee().epsilon == 0.0


def test_nothing_is_stated_of_steps_with_a_tree(tfp: Any) -> None:
    model = private_model(QueryNoise(residual_query(tfp)))
    model.fit(batches(np.arange(200) % 2), verbose=0)
    assert model.guarantee(1e-4).epsilon == math.inf
