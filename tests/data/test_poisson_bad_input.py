"""Bad arguments of ``poisson_batches``: errors name the remedy, and show no label."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp import PrivacyBudget, PrivateLabels
from tf_labeldp.data import poisson_batches

N = 20
FEATURES = np.zeros((N, 3), np.float32)
SECRET = 976
LABELS = np.full(N, SECRET)
USERS = np.arange(N) // 5


class Unreadable:
    """A source that reads neither an array of row numbers nor a single row."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, rows: Any) -> Any:
        raise OSError(f"row numbers of shape {np.shape(rows)}")


def labels_with(value: Any) -> np.ndarray:
    labels = np.full(N, float(SECRET))
    labels[4] = value
    return labels


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sampling_probability": 0.0}, ValueError, r"in \(0, 1\], got 0\. For"),
        ({"sampling_probability": 1.5}, ValueError, r"in \(0, 1\], got 1\.5.* b / n"),
        ({"sampling_probability": 0.04}, ValueError, r"at least one .* got 0\.8 = 0\.04 \* 20"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"buffer_size": 9}, ValueError, "at least the mean batch, 10, got 9.* Leave it out"),
        ({"labels": LABELS[1:]}, ValueError, "got 20 rows and 19 labels"),
        ({"labels": labels_with(np.nan)}, ValueError, "1 of 20 labels are missing.*rule that"),
        ({"labels": labels_with(1e300)}, ValueError, "finite labels .float32., but some"),
        ({"labels": LABELS.astype(str)}, TypeError, "vault or an array of numbers.*Classes"),
        ({"features": FEATURES[:0], "labels": LABELS[:0]}, ValueError, "hold no rows"),
        ({"features": {"a": FEATURES, "b": FEATURES[1:]}}, ValueError, r"lengths \[19, 20\]"),
        ({"features": np.array(["a", None] * 10)}, TypeError, "must be numbers.*StringLookup"),
        ({"features": tf.data.Dataset.range(N + 1)}, ValueError, "20 examples.* data set of more"),
        (
            {"features": tf.data.Dataset.range(N - 1)},
            ValueError,
            "20 examples.* set of 19 examples",
        ),
        (
            {"features": tf.data.Dataset.from_tensor_slices(FEATURES[1:]).batch(8)},
            ValueError,
            "expected 20 examples, one per label, got a data set of 19 in 3 batches",
        ),
        ({"features": tf.data.Dataset.range(N).repeat()}, ValueError, "endless.*repeat"),
        ({"features": tf.data.Dataset.range(N).shuffle(N)}, ValueError, "must not be shuffled"),
        ({"features": tf.data.Dataset.range(0)}, ValueError, "20 examples, got an empty one"),
        (
            {"features": tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))},
            ValueError,
            "features alone, got tuples",
        ),
        (
            {"features": tf.data.Dataset.range(N).map(lambda i: tf.ones([1 + i % 2, 2]))},
            ValueError,
            "one shape, got",
        ),
        (
            {"features": tf.data.Dataset.from_tensor_slices(tf.ragged.range(tf.range(N)))},
            TypeError,
            "dense tensors.*Pad",
        ),
        ({"features": Unreadable()}, OSError, r"shape \(\d+,\)"),
        ({"columns": {"a": 0}}, ValueError, "columns= .* for a vault with num_labels=L"),
        ({"users": USERS[1:]}, ValueError, rf"users of shape \({N},\)"),
        ({"users": USERS, "max_examples_per_user": 0}, ValueError, "at least 1, got 0"),
        ({"users": None}, ValueError, "Give both"),
        ({"users": np.where(USERS == 2, np.nan, USERS)}, ValueError, f"5 of {N} users are missing"),
        ({"users": USERS, "sampling_probability": 0.2}, ValueError, r"on average, got 0\.8"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    settings: dict[str, Any] = {"features": FEATURES, "labels": LABELS}
    settings |= {"sampling_probability": 0.5, "steps": 2}
    if "users" in change:
        settings["max_examples_per_user"] = 3
    settings |= change
    with pytest.raises(error, match=message) as found:
        poisson_batches(settings.pop("features"), settings.pop("labels"), **settings)
    assert str(SECRET) not in str(found.value)


def test_a_vault_of_another_length_is_refused() -> None:
    vault = PrivateLabels(LABELS[1:], num_classes=1000, budget=PrivacyBudget(epsilon=1.0))
    with pytest.raises(ValueError, match="got 20 rows and 19 labels"):
        poisson_batches(FEATURES, vault, sampling_probability=0.5, steps=2)
    with pytest.raises(TypeError, match="does not give out true labels"):
        poisson_batches(vault, FEATURES, sampling_probability=0.5, steps=2)


def test_b_over_n_is_taken_as_meant() -> None:
    below, above = (2, 49), (7, 25)
    assert below[0] / below[1] * below[1] < below[0]
    assert above[0] / above[1] * above[1] > above[0]
    for b, n in (below, above):
        with pytest.warns(UserWarning, match="will overflow"):
            batches = poisson_batches(
                np.zeros((n, 1)), np.zeros(n), sampling_probability=b / n, steps=1, buffer_size=b
            )
        assert batches.buffer_size == b
