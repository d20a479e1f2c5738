"""The batches of ``poisson_batches`` as training gets them, and as a user sees them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse, _validate
from tf_labeldp.accounting import PublicInput
from tf_labeldp.data import poisson_batches
from tf_labeldp.plugins import PoissonBatches, open_for_training
from tf_labeldp.vault import LabelKind

N, K, Q = 40, 5, 0.2
REJECT = 1e-6
ROWS = np.arange(N)
LABELS = np.random.default_rng(7).integers(0, K, N)


def make(features: Any = None, labels: Any = LABELS, **changes: Any) -> PoissonBatches:
    settings: dict[str, Any] = {"sampling_probability": Q, "steps": 3, "insecure_seed": 11}
    settings |= changes
    features = ROWS[:, np.newaxis] if features is None else features
    return poisson_batches(features, labels, **settings)


def vault(labels: Any = LABELS, **kind: Any) -> PrivateLabels:
    of_kind = LabelKind.of(**(kind or {"num_classes": K}))
    return PrivateLabels(labels, of_kind, budget=PrivacyBudget(epsilon=1.0))


def take(batches: PoissonBatches, steps: int, alt_examples: int = 0) -> list[Any]:
    dataset = open_for_training(batches, alt_examples=alt_examples).take(steps)
    return [tf.nest.map_structure(lambda t: t.numpy(), element) for element in dataset]


def sampled(batches: PoissonBatches, steps: int) -> list[list[int]]:
    """The rows of each batch, where the features are row numbers."""
    return [x[weights > 0, 0].tolist() for x, _, weights in take(batches, steps)]


def test_the_numbers_that_steps_are_charged_by_are_fixed() -> None:
    batches: Any = make()
    for name in ("sampling_probability", "steps", "group_size", "seeded"):
        with pytest.raises(AttributeError):
            setattr(batches, name, 1)
    # The attributes of a sampler can be changed, so batches show none.
    assert "sampling" not in dir(batches)


def test_rows_of_labels_come_as_they_are() -> None:
    rows = np.eye(K)[LABELS]
    for x, y, weights in take(make(labels=vault(rows, num_labels=K)), 5):
        held = weights > 0
        np.testing.assert_array_equal(y[held], rows[x[held, 0]])
        np.testing.assert_array_equal(y[~held], 0.0)


@pytest.mark.parametrize("labels", [LABELS, vault()], ids=["array", "vault"])
def test_rows_come_with_their_labels(labels: Any) -> None:
    for x, y, weights in take(make(labels=labels), 5):
        held = weights > 0
        assert 0 < held.sum() < N
        np.testing.assert_array_equal(y[held], LABELS[x[held, 0]])


def test_padding_has_weight_zero_and_no_label() -> None:
    features = np.arange(1.0, N + 1)[:, np.newaxis]
    for labels, padding in ((LABELS + 1, 0), (vault(low=-3.0, high=9.0), -3.0)):
        for x, y, weights in take(make(features, labels), 5):
            size = int(weights.sum())
            np.testing.assert_array_equal(weights, np.arange(weights.size) < size)
            np.testing.assert_array_equal(x[size:], features[0, 0])
            np.testing.assert_array_equal(y[size:], padding)


def test_sampling_does_not_look_at_labels() -> None:
    for labels in (np.zeros(N, int), vault(), np.eye(N)):
        assert sampled(make(labels=labels), 5) == sampled(make(), 5)


@pytest.mark.parametrize(
    ("labels", "dtype", "shape"),
    [
        (vault(), tf.int64, ()),
        (vault(LABELS / 2, low=0, high=2), tf.float32, ()),
        (LABELS.astype(np.int32), tf.int32, ()),
        (tf.one_hot(LABELS, K), tf.float32, (K,)),
    ],
    ids=["classes", "numbers", "int32", "one-hot tensor"],
)
def test_shapes_and_dtypes_are_fixed(labels: Any, dtype: tf.DType, shape: tuple[int, ...]) -> None:
    features = {"image": np.zeros((N, 4, 4, 1), np.uint8), "rest": (np.zeros((N, 3)),)}
    batches = make(features, labels)
    dataset = open_for_training(batches, alt_examples=7)

    def x_spec(rows: int) -> Any:
        image = tf.TensorSpec((rows, 4, 4, 1), tf.uint8)
        return {"image": image, "rest": (tf.TensorSpec((rows, 3), tf.float32),)}

    b = batches.buffer_size
    y, weights = tf.TensorSpec((b, *shape), dtype), tf.TensorSpec((b,), tf.float32)
    assert dataset.element_spec == (x_spec(b), y, weights, x_spec(7))
    for element in dataset.take(3):
        tf.nest.map_structure(
            lambda t, spec: spec.is_compatible_with(t) or pytest.fail(f"{spec}"),
            element,
            dataset.element_spec,
        )
    assert open_for_training(batches).element_spec == (x_spec(b), y, weights)


def test_a_seed_repeats_the_batches() -> None:
    batches = make()
    first, second = sampled(batches, 6), sampled(batches, 6)
    assert first[:3] != first[3:] and first != second  # epochs differ, and so do fits
    again = make()
    assert [sampled(again, 6), sampled(again, 6)] == [first, second]
    assert sampled(make(insecure_seed=12), 6) != first
    assert batches.seeded and not make(insecure_seed=None).seeded


def test_bits_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asking: list[threading.Thread] = []
    urandom = os.urandom
    monkeypatch.setattr(
        os, "urandom", lambda size: asking.append(threading.current_thread()) or urandom(size)
    )

    def times_asked(**settings: Any) -> int:
        # Other datasets may still prepare their next batch, each on another thread.
        others = set(threading.enumerate())
        asking.clear()
        take(make(**settings), 2, alt_examples=5)
        return sum(thread not in others for thread in asking)

    users = {"users": ROWS // 4, "max_examples_per_user": 2, "sampling_probability": 0.5}
    for settings in ({}, users):
        assert times_asked(**settings) == 0
        assert times_asked(insecure_seed=None, **settings) > 4


def test_inclusion_through_the_whole_pipeline() -> None:
    steps = 400
    counts = np.bincount([row for rows in sampled(make(), steps) for row in rows], minlength=N)
    p_values = [stats.binomtest(int(c), steps, Q).pvalue for c in counts]
    assert min(p_values) * N > REJECT
    total = int(counts.sum())
    assert stats.binomtest(total, steps * N, Q).pvalue > REJECT
    assert stats.binomtest(total, steps * N, 1.25 * Q).pvalue < REJECT


@pytest.mark.slow
def test_the_second_batch_is_independent_of_the_first() -> None:
    steps, size = 600, 5
    shared = own = 0
    counts = np.zeros(N, int)
    for x, _, weights, alt in take(make(), steps, alt_examples=size):
        batch = x[weights > 0, 0]
        assert len(set(alt[:, 0].tolist())) == size
        counts[alt[:, 0]] += 1
        shared += np.isin(alt[:, 0], batch).sum()
        own += np.isin(batch[:size], batch).sum()  # were it taken from the batch
    # Given the second batch, each of its examples is in the first one with probability q.
    assert stats.binomtest(int(shared), steps * size, Q).pvalue > REJECT
    assert stats.binomtest(int(own), steps * size, Q).pvalue < REJECT
    p_values = [stats.binomtest(int(c), steps, size / N).pvalue for c in counts]
    assert min(p_values) * N > REJECT


def test_batches_that_overflow_are_empty() -> None:
    with pytest.warns(UserWarning, match=r"of the batches will overflow buffer_size=9"):
        batches = make(buffer_size=9)
    sizes = [int(weights.sum()) for _, _, weights in take(batches, 200)]
    assert max(sizes) <= 9
    lost = stats.binom.sf(9, N, Q) + stats.binom.pmf(0, N, Q)
    assert stats.binomtest(sizes.count(0), 200, lost).pvalue > REJECT


class Rows:
    """A source of rows as a file on disk is one: increasing row numbers, each once."""

    def __init__(self, read: Callable[[np.ndarray], Any]) -> None:
        self.read = read
        self.asked: list[np.ndarray] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, rows: np.ndarray) -> Any:
        assert rows.dtype == np.int64 and np.all(np.diff(rows) > 0)
        self.asked.append(rows)
        return self.read(rows)


def test_lazy_sources_are_read_by_increasing_rows() -> None:
    source = Rows(lambda rows: {"a": rows[:, np.newaxis] * 2.0, "b": (rows,)})
    users = {"users": ROWS // 4, "max_examples_per_user": 6, "sampling_probability": 0.5}
    for settings in ({}, users):
        asked = len(source.asked)
        for x, y, weights in take(make(source, **settings), 3):
            held = weights > 0
            np.testing.assert_array_equal(x["a"][held, 0], 2.0 * x["b"][0][held])
            np.testing.assert_array_equal(y[held], LABELS[x["b"][0][held]])
        assert len(source.asked) > asked


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda rows: np.zeros((1, 2)), "return [0-9]+ rows, got shape .1, 2."),
        (
            lambda rows: np.zeros((rows.size, 1 + (rows.size > 1))),
            "rows of shape .1,., as row 0 has, got .2,.",
        ),
    ],
    ids=["one row for many", "another shape"],
)
def test_sources_that_give_other_rows_raise(read: Callable[..., Any], message: str) -> None:
    with pytest.raises(tf.errors.OpError, match=message):
        take(make(Rows(read)), 5)


def test_labels_are_not_shown() -> None:
    secret = 987_654
    for labels in (np.full(N, secret), vault(np.full(N, secret), low=0, high=10**6)):
        batches = make(labels=labels)
        assert str(secret) not in f"{batches} {batches!r} {vars(batches)}"
        with pytest.raises(TypeError, match=r"contain true labels.*LabelDPModel\.fit"):
            iter(batches)
        with pytest.raises(TypeError):
            batches[0]


EXITS = """
import time
import numpy as np
from tf_labeldp.data import poisson_batches
from tf_labeldp.plugins import open_for_training

