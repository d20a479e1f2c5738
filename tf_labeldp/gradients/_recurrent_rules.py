"""Rules for recurrent layers, with one loop forward and one backward per batch.

The products of all steps' inputs with the kernel are one tensor, and its gradient is that of every
step's sum before the activations. The gradients of kernel and recurrent kernel are then those of
dense layers over time, whose inputs are the steps' inputs and the states before each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._layer_rules import (
    Factors,
    GroupedRule,
    LayerRule,
    LayerSettings,
    NoRuleError,
    ProductRule,
    ScaleRule,
    rule_of,
    tapped_by,
)

_LAYERS = (keras.layers.RNN, keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN)
# For each cell the inputs, their products with the kernel, and the states before each step.
_TAPS_PER_CELL = 3


class _TappedRecurrent(keras.layers.Layer):
    """Returns the outputs of a recurrent layer, flat, and then the taps (T, B, ...) of each cell.

    The gradients of recurrent weights stop here: only the rules know them.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy)
        self.layer = layer
        self.supports_masking = True

    @property
    def directions(self) -> list[Any]:
        if type(self.layer) is keras.layers.Bidirectional:
            return [self.layer.forward_layer, self.layer.backward_layer]
        return [self.layer]

    def compute_mask(self, *args: Any, **kwargs: Any) -> None:
        # The calls of later layers name their masks.
        return None

    def call(
        self, sequences: Any, initial_state: Any = None, mask: Any = None, training: Any = False
    ) -> tuple[tf.Tensor, ...]:
        # An absent state or mask is one None.
        parts = [part for part in keras.tree.flatten(initial_state) if part is not None]
        states = [tf.cast(part, self.compute_dtype) for part in parts]
        mask = keras.tree.flatten(mask)[0]
        outputs, ends, taps = [], [], []
        size = len(states) // len(self.directions)
        for number, layer in enumerate(self.directions):
            own = states[number * size : (number + 1) * size]
            found = _run(layer, sequences, own, mask, training)
            outputs.append(found[0])
            ends += found[1]
            taps += found[2]
        if len(outputs) > 1:
            if self.layer.return_sequences:
                outputs[1] = tf.reverse(outputs[1], [1])
            outputs = _MERGES[self.layer.merge_mode](*outputs)
        return (*outputs, *(ends if self.layer.return_state else []), *taps)


_MERGES: dict[str | None, Callable[[tf.Tensor, tf.Tensor], list[tf.Tensor]]] = {
    "concat": lambda forward, backward: [tf.concat([forward, backward], -1)],
    "sum": lambda forward, backward: [forward + backward],
    "ave": lambda forward, backward: [(forward + backward) / 2],
    "mul": lambda forward, backward: [forward * backward],
    None: lambda forward, backward: [forward, backward],
}


@tapped_by(*_LAYERS, keras.layers.Bidirectional)
def _tapped(layer: Any) -> keras.Layer:
    tapped, name = _TappedRecurrent(layer), f"layer {layer.name!r} ({type(layer).__name__})"
    for part in tapped.directions:
        if type(part) not in _LAYERS or any(type(cell) not in _STEPS for cell in _cells(part)):
            raise NoRuleError(f"{name} has cells without a rule for their per-example gradients")
        if part.stateful:
            raise NoRuleError(f"{name} carries its state from one batch to the next")
        for cell in _cells(part):
            LayerSettings.of(cell).check_activations(name)
    return tapped


def _cells(layer: Any) -> list[Any]:
    cell = layer.cell
    return cell.cells if type(cell) is keras.layers.StackedRNNCells else [cell]


