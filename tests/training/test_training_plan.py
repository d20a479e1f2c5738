"""The uses of each label in a ``fit``, found before it begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tf_labeldp.data import poisson_batches
from tf_labeldp.training import LabelDPOptimizer, SelfConv

# The uses of a label by each plan, of which a statement shows the product alone.
from tf_labeldp.training._training_plan import TrainingPlan

N = 50
X, Y = np.arange(N, dtype=np.float32)[:, None], 10 * np.arange(N)


def plan_of(x: Any, y: Any = None, settings: Any = None, denoiser: Any = None) -> TrainingPlan:
    return TrainingPlan.of(x, y, settings or {}, LabelDPOptimizer("sgd", 1.0, 1.0, denoiser))


def sampled(q: float = 0.2, steps: int = 12, **settings: Any) -> Any:
    return poisson_batches(X, Y % 3, sampling_probability=q, steps=steps, **settings)


@pytest.mark.parametrize(("batch", "steps"), [(None, 2), (8, 7)])
def test_arrays_use_each_example_once(batch: int | None, steps: int) -> None:
    plan = plan_of(X, Y, {} if batch is None else {"batch_size": batch})
    uses = plan.uses
    assert (uses.probability, uses.per_epoch, uses.num_units) == (1.0, 1, N)
    assert uses.steps_per_epoch == steps
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
    plan = plan_of(X, Y, {"batch_size": 8, "sample_weight": weights, "shuffle": False})
    dataset, _ = plan.open()  # type: ignore[misc]
    found = np.concatenate([w for _, _, w in dataset.as_numpy_iterator()])
    np.testing.assert_allclose(found, [*weights, *[0.0] * 6], rtol=1e-6)


@pytest.mark.parametrize(
    ("q", "steps", "uses"), [(0.2, 5, 1), (0.2, 6, 2), (0.3, 4, 2), (1.0, 4, 4)]
)
def test_denoisers_that_reveal_the_batch_get_passes(q: float, steps: int, uses: int) -> None:
    plan = plan_of(sampled(q, steps), denoiser=SelfConv())
    assert plan.disjoint
    found = (plan.uses.probability, plan.uses.per_epoch, plan.uses.steps_per_epoch)
    assert found == (1.0, uses, steps)


def test_divisor_and_groups_do_not_depend_on_the_sampled_batch() -> None:
    assert plan_of(X, Y, {"batch_size": 8}).divisor == 8.0
    assert plan_of(sampled()).divisor == 10.0
    by_user = plan_of(sampled(users=np.arange(N) // 2, max_examples_per_user=2))
    assert (plan_of(sampled()).group_rows, by_user.group_rows) == (1, 2)
