"""Operations without a rule: each example passes through them alone, many in parallel."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients._layer_rules import LayerRule, NoRuleError, Rule, Taps, unchanged
from tf_labeldp.gradients.clip import FLOAT16_SCALE
from tf_labeldp.gradients.masks import mask_of
from tf_labeldp.gradients.model_checks import InspectedModel
from tf_labeldp.gradients.vectorized_clipping import ONE_BY_ONE, Trace, check_scope, row_seeds


class RowByRow:
    """An operation that is called in training mode on each example alone, so it can't mix them.

    ``node`` is a call of the operation in the graph of ``model``; its inputs are like ``tensors``,
    with ``masks`` or None.
    """

    def __init__(self, model: keras.Model, node: Any, tensors: list[Any], masks: list[Any]) -> None:
        self._model, self._node = model, node
        self.operation = node.operation
        self._states = InspectedModel(self.operation).seed_states
        self._masked = [place for place, mask in enumerate(masks) if mask is not None]
        self._takes_training = "training" in inspect.signature(self.operation.call).parameters
        # The trained weights that the outputs depend on, of any layer; found by a trace.
        self.variables: tuple[Any, ...] = ()
        self._find_variables([*tensors, *(mask for mask in masks if mask is not None)])
        self.layer_rule = LayerRule(RowByRowRule(self), self.variables, unchanged)

    @property
    def described(self) -> str:
        return f"{self.operation.name!r} ({type(self.operation).__name__})"

    def __call__(self, tensors: list[Any]) -> tuple[list[Any], tuple[Any, Any]]:
        """Returns the outputs for inputs and masks, and the inputs and outputs of the rule."""
        rows = tensors, row_seeds(self._states, tensors[0].shape[0])
        trace = Trace.of(self.alone, rows)
        self.warn_if_slow(trace)
        floats, results = _floating(tensors), []  # type: list[Any], list[Any]

        def backward(*gradients: Any, variables: Any = ()) -> Any:
            kept = [g for g, part in zip(gradients, results, strict=True) if part.dtype.is_floating]
            backs = Trace.of(self._backward, (rows, kept)).map_rows(self._backward, (rows, kept))
            # The rule has the gradients of the weights.
            return (backs, [None] * len(variables)) if variables else backs

        @tf.custom_gradient
        def mapped(*floats: Any) -> Any:
            # A vectorized map would drop the gradients that an operation defines itself.
            nonlocal results
            results = trace.map_rows(self.alone, rows)
            return results, backward

        results = mapped(*floats)
        outputs = results[: len(self._output_masks)]
        masks = iter(results[len(outputs) :])
        for output, has_mask in zip(outputs, self._output_masks, strict=True):
            output._keras_mask = next(masks) if has_mask else None
        return outputs, (rows, _floating(outputs))

    def _backward(self, row: Any) -> list[tf.Tensor]:
        """Returns the gradients of one example's inputs from those of its outputs."""
        (tensors, seeds), gradients = row
        floats = _floating(tensors)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(floats)
            outputs = _floating(self.alone((tensors, seeds)))
        found = tape.gradient(outputs, floats, gradients, unconnected_gradients="zero")
        return [tf.convert_to_tensor(part) for part in found]

    def warn_if_slow(self, trace: Trace) -> None:
        if trace.one_by_one:
            _validate.warn(ONE_BY_ONE.format(name=f"layer {self.described}") + trace.one_by_one)

    def alone(self, row: Any, values: Sequence[Any] = ()) -> list[Any]:
        """Returns the outputs and their masks, from one example's inputs, masks and seeds.

        ``values`` are those of ``variables``; without them the present ones are used.
        """
        tensors, seeds = row
        tensors = [tensor[tf.newaxis] for tensor in tensors]
        count = len(self._node.input_tensors)
        for place, mask in zip(self._masked, tensors[count:], strict=True):
            tensors[place]._keras_mask = mask
        old = map(id, self._node.input_tensors)
        arguments, options = self._node.arguments.fill_in(dict(zip(old, tensors, strict=False)))
        if self._takes_training:
            options = {**options, "training": True}
        mapping = [*zip(self._states, seeds, strict=True)]
        mapping += [*zip(self.variables if values else (), values, strict=True)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = keras.tree.flatten(self.operation(*arguments, **options))
        check_scope(self._model, self._states, scope)
        masks = [mask_of(output) for output in outputs]
        self._output_masks = [mask is not None for mask in masks]
        return [part[0] for part in (*outputs, *masks) if part is not None]

    def _find_variables(self, tensors: list[Any]) -> None:
        self.variables = candidates = tuple(self._model.trainable_variables)

        def example(row: Any) -> Any:
            values = [tf.identity(variable.value) for variable in candidates]
            outputs = self.alone(row, values)
            # No tape records where clipping is prepared.
            gradients = tf.gradients(_floating(outputs), values)
            self.variables = tuple(
                variable
                for variable, gradient in zip(candidates, gradients, strict=True)
                if gradient is not None
            )
            return outputs

        states = [state.value for state in self._states]
        rows = tf.nest.map_structure(
            lambda part: tf.TensorSpec(part.shape, part.dtype), ([t[0] for t in tensors], states)
        )
        try:
            tf.function(example, autograph=False).get_concrete_function(rows)
        except Exception as error:
            raise NoRuleError(f"{self.described} can't run on one example alone") from error


@dataclasses.dataclass(frozen=True)
class RowByRowRule(Rule):
    """Any layer: the gradient of each example is found alone; inputs are (inputs, seeds)."""

    rows: RowByRow
    forms_sum = True

    @property
    def num_weights(self) -> int:
        return sum(math.prod(variable.shape) for variable in self.rows.variables)

    def plain_gradients(self, taps: Taps) -> list[tf.Tensor]:
        rows = taps.inputs, taps.output_gradients
        trace = Trace.of(self._example, rows)
        gradients = trace.map_rows(self._example, rows)
        shape = taps.groups, taps.group_size
        return [tf.reduce_sum(tf.reshape(g, (*shape, *g.shape[1:])), axis=1) for g in gradients]

    def formed_bytes(self, taps: Taps) -> int:
        trace = Trace.of(self._example, (taps.inputs, taps.output_gradients))
        return super().formed_bytes(taps) + taps.group_size * trace.num_bytes

    def _example(self, row: Any) -> list[tf.Tensor]:
        values = [tf.convert_to_tensor(variable.value) for variable in self.rows.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            outputs = _floating(self.rows.alone(row[0], values))
        is_half = any(output.dtype == tf.float16 for output in outputs)
        scale = FLOAT16_SCALE if is_half else 1.0
        directions = [
            tf.cast(scale * gradient, output.dtype)
            for gradient, output in zip(row[1], outputs, strict=True)
        ]
        gradients = tape.gradient(outputs, values, directions, unconnected_gradients="zero")
        return [tf.cast(tf.convert_to_tensor(g), tf.float32) / scale for g in gradients]


def _floating(tensors: list[Any]) -> list[Any]:
    return [tensor for tensor in tensors if tensor.dtype.is_floating]
