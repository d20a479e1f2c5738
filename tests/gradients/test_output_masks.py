"""Masks of outputs: losses and clipping leave out what Keras does; padded labels do nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches
from tf_labeldp.plugins import Batch, Clip, OutputLosses, PerExampleClipping, Speed
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer, SelfConv, SelfSpan

layers, losses = keras.layers, keras.losses
ROWS, STEPS, CLASSES, CLIP = 6, 5, 3, 0.05
RNG = np.random.default_rng(0)
LENGTHS = np.array([5, 3, 1, 0, 4, 2])
"""Row 3 is padding alone."""
SHOWN = np.arange(STEPS) < LENGTHS[:, None]
IDS = RNG.integers(1, 9, (ROWS, STEPS)) * SHOWN
NUMBERS = RNG.normal(size=(ROWS, STEPS, 2)).astype("f") * SHOWN[..., None]
CODES = RNG.integers(CLASSES, size=(ROWS, STEPS))
SPARSE = losses.SparseCategoricalCrossentropy(from_logits=True)


def sequential(*after: Any, embedding: Any = None) -> keras.Model:
    keras.utils.set_random_seed(0)
    embedding = embedding or layers.Embedding(9, 4, mask_zero=True)
    return keras.Sequential([keras.Input((STEPS,)), embedding, *after])


def attention() -> keras.Model:
    keras.utils.set_random_seed(0)
    ids = keras.Input((STEPS,))
    hidden = layers.Embedding(9, 4, mask_zero=True)(ids)
    hidden = layers.MultiHeadAttention(2, 2)(hidden, hidden)
    return keras.Model(ids, layers.Dense(CLASSES)(layers.LayerNormalization()(hidden)))


def nested() -> keras.Model:
    keras.utils.set_random_seed(0)
    inner = sequential(layers.GRU(3, return_sequences=True))
    ids = keras.Input((STEPS,))
    return keras.Model(ids, layers.Dense(CLASSES)(layers.Dropout(0.0)(inner(ids))))


def two_outputs() -> keras.Model:
    keras.utils.set_random_seed(0)
    ids = keras.Input((STEPS,))
    hidden = layers.LSTM(4, return_sequences=True)(layers.Embedding(9, 4, mask_zero=True)(ids))
    pooled = layers.GRU(3)(hidden)
    return keras.Model(
        ids,
        {"tag": layers.Dense(CLASSES, name="tag")(hidden), "whole": layers.Dense(1)(pooled)},
    )


@keras.saving.register_keras_serializable("test")
class Own(layers.Layer):
    """A layer without a rule, which keeps masks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale + keras.ops.mean(inputs, axis=1, keepdims=True)


lstm = lambda: layers.LSTM(4, return_sequences=True)  # noqa: E731
dense = lambda units=CLASSES: layers.Dense(units)  # noqa: E731
ONE_HOT = np.eye(CLASSES, dtype="f")[CODES]
REAL = RNG.normal(size=(ROWS, STEPS, 2)).astype("f")
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "LSTM": (lambda: sequential(lstm(), dense()), IDS, CODES, SPARSE),
    "one axis more": (lambda: sequential(lstm(), dense()), IDS, CODES[..., None], SPARSE),
    "GRU backwards": (
        lambda: sequential(layers.GRU(4, return_sequences=True, go_backwards=True), dense()),
        IDS,
        CODES,
        SPARSE,
    ),
    "bidirectional": (
        lambda: sequential(layers.Bidirectional(lstm()), dense()),
        IDS,
        CODES,
        SPARSE,
    ),
    "per step": (lambda: sequential(layers.TimeDistributed(dense())), IDS, CODES, SPARSE),
    "one-hot rows": (
        lambda: sequential(lstm(), dense()),
        IDS,
        ONE_HOT,
        losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    ),
    "numbers": (lambda: sequential(lstm(), dense(2)), IDS, REAL, "mse"),
    "a function": (
        lambda: sequential(lstm(), dense(2)),
        IDS,
        REAL,
        lambda y, p: keras.ops.mean(keras.ops.abs(y - p), axis=-1),
    ),
    "one number per step": (
        lambda: sequential(lstm(), dense(1)),
        IDS,
        REAL[..., :1],
        losses.Huber(),
    ),
    "attention": (attention, IDS, CODES, SPARSE),
    "nested": (nested, IDS, CODES, SPARSE),
    "without a rule": (lambda: sequential(Own(), dense()), IDS, CODES, SPARSE),
    "masked steps of numbers": (
        lambda: keras.Sequential([keras.Input((STEPS, 2)), layers.Masking(), lstm(), dense()]),
        NUMBERS,
        CODES,
        SPARSE,
    ),
    "masked rows": (
        lambda: keras.Sequential([keras.Input((2,)), layers.Masking(), dense()]),
        NUMBERS[:, 2],
        CODES[:, 0],
        SPARSE,
    ),
    "ignored class": (
        lambda: sequential(lstm(), dense()),
        IDS,
        CODES,
        losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1),
    ),
    "ignored class alone": (
        lambda: sequential(lstm(), dense(), embedding=layers.Embedding(9, 4)),
        IDS,
        CODES,
        losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1),
    ),
    "two outputs": (
        two_outputs,
        IDS,
        {"tag": CODES, "whole": REAL[:, 0, :1]},
        {"tag": SPARSE, "whole": "mse"},
    ),
}