def _run(
    layer: Any, sequences: tf.Tensor, states: list[tf.Tensor], mask: Any, training: Any
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """Returns the outputs of a layer in one direction, its last states and its cells' taps."""
    steps = tf.transpose(tf.cast(sequences, layer.compute_dtype), (1, 0, 2))
    seen = None if mask is None else tf.transpose(tf.cast(mask, tf.bool))[:, :, tf.newaxis]
    if layer.go_backwards:
        steps = tf.reverse(steps, [0])
        seen = None if seen is None else tf.reverse(seen, [0])
    ends, taps = [], []
    for cell in _cells(layer):
        sizes = cell.state_size if isinstance(cell.state_size, list) else [cell.state_size]
        starts = [
            states.pop(0) if states else tf.zeros((tf.shape(steps)[1], size), steps.dtype)
            for size in sizes
        ]
        input_mask, state_mask = _dropout_masks(cell, steps[0], starts[0], training)
        inputs = _dropped(steps, input_mask)
        products = _times(inputs, cell.kernel)
        if cell.use_bias:
            products += cell.bias[0] if len(cell.bias.shape) > 1 else cell.bias
        found = _STEPS[type(cell)](cell, products, starts, state_mask, seen)
        before = tf.concat([starts[0][tf.newaxis], found[0][:-1]], 0)
        before = _dropped(before, state_mask)
        if type(cell) is keras.layers.GRUCell:
            before = tf.concat([before, found[1]], -1)
        taps += [inputs, products, before]
        ends += [part[-1] for part in found[: len(starts)]]
        steps = found[0]
    if seen is not None:
        # An output is zero until the first step that is not masked, and stays while masked.
        shown = seen if layer.zero_output_for_mask else tf.cumsum(tf.cast(seen, tf.int32)) > 0
        steps = tf.where(shown, steps, tf.zeros((), steps.dtype))
    return tf.transpose(steps, (1, 0, 2)) if layer.return_sequences else steps[-1], ends, taps


def _scan(
    step: Callable[..., list[tf.Tensor]], products: tf.Tensor, starts: list[tf.Tensor], seen: Any
) -> list[tf.Tensor]:
    """Returns the states (T, B, ...) after each step; a masked step keeps them."""

    def body(states: list[tf.Tensor], parts: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
        after = step(parts[0], *states)
        if seen is None:
            return after
        return [tf.where(parts[1], new, old) for new, old in zip(after, states, strict=True)]

    return tf.scan(body, (products,) if seen is None else (products, seen), starts)


def _simple_steps(
    cell: Any, products: tf.Tensor, starts: list[tf.Tensor], mask: Any, seen: Any
) -> list[tf.Tensor]:
    kernel = tf.convert_to_tensor(cell.recurrent_kernel)

    def step(x: tf.Tensor, h: tf.Tensor) -> list[tf.Tensor]:
        return [cell.activation(x + _times(_dropped(h, mask), tf.stop_gradient(kernel)))]

    return _scan(step, products, starts, seen)


def _lstm_steps(
    cell: Any, products: tf.Tensor, starts: list[tf.Tensor], mask: Any, seen: Any
) -> list[tf.Tensor]:
    kernel = tf.convert_to_tensor(cell.recurrent_kernel)
    gate, activation = cell.recurrent_activation, cell.activation

    def step(x: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> list[tf.Tensor]:
        sums = x + _times(_dropped(h, mask), tf.stop_gradient(kernel))
        i, f, candidate, o = tf.split(sums, 4, axis=-1)
        c = gate(f) * c + gate(i) * activation(candidate)
        return [gate(o) * activation(c), c]

    return _scan(step, products, starts, seen)


def _gru_steps(
    cell: Any, products: tf.Tensor, starts: list[tf.Tensor], mask: Any, seen: Any
) -> list[tf.Tensor]:
    """Returns the states and the reset gates."""
    kernel, units = tf.convert_to_tensor(cell.recurrent_kernel), cell.units
    bias = cell.bias[1] if cell.reset_after and cell.use_bias else None
    gate = cell.recurrent_activation

    def step(x: tf.Tensor, h: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
        fixed, before = tf.stop_gradient(kernel), _dropped(h, mask)
        if cell.reset_after:
            sums = _times(before, fixed)
            if bias is not None:
                sums += tf.stop_gradient(bias)
        else:
            sums = _times(before[:, : 2 * units], fixed[:, : 2 * units])
        z = gate(x[:, :units] + sums[:, :units])
        r = gate(x[:, units : 2 * units] + sums[:, units : 2 * units])
        if cell.reset_after:
            last = r * sums[:, 2 * units :]
        else:
            last = tf.matmul(r * before[:, -units:], fixed[:, 2 * units :])
        return [z * h + (1 - z) * cell.activation(x[:, 2 * units :] + last), r]

    return _scan(step, products, [*starts, tf.zeros_like(starts[0])], seen)


_STEPS: dict[type, Callable[..., list[tf.Tensor]]] = {
    keras.layers.SimpleRNNCell: _simple_steps,
    keras.layers.LSTMCell: _lstm_steps,
    keras.layers.GRUCell: _gru_steps,
}


def _dropout_masks(cell: Any, inputs: tf.Tensor, state: tf.Tensor, training: Any) -> list[Any]:
    """Returns a cell's masks of inputs and states (B, k n), or None: k is 1, or one per gate."""
    masks = [cell.get_dropout_mask(inputs), cell.get_recurrent_dropout_mask(state)]
    cell.reset_dropout_mask()
    cell.reset_recurrent_dropout_mask()
    if not training:
        return [None, None]
    return [tf.concat(mask, -1) if isinstance(mask, list) else mask for mask in masks]


def _dropped(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Returns values (..., n) times a mask (B, k n)."""
    if mask is None:
        return values
    copies = mask.shape[-1] // values.shape[-1]
    return tf.concat([values] * copies, -1) * mask


def _times(values: tf.Tensor, kernel: Any) -> tf.Tensor:
    """Returns values (..., k n) times a kernel (n, m); each part k has its own columns."""
    kernel = tf.convert_to_tensor(kernel)
    parts = values.shape[-1] // kernel.shape[0]
    if parts == 1:
        return tf.tensordot(values, kernel, 1)
    pairs = zip(tf.split(values, parts, -1), tf.split(kernel, parts, 1), strict=True)
    return tf.concat([tf.tensordot(*pair, 1) for pair in pairs], -1)


@rule_of(_TappedRecurrent)
def _recurrent(tapped: Any, input_shape: Any) -> list[LayerRule]:
    cells = [cell for layer in tapped.directions for cell in _cells(layer)]
    rules = []
    for number, cell in enumerate(cells):
        place = (number - len(cells)) * _TAPS_PER_CELL
        rules += _cell_rules(tapped, cell, place)
    return rules


def _cell_rules(tapped: Any, cell: Any, place: int) -> list[LayerRule]:
    """Returns the rules of a cell whose taps start at a place among the layer's outputs."""
    units, is_gru = cell.units, type(cell) is keras.layers.GRUCell
    gates, resets_after = cell.kernel.shape[1] // units, is_gru and cell.reset_after
    by_gate = type(cell) is not keras.layers.SimpleRNNCell and cell.implementation == 1
    input_groups = gates if by_gate and cell.dropout else 1
    state_groups = gates if by_gate and cell.recurrent_dropout else 1
    if is_gru and not resets_after:
        state_groups = gates
    trained = {id(variable) for variable in tapped.trainable_variables}

    def of_inputs(inputs: tf.Tensor, products: tf.Tensor, gradients: tf.Tensor) -> Factors:
        return _batch_first(inputs), _batch_first(gradients)

    def of_states(before: tf.Tensor, products: tf.Tensor, gradients: tf.Tensor) -> Factors:
        before, gradients = _batch_first(before), _batch_first(gradients)
        if is_gru:
            before, reset = before[..., :-units], before[..., -units:]
            if resets_after:
                last = gradients[..., 2 * units :] * reset
                gradients = tf.concat([gradients[..., : 2 * units], last], -1)
            else:
                copies = [before] * (gates * units // before.shape[-1])
                before = tf.concat(copies, -1)
                last = before[..., 2 * units :] * reset
                before = tf.concat([before[..., : 2 * units], last], -1)
        return before, gradients

    def of_biases(before: tf.Tensor, products: tf.Tensor, gradients: tf.Tensor) -> Factors:
        inner = of_states(before, products, gradients)[1]
        both = tf.stack([_batch_first(gradients), inner], 2)
        return both, both

    def product(variables: list[Any], groups: int, factors: Any, first: int) -> LayerRule:
        shape, *flags = tuple(variables[0].shape), *(id(part) in trained for part in variables)
        kind: Any = ProductRule if groups == 1 else GroupedRule
        options = {} if groups == 1 else {"channel_groups": groups}
        rule = kind(shape, flags[0], any(flags[1:]), **options)
        kept = tuple(part for part in variables if id(part) in trained)
        return LayerRule(tapped, rule, kept, factors, (first, place + 1))

    biases = [cell.bias] if cell.use_bias else []
    first = [cell.kernel, *([] if resets_after else biases)]
    rules = [
        product(first, input_groups, of_inputs, place),
        product([cell.recurrent_kernel], state_groups, of_states, place + 2),
    ]
    if resets_after and biases:
        rule = ScaleRule(tuple(cell.bias.shape), (2, 3), False, True)
        kept = tuple(part for part in biases if id(part) in trained)
        rules.append(LayerRule(tapped, rule, kept, of_biases, (place + 2, place + 1)))
    return rules


def _batch_first(values: tf.Tensor) -> tf.Tensor:
    return tf.transpose(tf.cast(values, tf.float32), (1, 0, 2))
