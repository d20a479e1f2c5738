"""Clipped sums of whole models against a plain loop over examples, by both methods."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from slow_cases import with_slow

from tf_labeldp.plugins import (
    Batch,
    Clip,
    Coordinates,
    KerasLoss,
    LabelDistanceClip,
    PerExampleClipping,
    Speed,
)

layers = keras.layers
ROWS, CLASSES = 6, 3
LOSS = KerasLoss(keras.losses.SparseCategoricalCrossentropy(from_logits=True)).of_examples()


def image_model(*stack: Any, shape: tuple[int, ...] = (7, 6, 2)) -> keras.Model:
    return keras.Sequential([keras.Input(shape), *stack, layers.Flatten(), layers.Dense(CLASSES)])


def text_model(*stack: Any) -> keras.Model:
    table = layers.Embedding(4, 3)
    return keras.Sequential(
        [keras.Input((8,), dtype="int32"), table, *stack, layers.Flatten(), layers.Dense(CLASSES)]
    )


def residual() -> keras.Model:
    inputs = keras.Input((5,))
    hidden = layers.Dense(4, "tanh")(layers.Rescaling(0.5)(inputs))
    joined = layers.Add()([hidden, layers.Dense(4, "silu")(hidden)]) + hidden
    both = layers.Concatenate()([joined, inputs])
    return keras.Model(inputs, layers.Dense(CLASSES)(both))


def channels_first(moved: bool = False) -> keras.Model:
    """Convolves along the last axes; ``moved`` is the same function with channels last."""
    data_format, axis = ("channels_last", -1) if moved else ("channels_first", 1)
    stack = [
        layers.Conv2D(3, 2, data_format=data_format, activation="relu"),
        layers.GroupNormalization(3, axis=axis),
    ]
    if moved:
        stack = [layers.Permute((2, 3, 1)), *stack, layers.Permute((3, 1, 2))]
    return image_model(*stack)


def recurrent(*stack: Any, masked: bool = False) -> keras.Model:
    """Returns layers over 5 words, some of which are masked."""
    table = layers.Embedding(4, 2, mask_zero=masked)
    flat = [layers.Flatten(), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((5,), dtype="int32"), table, *stack, *flat])


def decoder() -> keras.Model:
    """Starts layers from the states of other layers, with masks at the start and in between."""
    inputs = keras.Input((5,), dtype="int32")
    words = layers.Embedding(4, 2, mask_zero=True)(inputs)
    _, *states = layers.LSTM(3, return_state=True)(words)
    y = layers.LSTM(3, return_sequences=True)(words, initial_state=states)
    first, second, *states = layers.Bidirectional(
        layers.SimpleRNN(3, return_state=True), merge_mode=None
    )(words)
    z = layers.Bidirectional(layers.GRU(3), merge_mode="mul")(y, initial_state=states)
    joined = layers.Concatenate()([layers.Flatten()(y), first, second, z])
    return keras.Model(inputs, layers.Dense(CLASSES)(joined))


def partly_frozen_rnn() -> keras.Model:
    model = recurrent(
        layers.SimpleRNN(3, return_sequences=True), layers.LSTM(3), layers.Reshape((1, 3))
    )
    model.layers[1].trainable = False
    model.layers[2].cell.kernel.trainable = False
    return model


def nested() -> keras.Model:
    encoder = keras.Sequential(
        [keras.Input((7, 6, 2)), layers.Conv2D(3, 3, activation="relu"), layers.MaxPooling2D()]
    )
    inner_in = keras.Input((7, 6, 2))
    inner = keras.Model(inner_in, layers.Flatten()(encoder(layers.Rescaling(2.0)(inner_in))))
    inputs = keras.Input((7, 6, 2))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.ReLU()(inner(inputs))))


def frozen() -> keras.Model:
    model = image_model(
        layers.Conv2D(3, 3, activation="relu"),
        layers.Conv2D(3, 2, activation="tanh"),
        layers.BatchNormalization(),
        layers.LayerNormalization(),
    )
    model.layers[1].trainable = False
    model.layers[2].trainable = False
    model.layers[0].bias.trainable = False
    return model


def adapted(first: Any) -> keras.Model:
    """Adds low-rank adapters to all layers except the last."""
    model = keras.Sequential([*first, layers.Dense(4, "gelu"), layers.Dense(4, "relu")])
    model.add(layers.Flatten())
    model.add(layers.Dense(CLASSES, use_bias=False))
    for layer in model.layers[:-1]:
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2, b_initializer="he_uniform")
            if hasattr(layer, "lora_alpha"):
                layer.lora_alpha = 3.0
    return model


def adapted_convolutions() -> keras.Model:
    model = image_model(
        layers.Conv2D(4, (3, 2), strides=(2, 1), padding="same", activation="tanh"),
        layers.Conv2D(4, 2, dilation_rate=(1, 2), activation="gelu"),
    )
    for layer in model.layers[:2]:
        layer.enable_lora(2, b_initializer="he_uniform")
    return model


def attention(layer: Any = None, mask_zero: bool = False) -> keras.Model:
    """Returns a transformer block over embedded words, with a weight for each position."""
    layer = layer or layers.MultiHeadAttention(2, 3)
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(4, 4, mask_zero=mask_zero)(inputs)
    if not mask_zero:
        x = Shift()(x)
    x = layers.Add()([x, layer(layers.LayerNormalization()(x), x)])
    x = layers.Add()([x, layers.Dense(4, "gelu")(layers.LayerNormalization()(x))])
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def cross_attention(layer: Any, **options: Any) -> keras.Model:
    """Returns attention of 3 words to 7, some of which are masked, with a mask of its own."""
    inputs = keras.Input((7,), dtype="int32")
    words = layers.Embedding(4, 4, mask_zero=True)(inputs)
    queries = layers.Cropping1D(2)(layers.Embedding(4, 4)(inputs))
    mask = np.tril(np.ones((1, 3, 7), bool), 3)
    found = keras.tree.flatten(layer(queries, words, attention_mask=mask, **options))
    x = layers.Concatenate()([layers.Flatten()(part) for part in (*found, queries)])
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def siamese() -> keras.Model:
    """Returns branches of the same layers, one of which is called on its own output."""
    inputs = keras.Input((5, 4))
    inner_in = keras.Input((5, 2))
    recurrent = layers.GRU(3, return_sequences=True)(layers.Dense(4, "gelu")(inner_in))
    normalized = layers.LayerNormalization()(layers.Conv1D(3, 2)(recurrent))
    inner = keras.Model(inner_in, Shift()(normalized))
    first, second = inner(inputs[:, :, :2]), inner(inputs[:, :, 2:])
    dense = layers.Dense(3, "tanh")
    at_steps = layers.TimeDistributed(dense)(second)
    joined = layers.Subtract()([dense(dense(first)), at_steps])
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(joined)))


class Tied(layers.Layer):
    """Scores words by the table of an embedding."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def call(self, inputs: Any) -> Any:
        return keras.ops.matmul(inputs, keras.ops.transpose(self.table.embeddings))


