"""``poisson_batches``: Poisson-sampled batches of a fixed size, for label-private DP-SGD."""

from __future__ import annotations

import itertools
import numbers
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.data._label_rows import LabelRows
from tf_labeldp.data._one_ahead import OneAhead
from tf_labeldp.data._poisson_sampler import PoissonSampler, uniform_subset
from tf_labeldp.data._row_source import RowSource
from tf_labeldp.data._user_rows import rows_of_users
from tf_labeldp.mechanisms._random import uniform_integers

_WARN_OVERFLOW = 0.01
_BATCH, _ALT, _USERS = range(3)
"""Streams of a seed: asking for a second batch does not change the first one."""


def poisson_batches(
    features: Any,
    labels: Any,
    *,
    sampling_probability: float,
    steps: int,
    buffer_size: int | None = None,
    users: Any = None,
    max_examples_per_user: int | None = None,
    insecure_seed: int | None = None,
) -> PoissonBatches:
    """Returns batches for ``LabelDPModel.fit`` that include each example with probability q.

    Every step draws its batch anew: each example (or user) enters independently with probability
    ``sampling_probability``, as ``accounting.dp_sgd_guarantee`` assumes. Batches vary in size, the
    tensors do not: a batch lies in a buffer of fixed size, with a weight of one on each of its
    rows and of zero on the padding. Only what ``LabelDPModel.fit`` makes of the batches is
    private; so it alone opens them, after it has charged the labels.

    Privacy:
        Sampling does not look at labels, and takes its bits from the operating system, unless a
        seed is given: then the run is "not private: seeded".

        Given which others are in a batch, an example (user) is in it with probability at most
        ``sampling_probability``, exactly: counts are drawn with integer weights, rounded such that
        this holds.

        A batch that does not fit into the buffer is emptied: all its weights are zero, and the
        step is noise alone. So the guarantee of the subsampled Gaussian stands under replacement
        of one label: let R be the batch without example i. If R has fewer examples than the
        buffer, i is in the batch with probability at most q. If R fills the buffer, the batch
        with i is emptied, and the one without i does not depend on i's label; neither does a
        larger R. Under ``relation="add_or_remove"`` it does not stand, as the presence of i
        empties batches. Cutting the batch down to the buffer would break it for both.

        Padding repeats the first row of the features, with the label 0 (or the low end of the
        range) and weight zero, and so is made without labels.

        With ``users``, a user's k rows come together or not at all, so all of this holds for
        replacement of all labels of one user.

        All this rests on batches that nobody sees: an adversary who is shown which examples are in
        a batch, also through its size, gets no amplification by sampling.

    Args:
        features: public features of n examples: an array (n, ...), or a dict or tuple of arrays,
            nested as wanted. What is too big for memory may be an ``np.memmap``, or any object
            with ``__len__`` and ``__getitem__``: it is asked for ``int64`` row numbers (m,),
            increasing and without repeats, as ``h5py`` takes them, and gives an array (m, ...) or
            a dict or tuple of arrays. ``float64`` becomes ``float32``.
        labels: a ``PrivateLabels`` vault of n labels (or rows of labels), or an array (n, ...) of
            numbers. For an array, no vault keeps count of what is spent: that is up to you.
        sampling_probability: q in (0, 1], such that at least two examples (users) are expected in
            a batch.
        steps: steps of an epoch. An epoch is a number of steps and no pass over the data.
        buffer_size: the most examples (users) of a batch. None takes the smallest multiple of 8
            that a batch exceeds with probability at most 1e-9.
        users: for privacy of users, the user of each example (n,): integers, texts or other
            hashable values. Public knowledge.
        max_examples_per_user: k; each user contributes exactly k rows to each of its batches. Of
            more examples k are chosen at random, once; fewer are repeated at random up to k
            (``ghazi2024``, section 6).
        insecure_seed: makes the batches repeatable, and the guarantee "not private: seeded".

    Raises:
        TypeError: features that can't be read by row number, features or labels that are not
            numbers, arguments of a wrong type.
        ValueError: q outside (0, 1], fewer than two examples expected in a batch, a buffer smaller
            than the expected batch, no steps, lengths that differ, labels with NaN, ``users``
            without ``max_examples_per_user`` or the other way round.

    Source: ``ghazi2024``, Algorithm 1, line 2, with the Poisson sampling that its accounting
    (Appendix C) assumes.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> labels = PrivateLabels([0, 1] * 50, num_classes=2, budget=PrivacyBudget(epsilon=1.0))
        >>> features = np.zeros((100, 3), np.float32)
        >>> batches = poisson_batches(features, labels, sampling_probability=0.2, steps=10)
        >>> batches.expected_batch_size, batches.buffer_size
        (20.0, 48)
    """
    source = RowSource(features)
    q = _checked_probability(sampling_probability)
    if (users is None) != (max_examples_per_user is None):
        raise ValueError(
            "users and max_examples_per_user go together: a guarantee for users needs to know who "
            "they are and a limit to what each contributes. Give both, or none."
        )
    seed = insecure_seed
    if seed is not None:
        seed = _validate.integer_at_least("insecure_seed", seed, 0)
    user_rows = None
    if users is not None:
        k = _validate.integer_at_least("max_examples_per_user", max_examples_per_user, 1)
        user_rows = rows_of_users(users, source.num_rows, k, _generator(seed, _USERS))
    return PoissonBatches(
        source,
        LabelRows(labels, source.num_rows),
        _sampler(source.num_rows if user_rows is None else len(user_rows), q, buffer_size),
        q,
        _validate.integer_at_least("steps", steps, 1),
        user_rows,
        seed,
    )