class Slow:
    def __len__(self): return 100
    def __getitem__(self, rows):
        time.sleep(0.3)
        return np.zeros((len(rows), 2), np.float32)

dataset = open_for_training(
    poisson_batches(Slow(), np.zeros(100), sampling_probability=0.2, steps=4)
)
iterator = iter(dataset)
next(iterator)
time.sleep(0.1)  # the next batch is being read when Python exits
print("read")
"""


@pytest.mark.slow
def test_python_exits_while_a_batch_is_read() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "read"


NUMBERS = ROWS.astype(np.float32)[:, np.newaxis] + np.array([0.0, 0.5], np.float32)
BY_NAME = {"a": NUMBERS, "b": ROWS}


class OneExample:
    """A source of single examples, as Grain's; its transformation takes one example."""

    def __init__(self, module: str, returns_rows: bool) -> None:
        self.returns_rows = returns_rows
        type(self).__module__ = module

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: Any) -> dict[str, np.ndarray]:
        row = row if self.returns_rows else int(row)
        return {"a": NUMBERS[row], "b": ROWS[row]}


FEATURES = {
    "batches": tf.data.Dataset.from_tensor_slices(BY_NAME).batch(7),
    "examples": tf.data.Dataset.from_tensor_slices(BY_NAME),
    "one example per batch": tf.data.Dataset.from_tensor_slices(BY_NAME).batch(1),
    "known sizes": tf.data.Dataset.from_tensor_slices(BY_NAME).batch(8, drop_remainder=True),
    "variables": {"a": tf.Variable(NUMBERS), "b": tf.Variable(ROWS)},
    "ragged": {"a": tf.RaggedTensor.from_tensor(NUMBERS), "b": ROWS},
    "source of one number": OneExample("my_sources", returns_rows=False),
    "source of one number or rows": OneExample("grain.python", returns_rows=True),
}


