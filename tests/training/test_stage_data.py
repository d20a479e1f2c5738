"""The schedule and the dataset of a run: both fixed by sizes and seed, and nothing is left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.training._stage_data import Features, StageDataset, StagePlan, TrainingSet


def build(x, steps, use_mixup=False):
    features = Features(x)
    data = StageDataset(features, num_classes=3, steps=steps, seed=0)
    return data, data.build(use_mixup)


def collect(dataset):
    batches = list(dataset.as_numpy_iterator())
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches]), batches


@pytest.mark.parametrize(("size", "steps"), [(10, 4), (7, 7), (23, 5), (20, 4)])
def test_one_epoch_is_one_pass_in_a_constant_number_of_batches(size, steps):
    x = np.arange(30, dtype=np.float32)
    data, dataset = build(x, steps)
    chosen = np.arange(size) + 5
    noisy = chosen % 3
    data.set(TrainingSet(chosen, noisy, 0.0, epoch=0))
    seen, targets, batches = collect(dataset)
    assert int(dataset.cardinality()) == steps == len(batches)
    np.testing.assert_array_equal(np.sort(seen), chosen)
    np.testing.assert_array_equal(targets.argmax(axis=1), seen.astype(int) % 3)
    sizes = [len(y) for _, y in batches]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("size", "steps", "replicas"), [(23, 5, 2), (29, 4, 3), (16, 4, 4)])
def test_batches_split_evenly_among_replicas(size, steps, replicas):
    features = Features(np.arange(size, dtype=np.float32))
    data = StageDataset(features, num_classes=3, steps=steps, seed=0)
    data.set(TrainingSet(np.arange(size), np.zeros(size, np.int64), 0.0, 0))
    seen, _, batches = collect(data.build(use_mixup=False, num_replicas=replicas))
    np.testing.assert_array_equal(np.sort(seen), np.arange(size))
    sizes = [len(y) for _, y in batches]
    assert len(sizes) == steps and min(sizes) > 0
    assert all(n % replicas == 0 for n in sizes[:-1])


def test_epochs_differ_in_order_and_an_epoch_repeats_itself():
    data, dataset = build(np.arange(50, dtype=np.float32), 5)
    orders = []
    for epoch in (0, 1, 0):
        data.set(TrainingSet(np.arange(50), np.zeros(50, np.int64), 0.0, epoch))
        orders.append(collect(dataset)[0])
    assert not np.array_equal(orders[0], orders[1])
    np.testing.assert_array_equal(orders[0], orders[2])


def test_a_swap_shows_in_the_next_iterator():
    data, dataset = build(np.arange(12, dtype=np.float32), 2)
    data.set(TrainingSet(np.arange(4), np.zeros(4, np.int64), 0.0, 0))
    assert set(collect(dataset)[0]) == {0, 1, 2, 3}
    data.set(TrainingSet(np.array([10, 11]), np.array([1, 2]), 0.0, 1))
    seen, targets, _ = collect(dataset)
    assert set(seen) == {10, 11}
    np.testing.assert_array_equal(targets[np.argsort(seen)], [[0, 1, 0], [0, 0, 1]])


def test_structures_of_features_are_kept():
    x = {"a": np.arange(6, dtype=np.float32), "b": (np.arange(6), np.ones((6, 2), np.float64))}
    data, dataset = build(x, 2)
    data.set(TrainingSet(np.arange(6), np.zeros(6, np.int64), 0.0, 0))
    batch, _ = next(iter(dataset))
    assert set(batch) == {"a", "b"} and isinstance(batch["b"], tuple)
    assert batch["b"][0].dtype.name == "int64"
    assert batch["b"][1].dtype.name == "float32"  # as Keras feeds float64 arrays
    np.testing.assert_array_equal(batch["a"].numpy().astype(int), batch["b"][0].numpy())


def test_mixup_averages_a_batch_with_its_reverse():
    data, dataset = build(np.arange(8, dtype=np.float32), 2, use_mixup=True)
    data.set(TrainingSet(np.arange(8), np.arange(8) % 3, 2.0, 0))
    for x, y in dataset.as_numpy_iterator():
        # x = lam a + (1 - lam) a[::-1]: the pair sums are those of the plain batch.
        np.testing.assert_allclose(y.sum(axis=1), 1.0, atol=1e-6)
        assert np.any((x > x.min()) & (np.abs(x - np.round(x)) > 1e-3))
        np.testing.assert_allclose(x + x[::-1], np.round(x + x[::-1]), atol=1e-4)


def test_rows_must_agree():
    with pytest.raises(ValueError, match=r"same length, got lengths \[3, 4\]"):
        Features({"a": np.zeros(3), "b": np.zeros((4, 2))})
    with pytest.raises(TypeError, match=r"must be an array, .* dict or tuple of arrays"):
        Features(np.float32(1.0))


# The plan.


def make_plan(num_examples: int = 100, **options) -> StagePlan:
    options = {
        "fractions": (0.6, 0.4),
        "epochs_per_stage": 3,
        "batch_size": 10,
        "temperature": 1.0,
        "mixup_alpha": 0.0,
        "seed": 0,
        **options,
    }
    return StagePlan.make(num_examples, **options)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    num_examples=st.integers(200, 500),
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 5),
)
def test_parts_are_disjoint_and_cover_all_examples(num_examples, weights, seed):
    fractions = [weight / sum(weights) for weight in weights]
    plan = make_plan(num_examples, fractions=fractions, batch_size=20, seed=seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(plan.parts)), np.arange(num_examples))
    ends = np.cumsum([part.size for part in plan.parts])
    np.testing.assert_allclose(ends, num_examples * np.cumsum(fractions), atol=1)


def test_partition_depends_on_size_and_seed_alone():
    for first, second in zip(make_plan().parts, make_plan().parts, strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(make_plan(seed=0).parts[0], make_plan(seed=1).parts[0])


def test_stages_of_different_length():
    plan = make_plan(epochs_per_stage=(2, 5))
    assert plan.starts == (0, 2)
    assert [plan.stage_of(epoch) for epoch in range(7)] == [0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": (0.6, 0.6)}, r"fractions must sum to one, got 1.2"),
        ({"fractions": ()}, r"fractions must sum to one"),
        ({"fractions": (1.0, 0.0)}, r"fractions\[1\] must be finite and above zero"),
        ({"fractions": (0.95, 0.05)}, r"stage 2 would have 5 of 100 examples, fewer than the 10"),
        ({"epochs_per_stage": 0}, "epochs_per_stage must be at least 1"),
        ({"epochs_per_stage": (1, 2, 3)}, r"one per stage \(2\), got 3"),
        ({"temperature": 0.0}, "temperature must be finite and above zero"),
        ({"temperature": (1.0,)}, "temperature must be one value or one per stage"),
        ({"mixup_alpha": -1.0}, r"mixup_alpha must be in \[0, inf\), got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_arguments_of_the_plan(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**options)