class PoissonBatches:
    """Batches of ``poisson_batches``: says how they are sampled, shows neither them nor labels.

    Attributes:
        labels: the vault, or None if the labels were given as an array.
        num_examples: n, rows of the features.
        num_units: what is sampled: examples, or users.
        sampling_probability: q.
        steps: steps of an epoch.
        buffer_size: the most units of a batch; a batch has ``buffer_size * group_size`` rows.
        expected_batch_size: ``q * num_units``.
        privacy_unit: "label", or "user" if a user's labels are protected together.
        group_size: rows of a unit, which stand together: 1, or k for users.
        seeded: whether a seed was given, which takes the privacy away.

    Example:
        >>> features, labels = np.zeros((100, 3)), np.tile([0, 1], 50)
        >>> poisson_batches(features, labels, sampling_probability=0.2, steps=10)
        PoissonBatches(num_examples=100, sampling_probability=0.2, steps=10, buffer_size=48,
                       privacy_unit='label', group_size=1, seeded=False)
    """

    def __init__(
        self,
        features: RowSource,
        labels: LabelRows,
        sampler: PoissonSampler,
        sampling_probability: float,
        steps: int,
        user_rows: np.ndarray | None,
        seed: int | None,
    ) -> None:
        self._features = features
        self._label_rows = labels
        self._sampler = sampler
        self._user_rows = user_rows
        self._seed = seed
        self._openings = itertools.count()
        self.labels = labels.vault
        self.num_examples = features.num_rows
        self.num_units = sampler.num_units
        self.sampling_probability = sampling_probability
        self.steps = steps
        self.buffer_size = sampler.buffer_size
        self.expected_batch_size = sampling_probability * sampler.num_units
        self.privacy_unit = "label" if user_rows is None else "user"
        self.group_size = 1 if user_rows is None else int(user_rows.shape[1])
        self.seeded = seed is not None

    def _open(self, *, alt_examples: int = 0, disjoint: bool = False) -> tf.data.Dataset:
        """Returns the batches with their true labels; for ``LabelDPModel.fit``, after the charge.

        Args:
            alt_examples: size of a second set of examples, drawn for each step uniformly without
                replacement and independently of the batch; 0 for none.
            disjoint: for a training step that shows which examples are in a batch, and so gets no
                amplification: batches of the expected size without sampling. In every epoch all
                units are put in a random order and taken in turn, so that each is used
                ``ceil(steps / (num_units // size))`` times at most.

        Returns:
            An endless dataset of (x, y, weights), or (x, y, weights, alt_x) if a second set was
            asked for. With B ``buffer_size * group_size`` rows: x has the structure of the
            features, each (B, ...); y is (B, ...), ``int64`` codes or ``float32`` numbers of a
            vault, else the dtype of the array; weights ``float32`` (B,) are one for examples and
            zero for padding; alt_x has the structure of the features, each (alt_examples, ...).

        Raises:
            ValueError: a larger second set than there are examples.
        """
        alt_examples = _validate.integer_at_least("alt_examples", alt_examples, 0)
        if alt_examples > self.num_examples:
            raise ValueError(
                f"a second batch of {alt_examples} examples was asked for, but there are only "
                f"{self.num_examples}. Give the denoiser fewer examples."
            )
        rows = self.buffer_size * self.group_size
        labels, spec = self._label_rows, self._label_rows.spec(rows)
        true_labels = labels.open()
        opening = next(self._openings)
        turns = _Turns(self, opening) if disjoint else None
        x_specs, alt_specs = self._features.specs(rows), self._features.specs(alt_examples)
        specs = [*x_specs, spec, tf.TensorSpec((rows,), tf.float32)]
        specs += alt_specs if alt_examples else []

        def make(step: int) -> list[np.ndarray]:
            drawn = self._draw(opening, step, turns)
            if self._user_rows is not None:
                drawn = self._user_rows[drawn].ravel()
            y = np.full(spec.shape, labels.padding, spec.dtype.as_numpy_dtype)
            y[: drawn.size] = true_labels[drawn]
            weights = np.zeros(rows, np.float32)
            weights[: drawn.size] = 1.0
            batch = [*self._features.read(drawn, rows), y, weights]
            if alt_examples:
                rng = _generator(self._seed, _ALT, opening, step)
                others = uniform_subset(alt_examples, self.num_examples, rng)
                batch += self._features.read(others, alt_examples)
            return batch

        make_ahead = OneAhead(make)

        def element(step: tf.Tensor) -> tuple[Any, ...]:
            tensors = tf.numpy_function(make_ahead, [step], [one.dtype for one in specs])
            for tensor, one in zip(tensors, specs, strict=True):
                tensor.set_shape(one.shape)
            x, (y, weights) = tensors[: len(x_specs)], tensors[len(x_specs) :][:2]
            parts = (self._features.pack(x), y, weights)
            alt = tensors[len(x_specs) + 2 :]
            return (*parts, self._features.pack(alt)) if alt_examples else parts

        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # see OneAhead
        return tf.data.Dataset.counter().map(element).with_options(options)

    @property
    def disjoint_size(self) -> int:
        """Units of a batch where batches are disjoint: the expected size, rounded."""
        return max(1, min(round(self.expected_batch_size), self.buffer_size))

    def _draw(self, opening: int, step: int, turns: _Turns | None) -> np.ndarray:
        """Returns the units of a step's batch."""
        if turns is not None:
            return turns.take(step)
        return self._sampler.draw(_generator(self._seed, _BATCH, opening, step))

    def __iter__(self) -> NoReturn:
        """Raises: the batches have true labels."""
        raise TypeError(
            "PoissonBatches can't be iterated: its batches hold true labels. Pass it to "
            "LabelDPModel.fit, which charges the labels and opens it."
        )

    def __repr__(self) -> str:
        """Returns how the batches are sampled, never a label."""
        names = ["num_examples", "sampling_probability", "steps", "buffer_size"]
        names += ["privacy_unit", "group_size", "seeded"]
        said = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"PoissonBatches({said})"


