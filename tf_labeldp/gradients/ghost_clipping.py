"""Clipped sums in one backward pass per batch, for models that are graphs of layers.

Book-keeping (Bu et al. 2023, "Differentially private optimization on large foundation models at
almost no cost", algorithm 1): the inputs and output gradients of the layers give the norms and
then, scaled, the clipped sum. The gradients of a layer are formed and kept for the sum if that is
faster than Gram matrices (Bu et al. 2022, "Scalable and efficient training of large convolutional
neural networks with differential privacy") and if memory allows it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_labeldp.gradients._layer_rules import Rule, Taps
from tf_labeldp.gradients.clip import (
    Batch,
    Clip,
    Sums,
    by_chunks,
    in_chunks,
    squared_norms,
    weighted_sum,
)
from tf_labeldp.gradients.layer_graph import Tap, TappedModel
from tf_labeldp.gradients.masks import copied


class LayerCall(NamedTuple):
    """A rule with the tensors of one call of its layer in a backward pass."""

    # The name of the layer.
    name: str
    rule: Rule
    taps: Taps
    variables: tuple[Any, ...] = ()

    @classmethod
    def of(cls, tap: Tap, output_gradients: Any) -> LayerCall:
        """Returns the call of a tap, given the gradients of its outputs."""
        rule = tap.rule
        inputs, products = rule.factors(tap.inputs, tap.outputs, output_gradients)
        return cls(tap.name, rule.rule, Taps(inputs, products, rule.rows), rule.variables)


@dataclasses.dataclass(frozen=True)
class _SharedRule(Rule):
    """Several calls with the same weights: their gradients add up before the norm.

    Inputs and output gradients are tuples with those of each call, by example.
    """

    # Of each call: its rule, weights and number of rows per example.
    calls: tuple[tuple[Rule, tuple[Any, ...], int], ...]
    variables: tuple[Any, ...]
    forms_sum = True

    @property
    def num_weights(self) -> int:
        return sum(math.prod(variable.shape) for variable in self.variables)

    def plain_gradients(self, taps: Taps) -> list[tf.Tensor]:
        sums: dict[int, tf.Tensor] = {}
        for (rule, variables, _), own in zip(self.calls, self._taps(taps), strict=True):
            for variable, gradient in zip(variables, rule.plain_gradients(own), strict=True):
                key = id(variable)
                sums[key] = sums[key] + gradient if key in sums else gradient
        return [sums[id(variable)] for variable in self.variables]

    def formed_bytes(self, taps: Taps) -> int:
        # The sums, and the gradients of one call.
        return super().formed_bytes(taps) + max(
            rule.formed_bytes(own)
            for (rule, _, _), own in zip(self.calls, self._taps(taps), strict=True)
        )

    def _taps(self, taps: Taps) -> list[Taps]:
        def flat(values: Any, rows: int) -> Any:
            return values if rows == 1 else tf.reshape(values, (-1, *values.shape[2:]))

        return [
            Taps(flat(inputs, rows), flat(gradients, rows), taps.group_size * rows)
            for (_, _, rows), inputs, gradients in zip(
                self.calls, taps.inputs, taps.output_gradients, strict=True
            )
        ]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The way to compute one layer's norms and sum."""

    # Forms all gradients once, for the norms and for the sum.
    keep: bool
    # Computes norms without gradients.
    ghost: bool
    # The number of groups per chunk.
    chunk: int