@pytest.mark.parametrize("name", FEATURES)
def test_data_sets_tensors_and_sources_of_examples_are_read_like_arrays(name: str) -> None:
    from_arrays, found = take(make(BY_NAME), 4), take(make(FEATURES[name]), 4)
    for batch, other in zip(from_arrays, found, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, batch, other)


def test_examples_of_one_number_and_of_unknown_shape_are_no_batches() -> None:
    column = ROWS[:, np.newaxis]
    dataset = tf.data.Dataset.from_tensor_slices(column)

    def of_unknown_shape(row: Any) -> Any:
        [row] = tf.numpy_function(lambda part: [part], [row], [tf.int64])
        row.set_shape([None])
        return tf.concat([row, row], 0)

    for features, expected in (
        (dataset, column),
        (dataset.batch(1), column),
        (dataset.map(of_unknown_shape), np.repeat(column, 2, axis=1)),
    ):
        for batch, other in zip(take(make(expected), 2), take(make(features), 2), strict=True):
            np.testing.assert_array_equal(batch[0], other[0])


def test_a_data_set_that_does_not_fit_in_memory_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(_validate, "_MOST_BYTES", NUMBERS.nbytes - 1)
    dataset = tf.data.Dataset.from_tensor_slices(NUMBERS)
    with pytest.raises(ValueError, match=r"which are read into memory, got more.*np\.memmap"):
        make(dataset)
    # Its number of batches is unknown, and without end.
    endless = tf.data.Dataset.from_generator(
        lambda: itertools.repeat(np.zeros((1, 1), np.float32)),
        output_signature=tf.TensorSpec((None, 1)),
    )
    with pytest.raises(ValueError, match=r"expected 40 examples.* data set of more"):
        make(endless)


