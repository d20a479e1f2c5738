"""Every trainable layer of ``keras.layers`` and every rule: the guide's table, and the gradients.

A new rule is found by its registration. The layer needs a line in ``CALLS``, and the guide's table
has the layer's name in the row "exact rule".
"""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from slow_cases import with_slow

# The registry: no public name lists the layers that have a rule.
from tf_labeldp.gradients._layer_rules import RULES
from tf_labeldp.plugins import Batch, Clip, PerExampleClipping

layers = keras.layers
_GUIDE = Path(__file__).parents[2] / "docs/guide.md"
# They need other frameworks or saved programs.
_NOT_BUILT = {"FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"}
# A call on an input, and the input's shape per example.
CALLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Dense": (layers.Dense(2), (3,)),
    "EinsumDense": (layers.EinsumDense("xyz,zw->xyw", (4, 2)), (4, 3)),
    "Embedding": (layers.Embedding(3, 2), (4,)),
    **{f"Conv{n}D": (getattr(layers, f"Conv{n}D")(2, 2), (3,) * n + (2,)) for n in (1, 2, 3)},
    **{
        f"DepthwiseConv{n}D": (getattr(layers, f"DepthwiseConv{n}D")(2), (3,) * n + (2,))
        for n in (1, 2)
    },
    "LayerNormalization": (layers.LayerNormalization(), (3,)),
    "GroupNormalization": (layers.GroupNormalization(2), (4,)),
    **{
        name: (getattr(layers, name)(), (3,))
        for name in ("RMSNormalization",)
        if hasattr(layers, name)
    },
    "MultiHeadAttention": (lambda x: layers.MultiHeadAttention(2, 2)(x, x), (3, 4)),
    "GroupQueryAttention": (lambda x: layers.GroupQueryAttention(2, 4, 2)(x, x), (3, 4)),
    **{name: (getattr(layers, name)(2), (3, 2)) for name in ("LSTM", "GRU", "SimpleRNN")},
    **{
        name: (layers.RNN(getattr(layers, name)(2)), (3, 2))
        for name in ("LSTMCell", "GRUCell", "SimpleRNNCell")
    },
    "StackedRNNCells": (layers.RNN(layers.StackedRNNCells([layers.GRUCell(2)])), (3, 2)),
    "RNN": (layers.RNN([layers.LSTMCell(2), layers.GRUCell(2)]), (3, 2)),
    "Bidirectional": (layers.Bidirectional(layers.GRU(2)), (3, 2)),
    "TimeDistributed": (layers.TimeDistributed(layers.Dense(2)), (3, 2)),
    **{
        f"Conv{n}DTranspose": (getattr(layers, f"Conv{n}DTranspose")(2, 2), (3,) * n + (2,))
        for n in (1, 2, 3)
    },
    **{
        f"SeparableConv{n}D": (getattr(layers, f"SeparableConv{n}D")(2, 2), (3,) * n + (2,))
        for n in (1, 2)
    },
    **{
        f"ConvLSTM{n}D": (getattr(layers, f"ConvLSTM{n}D")(2, 2), (2,) + (3,) * n + (2,))
        for n in (1, 2, 3)
    },
    "PReLU": (layers.PReLU(), (3,)),
    "Attention": (lambda x: layers.Attention(use_scale=True)([x, x]), (3, 4)),
    "AdditiveAttention": (lambda x: layers.AdditiveAttention()([x, x]), (3, 4)),
    # Earlier versions of Keras lack it.
    **{
        name: (getattr(layers, name)(3, 2), (4,))
        for name in ("ReversibleEmbedding",)
        if hasattr(layers, name)
    },
    "BatchNormalization": (layers.BatchNormalization(), (3,)),
    "SpectralNormalization": (layers.SpectralNormalization(layers.Dense(2)), (3,)),
}
# Their weights are not trained: statistics, and a fixed transform.
_UNTRAINED = {"Normalization", "STFTSpectrogram"}
_ABSTRACT = {"Layer", "Wrapper"}


def _table() -> dict[str, str]:
    """Returns the first cell of the row by the name of the layer."""
    text = _GUIDE.read_text(encoding="utf-8").split("| gradients | layers of `keras.layers` |")[1]
    rows = [row.split("|")[1:3] for row in text.split("\n\n")[0].splitlines()[2:]]
    found = {name: kind.strip() for kind, cell in rows for name in re.findall(r"`(\w+)`", cell)}
    # Earlier versions of Keras have fewer layers.
    return {name: kind for name, kind in found.items() if hasattr(layers, name)}