class _Turns:
    """Batches in which, within a pass, no unit comes twice; each epoch begins a new pass."""

    def __init__(self, batches: PoissonBatches, opening: int) -> None:
        self._batches, self._opening = batches, opening
        self._size = batches.disjoint_size
        self._a_pass = batches.num_units // self._size
        self._current = (-1, -1)
        self._order = np.arange(batches.num_units)

    def take(self, step: int) -> np.ndarray:
        """Returns the sorted units of a step, counted from the first epoch on."""
        epoch, place = divmod(step, self._batches.steps)
        number, place = divmod(place, self._a_pass)
        if self._current != (epoch, number):
            self._current = (epoch, number)
            rng = _generator(self._batches._seed, _BATCH, self._opening, epoch, number)
            self._order = np.argsort(uniform_integers(self._order.size, rng), kind="stable")
        return np.sort(self._order[place * self._size : (place + 1) * self._size])


def _checked_probability(value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"sampling_probability must be a number in (0, 1], got {type(value).__name__}."
        )
    if not 0.0 < float(value) <= 1.0:
        raise ValueError(
            f"sampling_probability must be in (0, 1], got {float(value)}. For an expected batch of "
            "b of n examples, give b / n."
        )
    return float(value)


def _sampler(num_units: int, q: float, buffer_size: Any) -> PoissonSampler:
    expected = round(q * num_units, 6)  # (b / n) * n may miss b
    if expected < 2.0:
        raise ValueError(
            f"a batch needs at least two examples (users) expected, got {expected:g} = "
            f"{q:g} * {num_units}. Raise sampling_probability to at least 2 / {num_units}."
            if num_units >= 2
            else f"a batch needs at least two examples (users), got {num_units} in all."
        )
    if buffer_size is not None:
        buffer_size = _validate.integer_at_least("buffer_size", buffer_size, 1)
        if buffer_size < expected:
            raise ValueError(
                f"buffer_size={buffer_size} is smaller than the expected batch of {expected:g}, so "
                "that most batches would be emptied. Leave it out for one that fits."
            )
    sampler = PoissonSampler(num_units, q, buffer_size)
    lost = sampler.overflow_probability
    if lost > _WARN_OVERFLOW:
        _validate.warn(
            f"{lost:.0%} of the batches will not fit into buffer_size={buffer_size} and be emptied "
            "(their steps are noise alone). Leave buffer_size out for one that fits."
        )
    return sampler


def _generator(seed: int | None, *stream: int) -> np.random.Generator | None:
    """Returns the generator of a stream of a seed, or None for the operating system's bits."""
    if seed is None:
        return None
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))