def tied(reversible: bool = False) -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    if reversible:
        table = layers.ReversibleEmbedding(CLASSES + 1, 4)
        scores = functools.partial(table, reverse=True)
    else:
        table = layers.Embedding(CLASSES + 1, 4)
        scores = Tied(table)
    x = layers.GlobalAveragePooling1D()(layers.Dense(4, "relu")(table(inputs)))
    return keras.Model(inputs, scores(x))


def two_lookups() -> keras.Model:
    """Looks words up in one table twice, which has more rows than words."""
    inputs, table = keras.Input((8,), dtype="int32"), layers.Embedding(1_000, 4)
    halves = table(inputs[:, :3]), table(inputs[:, 3:])
    pooled = [layers.GlobalAveragePooling1D()(half) for half in halves]
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Multiply()(pooled)))


def adapted_twice() -> keras.Model:
    inputs, dense = keras.Input((5,)), layers.Dense(5, "tanh")
    model = keras.Model(inputs, layers.Dense(CLASSES)(dense(dense(inputs))))
    dense.enable_lora(2, b_initializer="he_uniform")
    return model


class Shift(layers.Layer):
    """Adds a weight per position, without a rule."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, inputs: Any) -> Any:
        return inputs + self.shift


def encoder() -> keras.Model:
    """Returns a model with a frozen encoder of layers that both methods support."""
    inner = residual()
    inner.trainable = False
    inputs = keras.Input((5,))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Dense(3, "relu")(inner(inputs))))


# Models that both methods support: settings and combinations of layers. Each layer alone, with its
# default settings, is in `test_layer_rules.py`.
GHOST: dict[str, Callable[[], keras.Model]] = {
    "dense": lambda: image_model(layers.Dense(4, "relu"), shape=(5,)),
    "dense over time": lambda: image_model(layers.Dense(4, "sigmoid"), shape=(7, 5)),
    # Norms over few positions are computed without gradients.
    "dense over a short time": lambda: image_model(layers.Dense(9, "tanh"), shape=(3, 20)),
    "Conv2D of few positions": lambda: image_model(layers.Conv2D(8, 3), shape=(4, 4, 8)),
    "no bias": lambda: image_model(layers.Conv2D(3, 3, use_bias=False, activation="elu")),
    "Conv1D": lambda: image_model(
        layers.Conv1D(3, 3, padding="causal", dilation_rate=2, activation="relu6"), shape=(9, 2)
    ),
    "Conv2D": lambda: image_model(
        layers.Conv2D(3, (3, 2), strides=(2, 1), padding="same", activation="selu"),
        layers.AveragePooling2D(2, padding="same"),
        layers.Conv2D(2, 2, activation="softmax"),
    ),
    # The product for the kernel has the bias's gradient, too.
    "one channel": lambda: image_model(
        layers.Conv2D(3, 2, padding="same", activation="exponential"), shape=(7, 6, 1)
    ),
    "channels first": lambda: channels_first(),
    "groups": lambda: image_model(
        layers.Conv2D(4, 2, groups=2, activation="gelu"),
        layers.Conv2D(6, 2, groups=2, strides=2, padding="same", activation="relu"),
    ),
    # Its patches do not fit the cache: chunks of three examples.
    "large Conv2D": lambda: image_model(
        layers.Conv2D(8, 3, activation="relu"), layers.AveragePooling2D(8), shape=(48, 48, 16)
    ),
    "Conv2D with dilations": lambda: image_model(
        layers.Conv2D(3, (3, 2), dilation_rate=(2, 1), padding="same"),
        layers.Conv2D(4, 3, strides=(1, 2)),
    ),
    "Conv3D with groups": lambda: image_model(
        layers.Conv3D(4, (2, 1, 2), groups=2, padding="same"),
        shape=(3, 4, 4, 2),
    ),
    "DepthwiseConv2D": lambda: image_model(
        layers.DepthwiseConv2D(3, strides=2, depth_multiplier=2, padding="same", activation="gelu")
    ),
    "Embedding": lambda: text_model(),
    "large Embedding": lambda: keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(20_000, 8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(CLASSES),
        ]
    ),
    "Embedding with masks": lambda: keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(4, 3, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(CLASSES),
        ]
    ),
    "LayerNormalization of two axes": lambda: text_model(layers.LayerNormalization(axis=(1, 2))),
    "LayerNormalization, scale only": lambda: text_model(layers.LayerNormalization(center=False)),
    "GroupNormalization": lambda: image_model(
        layers.Conv2D(4, 2), layers.GroupNormalization(2), layers.LeakyReLU()
    ),
    "GroupNormalization of other axes": lambda: image_model(
        layers.GroupNormalization(3, axis=2, center=False),
        layers.Flatten(),
        layers.GroupNormalization(-1, scale=False, epsilon=0.1),
    ),
    "frozen GroupNormalization": lambda: image_model(
        layers.Conv2D(4, 2), layers.GroupNormalization(2, trainable=False)
    ),
    "other activations": lambda: image_model(
        layers.Dense(4, "softplus"),
        layers.Dense(4, "leaky_relu"),
        layers.Dense(4, "mish"),
        shape=(5,),
    ),
    "residual": residual,
    "nested": nested,
    "frozen": frozen,
    "frozen encoder": encoder,
    "LSTM": lambda: recurrent(
        layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
        layers.LSTM(3, return_sequences=True, go_backwards=True),
        masked=True,
    ),
    "GRU": lambda: recurrent(
        layers.GRU(3, return_sequences=True), layers.GRU(3, reset_after=False, unroll=True)
    ),
    "recurrent cells": lambda: recurrent(
        layers.RNN(
            [
                layers.LSTMCell(3, use_bias=False),
                layers.SimpleRNNCell(3, "hard_sigmoid"),
                layers.GRUCell(2, use_bias=False),
            ],
            return_sequences=True,
            zero_output_for_mask=True,
        ),
        masked=True,
    ),
    "decoder": decoder,
    "partly frozen RNN": partly_frozen_rnn,
    "TimeDistributed twice": lambda: image_model(
        layers.TimeDistributed(layers.TimeDistributed(layers.Dense(3, "tanh"))),
    ),
    "TimeDistributed": lambda: image_model(
        layers.TimeDistributed(layers.Conv2D(3, 2, strides=2, activation="gelu")),
        layers.TimeDistributed(layers.LayerNormalization()),
        shape=(3, 4, 4, 2),
    ),
    "own cell": lambda: recurrent(layers.RNN(OwnCell(3)), layers.Reshape((1, 3))),
    "attention": lambda: attention(),
    "attention with masks": lambda: attention(mask_zero=True),
    "grouped attention": lambda: attention(layers.GroupQueryAttention(2, 4, 2)),
    "cross-attention": lambda: cross_attention(layers.MultiHeadAttention(2, 3, value_dim=2)),
    "causal cross-attention": lambda: cross_attention(
        layers.GroupQueryAttention(2, 4, 2), use_causal_mask=True, return_attention_scores=True
    ),
    "shared layer": lambda: (lambda i, d: keras.Model(i, layers.Dense(CLASSES)(d(d(i)))))(
        keras.Input((5,)), layers.Dense(5, "tanh")
    ),
    "siamese": siamese,
    "tied": tied,
    "two lookups": two_lookups,
    "LoRA twice": adapted_twice,
    "EinsumDense": lambda: image_model(
        layers.EinsumDense("btc,dc->btd", (3, 4), "gelu", bias_axes="d"),
        layers.EinsumDense("btc,tcd->btd", (3, 3), "relu", bias_axes="td"),
        layers.EinsumDense("...x,xyz->...yz", (4, 2), bias_axes="z"),
        layers.EinsumDense("abcd,cd->ac", (4,)),
        shape=(3, 5),
    ),
    "EinsumDense of few positions": lambda: image_model(
        layers.EinsumDense("abc,cde->adbe", (2, 3, 8), bias_axes="de"), shape=(3, 20)
    ),
    "RMSNormalization": lambda: text_model(layers.RMSNormalization(), Shift()),
    "a gradient of its own": lambda: image_model(
        layers.Dense(4), layers.Lambda(tf.custom_gradient(lambda x: (x, lambda g: -2 * g)))
    ),
    "groups and Lambda": lambda: image_model(
        layers.Conv2D(4, 2, groups=2), layers.Lambda(lambda x: x * x), layers.Conv2D(4, 2, groups=2)
    ),
    "LoRA": lambda: adapted([keras.Input((5,))]),
    "LoRA of Conv2D": lambda: adapted_convolutions(),
    "LoRA over time": lambda: adapted([keras.Input((8,), dtype="int32"), layers.Embedding(4, 3)]),
}


class Subclass(keras.Model):
    """Has no rule and no ``training`` argument, and a weight that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [layers.LayerNormalization(), layers.Dense(CLASSES)]
        self.unused = layers.Dense(2)
        self.unused.build((None, 4))

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return keras.ops.sin(x)


