"""The table in docs/guide.md: the trainable layers of ``keras.layers`` and their gradients."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import keras
import pytest
from slow_cases import with_slow

from tf_labeldp.plugins import PerExampleClipping

layers = keras.layers
_GUIDE = Path(__file__).parents[2] / "docs/guide.md"
# They need other frameworks or saved programs.
_NOT_BUILT = {"FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"}
# A call on an input, and the input's shape per example.
_CALLS: dict[str, tuple[Any, tuple[int, ...]]] = {
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
    assert _table().keys() - _NOT_BUILT == set(_CALLS)


@pytest.mark.parametrize("name", with_slow(_CALLS, {"ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"}))
def test_the_table_is_true(name: str):
    call, shape = _CALLS[name]
    dtype = "int32" if "Embedding" in name else "float32"
    inputs = keras.Input(shape, dtype=dtype)
    clipping = PerExampleClipping(keras.Model(inputs, layers.Flatten()(call(inputs))))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert clipping.method == "ghost"
        kind = "row by row" if any("no rule" in str(w.message) for w in caught) else "exact rule"
    except ValueError as error:
        assert "mix the examples" in str(error)
        kind = "refused"
    assert kind == _table()[name]
