"""Clips and sums per-example gradients of known layers after one backward pass.

Book-keeping (Bu et al. 2023, "Differentially private optimization on large foundation models at
almost no cost", algorithm 1): the inputs and output gradients of the layers give the norms first
and then, scaled, the clipped sum. A layer's gradients are formed and kept for the sum where that
is cheaper than their Gram matrices (Bu et al. 2022, "Scalable and efficient training of large
convolutional neural networks with differential privacy": 2 T^2 against the number of weights) and
where memory allows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_labeldp.gradients._layer_gradients import FLOAT_BYTES, Rule


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """What one layer saw in one backward pass.

    Attributes:
        name: of the layer.
        rule: how its gradient follows.
        inputs: (B, ...), ``float32`` (integers for embeddings).
        output_gradients: (B, ...), ``float32``; the weight of each row is in them.
        scales: factors on the gradient, like the weights; None for ones.
    """

    name: str
    rule: Rule
    inputs: tf.Tensor
    output_gradients: tf.Tensor
    scales: list[tf.Tensor] | None = None

    def norm_bytes(self, group_size: int) -> int | None:
        """Returns the memory of one norm without its gradient; None if there is no way."""
        if self.scales is None:
            return self.rule.norm_bytes(self.output_gradients, group_size)
        return self.rule.scaled_norm_bytes(self.output_gradients, group_size)

    def scaled(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns gradients (like the weights, or with more axes before) times the scales."""
        if self.scales is None:
            return gradients
        return [g * scale for g, scale in zip(gradients, self.scales, strict=True)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one layer is handled.

    Attributes:
        keep: form all gradients once, and use them for the norms and for the sum.
        ghost: norms without gradients.
        chunk: groups whose norms are computed at a time.
    """

    keep: bool
    ghost: bool
    chunk: int


def make_plans(records: Sequence[LayerRecord], group_size: int, max_bytes: int) -> list[Plan]:
    """Decides for each layer, so that all that is kept and worked on fits into ``max_bytes``."""
    plans: dict[int, Plan] = {}
    wanted: list[tuple[int, int]] = []
    work: dict[int, tuple[bool, int]] = {}
    for place, record in enumerate(records):
        groups = record.output_gradients.shape[0] // group_size
        formed = FLOAT_BYTES * record.rule.num_weights
        ghost = record.norm_bytes(group_size)
        if ghost is not None and ghost < formed:
            work[place] = (True, ghost)
        else:
            work[place] = (False, formed)
            wanted.append((formed * groups, place))
        if work[place][1] > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes} is too small for layer {record.name!r}: the norm of one "
                f"gradient needs {work[place][1]} bytes. Raise max_bytes to at least that."
            )
    left = max_bytes
    for needed, place in sorted(wanted):
        # What is kept leaves room for one group of any layer that is worked on in chunks.
        reserve = max((size for other, (_, size) in work.items() if other != place), default=0)
        if needed + reserve <= left:
            left -= needed
            plans[place] = Plan(keep=True, ghost=False, chunk=0)
    for place, (ghost_norm, size) in work.items():
        if place not in plans:
            plans[place] = Plan(keep=False, ghost=ghost_norm, chunk=max(1, left // size))
    return [plans[place] for place in range(len(records))]


def clipped_sums(
    records: Sequence[LayerRecord], group_size: int, l2_norm_clip: tf.Tensor, max_bytes: int
) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
    """Returns each layer's sum of clipped group gradients, and the norms (B / group_size,) before.

    A group whose norm is not finite adds exactly zero.
    """
    plans = make_plans(records, group_size, max_bytes)
    squares: list[tf.Tensor] = []
    kept: list[list[tf.Tensor]] = []
    for record, plan in zip(records, plans, strict=True):
        formed = []
        if plan.keep:
            formed = record.scaled(
                record.rule.gradients(record.inputs, record.output_gradients, group_size)
            )
            squares.append(_squared_norms(formed))
        else:
            squares.append(_norms_in_chunks(record, plan, group_size))
        kept.append(formed)
    norms = tf.sqrt(tf.add_n(squares))
    coefficients = clip_coefficients(norms, l2_norm_clip)
    rows = tf.repeat(coefficients, group_size)
    sums = []
    for record, formed in zip(records, kept, strict=True):
        if formed:
            sums.append([weighted_sum(coefficients, gradient) for gradient in formed])
        else:
            whole = record.rule.sum(
                zero_where(rows == 0, record.inputs),
                _scaled(rows, zero_where(rows == 0, record.output_gradients)),
            )
            sums.append(record.scaled(whole))
    return sums, norms


def clip_coefficients(norms: tf.Tensor, l2_norm_clip: tf.Tensor) -> tf.Tensor:
    """Returns min(1, C / norm) for each norm, and zero for those that are not finite."""
    coefficients = l2_norm_clip / tf.maximum(norms, l2_norm_clip)
    return tf.where(tf.math.is_finite(norms), coefficients, 0.0)


def weighted_sum(coefficients: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
    """Returns the sum over the first axis; rows with coefficient zero count nothing, even NaN."""
    return tf.tensordot(coefficients, zero_where(coefficients == 0, gradients), 1)


def zero_where(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns ``values`` (B, ...) with zeros in the rows where ``rows`` (B,) is true."""
    shape = (rows.shape[0], *(1,) * (values.shape.rank - 1))
    return tf.where(tf.reshape(rows, shape), tf.zeros((), values.dtype), values)


def _scaled(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return values * tf.reshape(rows, (rows.shape[0], *(1,) * (values.shape.rank - 1)))


def _squared_norms(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the squared norms over all weights, (N,)."""
    return tf.add_n(
        [tf.reduce_sum(tf.square(g), axis=list(range(1, g.shape.rank))) for g in gradients]
    )


def _norms_in_chunks(record: LayerRecord, plan: Plan, group_size: int) -> tf.Tensor:
    """Returns the squared norms (N,) of a layer, ``plan.chunk`` groups at a time."""

    def norms(inputs: tf.Tensor, output_gradients: tf.Tensor) -> tf.Tensor:
        if plan.ghost and record.scales is not None:
            return record.rule.scaled_squared_norms(inputs, output_gradients, record.scales)
        if plan.ghost:
            return record.rule.squared_norms(inputs, output_gradients, group_size)
        formed = record.rule.gradients(inputs, output_gradients, group_size)
        return _squared_norms(record.scaled(formed))

    return map_chunks(
        norms, (record.inputs, record.output_gradients), plan.chunk * group_size, plan.chunk
    )


def map_chunks(
    function: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor], rows: int, results: int
) -> tf.Tensor:
    """Applies ``function`` to ``rows`` rows at a time, one chunk after the other."""
    batch = tensors[0].shape[0]
    if rows >= batch:
        return function(*tensors)
    num_chunks = -(-batch // rows)

    def split(tensor: tf.Tensor) -> tf.Tensor:
        padding = [(0, num_chunks * rows - batch), *[(0, 0)] * (tensor.shape.rank - 1)]
        sizes = [
            tf.shape(tensor)[axis] if size is None else size
            for axis, size in enumerate(tensor.shape)
        ]
        return tf.reshape(tf.pad(tensor, padding), (num_chunks, rows, *sizes[1:]))

    mapped = tf.map_fn(
        lambda chunk: function(*chunk),
        [split(tensor) for tensor in tensors],
        fn_output_signature=tf.TensorSpec((results,), tf.float32),
        parallel_iterations=1,  # in parallel, the chunks would need the memory of all
    )
    return tf.reshape(mapped, (-1,))[: batch * results // rows]