def _trainable() -> set[str]:
    """Returns the names of layers that add weights or build layers, each class once."""
    found = set()
    for kind in vars(layers).values():
        if inspect.isclass(kind) and issubclass(kind, keras.Layer):
            parts = kind.__mro__[: kind.__mro__.index(keras.Layer)]
            sources = " ".join(map(inspect.getsource, parts))
            if re.search(
                r"add_weight|self\.\w*(layer|dense)\.build\(|cell\.build\(|_track_var|track_module",
                sources,
            ):
                found.add(kind.__name__.replace("Grouped", "Group"))
    return found - _UNTRAINED - _ABSTRACT


@pytest.mark.slow
def test_the_table_lists_all_trainable_layers():
    assert _trainable() - _table().keys() == set()
    assert _table().keys() - _NOT_BUILT == set(CALLS)


def _squares(_: Any, outputs: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(outputs - 1.0), axis=-1)


def _method(clipping: PerExampleClipping) -> str:
    """Returns the first cell of the row in the guide's table that describes a model's method."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert clipping.method == "ghost"
    except ValueError as error:
        assert "mix the examples" in str(error)
        return "refused"
    return "row by row" if any("no rule" in str(w.message) for w in caught) else "exact rule"


def _check_clipped_sum(model: keras.Model, clipping: PerExampleClipping) -> None:
    """Compares norms and sum with those of single examples."""
    rng = np.random.default_rng(0)
    shape = (3, *model.input_shape[1:])
    is_float = model.inputs[0].dtype == "float32"
    x = rng.normal(size=shape).astype("float32") if is_float else rng.integers(3, size=shape)
    sources = [variable.value for variable in model.trainable_variables]
    rows = []
    for row in range(len(x)):
        with tf.GradientTape() as tape:
            loss = _squares(None, model(x[row : row + 1], training=True))
        found = tape.gradient(loss, sources, unconnected_gradients="zero")
        rows.append([tf.convert_to_tensor(part).numpy() for part in found])
    norms = np.sqrt([sum(np.sum(np.square(part, dtype=float)) for part in row) for row in rows])
    clip = float(np.median(norms))
    batch = Batch(x, np.zeros(len(x)), np.ones(len(x)), _squares)
    result = clipping.clipped_sum(batch, Clip(clip))
    np.testing.assert_allclose(result.norms, norms, rtol=1e-5)
    factors = np.minimum(1.0, clip / norms)
    for got, parts in zip(result.gradients, zip(*rows, strict=True), strict=True):
        expected = np.tensordot(factors, np.stack(parts), 1)
        np.testing.assert_allclose(got, expected, atol=1e-5 * clip)


def _model(name: str) -> keras.Model:
    assert name in CALLS, f"Add a call of {name} and the shape of its inputs to CALLS."
    keras.utils.set_random_seed(0)
    call, shape = CALLS[name]
    inputs = keras.Input(shape, dtype="int32" if "Embedding" in name else "float32")
    return keras.Model(inputs, layers.Flatten()(call(inputs)))


_RULES = sorted(kind.__name__ for kind in RULES)
_VOLUMES = {"ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"}


@pytest.mark.parametrize("name", with_slow(sorted({*_RULES, *CALLS}), _VOLUMES))
def test_a_layer_is_clipped_by_the_method_of_the_table(name: str):
    model = _model(name)
    clipping = PerExampleClipping(model)
    method = _method(clipping)
    assert method == _table().get(name), f"Move `{name}` to the row of its method in the guide."
    if name in _RULES:
        assert method == "exact rule"
    if method != "refused":
        _check_clipped_sum(model, clipping)


@pytest.mark.slow
@pytest.mark.parametrize("name", _RULES)
def test_a_rule_covers_a_layer_with_a_frozen_weight(name: str):
    model = _model(name)
    model.trainable_variables[0].trainable = False
    if model.trainable_variables:
        clipping = PerExampleClipping(model)
        assert _method(clipping) == "exact rule"
        _check_clipped_sum(model, clipping)
