"""The guarantee of the clipped sum, line by line, and the errors that protect it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.plugins import Batch, Clip, KerasLoss, PerExampleClipping, Speed

layers = keras.layers
ROWS, CLASSES = 8, 3
LOSS = KerasLoss(keras.losses.SparseCategoricalCrossentropy(from_logits=True)).of_examples()
METHODS = ("ghost", "vectorized")


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    keras.utils.set_random_seed(4)
    yield
    keras.config.set_dtype_policy("float32")


def cnn(*more: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="relu", name="first"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(5, "tanh", name="second"),
            *more,
            layers.Dense(CLASSES, name="last"),
        ]
    )


def batch(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(rows, 6, 6, 2)).astype(np.float32)
    return x, rng.integers(CLASSES, size=rows)


def clipped(model: keras.Model, method: str, x: Any, y: Any, **options: Any) -> Any:
    weights, loss = options.pop("weights", np.ones(len(x))), options.pop("loss", LOSS)
    clip = Clip(**{"l2_norm_clip": 0.1, **options})
    return PerExampleClipping(model, Speed(method)).clipped_sum(Batch(x, y, weights, loss), clip)


def flat(result: Any) -> np.ndarray:
    return np.concatenate([part.numpy().astype(np.float64).ravel() for part in result.gradients])


@pytest.mark.parametrize(
    ("method", "clip"),
    [
        ("ghost", 1e-3),
        ("ghost", 1e9),
        ("vectorized", 0.1),
    ],
)
@pytest.mark.holds("gradients.PerExampleClipping")
def test_privacy_one_group_adds_at_most_the_clip(method: str, clip: float):
    clipper = PerExampleClipping(cnn(), Speed(method))
    step = tf.function(lambda *rows: clipper.clipped_sum(Batch(*rows, LOSS), Clip(clip, 2)))
    x, y = batch(20)
    for row in range(0, 20, 2):
        weights = tf.constant([1.0, 3.0 * row])
        result = step(tf.constant(x[row : row + 2]), tf.constant(y[row : row + 2]), weights)
        size, norm = np.linalg.norm(flat(result)), float(result.norms[0])
        assert size <= clip * (1 + 1e-6)
        # It is no less where there is more to clip.
        assert size == pytest.approx(min(clip, norm), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.holds("gradients.PerExampleClipping")
def test_privacy_replacing_one_label_moves_the_sum_by_at_most_twice_the_clip(method: str):
    model, (x, y) = cnn(), batch()
    clip = 0.05
    first = flat(clipped(model, method, x, y, l2_norm_clip=clip))
    other = y.copy()
    other[3] = (y[3] + 1) % CLASSES
    moved = np.linalg.norm(first - flat(clipped(model, method, x, other, l2_norm_clip=clip)))
    assert clip < moved <= 2 * clip * (1 + 1e-5)


@pytest.mark.parametrize(
    ("method", "bad"),
    [
        ("ghost", np.nan),
        ("ghost", 3e38),
        ("vectorized", np.inf),
        ("vectorized", 3e38),
    ],
)
def test_privacy_a_group_whose_gradient_is_not_finite_adds_exactly_zero(method: str, bad: float):
    model, (x, y) = cnn(), batch()
    broken = x.copy()
    broken[3] = bad
    result = clipped(model, method, broken, y)
    assert not np.isfinite(result.norms[3])
    assert np.isfinite(np.delete(result.norms, 3)).all()
    rest = clipped(model, method, np.delete(x, 3, axis=0), np.delete(y, 3))
    np.testing.assert_allclose(flat(result), flat(rest), rtol=1e-4, atol=1e-7)
    alone = clipped(model, method, broken[3:4], y[3:4])
    np.testing.assert_array_equal(flat(alone), 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_privacy_a_loss_without_finite_slope_adds_exactly_zero(method: str):
    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.sqrt(tf.nn.relu(tf.cast(y_true, tf.float32))) * y_pred[:, 0]

    model, (x, _) = cnn(), batch()
    steep = np.array([1.0, np.inf, *[1.0] * (ROWS - 2)])
    result = clipped(model, method, x, steep, loss=KerasLoss(loss).of_examples())
    assert not np.isfinite(result.norms[1])
    assert np.isfinite(flat(result)).all() and np.any(flat(result))


def test_privacy_no_layer_mixes_examples():
    mixing = layers.Lambda(lambda x: x - keras.ops.mean(x, axis=0) + x[:1], output_shape=(5,))
    model, (x, y) = cnn(mixing), batch()
    changed = x.copy()
    changed[0] += 1.0
    results = [clipped(model, "auto", features, y) for features in (x, changed)]
    assert results[0].norms[0] != results[1].norms[0]
    np.testing.assert_allclose(results[0].norms[1:], results[1].norms[1:], rtol=1e-5)
    plain = [model(features).numpy()[1:] for features in (x, changed)]
    assert not np.allclose(*plain)  # a pass over the whole batch would mix them


@pytest.mark.parametrize(
    "layer",
    [
        layers.Softmax(axis=0),
        layers.LayerNormalization(axis=(0, 1)),
        layers.Activation(lambda x: x - keras.ops.mean(x, axis=0)),
        layers.Activation("softmax"),
    ],
    ids=["Softmax", "LayerNormalization", "function", "harmless"],
)
def test_privacy_known_layers_are_not_trusted_across_the_batch_axis(layer: Any):
    harmless = getattr(layer, "activation", None) is keras.activations.softmax
    inputs = keras.Input((5,), batch_size=ROWS)
    model = keras.Model(inputs, layers.Dense(CLASSES)(layer(inputs)))
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)
    alone = PerExampleClipping(model).training_pass()(x)[0]
    others = x + np.concatenate([np.zeros((1, 5)), np.ones((ROWS - 1, 5))]).astype(np.float32)
    np.testing.assert_allclose(
        PerExampleClipping(model).training_pass()(others)[0][0], alone[0], rtol=1e-5
    )
    assert harmless == np.allclose(model(others)[0], model(x)[0], rtol=1e-5)


def test_privacy_a_subclass_of_a_known_layer_is_not_trusted():
    class Mixing(layers.Dense):
        def call(self, inputs: Any) -> Any:
            return super().call(inputs - keras.ops.mean(inputs, axis=0))

    with pytest.warns(UserWarning, match=r"vectorized.*no rule for.*\(Mixing\)"):
        assert PerExampleClipping(cnn(Mixing(5))).method == "ghost"


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_weight_add_nothing(method: str):
    model, (x, y) = cnn(), batch()
    weights = np.array([1.0] * 5 + [0.0] * 3)
    result = clipped(model, method, x, y, weights=weights)
    np.testing.assert_array_equal(result.norms[5:], 0.0)
    rest = clipped(model, method, x[:5], y[:5])
    np.testing.assert_allclose(flat(result), flat(rest), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_dropout_is_drawn_for_each_example_and_step(method: str):
    model = cnn(layers.Dropout(0.5))
    clipper = PerExampleClipping(model, Speed(method))
    x, y = batch()
    same = tf.constant(np.repeat(x[:1], ROWS, axis=0))
    step = tf.function(lambda: clipper.clipped_sum(Batch(same, y, np.ones(ROWS), LOSS), Clip(0.1)))
    first, second = step(), step()
    # 2^5 masks: eight examples share all of theirs by chance once in 2^35 steps.
    assert len(np.unique(first.outputs.numpy(), axis=0)) > 1
    assert not np.allclose(first.outputs, second.outputs)
    assert np.linalg.norm(flat(first)) <= 0.1 * ROWS * (1 + 1e-5)


@pytest.mark.parametrize(
    ("method", "policy"), [("ghost", "mixed_float16"), ("vectorized", "mixed_bfloat16")]
)
def test_mixed_precision_gives_the_same_up_to_its_rounding(method: str, policy: str):
    reference = cnn()
    keras.config.set_dtype_policy(policy)
    model = cnn()
    model.set_weights(reference.get_weights())
    x, y = batch()
    expected, found = clipped(reference, method, x, y), clipped(model, method, x, y)
    assert found.norms.dtype == tf.float32
    assert {part.dtype for part in found.gradients} == {tf.float32}
    rounding = 2.0**-10 if policy == "mixed_float16" else 2.0**-7
    np.testing.assert_allclose(found.norms, expected.norms, rtol=20 * rounding)
    error = np.linalg.norm(flat(found) - flat(expected)) / np.linalg.norm(flat(expected))
    assert error < 20 * rounding


@pytest.mark.parametrize("method", METHODS)
def test_small_gradients_survive_float16(method: str):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = batch()
    weight = 2.0**-28  # without a loss scale, the gradient by the logits is zero in float16
    small = clipped(cnn(), method, x, y, weights=np.full(ROWS, weight))
    assert np.all(small.norms > 0)


def test_the_layer_that_is_not_finite_is_named():
    method, model, (x, y) = "ghost", cnn(), batch()
    fine = clipped(model, method, x, y).finite
    assert {"first", "second", "last"} <= set(fine) and all(fine.values())
    kernel = model.get_layer("second").kernel
    kernel.assign(np.full(kernel.shape, np.nan))
    finite = clipped(model, method, x, y).finite
    assert finite["first"] and not finite["second"] and not finite["last"]


def test_freezing_a_layer_later_is_seen():
    model, (x, y) = cnn(), batch()
    clipper = PerExampleClipping(model)
    assert len(clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(1.0)).gradients) == 6
    model.get_layer("first").trainable = False
    found = clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(1.0)).gradients
    shapes = [tuple(part.shape) for part in found]
    assert shapes == [tuple(v.shape) for v in model.trainable_variables]


def test_a_layer_that_mixes_examples_is_seen_when_unfrozen():
    model, (x, y) = cnn(layers.BatchNormalization(trainable=False, name="norm")), batch()
    clipper = PerExampleClipping(model)
    clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(1.0))
    model.get_layer("norm").trainable = True
    with pytest.raises(ValueError, match=r"mix the examples.*'norm'.*LayerNormalization"):
        clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(1.0))


class Counting(layers.Layer):
    """Updates a state in each call."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.mean.assign(keras.ops.mean(inputs, axis=0))
        return inputs