@pytest.mark.holds("data.PoissonBatches.map")
def test_map_gets_the_features_alone_of_batches_and_of_other_examples() -> None:
    shapes = []

    def shifted(x: Any) -> Any:
        shapes.append(tf.nest.map_structure(lambda part: tuple(part.shape), x))
        return {"c": x["a"] + 100.0, "b": tf.reverse(x["b"], [0])}

    plain, mapped = make(BY_NAME), make(BY_NAME).map(shifted)
    rows = plain.buffer_size
    assert mapped.feature_specs()["c"].shape == (rows, 2) and plain.feature_specs()["a"]
    twice = mapped.map(lambda x: {**x, "c": 2.0 * x["c"]})
    pairs = zip(*(take(batches, 3, alt_examples=5) for batches in (plain, twice)), strict=True)
    for (x, y, weights, alt), (new, new_y, new_weights, new_alt) in pairs:
        for before, after in ((x, new), (alt, new_alt)):
            np.testing.assert_array_equal(after["c"], 2.0 * (before["a"] + 100.0))
            np.testing.assert_array_equal(after["b"], before["b"][::-1])
        np.testing.assert_array_equal(new_y, y)
        np.testing.assert_array_equal(new_weights, weights)
    assert {shape["a"] for shape in shapes} == {(rows, 2), (5, 2)}
    assert {tuple(shape) for shape in shapes} == {("a", "b")}
    with pytest.raises(ValueError, match="expected a function that returns 16 rows, as it gets"):
        make().map(lambda x: x[1:])


@pytest.mark.holds("data.PoissonBatches.map")
def test_the_receipts_of_a_mapped_function_are_counted() -> None:
    noisy = vault().randomize(RandomizedResponse(0.5, K))
    function = PublicInput(tf.identity, noisy.receipts)
    assert make().map(function).receipts == noisy.receipts