class OwnCell(keras.layers.SimpleRNNCell):
    """Has no rule: a subclass may compute anything."""


def subclassed() -> keras.Model:
    model = Subclass()
    model(np.zeros((1, 5), np.float32))
    return model


if hasattr(layers, "ReversibleEmbedding"):
    GHOST["ReversibleEmbedding"] = lambda: tied(reversible=True)
# Models that only the vectorized method supports.
OTHER: dict[str, Callable[[], keras.Model]] = {
    "subclass": subclassed,
}
# The vectorized method treats all layers alike, so a few of the ghost models suffice.
FEW = ("Conv2D", "Embedding", "residual")
VECTORIZED = ("Conv2D", "residual", "shared layer", "subclass")
# Models of many operators, whose rules smaller models have too.
LARGE = {
    "attention",
    "groups",
    "GRU",
    "tied",
    "RMSNormalization",
    "two lookups",
    "GroupNormalization",
    "GroupNormalization of other axes",
    "EinsumDense",
    "frozen",
    "frozen encoder",
    "frozen GroupNormalization",
    "other activations",
    "a gradient of its own",
    "Conv2D with dilations",
    "LayerNormalization of two axes",
    "nested",
    "large Conv2D",
    "Conv3D with groups",
    "LSTM",
    "recurrent cells",
    "decoder",
    "partly frozen RNN",
    "own cell",
    "TimeDistributed",
    "TimeDistributed twice",
    "attention with masks",
    "grouped attention",
    "causal cross-attention",
    "siamese",
    "groups and Lambda",
    "cross-attention",
    "ReversibleEmbedding",
    "channels first",
    "LoRA of Conv2D",
    "LoRA over time",
}


