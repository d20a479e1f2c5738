"""What a ``fit`` will use of each label, found before it begins."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import poisson_batches
from tf_labeldp.training import GaussianNoise, LabelDPOptimizer, SelfConv
from tf_labeldp.training._private_step import StepGuard
from tf_labeldp.training._training_plan import ArrayPlan, TrainingPlan

N = 50


def optimizer(**settings: Any) -> LabelDPOptimizer:
    return LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, 1.0, **settings)


def plan_of(x: Any, y: Any = None, settings: Any = None, **of_optimizer: Any) -> TrainingPlan:
    return TrainingPlan.of(x, y, {} if settings is None else settings, optimizer(**of_optimizer))


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(N, dtype=np.float32)[:, None], 10 * np.arange(N)


def sampled(q: float = 0.2, steps: int = 12, **settings: Any) -> Any:
    x, y = arrays()
    return poisson_batches(x, y % 3, sampling_probability=q, steps=steps, **settings)


@pytest.mark.parametrize(("batch", "steps"), [(None, 2), (8, 7)])
def test_arrays_use_each_example_once(batch: int | None, steps: int) -> None:
    plan = plan_of(*arrays(), {} if batch is None else {"batch_size": batch})
    assert (plan.sampling_probability, plan.uses_an_epoch, plan.num_units) == (1.0, 1, N)
    assert isinstance(plan, ArrayPlan)
    assert plan.steps_an_epoch == steps
    dataset, settings = plan.open()
    assert settings == {}
    for _ in range(2):  # epochs
        used = []
        for x, y, weights in dataset.as_numpy_iterator():
            assert x.shape[0] == y.shape[0] == weights.shape[0] == plan.batch_size
            np.testing.assert_array_equal(10 * x[:, 0], y)  # rows stay together
            used += x[weights > 0, 0].tolist()
        assert sorted(used) == list(range(N))


def test_sample_weights_come_along_and_padding_has_none() -> None:
    weights = np.linspace(1.0, 2.0, N)
    plan = plan_of(*arrays(), {"batch_size": 8, "sample_weight": weights, "shuffle": False})
    dataset, _ = plan.open()  # type: ignore[misc]
    found = np.concatenate([w for _, _, w in dataset.as_numpy_iterator()])
    np.testing.assert_allclose(found, [*weights, *[0.0] * 6], rtol=1e-6)


@pytest.mark.parametrize(
    ("q", "steps", "uses"),
    [(0.2, 5, 1), (0.2, 6, 2), (0.3, 4, 2), (1.0, 4, 4)],
)
def test_denoisers_that_reveal_the_batch_get_passes(q: float, steps: int, uses: int) -> None:
    plan = plan_of(sampled(q, steps), denoiser=SelfConv())
    assert plan.disjoint
    assert (plan.sampling_probability, plan.uses_an_epoch, plan.steps_an_epoch) == (
        1.0,
        uses,
        steps,
    )


def test_the_divisor_knows_nothing_of_the_batch() -> None:
    replicas = tf.distribute.get_replica_context()
    batch = tf.zeros([6, 1])
    assert float(plan_of(*arrays(), {"batch_size": 8}).divisor(batch, replicas)) == 8.0
    assert float(plan_of(sampled()).divisor(batch, replicas)) == 10.0
    micro = plan_of(*arrays(), {"batch_size": 8}, num_microbatches=4)
    assert float(micro.divisor(batch, replicas)) == 4.0
    assert float(plan_of(tf.data.Dataset.range(1)).divisor(batch, replicas)) == 6.0


def test_rows_that_are_clipped_together() -> None:
    micro = plan_of(*arrays(), {"batch_size": 8}, num_microbatches=4)
    assert micro.rows_a_group(tf.zeros([8, 1]), 1) == 2
    assert micro.rows_a_group(tf.zeros([4, 1]), 2) == 2
    for rows, replicas in ((6, 1), (3, 2), (1, 2)):
        with pytest.raises(ValueError, match="must divide the batch"):
            micro.rows_a_group(tf.zeros([rows, 1]), replicas)
    by_user = plan_of(sampled(users=np.arange(N) // 2, max_examples_per_user=2))
    assert by_user.rows_a_group(tf.zeros([8, 1]), 1) == 2


# The guard.


def test_a_guard_lets_through_what_was_admitted() -> None:
    guard = StepGuard()
    noise = GaussianNoise(1.0)
    guard.price(noise)
    with pytest.raises(RuntimeError, match="has not been charged"):
        guard.take_step(noise)
    guard.admit(2)
    guard.take_step(noise)
    guard.take_step(noise)
    with pytest.raises(RuntimeError, match="has not been charged"):
        guard.take_step(noise)
    assert "has not been charged" in str(guard.error)
    guard.admit(2)
    guard.admit(1)  # does not add up
    guard.take_step(noise)
    with pytest.raises(RuntimeError, match="has not been charged"):
        guard.take_step(noise)
    guard.admit(None)
    for _ in range(5):
        guard.take_step(noise)
