"""`QueryNoise`: the query's own noise and event, and true statements in a `LabelDPModel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from tensorflow.python.eager import context

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches
from tf_labeldp.tf_privacy import QueryNoise
from tf_labeldp.training import GaussianNoise, LabelDPModel, LabelDPOptimizer

pytestmark = pytest.mark.tf_privacy

SHAPES = [(2, 3), (4,), ()]
CLIP, STDDEV = 0.5, 2.0
ARRAY = np.arange(200) % 2


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have set a seed."""
    monkeypatch.setattr(context.context(), "_seed", None)


@pytest.fixture
def noise(tfp: Any) -> QueryNoise:
    return QueryNoise(tfp.GaussianSumQuery(l2_norm_clip=CLIP, stddev=STDDEV))


def noisy_steps(noise: QueryNoise, count: int, value: float = 0.0) -> np.ndarray:
    """Noisy sums of some steps of one compiled function."""
    sums = [tf.fill(shape, value) for shape in SHAPES]
    step = tf.function(lambda: noise.add_noise(sums, CLIP, ())[0])
    return np.stack([np.concatenate([np.ravel(part) for part in step()]) for _ in range(count)])


def test_gaussian_noise_has_the_standard_deviation_of_the_query(noise: QueryNoise) -> None:
    assert noise.noise_multiplier == 4.0
    drawn = noisy_steps(noise, 400)
    assert len(np.unique(drawn)) > 0.99 * drawn.size  # each step has its own
    squares, size = np.sum((drawn / STDDEV) ** 2), drawn.size
    low, high = scipy.stats.chi2.ppf([1e-9, 1 - 1e-9], size)
    assert low < squares < high
    assert not low < squares * 1.3**2 < high  # noise of another size is rejected


def test_noise_is_added_to_the_sum(noise: QueryNoise) -> None:
    drawn = noisy_steps(noise, 3, 1000.0)
    assert 0.0 < np.abs(drawn - 1000.0).max() < 8 * STDDEV


def test_noise_that_was_seeded_once_stays_seeded(
    noise: QueryNoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not noise.seeded
    tf.random.set_seed(5)
    assert noise.seeded
    noisy_steps(noise, 1)
    monkeypatch.setattr(context.context(), "_seed", None)
    assert noise.seeded


def test_statements_name_the_random_numbers(noise: QueryNoise) -> None:
    [text] = noise.assumptions()
    assert "TensorFlow" in text and "not the operating system's" in text


@pytest.mark.holds("tf_privacy.QueryNoise")
def test_a_gaussian_query_has_the_event_of_dp_sgd(noise: QueryNoise) -> None:
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    by_hand = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(noise.dp_event(0.01, 50))
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(4.0))
    by_hand.compose(event, 50)
    assert accountant.get_epsilon(1e-5) == pytest.approx(by_hand.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda tfp: tfp.GaussianSumQuery(1.0, 0.0), ValueError, "stddev"),
        (lambda tfp: tfp.NoPrivacySumQuery(), TypeError, "got NoPrivacySumQuery"),
        (
            lambda tfp: tfp.TreeResidualSumQuery.build_l2_gaussian_query(
                1.0, 4.0, [tf.TensorSpec([3])]
            ),
            TypeError,
            "got TreeResidualSumQuery",
        ),
    ],
    ids=["no-noise", "no-privacy", "tree"],
)
def test_a_query_without_an_event_is_refused(
    tfp: Any, make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        QueryNoise(make(tfp))


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


def test_training_with_a_gaussian_query_is_stated_as_dp_sgd(noise: QueryNoise) -> None:
    stated = []
    for mechanism in (noise, GaussianNoise(STDDEV / CLIP)):
        labels = ldp.PrivateLabels(ARRAY, 2, budget=ldp.PrivacyBudget(5.0, 1e-4))
        model = private_model(mechanism)
        before = model.get_weights()
        model.fit(batches(labels), epochs=2, verbose=0)
        assert np.abs(model.get_weights()[0] - before[0]).min() > 0.0
        stated.append(model.guarantee())
        assert labels.guarantee().epsilon == pytest.approx(stated[-1].epsilon, rel=1e-3)
    query, own = stated
    assert 0.0 < query.epsilon == pytest.approx(own.epsilon, rel=1e-6)
    assert query.is_private
    assert any("TensorFlow" in text for text in query.assumptions)


def test_training_with_a_seeded_query_is_not_private(noise: QueryNoise) -> None:
    model = private_model(noise)
    tf.random.set_seed(1)
    model.fit(batches(ARRAY), verbose=0)
    assert not model.guarantee(1e-4).is_private


def test_a_saved_model_has_the_query_but_no_noise(noise: QueryNoise, tmp_path: Path) -> None:
    model = private_model(noise)
    model.fit(batches(ARRAY), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.noise.get_config() == noise.get_config()
    assert loaded.optimizer.noise.noise_multiplier == noise.noise_multiplier
    shapes = {tuple(variable.shape) for variable in loaded.optimizer.variables}
    assert shapes <= {()}  # counters and rates: nothing of the shape of a gradient
    loaded.fit(batches(ARRAY), verbose=0)


def test_another_clip_stops_the_training(tfp: Any) -> None:
    model = private_model(QueryNoise(tfp.GaussianSumQuery(2.0 * CLIP, STDDEV)))
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"l2_norm_clip=0\.5, the query is for 1\. Make both"):
        model.fit(batches(ARRAY), verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