# One model of each form, and the other method once.
FAST = {(case, "auto") for case in ("LSTM", "attention", "masked rows", "ignored class")}
FAST |= {("two outputs", "auto"), ("per step", "vectorized")}


def with_methods(cases: Iterable[str], odd: bool) -> list[Any]:
    """Returns each case with each method; the tests have each pair that is not fast in turn."""
    methods, order = ("auto", "vectorized"), sorted(CASES)

    def marks(case: str, method: str) -> list[Any]:
        if (case, method) in FAST:
            return []
        in_turn = (order.index(case) + methods.index(method)) % 2 == odd
        return [pytest.mark.slow if in_turn else pytest.mark.exhaustive]

    pairs = itertools.product(cases, methods)
    return [pytest.param(*pair, marks=marks(*pair)) for pair in pairs]


def gradients_of_keras(model: keras.Model, x: Any, y: Any, loss: Any) -> list[list[np.ndarray]]:
    """Returns the gradients of Keras's own loss of each example, as a batch of one."""
    model.compile("sgd", loss)
    found = []
    for row in range(ROWS):
        single, labels = tf.nest.map_structure(lambda part, r=row: part[r : r + 1], (x, y))
        with tf.GradientTape() as tape:
            value = model.compute_loss(single, labels, model(single, training=True))
        values = [variable.value for variable in model.trainable_variables]
        parts = tape.gradient(value, values, unconnected_gradients="zero")
        found.append([np.asarray(tf.convert_to_tensor(part)) for part in parts])
    return found


def clipped(model: Any, x: Any, y: Any, loss: Any, method: str, max_bytes: int = 2**30) -> Any:
    batch = Batch(x, y, np.ones(ROWS, "f"), OutputLosses(model, loss))
    clipping = PerExampleClipping(model, Speed(method, max_bytes))
    return clipping.clipped_sum(batch, Clip(CLIP))


