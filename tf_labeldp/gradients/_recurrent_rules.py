"""Rules for recurrent layers, with one loop forward and one backward per batch.

The products of all steps' inputs with the kernel are one tensor, and its gradient is that of every
step's sum before the activations. The gradients of kernel and recurrent kernel are then those of
dense layers over time, whose inputs are the steps' inputs and the states before each step.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._layer_rules import (
    Factors,
    GroupedRule,
    LayerRule,
    LayerSettings,
    ProductRule,
    ScaleRule,
    TappedLayer,
    rule_of,
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


def _cells(layer: Any) -> list[Any]:
    cell = layer.cell
    return cell.cells if type(cell) is keras.layers.StackedRNNCells else [cell]


def _run(
    layer: Any, sequences: tf.Tensor, states: list[tf.Tensor], mask: Any, training: Any
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """Returns the outputs of a layer in one direction, its last states and its cells' taps."""
    steps = tf.transpose(tf.cast(sequences, layer.compute_dtype), (1, 0, 2))
    kept = None if mask is None else tf.transpose(tf.cast(mask, tf.bool))[:, :, tf.newaxis]
    if layer.go_backwards:
        steps = tf.reverse(steps, [0])
        kept = None if kept is None else tf.reverse(kept, [0])
    ends, taps = [], []
    for rules in map(_Cell.of, _cells(layer)):
        cell = rules.cell
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
        found = rules.steps(products, starts, state_mask, kept)
        before = tf.concat([starts[0][tf.newaxis], found[0][:-1]], 0)
        taps += [inputs, products, rules.state_tap(_dropped(before, state_mask), found)]
        ends += [part[-1] for part in found[: len(starts)]]
        steps = found[0]
    if kept is not None:
        # An output is zero until the first step that is not masked, and stays while masked.
        shown = kept if layer.zero_output_for_mask else tf.cumsum(tf.cast(kept, tf.int32)) > 0
        steps = tf.where(shown, steps, tf.zeros((), steps.dtype))
    return tf.transpose(steps, (1, 0, 2)) if layer.return_sequences else steps[-1], ends, taps


