"""The partition and the schedule: fixed by sizes and seed, refused where a stage would be empty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.training._stage_plan import StagePlan


def make(num_examples: int = 100, **options) -> StagePlan:
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
    plan = make(num_examples, fractions=fractions, batch_size=20, seed=seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(plan.parts)), np.arange(num_examples))
    ends = np.cumsum([part.size for part in plan.parts])
    np.testing.assert_allclose(ends, num_examples * np.cumsum(fractions), atol=1)


def test_partition_depends_on_size_and_seed_alone():
    for first, second in zip(make().parts, make().parts, strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(make(seed=0).parts[0], make(seed=1).parts[0])


def test_stages_of_different_length():
    plan = make(epochs_per_stage=(2, 5))
    assert plan.starts == (0, 2)
    assert [plan.stage_of(epoch) for epoch in range(7)] == [0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": (0.6, 0.6)}, r"fractions must sum to one .* sum 1.2"),
        ({"fractions": ()}, r"fractions must sum to one"),
        ({"fractions": (1.0, 0.0)}, r"fractions\[1\] must be finite and above zero"),
        ({"fractions": (0.95, 0.05)}, r"stage 2 would have 5 of 100 examples, fewer than the 10"),
        ({"epochs_per_stage": 0}, "epochs_per_stage must be at least 1"),
        ({"epochs_per_stage": (1, 2, 3)}, "got 3 values for 2 stages"),
        ({"temperature": 0.0}, "temperature must be finite and above zero"),
        ({"temperature": (1.0,)}, "temperature must be one value or one a stage"),
        ({"mixup_alpha": -1.0}, "mixup_alpha must be finite and above zero"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