def slow_if_large(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Marks the cases of large models."""
    return with_slow(cases, [case for case in cases if case[0] in LARGE])


SLOW_VECTORIZED = ("own cell", "groups and Lambda")
CASES = [
    *slow_if_large([(name, "ghost") for name in GHOST]),
    *with_slow(
        itertools.product((*VECTORIZED, *SLOW_VECTORIZED), ["vectorized"]),
        set(itertools.product(SLOW_VECTORIZED, ["vectorized"])),
    ),
]


def problem(name: str, seed: int = 0) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Returns a model, features and labels."""
    keras.utils.set_random_seed(seed)
    model = {**GHOST, **OTHER}[name]()
    rng = np.random.default_rng(seed)
    shape = (5,) if name == "subclass" else model.input_shape[1:]
    x = rng.normal(size=(ROWS, *shape)).astype(np.float32)
    if name != "subclass" and "int" in model.inputs[0].dtype:
        x = rng.integers(4, size=(ROWS, *shape))
    return model, x, rng.integers(CLASSES, size=ROWS)


@functools.cache
def runs_channels_first() -> bool:
    """Returns whether this CPU has kernels for channels-first convolutions (oneDNN)."""
    try:
        tf.nn.conv2d(tf.zeros((1, 1, 2, 2)), tf.zeros((1, 1, 1, 1)), 1, "VALID", "NCHW")
    except tf.errors.UnimplementedError:
        return False
    return True


def is_channels_first(model: keras.Model) -> bool:
    return getattr(model.layers[0], "data_format", None) == "channels_first"


def runnable(model: keras.Model) -> keras.Model:
    """Returns the model, or its channels-last equivalent, which every CPU runs uncompiled."""
    if not is_channels_first(model):
        return model
    same = channels_first(moved=True)
    same.set_weights(model.get_weights())
    return same


def in_graph(model: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles with XLA, which has all convolutions, if TensorFlow lacks the kernels."""
    return tf.function(step, jit_compile=is_channels_first(model) and not runs_channels_first())


def loop(
    model: keras.Model, x: np.ndarray, y: np.ndarray, weights: np.ndarray, group_size: int = 1
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the gradients (N, ...) of groups and their norms, by a loop over examples."""
    model = runnable(model)
    variables = model.trainable_variables
    sources = [variable.value for variable in variables]
    rows: list[list[np.ndarray]] = []
    for row in range(len(x)):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            loss = weights[row] * LOSS(y[row : row + 1], model(x[row : row + 1], training=True))[0]
        found = tape.gradient(loss, sources, unconnected_gradients="zero")
        rows.append([tf.convert_to_tensor(part).numpy().astype(np.float64) for part in found])
    counts = np.maximum(1, np.count_nonzero(weights.reshape(-1, group_size), axis=1))
    groups = []
    for part in map(np.stack, zip(*rows, strict=True)):
        grouped = part.reshape(-1, group_size, *part.shape[1:]).sum(axis=1)
        groups.append(grouped / counts.reshape(-1, *(1,) * (grouped.ndim - 1)))
    squares = sum(np.square(part.reshape(part.shape[0], -1)).sum(axis=1) for part in groups)
    return groups, np.sqrt(squares)


def check_against_loop(
    name: str, clipping: Callable[[keras.Model], PerExampleClipping], group_size: int = 1
) -> None:
    model, x, y = problem(name)
    weights = np.linspace(0.5, 2.0, ROWS).astype(np.float32)
    weights[2] = 0.0
    groups, norms = loop(model, x, y, weights, group_size)
    clip = float(np.float32(np.median(norms)))
    clipper = clipping(model)

    def step(*batch: Any) -> Any:
        return clipper.clipped_sum(Batch(*batch, LOSS), Clip(tf.constant(clip), group_size))

    batch = (tf.constant(x), tf.constant(y), tf.constant(weights))
    steps = [in_graph(model, step)]
    # Without a graph, vectorizing starts over each time, which is slow.
    eager = clipper.method == "ghost" or name == "residual"
    if eager and (runs_channels_first() or not is_channels_first(model)):
        steps.append(step)
    results = [run(*batch) for run in steps]
    factors = np.minimum(1.0, clip / np.maximum(norms, 1e-30))
    for result in results:
        np.testing.assert_allclose(result.norms, norms, rtol=1e-5, atol=1e-5 * clip)
        assert [g.dtype for g in result.gradients] == [tf.float32] * len(groups)
        for got, part in zip(result.gradients, groups, strict=True):
            np.testing.assert_allclose(got, np.tensordot(factors, part, 1), atol=1e-5 * clip)
        np.testing.assert_allclose(result.outputs, runnable(model)(x), rtol=1e-4, atol=1e-5)
        assert all(bool(flag) for flag in result.finite.values())


SHAPE = (3, 2, 4)
"""Of one example: with the batch 4 axes, and 5 with that of attention heads."""


def along_the_batch() -> list[tuple[str, Any]]:
    """Returns layers of Keras with an axis that may be that of the batch, counted from any end."""
    found: list[tuple[str, Any]] = []
    for name, kind in vars(layers).items():
        if not inspect.isclass(kind) or kind is layers.InputSpec:
            continue
        for argument in inspect.signature(kind).parameters:
            if argument not in ("axis", "axes", "attention_axes", "dims"):
                continue
            for axis, form in itertools.product((0, -4, -5), (int, lambda axis: (axis,))):
                settings = {argument: form(axis)}
                if "MultiHead" in name:
                    settings |= {"num_heads": 2, "key_dim": 2}
                found.append((f"{name}({settings})", functools.partial(kind, **settings)))
    found.append(("EinsumDense", lambda: layers.EinsumDense("abcd,ae->ebcd", (ROWS, 3, 2, 4))))
    return found


@pytest.mark.slow
def test_no_axis_of_a_layer_mixes_examples():
    """A negative axis may be the batch: such a layer is refused, or runs on each example alone."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, *SHAPE)).astype(np.float32)
    y, weights = rng.integers(CLASSES, size=ROWS), np.ones(ROWS, np.float32)
    tried, refused = [], []
    for name, make in along_the_batch():
        keras.utils.set_random_seed(1)
        inputs = keras.Input(SHAPE)
        hidden = layers.Dense(4, "tanh")(inputs)
        try:
            layer = make()
            pair = isinstance(layer, layers.MultiHeadAttention)
            several = isinstance(layer, (layers.Concatenate, layers.Dot))
            mixed = layer([hidden, hidden]) if several else layer(*[hidden] * (1 + pair))
            model = keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(mixed)))
            groups, norms = loop(model, x, y, weights)
        except (ValueError, IndexError, TypeError, tf.errors.OpError):
            continue  # Keras refuses the axis, or one example alone.
        clip = float(np.median(norms))
        factors = np.minimum(1.0, clip / np.maximum(norms, 1e-30))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batch = Batch(x, y, weights, LOSS)
                result = PerExampleClipping(model).clipped_sum(batch, Clip(clip))
        except (ValueError, tf.errors.AbortedError):
            refused.append(name)  # TensorFlow has no softmax of a row's six axes.
            continue
        tried.append(name)
        np.testing.assert_allclose(result.norms, norms, rtol=1e-4, atol=1e-5, err_msg=name)
        for got, part in zip(result.gradients, groups, strict=True):
            expected = np.tensordot(factors, part, 1)
            np.testing.assert_allclose(got, expected, atol=1e-4 * clip, err_msg=name)
    classes = {name.partition("(")[0] for name in (*tried, *refused)}
    assert {"MultiHeadAttention", "Softmax", "UnitNormalization"} <= classes


def test_adapters_of_a_convolution_in_groups_have_no_rule():
    model = image_model(layers.Conv2D(4, 2, groups=2))
    model.layers[0].enable_lora(2)
    with pytest.warns(UserWarning, match=r"no rule for .*\(Conv2D\)"):
        assert PerExampleClipping(model).method == "ghost"


@pytest.mark.parametrize(("name", "method"), CASES)
def test_sums_and_norms_are_those_of_a_loop_over_examples(name: str, method: str):
    assert PerExampleClipping(problem(name)[0]).method == (
        "ghost" if name in GHOST else "vectorized"
    )
    check_against_loop(name, lambda model: PerExampleClipping(model, Speed(method)))


@pytest.mark.parametrize(
    ("name", "method", "group_size"),
    slow_if_large(
        [
            *[(name, "ghost", 2) for name in (*FEW, "Conv2D of few positions", "LoRA over time")],
            ("TimeDistributed", "ghost", 2),
            ("Conv2D", "ghost", 3),
            ("one channel", "ghost", 2),
            ("attention with masks", "ghost", 2),
            ("cross-attention", "ghost", 3),
            ("EinsumDense", "ghost", 2),
            ("siamese", "ghost", 2),
            ("tied", "ghost", 3),
            ("residual", "vectorized", 2),
        ]
    ),
)
def test_groups_are_clipped_as_one(name: str, method: str, group_size: int):
    check_against_loop(name, lambda model: PerExampleClipping(model, Speed(method)), group_size)


@pytest.mark.parametrize(
    ("name", "method", "max_bytes"),
    slow_if_large(
        [
            ("Conv2D", "ghost", 1_000),
            ("one channel", "ghost", 200),
            ("groups", "ghost", 1_000),
            ("Embedding with masks", "ghost", 400),
            ("LoRA over time", "ghost", 1_000),
            ("LSTM", "ghost", 2_000),
            ("siamese", "ghost", 8_000),
            ("two lookups", "ghost", 2_000),  # a gradient of its table has 16,000 bytes
            ("large Embedding", "ghost", 2_000),  # a gradient of its table has 640,000 bytes
            ("residual", "vectorized", 3_000),
        ]
    ),
)
def test_a_bound_on_memory_changes_nothing(name: str, method: str, max_bytes: int):
    check_against_loop(name, lambda model: PerExampleClipping(model, Speed(method, max_bytes)))


@pytest.mark.parametrize("method", ["ghost", "vectorized"])
def test_too_little_memory_is_refused(method: str):
    model, x, y = problem("residual")
    clipper = PerExampleClipping(model, Speed(method, max_bytes=4))
    with pytest.raises(ValueError, match=r"max_bytes=4 is too small.*Raise max_bytes"):
        clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(1.0))


def test_ghost_clipping_refuses_other_layers():
    model = problem("subclass")[0]
    clipper = PerExampleClipping(model, Speed("ghost"))
    with pytest.raises(ValueError, match=r"method='ghost' cannot handle model.*'auto'"):
        clipper.clipped_sum(Batch(np.zeros((1, 5)), np.zeros(1), np.ones(1), LOSS), Clip(1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.LSTM(3, activation=lambda x: x - keras.ops.mean(x, axis=0)),
        lambda: layers.GRU(3, recurrent_activation=lambda x: x - keras.ops.mean(x, axis=0)),
    ],
)
def test_privacy_a_cell_whose_activation_may_mix_examples_has_no_rule(layer):
    model = keras.Sequential([keras.Input((2, 2)), layer(), layers.Dense(CLASSES)])
    with pytest.warns(UserWarning, match="vectorized.*no rule for '(lstm|gru)"):
        assert PerExampleClipping(model).method == "ghost"


@pytest.mark.slow
def test_a_loop_that_cannot_be_vectorized_runs_one_by_one():
    with pytest.warns(UserWarning, match="one by one.*set unroll=True"):
        check_against_loop("own cell", lambda model: PerExampleClipping(model, Speed("vectorized")))


def test_privacy_a_state_that_outlives_the_batch_is_refused():
    stack = [keras.Input(batch_shape=(1, 5, 2)), layers.LSTM(3, stateful=True)]
    clipper = PerExampleClipping(keras.Sequential([*stack, layers.Dense(CLASSES)]))
    batch = Batch(np.zeros((1, 5, 2), np.float32), np.zeros(1), np.ones(1), LOSS)
    with pytest.raises(ValueError, match=r"\['lstm.*'\] keep.*stateful=False"):
        clipper.clipped_sum(batch, Clip(1.0))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.LSTM(8, dropout=0.4),
        lambda: layers.LSTM(8, dropout=0.4, recurrent_dropout=0.4),
        lambda: layers.GRU(8, dropout=0.4, recurrent_dropout=0.4),
        lambda: layers.GRU(8, recurrent_dropout=0.4, reset_after=False),
        lambda: layers.SimpleRNN(8, dropout=0.4, recurrent_dropout=0.4),
    ],
)
def test_recurrent_dropout_is_that_of_the_layer(layer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5, 3)), layer(), layers.Dense(CLASSES)])
    (seed,) = [v for v in model.variables if "seed" in v.path]
    state = np.array(seed)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 5, 3)).astype(np.float32), rng.integers(CLASSES, size=ROWS)
    sources = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        loss = tf.reduce_sum(LOSS(y, model(x, training=True)))
    expected_sums = tape.gradient(loss, sources)
    seed.assign(state)
    clipper = PerExampleClipping(model, Speed("ghost"))
    # Nothing is clipped, so the sum is the gradient of the sum.
    result = clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(1e9))
    for got, part in zip(result.gradients, expected_sums, strict=True):
        np.testing.assert_allclose(got, part, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        layers.MultiHeadAttention(2, 3, dropout=0.4),
        layers.GroupQueryAttention(2, 4, 2, dropout=0.4),
    ],
)
def test_attention_is_clipped_with_the_dropout_of_the_layer(layer):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 4))
    x = layers.Flatten()(layer(inputs, inputs, use_causal_mask=True))
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    seeds = [v for v in model.variables if "seed" in v.path]
    states = [np.array(seed) for seed in seeds]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 5, 4)).astype(np.float32), rng.integers(CLASSES, size=ROWS)
    sources = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(sources)
        losses = LOSS(y, model(x, training=True))
    rows = tape.jacobian(losses, sources, experimental_use_pfor=False)
    squares = sum(np.square(np.reshape(part, (ROWS, -1))).sum(axis=1) for part in rows)
    norms = np.sqrt(squares)
    for seed, state in zip(seeds, states, strict=True):
        seed.assign(state)
    clip = float(np.median(norms))
    clipper = PerExampleClipping(model, Speed("ghost"))
    result = clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(clip))
    np.testing.assert_allclose(result.norms, norms, rtol=1e-5)
    for got, part in zip(result.gradients, rows, strict=True):
        np.testing.assert_allclose(
            got, np.tensordot(np.minimum(1, clip / norms), part, 1), atol=1e-5
        )


@pytest.mark.slow
def test_attention_is_clipped_by_the_distance_of_labels():
    model, x, y = problem("attention with masks")
    model = keras.Model(model.input, layers.Dense(2)(model.output))
    batch = Batch(x, np.minimum(y, 1), np.ones(ROWS), LOSS)
    results = [
        PerExampleClipping(model, Speed(method)).clipped_sum(batch, LabelDistanceClip(0.1))
        for method in ("ghost", "vectorized")
    ]
    np.testing.assert_allclose(results[0].norms, results[1].norms, rtol=1e-5)
    assert np.max(results[0].norms) > 0.2
    for got, part in zip(results[0].gradients, results[1].gradients, strict=True):
        np.testing.assert_allclose(got, part, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "policy"),
    slow_if_large(
        [
            ("attention", "mixed_float16"),
            ("cross-attention", "mixed_bfloat16"),
            ("cross-attention", "mixed_float16"),
            ("RMSNormalization", "mixed_float16"),
            ("siamese", "mixed_bfloat16"),
            ("tied", "mixed_float16"),
        ]
    ),
)
def test_layers_in_mixed_precision_have_the_same_up_to_its_rounding(name: str, policy: str):
    reference, x, y = problem(name)
    keras.config.set_dtype_policy(policy)
    try:
        model = problem(name)[0]
    finally:
        keras.config.set_dtype_policy("float32")
    model.set_weights(reference.get_weights())
    groups, norms = loop(reference, x, y, np.ones(ROWS, np.float32))
    clip = float(np.median(norms))
    clipper = PerExampleClipping(model, Speed("ghost"))
    result = clipper.clipped_sum(Batch(x, y, np.ones(ROWS), LOSS), Clip(clip))
    rounding = 2.0**-10 if policy == "mixed_float16" else 2.0**-7
    np.testing.assert_allclose(result.norms, norms, rtol=20 * rounding)
    for got, part in zip(result.gradients, groups, strict=True):
        expected_sum = np.tensordot(np.minimum(1, clip / norms), part, 1)
        assert np.linalg.norm(got - expected_sum) < 20 * rounding * ROWS * clip


@pytest.mark.parametrize(
    "name",
    with_slow(
        ("masked LSTM", "attention with masks", "cross-attention", "grouped attention", "tied"),
        {"masked LSTM", *LARGE},
    ),
)
def test_layers_are_compiled_by_xla(name: str):
    model, x, y = problem("LSTM" if name == "masked LSTM" else name)
    if name == "masked LSTM":
        model = recurrent(layers.LSTM(3), layers.Reshape((1, 3)), masked=True)
    groups, norms = loop(model, x, y, np.ones(ROWS, np.float32))
    clipper = PerExampleClipping(model, Speed("ghost"))
    batch = Batch(tf.constant(x), tf.constant(y), tf.ones(ROWS), LOSS)
    clip = Clip(float(np.median(norms)))
    result = tf.function(lambda: clipper.clipped_sum(batch, clip), jit_compile=True)()
    factors = np.minimum(1.0, np.median(norms) / norms)
    for got, part in zip(result.gradients, groups, strict=True):
        np.testing.assert_allclose(got, np.tensordot(factors, part, 1), atol=1e-5)


@pytest.mark.slow
def test_a_recurrent_step_has_one_loop_forward_and_one_backward():
    _, x, y = problem("GRU")
    model = recurrent(layers.GRU(3), layers.Reshape((1, 3)))
    clipper = PerExampleClipping(model, Speed("ghost"))
    batch = Batch(tf.constant(x), tf.constant(y), tf.ones(ROWS), LOSS)
    step = tf.function(lambda: clipper.clipped_sum(batch, Clip(1.0))).get_concrete_function()
    # The layers' outputs are looked at only if the model's are not finite: their loop is inside.
    kinds = [operation.type for operation in step.graph.get_operations()]
    assert sum(kind in ("While", "StatelessWhile") for kind in kinds) == 2


IN_COORDINATES = (
    "dense",
    "dense over a short time",
    "Conv2D",
    "Conv2D of few positions",
    "Conv3D with groups",
    "channels first",
    "DepthwiseConv2D",
    "Embedding",
    "LayerNormalization of two axes",
    "frozen",
    "LoRA over time",
    "GRU",
    "TimeDistributed",
    "attention with masks",
    "shared layer",
    "siamese",
    "two lookups",
)


def random_coordinates(shape: tuple[int, ...], rng: Any) -> Coordinates:
    """Returns maps that are not rotations, diagonal for long sides and vectors."""

    def side(n: int) -> tf.Tensor:
        small = n <= 1000 and len(shape) > 1
        return tf.constant(rng.normal(size=(n, n) if small else n), tf.float32)

    rows = int(np.prod(shape[:-1]))
    return Coordinates(side(rows) if len(shape) > 1 else None, side(shape[-1]))


def mapped(groups: np.ndarray, sides: Coordinates) -> np.ndarray:
    """Returns the gradients (N, ...) in coordinates, with each axis written out."""
    found = groups.reshape(len(groups), -1, groups.shape[-1])
    for side, sums in ((sides.left, "ij,njk->nik"), (sides.right, "kl,njk->njl")):
        if side is not None and len(side.shape) == 2:
            found = np.einsum(sums, side.numpy().astype(np.float64), found)
        elif side is not None:
            found = found * (side.numpy()[:, None] if side is sides.left else side.numpy())
    return found.reshape(groups.shape)


def check_coordinates(
    name: str, method: str, max_bytes: int, group_size: int = 1, tables: bool = False
) -> None:
    """Compares with a loop; ``tables`` leaves the rows of embeddings as they are."""
    model, x, y = problem(name)
    rng = np.random.default_rng(3)
    coordinates = [random_coordinates(tuple(v.shape), rng) for v in model.trainable_variables]
    for place, variable in enumerate(model.trainable_variables):
        if tables and "embeddings" in variable.path:
            coordinates[place] = Coordinates(None, coordinates[place].right)
    weights = np.array([1, 1, 0, 0.5, 1, 1], np.float32)
    groups, _ = loop(model, x, y, weights, group_size)
    groups = [mapped(part, side) for part, side in zip(groups, coordinates, strict=True)]
    norms = np.sqrt(
        sum(np.square(part.reshape(ROWS // group_size, -1)).sum(axis=1) for part in groups)
    )
    clip = float(np.median(norms))
    clipper = PerExampleClipping(model, Speed(method, max_bytes))
    bound = Clip(clip, group_size, coordinates=coordinates)
    result = in_graph(model, lambda: clipper.clipped_sum(Batch(x, y, weights, LOSS), bound))()
    np.testing.assert_allclose(result.norms, norms, rtol=2e-5, atol=1e-5 * clip)
    factors = np.minimum(1.0, clip / np.maximum(norms, 1e-30))
    for got, part in zip(result.gradients, groups, strict=True):
        np.testing.assert_allclose(got, np.tensordot(factors, part, 1), atol=3e-5 * clip)


@pytest.mark.parametrize("name", slow_if_large([(name,) for name in IN_COORDINATES]))
def test_gradients_are_clipped_in_coordinates(name: str):
    check_coordinates(name, "ghost", 2**30)


@pytest.mark.parametrize(
    ("name", "max_bytes"),
    [
        ("dense over time", 3_000),
        ("Conv2D", 5_000),
        ("Embedding", 3_000),
        ("large Embedding", 3_000),
    ],
)
def test_tables_and_small_memory_in_coordinates(name: str, max_bytes: int):
    check_coordinates(name, "ghost", max_bytes, tables=True)


def test_the_rows_of_a_large_table_may_be_scaled():
    check_coordinates("large Embedding", "ghost", 2**30)


@pytest.mark.parametrize("name", ["dense over time", "Embedding"])
def test_groups_in_coordinates(name: str):
    check_coordinates(name, "ghost", 2**30, group_size=2, tables=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "max_bytes"),
    [
        ("dense", 30_000),
        ("attention", 2**30),
    ],
)
def test_vectorized_gradients_are_clipped_in_coordinates(name: str, max_bytes: int):
    check_coordinates(name, "vectorized", max_bytes)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 3)])
def test_the_way_back_is_the_transposed_map(shape: tuple[int, ...]):
    rng = np.random.default_rng(0)
    sides = random_coordinates(shape, rng) if shape else Coordinates(None, tf.constant([2.0]))
    there, back = (tf.constant(rng.normal(size=shape), tf.float32) for _ in range(2))
    product = tf.reduce_sum(sides.forward(there[tf.newaxis])[0] * back)
    np.testing.assert_allclose(product, tf.reduce_sum(there * sides.back(back)), rtol=1e-4)
    np.testing.assert_array_equal(Coordinates().back(there), there)
