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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_labeldp.gradients._layer_rules import Rule, Taps, Use, shared
from tf_labeldp.gradients.clip import (
    Batch,
    Clip,
    Sums,
    by_chunks,
    in_chunks,
    squared_norms,
    weighted_sum,
)
from tf_labeldp.gradients.layer_graph import TappedModel
from tf_labeldp.gradients.masks import copied


class LayerRecord(NamedTuple):
    """A layer's rule and tensors in one backward pass."""

    name: str
    rule: Rule
    taps: Taps


@dataclasses.dataclass(frozen=True)
class Plan:
    """The way to compute one layer's norms and sum."""

    # Forms all gradients once, for the norms and for the sum.
    keep: bool
    # Computes norms without gradients.
    ghost: bool
    # The number of groups per chunk.
    chunk: int


def make_plans(records: Sequence[LayerRecord], max_bytes: int) -> list[Plan]:
    """Returns a plan for each layer; kept gradients and working memory fit ``max_bytes``."""
    plans: dict[int, Plan] = {}
    candidates: list[tuple[int, int]] = []
    work: dict[int, tuple[bool, int]] = {}
    for place, (name, rule, taps) in enumerate(records):
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
            plans[place] = Plan(keep=True, ghost=False, chunk=0)
    for place, (ghost_norm, size) in work.items():
        if place not in plans:
            plans[place] = Plan(keep=False, ghost=ghost_norm, chunk=max(1, left // size))
    return [plans[place] for place in range(len(records))]


def clipped_sums(
    records: Sequence[LayerRecord], coefficients_of: Callable[[tf.Tensor], Any], max_bytes: int
) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
    """Returns each layer's sum of gradients times coefficients, and the norms (groups,).

    ``coefficients_of`` maps the norms to coefficients (groups,).
    """
    plans = make_plans(records, max_bytes)
    kept = [
        record.rule.gradients(record.taps) if plan.keep else []
        for record, plan in zip(records, plans, strict=True)
    ]
    squares = [
        squared_norms(gradients) if gradients else _norms_in_chunks(record, plan)
        for record, plan, gradients in zip(records, plans, kept, strict=True)
    ]
    norms = tf.sqrt(tf.add_n(squares))
    coefficients = coefficients_of(norms)
    sums = []
    for record, plan, gradients in zip(records, plans, kept, strict=True):
        _, rule, taps = record
        if gradients:
            sums.append([weighted_sum(coefficients, part) for part in gradients])
        elif rule.forms_sum:
            sums.append(_sum_in_chunks(record, plan, coefficients))
        else:
            sums.append(rule.sum(taps, tf.repeat(coefficients, taps.group_size)))
    return sums, norms


def _norms_in_chunks(record: LayerRecord, plan: Plan) -> tf.Tensor:
    """Returns the squared norms (groups,) of a layer, ``plan.chunk`` groups at a time."""
    _, rule, taps = record

    def squares(tensors: Any) -> tf.Tensor:
        chunk = dataclasses.replace(taps, inputs=tensors[0], output_gradients=tensors[1])
        return rule.squared_norms(chunk) if plan.ghost else squared_norms(rule.gradients(chunk))

    whole = taps.inputs, taps.output_gradients

    def of_chunk(parts: Sequence[tf.Tensor]) -> tf.Tensor:
        return squares(tf.nest.pack_sequence_as(whole, parts))

    return by_chunks(of_chunk, tf.nest.flatten(whole), plan.chunk * taps.group_size)


def _sum_in_chunks(record: LayerRecord, plan: Plan, coefficients: tf.Tensor) -> list[tf.Tensor]:
    """Returns the sum of a layer's gradients times coefficients (groups,), formed in chunks."""
    _, rule, taps = record
    tensors = tf.nest.map_structure(
        lambda part: in_chunks(part, plan.chunk * taps.group_size),
        (taps.inputs, taps.output_gradients),
    )
    factors = in_chunks(coefficients, plan.chunk)

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


def _by_weights(uses: Sequence[Use]) -> list[Use]:
    """Returns uses of distinct weights: the norm of a sum is not the sum of norms."""

    def weights(group: Sequence[Use]) -> set[int]:
        return {id(variable) for use in group for variable in use.rule.variables}

    groups: list[list[Use]] = []
    for use in uses:
        joined = [group for group in groups if weights(group) & weights([use])]
        groups = [group for group in groups if not weights(group) & weights([use])]
        groups.append([*itertools.chain(*joined), use])
    return [group[0] if len(group) == 1 else shared(group) for group in groups]


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
        uses = [
            Use(tap.rule, *tap.rule.factors(tap.inputs, tap.outputs, gradient))
            for tap, gradient in zip(taps, batch.unscaled(gradients), strict=True)
        ]
        rules, records = [], []
        for rule, inputs, products in _by_weights(uses):
            own = [coordinates[id(v)] for v in rule.variables] if coordinates else None
            own_taps = Taps(inputs, products, clip.group_size * rule.rows, own)
            rules.append(rule)
            records.append(LayerRecord(rule.layer.name, rule.rule, own_taps))

        sums, norms = clipped_sums(
            records, lambda norms: clip.coefficients(norms, batch, outputs), max_bytes
        )
        by_variable = {
            id(variable): gradient
            for rule, gradients in zip(rules, sums, strict=True)
            for variable, gradient in zip(rule.variables, gradients, strict=True)
        }
        unused = [v for v in variables if id(v) not in by_variable]
        by_variable |= {id(variable): tf.zeros(variable.shape) for variable in unused}
        return [by_variable[id(variable)] for variable in variables], norms, outputs