class Penalized(layers.Layer):
    """Adds a loss in each call."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(inputs))
        return inputs


def test_state_that_training_updates_is_refused():
    x, y = batch()
    with pytest.raises(ValueError, match=r"updates its own state.*counting.*Freeze"):
        clipped(cnn(Counting()), "auto", x, y)


def test_a_loss_that_a_layer_adds_is_refused():
    x, y = batch()
    with pytest.raises(ValueError, match="add_loss"):
        clipped(cnn(Penalized()), "auto", x, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": np.ones(ROWS - 1)}, "same fixed number of rows"),
        ({"group_size": 3}, r"8 rows cannot be cut into groups of 3"),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"l2_norm_clip": 0.0}, "l2_norm_clip must be finite and above zero"),
        ({"l2_norm_clip": np.nan}, "l2_norm_clip must be finite and above zero"),
        ({"loss": lambda y, p: tf.reduce_mean(p)}, "expected one loss per example"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str):
    x, y = batch()
    with pytest.raises(ValueError, match=message):
        clipped(cnn(), "auto", x, y, **options)


def test_a_batch_of_unknown_size_is_refused():
    clipper = PerExampleClipping(cnn())
    step = tf.function(
        lambda x: clipper.clipped_sum(Batch(x, x[:, 0, 0, 0], x[:, 0, 0, 0], LOSS), Clip(1.0)),
        input_signature=[tf.TensorSpec((None, 6, 6, 2))],
    )
    with pytest.raises(ValueError, match=r"same fixed number of rows.*poisson_batches"):
        step(tf.zeros((2, 6, 6, 2)))


def test_an_unknown_method_and_a_model_that_is_not_built_are_refused():
    with pytest.raises(ValueError, match=r"method must be one of.*'fast'"):
        PerExampleClipping(cnn(), Speed("fast"))
    x, y = batch()
    clipper = PerExampleClipping(keras.Sequential([layers.Flatten(), layers.Dense(CLASSES)]))
    with pytest.raises(ValueError, match=r"is not built.*Call it on a batch"):
        clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(1.0))