def _scan(
    step: Callable[..., list[tf.Tensor]],
    products: tf.Tensor,
    starts: list[tf.Tensor],
    kept: Any,
) -> list[tf.Tensor]:
    """Returns the states (T, B, ...) after each step; a masked step keeps them."""

    def body(states: list[tf.Tensor], parts: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
        after = step(parts[0], *states)
        if kept is None:
            return after
        return [tf.where(parts[1], new, old) for new, old in zip(after, states, strict=True)]

    return tf.scan(body, (products,) if kept is None else (products, kept), starts)


class _Cell(abc.ABC):
    """A cell of Keras: its steps over time, and the rules of its weights."""

    def __init__(self, cell: Any) -> None:
        self.cell, self.units = cell, cell.units

    @staticmethod
    def of(cell: Any) -> _Cell:
        return _CELLS[type(cell)](cell)

    @abc.abstractmethod
    def steps(
        self, products: tf.Tensor, starts: list[tf.Tensor], mask: Any, kept: Any
    ) -> list[tf.Tensor]:
        """Returns the states (T, B, ...) after each step, and then what ``state_tap`` needs."""

    def state_tap(self, before: tf.Tensor, found: list[tf.Tensor]) -> tf.Tensor:
        """Returns the tap of the states before each step, given the result of ``steps``."""
        return before

    def state_factors(self, tap: tf.Tensor, gradients: tf.Tensor) -> Factors:
        """Returns the factors (B, T, ...) of the recurrent kernel, from those of the sums."""
        return tap, gradients

    @property
    def kernel_biases(self) -> list[Any]:
        """The biases whose gradients are those of the sums."""
        return [self.cell.bias] if self.cell.use_bias else []

    @property
    def state_groups(self) -> int:
        return self.groups_under(self.cell.recurrent_dropout)

    def groups_under(self, dropout: float) -> int:
        """Returns the number of gates if each has its own dropped inputs, else 1."""
        by_gate = bool(dropout) and self.cell.implementation == 1
        return self.cell.kernel.shape[1] // self.units if by_gate else 1

    def rules(self, trained: set[int], place: int) -> list[LayerRule]:
        """Returns the rules of the trained weights of a cell whose taps start at this place."""
        cell, inputs, products, states = self.cell, *range(place, place + _TAPS_PER_CELL)

        def of_inputs(tap: tf.Tensor, _: tf.Tensor, gradients: tf.Tensor) -> Factors:
            return _batch_first(tap), _batch_first(gradients)

        def of_states(tap: tf.Tensor, _: tf.Tensor, gradients: tf.Tensor) -> Factors:
            return self.state_factors(_batch_first(tap), _batch_first(gradients))

        weights, groups = [cell.kernel, *self.kernel_biases], self.groups_under(cell.dropout)
        of_kernel = _product(weights, trained, groups)
        of_recurrent = _product([cell.recurrent_kernel], trained, self.state_groups)
        return [
            LayerRule(*of_kernel, of_inputs, (inputs, products)),
            LayerRule(*of_recurrent, of_states, (states, products)),
        ]


class _SimpleCell(_Cell):
    def groups_under(self, dropout: float) -> int:
        return 1

    def steps(
        self, products: tf.Tensor, starts: list[tf.Tensor], mask: Any, kept: Any
    ) -> list[tf.Tensor]:
        kernel, activation = tf.convert_to_tensor(self.cell.recurrent_kernel), self.cell.activation

        def step(x: tf.Tensor, h: tf.Tensor) -> list[tf.Tensor]:
            return [activation(x + _times(_dropped(h, mask), tf.stop_gradient(kernel)))]

        return _scan(step, products, starts, kept)


class _LSTMCell(_Cell):
    def steps(
        self, products: tf.Tensor, starts: list[tf.Tensor], mask: Any, kept: Any
    ) -> list[tf.Tensor]:
        kernel = tf.convert_to_tensor(self.cell.recurrent_kernel)
        gate, activation = self.cell.recurrent_activation, self.cell.activation

        def step(x: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> list[tf.Tensor]:
            sums = x + _times(_dropped(h, mask), tf.stop_gradient(kernel))
            i, f, candidate, o = tf.split(sums, 4, axis=-1)
            c = gate(f) * c + gate(i) * activation(candidate)
            return [gate(o) * activation(c), c]

        return _scan(step, products, starts, kept)


class _GRUCell(_Cell):
    """Resets the state before its product: its tap has the reset gates in its last columns."""

    @property
    def state_groups(self) -> int:
        # The candidate has its own input, the state that is reset.
        return self.cell.kernel.shape[1] // self.units

    def steps(
        self, products: tf.Tensor, starts: list[tf.Tensor], mask: Any, kept: Any
    ) -> list[tf.Tensor]:
        weights, units = [tf.convert_to_tensor(part) for part in self.state_weights], self.units
        gate, activation = self.cell.recurrent_activation, self.cell.activation

        def step(x: tf.Tensor, h: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
            sums, candidate = self.sums(_dropped(h, mask), *map(tf.stop_gradient, weights))
            z = gate(x[:, :units] + sums[:, :units])
            r = gate(x[:, units : 2 * units] + sums[:, units : 2 * units])
            return [z * h + (1 - z) * activation(x[:, 2 * units :] + candidate(r)), r]

        return _scan(step, products, [*starts, tf.zeros_like(starts[0])], kept)

    @property
    def state_weights(self) -> list[Any]:
        """The weights of the states' products."""
        return [self.cell.recurrent_kernel]

    def sums(
        self, state: tf.Tensor, kernel: tf.Tensor, bias: Any = None
    ) -> tuple[tf.Tensor, _OfGates]:
        """Returns the products of the state for the gates, and for the candidate by reset gate."""
        split = 2 * self.units

        def candidate(reset: tf.Tensor) -> tf.Tensor:
            return tf.matmul(reset * state[:, -self.units :], kernel[:, split:])

        return _times(state[:, :split], kernel[:, :split]), candidate

    def state_tap(self, before: tf.Tensor, found: list[tf.Tensor]) -> tf.Tensor:
        return tf.concat([before, found[1]], -1)

    def state_factors(self, tap: tf.Tensor, gradients: tf.Tensor) -> Factors:
        before, reset = tap[..., : -self.units], tap[..., -self.units :]
        copies = [before] * (gradients.shape[-1] // before.shape[-1])
        return self._reset(tf.concat(copies, -1), reset), gradients

    def _reset(self, values: tf.Tensor, reset: tf.Tensor) -> tf.Tensor:
        """Returns values (B, T, 3 n) whose last part, the candidate's, is times the gate."""
        split = 2 * self.units
        return tf.concat([values[..., :split], values[..., split:] * reset], -1)


class _ResetAfterCell(_GRUCell):
    """Resets the product of the state, which has a bias of its own."""

    @property
    def state_groups(self) -> int:
        return self.groups_under(self.cell.recurrent_dropout)

    @property
    def kernel_biases(self) -> list[Any]:
        return []

    @property
    def state_weights(self) -> list[Any]:
        bias = [self.cell.bias[1]] if self.cell.use_bias else []
        return [self.cell.recurrent_kernel, *bias]

    def sums(
        self, state: tf.Tensor, kernel: tf.Tensor, bias: Any = None
    ) -> tuple[tf.Tensor, _OfGates]:
        sums = _times(state, kernel)
        if bias is not None:
            sums += bias
        return sums, lambda reset: reset * sums[:, 2 * self.units :]

    def state_factors(self, tap: tf.Tensor, gradients: tf.Tensor) -> Factors:
        before, reset = tap[..., : -self.units], tap[..., -self.units :]
        return before, self._reset(gradients, reset)

    def rules(self, trained: set[int], place: int) -> list[LayerRule]:
        rules, bias = super().rules(trained, place), self.cell.bias
        if not self.cell.use_bias:
            return rules

        def factors(tap: tf.Tensor, products: tf.Tensor, gradients: tf.Tensor) -> Factors:
            gradients = _batch_first(gradients)
            inner = self.state_factors(_batch_first(tap), gradients)[1]
            both = tf.stack([gradients, inner], 2)
            return both, both

        # Its rows are the biases of the inputs' and the states' products.
        rule = ScaleRule(tuple(bias.shape), (2, 3), False, True)
        kept = (bias,) if id(bias) in trained else ()
        return [*rules, LayerRule(rule, kept, factors, (place + 2, place + 1))]


_OfGates = Callable[[tf.Tensor], tf.Tensor]
_CELLS: dict[type, Callable[[Any], _Cell]] = {
    keras.layers.SimpleRNNCell: _SimpleCell,
    keras.layers.LSTMCell: _LSTMCell,
    keras.layers.GRUCell: lambda cell: (_ResetAfterCell if cell.reset_after else _GRUCell)(cell),
}


def _product(
    weights: list[Any], trained: set[int], groups: int
) -> tuple[ProductRule, tuple[Any, ...]]:
    """Returns the rule of a kernel, with or without bias, and those that are trained."""
    is_trained = [id(weight) in trained for weight in weights]
    kept = tuple(weight for weight, keeps in zip(weights, is_trained, strict=True) if keeps)
    shape, has_kernel, has_bias = tuple(weights[0].shape), is_trained[0], any(is_trained[1:])
    if groups == 1:
        return ProductRule(shape, has_kernel, has_bias), kept
    return GroupedRule(shape, has_kernel, has_bias, channel_groups=groups), kept


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


@rule_of(*_LAYERS, keras.layers.Bidirectional)
def _recurrent(layer: Any, input_shape: Any) -> TappedLayer | None:
    tapped = _TappedRecurrent(layer)
    if any(type(part) not in _LAYERS or part.stateful for part in tapped.directions):
        return None
    cells = [cell for part in tapped.directions for cell in _cells(part)]
    for cell in cells:
        if type(cell) not in _CELLS or not LayerSettings.of(cell).has_known_activations:
            return None
    trained, rules = {id(variable) for variable in tapped.trainable_variables}, []
    for number, cell in enumerate(cells):
        rules += _Cell.of(cell).rules(trained, (number - len(cells)) * _TAPS_PER_CELL)
    return TappedLayer(tapped, rules)


def _batch_first(values: tf.Tensor) -> tf.Tensor:
    return tf.transpose(tf.cast(values, tf.float32), (1, 0, 2))