def make_schedules(calls: Sequence[LayerCall], max_bytes: int) -> list[Schedule]:
    """Returns a schedule for each layer; kept gradients and working memory fit ``max_bytes``."""
    schedules: dict[int, Schedule] = {}
    candidates: list[tuple[int, int]] = []
    work: dict[int, tuple[bool, int]] = {}
    for place, (name, rule, taps, _) in enumerate(calls):
        formed = rule.formed_bytes(taps)
        ghost = rule.norm_bytes(taps)
        if ghost is not None and ghost < formed:
            work[place] = (True, ghost)
        else:
            work[place] = (False, formed)
        if not work[place][0] or rule.forms_faster(taps):
            candidates.append((formed * taps.groups, place))
        if work[place][1] > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes} is too small for layer {name!r}: the norm of one gradient "
                f"needs {work[place][1]} bytes. Raise max_bytes to at least that."
            )
    left = max_bytes
    for needed, place in sorted(candidates):
        # Kept gradients leave room for one group of any layer that is processed in chunks.
        reserve = max((size for other, (_, size) in work.items() if other != place), default=0)
        if needed + reserve <= left:
            left -= needed
            schedules[place] = Schedule(keep=True, ghost=False, chunk=0)
    for place, (ghost_norm, size) in work.items():
        if place not in schedules:
            schedules[place] = Schedule(keep=False, ghost=ghost_norm, chunk=max(1, left // size))
    return [schedules[place] for place in range(len(calls))]


def clipped_sums(
    calls: Sequence[LayerCall], coefficients_of: Callable[[tf.Tensor], Any], max_bytes: int
) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
    """Returns each layer's sum of gradients times coefficients, and the norms (groups,).

    ``coefficients_of`` maps the norms to coefficients (groups,).
    """
    schedules = make_schedules(calls, max_bytes)
    kept = [
        call.rule.gradients(call.taps) if schedule.keep else []
        for call, schedule in zip(calls, schedules, strict=True)
    ]
    squares = [
        squared_norms(gradients) if gradients else _norms_in_chunks(call, schedule)
        for call, schedule, gradients in zip(calls, schedules, kept, strict=True)
    ]
    norms = tf.sqrt(tf.add_n(squares))
    coefficients = coefficients_of(norms)
    sums = []
    for call, schedule, gradients in zip(calls, schedules, kept, strict=True):
        rule, taps = call.rule, call.taps
        if gradients:
            sums.append([weighted_sum(coefficients, part) for part in gradients])
        elif rule.forms_sum:
            sums.append(_sum_in_chunks(call, schedule, coefficients))
        else:
            sums.append(rule.sum(taps, tf.repeat(coefficients, taps.group_size)))
    return sums, norms


def _norms_in_chunks(call: LayerCall, schedule: Schedule) -> tf.Tensor:
    """Returns the squared norms (groups,) of a layer, ``schedule.chunk`` groups at a time."""
    rule, taps = call.rule, call.taps

    def squares(tensors: Any) -> tf.Tensor:
        chunk = dataclasses.replace(taps, inputs=tensors[0], output_gradients=tensors[1])
        return rule.squared_norms(chunk) if schedule.ghost else squared_norms(rule.gradients(chunk))

    whole = taps.inputs, taps.output_gradients

    def of_chunk(parts: Sequence[tf.Tensor]) -> tf.Tensor:
        return squares(tf.nest.pack_sequence_as(whole, parts))

    return by_chunks(of_chunk, tf.nest.flatten(whole), schedule.chunk * taps.group_size)


def _sum_in_chunks(call: LayerCall, schedule: Schedule, coefficients: tf.Tensor) -> list[tf.Tensor]:
    """Returns the sum of a layer's gradients times coefficients (groups,), formed in chunks."""
    rule, taps = call.rule, call.taps
    tensors = tf.nest.map_structure(
        lambda part: in_chunks(part, schedule.chunk * taps.group_size),
        (taps.inputs, taps.output_gradients),
    )
    factors = in_chunks(coefficients, schedule.chunk)

    def of_chunk(number: Any) -> list[tf.Tensor]:
        inputs, gradients = tf.nest.map_structure(lambda part: part[number], tensors)
        chunk = dataclasses.replace(taps, inputs=inputs, output_gradients=gradients)
        return [weighted_sum(factors[number], part) for part in rule.gradients(chunk)]

    _, sums = tf.while_loop(
        lambda number, sums: number < factors.shape[0],
        lambda number, sums: (
            number + 1,
            [total + part for total, part in zip(sums, of_chunk(number), strict=True)],
        ),
        (tf.constant(1), of_chunk(0)),
        parallel_iterations=1,
    )
    return sums


def _by_weights(calls: Sequence[LayerCall]) -> list[LayerCall]:
    """Returns calls of distinct weights: the norm of a sum is not the sum of norms."""

    def weights(group: Sequence[LayerCall]) -> set[int]:
        return {id(variable) for call in group for variable in call.variables}

    groups: list[list[LayerCall]] = []
    for call in calls:
        joined = [group for group in groups if weights(group) & weights([call])]
        groups = [group for group in groups if not weights(group) & weights([call])]
        groups.append([*itertools.chain(*joined), call])
    return [group[0] if len(group) == 1 else _shared(group) for group in groups]


def _shared(calls: Sequence[LayerCall]) -> LayerCall:
    """Returns one call that stands for several calls with the same weights.

    Their groups are single examples.
    """
    first = calls[0]
    identities = {tuple(map(id, call.variables)) for call in calls}
    if len(identities) == 1 and all(call.rule == first.rule for call in calls):
        whole = first.rule.at_all_positions([call.taps for call in calls])
        if whole is not None:
            return first._replace(taps=whole)

    def by_example(values: Any, rows: int) -> Any:
        return values if rows == 1 else tf.reshape(values, (-1, rows, *values.shape[1:]))

    variables = tuple({id(v): v for call in calls for v in call.variables}.values())
    parts = tuple((call.rule, call.variables, call.taps.group_size) for call in calls)
    taps = Taps(
        tuple(by_example(call.taps.inputs, call.taps.group_size) for call in calls),
        tuple(by_example(call.taps.output_gradients, call.taps.group_size) for call in calls),
    )
    return LayerCall(first.name, _SharedRule(parts, variables), taps, variables)


class GhostClipping:
    """Clips a functional or sequential model; raises ``NoRuleError`` for any other."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._tapped = TappedModel(model)

    @property
    def vectorized(self) -> list[str]:
        """The layers with trained weights and no rule."""
        return [rows.described for rows in self._tapped.row_by_row if rows.variables]

    @property
    def by_row(self) -> bool:
        """Whether an operation runs on each example alone."""
        return bool(self._tapped.row_by_row)

    def forward(self, x: Any) -> Any:
        """Returns the outputs of the model in training mode, as ``sums`` does."""
        return self._tapped(x)[0]

    def sums(self, batch: Batch, clip: Clip, max_bytes: int) -> Sums:
        """Returns the clipped sum for each trainable variable, the norms and the outputs."""
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            # The tape does not watch a variable that was created frozen.
            tape.watch([variable.value for variable in variables])
            outputs, taps = self._tapped(batch.x)
            # Keras computes a loss of probabilities from the logits they refer to, which would
            # bypass the tensors of this gradient; a copy has no such reference.
            objective = clip.objective(batch, copied(outputs))
        gradients = tape.gradient(
            objective, [tap.outputs for tap in taps], unconnected_gradients="zero"
        )

        coordinates = {}
        if clip.coordinates is not None:
            coordinates = dict(zip(map(id, variables), clip.coordinates, strict=True))
        calls = []
        backward = zip(taps, batch.unscaled(gradients), strict=True)
        for call in _by_weights(list(itertools.starmap(LayerCall.of, backward))):
            own = [coordinates[id(v)] for v in call.variables] if coordinates else None
            group_size = clip.group_size * call.taps.group_size
            grouped = dataclasses.replace(call.taps, group_size=group_size, coordinates=own)
            calls.append(call._replace(taps=grouped))

        sums, norms = clipped_sums(
            calls, lambda norms: clip.coefficients(norms, batch, outputs), max_bytes
        )
        by_variable = {
            id(variable): gradient
            for call, gradients in zip(calls, sums, strict=True)
            for variable, gradient in zip(call.variables, gradients, strict=True)
        }
        unused = [v for v in variables if id(v) not in by_variable]
        by_variable |= {id(variable): tf.zeros(variable.shape) for variable in unused}
        return [by_variable[id(variable)] for variable in variables], norms, outputs