def with_padded_labels(y: Any) -> Any:
    """Returns labels of which those of padded steps are others."""
    if isinstance(y, dict):
        return {**y, "tag": with_padded_labels(y["tag"])}
    shown = SHOWN[:, 2] if y.ndim == 1 else SHOWN
    keep = shown.reshape(shown.shape + (1,) * (y.ndim - shown.ndim))
    other = (y + 1) % CLASSES if y.dtype.kind in "iu" else y + 1.0
    return np.where(keep, y, other).astype(y.dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.holds("training.LabelDPModel")
@pytest.mark.parametrize(("case", "method"), with_methods(CASES, odd=False))
def test_gradients_are_those_of_keras(case: str, method: str) -> None:
    make, x, y, loss = CASES[case]
    model = make()
    expected = gradients_of_keras(model, x, y, loss)
    norms = [np.sqrt(sum(np.sum(part**2) for part in parts)) for parts in expected]
    result = clipped(model, x, y, loss, method)
    np.testing.assert_allclose(result.norms, norms, rtol=1e-4, atol=1e-6)
    factors = CLIP / np.maximum(norms, CLIP)
    for place, part in enumerate(result.gradients):
        total = sum(factor * parts[place] for factor, parts in zip(factors, expected, strict=True))
        np.testing.assert_allclose(part, total, rtol=1e-3, atol=2e-6)
    if case not in ("ignored class alone", "two outputs", "masked rows"):
        assert float(result.norms[3]) == 0.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.holds("training.LabelDPModel")
@pytest.mark.parametrize(
    ("case", "method"),
    with_methods((case for case in CASES if case != "ignored class alone"), odd=True),
)
def test_a_padded_label_changes_nothing(case: str, method: str) -> None:
    make, x, y, loss = CASES[case]
    model = make()
    sums = tf.function(lambda labels: clipped(model, x, labels, loss, method))
    first, second = (sums(part) for part in (y, with_padded_labels(y)))
    for one, other in zip(first.gradients, second.gradients, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(first.norms, second.norms)
    third = sums(tf.nest.map_structure(lambda part: np.roll(part, 1, axis=0), y))
    assert not np.allclose(first.norms, third.norms)


@pytest.mark.parametrize("group_size", [1, 2])
def test_chunks_and_groups_have_the_masks_of_their_rows(group_size: int) -> None:
    make, x, y, loss = CASES["LSTM"]
    model = make()
    batch = Batch(x, y, np.ones(ROWS, "f"), OutputLosses(model, loss))
    clip = Clip(CLIP, group_size)
    speeds = Speed("auto"), Speed("vectorized"), Speed("vectorized", 200_000)
    found = [PerExampleClipping(model, speed).clipped_sum(batch, clip) for speed in speeds]
    for result in found:
        np.testing.assert_allclose(result.norms, found[0].norms, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(result.outputs._keras_mask, SHOWN)


SAMPLING: dict[str, Any] = {"steps": 2, "insecure_seed": 1}
PRIVATE: dict[str, Any] = {"epsilon": 100.0, "epochs": 1, "batch_size": 60, "insecure_seed": 0}


def of_numbers() -> Any:
    inputs = keras.Input((2,))
    return inputs, layers.Dense(2)(layers.Masking()(inputs))


SETTINGS = [
    {},
    {"method": "vectorized"},
    {"clipping": "label_distance"},
    {"denoiser": SelfConv()},
    {"denoiser": SelfConv(), "method": "vectorized"},
    {"denoiser": SelfSpan()},
    {"preconditioner": "gauss_newton"},
    {"door": "make_private"},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    with_slow(SETTINGS, SETTINGS[3:]),
    ids=str,
)
@pytest.mark.holds("training.LabelDPModel")
def test_a_masked_example_changes_no_step(settings: dict[str, Any]) -> None:
    """``Masking`` of rows of zeros: their labels change nothing, and others do."""

    def weights(y: np.ndarray) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        tf.random.set_seed(0)
        if settings == {"door": "make_private"}:
            vault = ldp.PrivateLabels(y, num_classes=2, budget=ldp.PrivacyBudget(1e3, 0.1))
            model, batches, callbacks = ldp.make_private(
                keras.Model(*of_numbers()), x=x, labels=vault, **PRIVATE
            )
            model.fit(batches, callbacks=callbacks, verbose=0)
            return model.get_weights()
        model = LabelDPModel(*of_numbers())
        model.compile(
            LabelDPOptimizer(keras.optimizers.SGD(0.5), 1.0, 1e-3, insecure_seed=1, **settings),
            losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.fit(poisson_batches(x, y, sampling_probability=0.2, **SAMPLING), verbose=0)
        return model.get_weights()

    x = RNG.normal(size=(300, 2)).astype("f")
    x[:50] = 0.0
    y = RNG.integers(2, size=300)
    first = weights(y)
    padded, shown = y.copy(), y.copy()
    padded[:50] = 1 - padded[:50]
    shown[50:100] = 1 - shown[50:100]
    for one, other in zip(first, weights(padded), strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(not np.allclose(a, b) for a, b in zip(first, weights(shown), strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.holds("training.LabelDPModel")
def test_a_padded_label_of_a_step_changes_no_weight_and_no_report(is_compiled: bool) -> None:
    def weights(y: np.ndarray) -> tuple[list[np.ndarray], dict[str, Any]]:
        private = LabelDPModel.from_model(sequential(lstm(), dense()))
        private.report_training_metrics = True
        own = LabelDPOptimizer(keras.optimizers.SGD(0.5), 1.0, 1e-6, insecure_seed=1)
        private.compile(own, SPARSE, jit_compile=is_compiled)
        batches = poisson_batches(IDS, y, sampling_probability=0.9, buffer_size=6, **SAMPLING)
        history = private.fit(batches, verbose=0).history
        return private.get_weights(), history

    (first, report), (second, same) = weights(CODES), weights(with_padded_labels(CODES))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert report["loss"] == same["loss"]
    third, _ = weights((CODES + 1) % CLASSES)
    assert any(not np.allclose(a, b) for a, b in zip(first, third, strict=True))
