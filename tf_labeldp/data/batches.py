"""``poisson_batches``: Poisson-sampled batches of a fixed size, for label-private DP-SGD."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Private, Public, Receipt, Receipts, Setting, public_input
from tf_labeldp.data.poisson_sampler import PoissonSampler, Sampling, Stream
from tf_labeldp.data.row_source import RowSource, kept_dtype
from tf_labeldp.mechanisms.users import UsersOfRows
from tf_labeldp.vault import LabelKind, PrivateLabels, Rows, Users
from tf_labeldp.vault.label_kinds import class_table
from tf_labeldp.vault.uses import LabelsTogether

_WARN_OVERFLOW = 0.01
"""Share of emptied batches: more of them waste steps and budget."""
_HIDDEN = (
    "PoissonBatches can't be iterated, pickled or copied: they contain true labels. Use "
    "LabelDPModel.fit; in another process call poisson_batches there."
)
_MOST_REPEATS = 20
"""The largest number of rows of a user, over the mean, that batches take without being asked."""


@_validate.clears_frames
def poisson_batches(  # noqa: PLR0913 (sampling, weights and users of one table)
    features: Public[Any],
    labels: Private[Any],
    *,
    sampling_probability: float,
    steps: int,
    columns: Setting[Any] = None,
    sample_weight: Public[Any] = None,
    class_weight: Public[Any] = None,
    buffer_size: int | None = None,
    users: Public[Any] = None,
    max_examples_per_user: int | None = None,
    insecure_seed: int | None = None,
) -> PoissonBatches:
    """Returns Poisson-sampled batches for ``LabelDPModel.fit``.

    In each step every example (or user) enters the batch independently with probability
    ``sampling_probability``, as ``accounting.dp_sgd_guarantee`` assumes. A batch fills part of a
    buffer of fixed size: its rows have weight one, the padding has weight zero. Batches contain
    true labels, so only ``LabelDPModel.fit`` can open them. It charges each step before taking it.

    Guarantee:
        Sampling does not look at labels. Its bits come from the operating system; with a seed the
        run is "not private: seeded". Conditional on the other members of a batch, an example (user)
        is in it with probability at most ``sampling_probability``, exactly.

        A batch that overflows the buffer is emptied: all its weights are zero, and the step is
        noise alone. The guarantee of the subsampled Gaussian holds nevertheless under replacement
        of one label: let R be the batch without example i. If R has fewer examples than the buffer,
        i is in the batch with probability at most q; otherwise the step does not depend on i's
        label. Under ``relation="add_or_remove"`` it does not hold, as the presence of i empties
        batches. Truncating batches would break it for both.

        Padding repeats the first row of the features, with the label 0 (or the low end of the
        range), and so does not depend on labels. With ``users``, a user's k rows come together or
        not at all, so all of this holds for replacement of all labels of one user. The same is true
        of all labels of one example, with labels of several outputs.

        Batches must stay hidden: a batch whose members or size are revealed gets no amplification
        by sampling.

    Source: ``ghazi2024``, Algorithm 1, line 2, with the Poisson sampling that its accounting
    (Appendix C) assumes.

    Args:
        features: public features of n examples: an array (n, ...), or a nested dict or tuple of
            arrays; a data frame or list of records, which becomes a matrix of its columns; or a
            ``tf.data.Dataset`` of arrays or dicts, batched or not, in the order of the labels,
            which is read into memory. For data larger than memory, an ``np.memmap`` or any object
            with ``__len__`` and ``__getitem__``: it gets increasing ``int64`` row numbers (m,)
            without repeats, as ``h5py`` takes them, and returns an array (m, ...) or a dict or
            tuple of arrays; or it takes one number and returns one example, as the sources and
            ``MapDataset`` of Grain do. ``float64`` becomes ``float32``.
        labels: a ``PrivateLabels`` vault of n labels (or rows of labels), or an array (n, ...) of
            numbers. With an array you track the privacy budget yourself. For a model with several
            outputs, a dict of them by output, or a list or tuple in the order of the outputs. Row i
            of each is the same example; vaults must be of one population. Each is charged, and the
            unit of privacy is all labels of one example.
        sampling_probability: q in (0, 1]; the expected batch must have at least two examples
            (users), or one for a denoiser that takes single examples (``SelfSpan``).
        steps: steps per epoch. An epoch is a number of steps, not a pass over the data.
        columns: the columns of a vault of rows for each output, a number or a list of numbers:
            ``{"click": 0, "tags": [1, 2, 3]}``, or a list in the order of the outputs.
        sample_weight: public weights (n,), at least zero: factors of the losses before clipping, so
            that a step's sensitivity stays the same. An example of weight zero is left out.
        class_weight: public weights of classes, ``{class: weight}``, 1 for others; by output for
            several, ``{"click": {1: 5.0}}``. A factor of the loss before clipping, like
            ``sample_weight``. Counts of private labels are no public weights: release them.
        buffer_size: the most examples (users) per batch. None takes the smallest multiple of 8 that
            a batch exceeds with probability at most 1e-3: one step in a thousand is then noise
            alone, and the others compute less padding.
        users: for user-level privacy, the user of each example (n,): integers, texts or other
            hashable values. Public knowledge. A vault made with ``users`` knows them.
        max_examples_per_user: k; each user contributes exactly k rows to a batch. None takes the
            most that a user of the vault has, up to 20 times the mean. From a user with
            more examples k are chosen at random, once; fewer are repeated at random up to k
            (``ghazi2024``, section 6).
        insecure_seed: makes the batches repeatable, and the guarantee "not private: seeded".

    Returns:
        A ``PoissonBatches`` for ``LabelDPModel.fit``; it cannot be iterated. Its attributes
        describe the sampling: ``labels`` (the only vault, or None), ``vaults`` (a tuple of all),
        ``num_examples``, ``num_units``
        (examples, or users), ``sampling_probability``, ``steps``, ``buffer_size`` (in units),
        ``expected_batch_size``, ``privacy_unit`` ("label" or "user"), ``group_size`` (rows per
        unit: 1, or k for users) and ``seeded``. Its method ``map`` augments the features.

    Raises:
        TypeError: features without row numbers, features or labels that are not numbers, another
            type than above, vaults together with arrays of labels.
        ValueError: an argument out of range, an expected batch below one example or above the
            buffer, lengths that differ, labels with NaN, ``users`` alone, vaults of different
            populations or of different examples, unsuitable columns or weights.
        RuntimeError: Keras runs on another backend than TensorFlow.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> labels = PrivateLabels([0, 1] * 50, num_classes=2, budget=PrivacyBudget(epsilon=1.0))
        >>> features = np.zeros((100, 3), np.float32)
        >>> poisson_batches(features, labels, sampling_probability=0.2, steps=10)
        PoissonBatches(num_examples=100, sampling_probability=0.2, steps=10, buffer_size=40,
                       privacy_unit='label', group_size=1, seeded=False)
    """
    _validate.keras_on_tensorflow("poisson_batches")
    public = public_input(features, users, sample_weight, class_weight)
    features, users, sample_weight, class_weight = public.value
    labels = OutputLabels.by_output(labels, columns)
    sizes = [len(part) for part in tf.nest.flatten(labels)]
    source = RowSource(features, sizes[0])
    source.check_dtypes()
    sample_weight = Column.weights(sample_weight, source.num_rows, np.float32)
    if class_weight is not None:
        class_table(class_weight, None)
    q = _validate.number_in(
        "sampling_probability",
        sampling_probability,
        "(0, 1]",
        ". For an expected batch of b of n examples, give b / n",
    )
    owners = [vault for vault in OutputLabels.vaults_of(labels) if vault.unit == "user"]
    if owners:
        own = [np.asarray(vault.users) for vault in owners]
        if users is not None or not all(np.array_equal(own[0], other) for other in own):
            raise ValueError("expected the users of the vault, got others. Leave users= out.")
        users = own[0]
        if max_examples_per_user is None:
            max_examples_per_user = _rows_per_user(UsersOfRows(users))
    if (users is None) != (max_examples_per_user is None):
        raise ValueError("expected users and max_examples_per_user, got one of them. Give both.")
    seed = insecure_seed
    if seed is not None:
        seed = _validate.integer_at_least("insecure_seed", seed, 0)
    for size in sizes:
        _validate.one_label_per_row(source.num_rows, size)
    rows_of_units = None
    if users is not None:
        k = _validate.integer_at_least("max_examples_per_user", max_examples_per_user, 1)
        rng = Stream.USERS.generator(seed)
        rows_of_units = Users(users, at_most=k).rows_of_each(source.num_rows, rng)
    if buffer_size is not None:
        buffer_size = _validate.integer_at_least("buffer_size", buffer_size, 1)
    num_units = source.num_rows if rows_of_units is None else len(rows_of_units)
    sampler = PoissonSampler(num_units, q, buffer_size)
    _check_sizes(sampler)
    steps = _validate.integer_at_least("steps", steps, 1)
    sampling = Sampling(sampler, steps, seed, rows_of_units)
    vaults = OutputLabels.vaults_of(labels)
    return PoissonBatches(
        source, labels, vaults, sample_weight, class_weight, sampling, public.receipts
    )


@dataclasses.dataclass(frozen=True, eq=False)
class OutputLabels:
    """The labels of one output.

    Attributes:
        vault: their vault, or None.
        array: labels without a vault, (n, ...); never shown.
        columns: the columns of a vault of rows, (L,), or None for all.
    """

    vault: PrivateLabels | None
    array: np.ndarray | None = dataclasses.field(default=None, repr=False)
    columns: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.array if self.vault is None else self.vault)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(_HIDDEN)

    @property
    def kind(self) -> LabelKind | None:
        """The kind of the labels; None for an array."""
        if self.columns is not None:
            return Rows(self.columns.size)
        return None if self.vault is None else self.vault.kind

    @staticmethod
    def by_output(labels: Any, columns: Any = None) -> Any:
        """Returns ``OutputLabels``, or a dict or tuple of them, for labels of ``poisson_batches``.

        Reads no vault.
        """
        if columns is not None:
            return _labels_of_columns(labels, columns)
        if isinstance(labels, dict):
            parts: Any = {name: _labels_of_one(part) for name, part in labels.items()}
        elif _are_of_outputs(labels):
            parts = tuple(map(_labels_of_one, labels))
        else:
            return _labels_of_one(labels)
        flat = tf.nest.flatten(parts)
        if not flat:
            raise ValueError("expected labels for each output, got none. Give a dict of vaults.")
        if len({part.vault is None for part in flat}) > 1:
            raise TypeError(
                "expected vaults for all outputs, or arrays for all, got both. Put every array "
                "into a PrivateLabels, which counts its uses."
            )
        _check_same_examples([part.vault for part in flat if part.vault is not None])
        return parts

    @staticmethod
    def vaults_of(labels: Any) -> tuple[PrivateLabels, ...]:
        """Returns the vaults of ``OutputLabels``, each label set once."""
        vaults = [part.vault for part in tf.nest.flatten(labels) if part.vault is not None]
        return tuple({vault.label_set.name: vault for vault in vaults}.values())

    def spec(self, rows: int) -> tf.TensorSpec:
        """Returns the spec of a batch; reads no label."""
        if self.kind is None:
            return tf.TensorSpec((rows, *self.array.shape[1:]), self.array.dtype)  # type: ignore[union-attr]
        some = self.kind.any_labels(rows)
        return tf.TensorSpec(some.shape, self.kind.target_dtype)


class _OpenedLabels(NamedTuple):
    """The true labels of an output, their dtype in batches, and the label of padding."""

    values: np.ndarray
    dtype: np.dtype
    padding: Any

    @classmethod
    def of(cls, part: OutputLabels) -> _OpenedLabels:
        if part.vault is None:
            return cls(part.array, part.array.dtype, 0)  # type: ignore[arg-type, union-attr]
        [labels], kind = LabelsTogether([part.vault]).open(), part.vault.kind
        if part.columns is not None:
            labels = labels[:, part.columns]
        return cls(labels, np.dtype(kind.target_dtype), kind.any_labels(1).flat[0])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _BatchReader:
    """Reads batches of features, true labels and weights, padded to a number of rows."""

    features: RowSource
    sample_weight: np.ndarray | None
    rows: int
    labels: list[_OpenedLabels]  # by output
    alt_examples: int

    def label_specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec((self.rows, *y.values.shape[1:]), y.dtype) for y in self.labels]

    def batches(
        self, sampling: Sampling, opening: int, disjoint: bool
    ) -> Callable[[int], list[np.ndarray]]:
        """Returns the batch of a step, with other public examples where they are asked for."""
        rows_of = sampling.in_turn(opening) if disjoint else sampling.sampled(opening)

        def batch(step: int) -> list[np.ndarray]:
            parts = self._read(rows_of(step))
            if self.alt_examples:
                rng = Stream.ALT.generator(sampling.seed, opening, step)
                number = self.features.num_rows
                others = PoissonSampler.uniform_subset(self.alt_examples, number, rng)
                parts += self.features.read(others, self.alt_examples)
            return parts

        return batch

    def _read(self, drawn: np.ndarray) -> list[np.ndarray]:
        parts = self.features.read(drawn, self.rows)
        for labels in self.labels:
            y = np.full((self.rows, *labels.values.shape[1:]), labels.padding, labels.dtype)
            y[: drawn.size] = labels.values[drawn]
            parts.append(y)
        weights = (np.arange(self.rows) < drawn.size).astype(np.float32)
        if self.sample_weight is not None:
            weights[: drawn.size] = self.sample_weight[drawn]
        return [*parts, weights]


class _OneAhead:
    """Computes the result of the next step in a thread, while the one before it is in use."""

    # tf.data's own prefetch hangs if Python exits while it calls Python.
    def __init__(self, function: Callable[[int], list[np.ndarray]]) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._waiting: dict[int, Future[Any]] = {}

    def __call__(self, step: np.ndarray) -> list[np.ndarray]:
        now, submit = int(step), self._pool.submit
        ready = self._waiting.pop(now, None) or submit(self._function, now)
        self._waiting.clear()
        self._waiting[now + 1] = submit(self._function, now + 1)
        return ready.result()


def _are_of_outputs(labels: Any) -> bool:
    """Returns whether a sequence has the labels of several outputs."""
    # A list of arrays may be rows of labels.
    kinds = (PrivateLabels, np.ndarray) if isinstance(labels, tuple) else PrivateLabels
    is_sequence = isinstance(labels, (list, tuple))
    return is_sequence and any(isinstance(part, kinds) for part in labels)


def _check_same_examples(vaults: list[PrivateLabels]) -> None:
    """Raises, or warns, if row i is not the same example in the vaults of all outputs.

    The cost is for the labels of one row: that of a person with different rows would be twice as
    large.
    """
    people = {vault.label_set.people for vault in vaults} - {None}
    if len(people) > 1:
        raise ValueError(
            "expected labels of the same examples for all outputs, got vaults of the "
            f"populations {sorted(map(str, people))}. Give them one name in people=."
        )
    for vault in vaults:
        others = [other for other in vaults if not np.array_equal(other.indices, vault.indices)]
        if any(other.label_set.name == vault.label_set.name for other in others):
            raise ValueError(
                "expected labels of the same examples for all outputs, got different parts "
                "of one vault. Give one part."
            )
        if any(other.label_set.size == vault.label_set.size for other in others):
            _validate.warn(
                "row i of each output must be the same example, and these vaults of equal size "
                "have different rows. Split them by the same held_out=."
            )


def _labels_of_one(labels: Any) -> OutputLabels:
    if isinstance(labels, PrivateLabels):
        return OutputLabels(labels)
    return OutputLabels(None, _checked_labels(labels))


def _labels_of_columns(labels: Any, columns: Any) -> Any:
    num_labels = labels.num_labels if isinstance(labels, PrivateLabels) else None
    if num_labels is None or not isinstance(columns, (dict, list, tuple)):
        raise ValueError(
            "expected columns= as a dict or list, for a vault with num_labels=L, got "
            f"{type(columns).__name__} and {type(labels).__name__}. Give several vaults as a dict."
        )

    def of(chosen: Any) -> OutputLabels:
        numbers = np.atleast_1d(np.asarray(chosen))
        whole = numbers.ndim == 1 and numbers.size and numbers.dtype.kind in "iu"
        if not whole or numbers.min() < 0 or numbers.max() >= num_labels:
            raise ValueError(
                f"expected columns in 0..{num_labels - 1} for each output, got {chosen!r}. Give a "
                "number or a list of numbers."
            )
        return OutputLabels(labels, columns=numbers)

    if isinstance(columns, dict):
        return {name: of(chosen) for name, chosen in columns.items()}
    return tuple(map(of, columns))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PoissonBatches:
    """The batches of ``poisson_batches``; shows their sampling, and no batch or label.

    The one frozen ``Sampling`` is what steps are charged by and batches are drawn by.
    """

    _features: RowSource
    # Not public: the labels of an array are in it.
    _by_output: Any  # OutputLabels, or a dict or tuple of them
    # An attribute, since statements of objects that a user holds look at their attributes.
    vaults: tuple[PrivateLabels, ...]
    sample_weight: np.ndarray | None
    class_weight: Any
    _sampling: Sampling
    receipts: tuple[Receipt, ...]
    _function: Callable[[Any], Any] | None = None  # of the features of a batch
    _openings: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def labels(self) -> PrivateLabels | None:
        """The only vault, or None."""
        return self.vaults[0] if len(self.vaults) == 1 else None

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return self._features.num_rows

    @property
    def num_units(self) -> int:
        """The number of examples, or of users."""
        return self._sampling.sampler.num_units

    @property
    def sampling_probability(self) -> float:
        """The probability with which a unit enters a batch."""
        return self._sampling.sampler.probability

    @property
    def expected_batch_size(self) -> float:
        """The mean number of units in a batch."""
        return self._sampling.sampler.expected_size

    @property
    def buffer_size(self) -> int:
        """The most units in a batch."""
        return self._sampling.sampler.buffer_size

    @property
    def disjoint_size(self) -> int:
        """The number of units per disjoint batch: the expected size, rounded."""
        return self._sampling.disjoint_size

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return self._sampling.steps

    @property
    def group_size(self) -> int:
        """Rows per unit."""
        return self._sampling.group_size

    @property
    def privacy_unit(self) -> str:
        """``"label"`` or ``"user"``."""
        return "label" if self._sampling.rows_of_units is None else "user"

    @property
    def seeded(self) -> bool:
        """Whether a seed makes the batches repeatable."""
        return self._sampling.seed is not None

    def map(self, function: Public[Callable[[Any], Any]]) -> PoissonBatches:
        """Returns these batches with a function applied to the features, such as augmentation.

        Guarantee:
            The function gets the public features of a batch, padding included, and no label. So it
            may draw, and mix rows: clipping comes after it, and a replaced label changes no
            features. It is public like the features, and its receipts are counted. It must not
            write or show the batch, whose members have to stay hidden.

        Args:
            function: features -> features of as many rows, of TensorFlow operations; ``tf.data``
                calls it for each batch, and for the public examples of denoisers.

        Raises:
            ValueError: another number of rows.

        Example:
            >>> from tf_labeldp import PrivacyBudget, PrivateLabels
            >>> labels = PrivateLabels([0, 1] * 50, num_classes=2, budget=PrivacyBudget(1.0))
            >>> images = np.zeros((100, 8, 8, 1), np.float32)
            >>> batches = poisson_batches(images, labels, sampling_probability=0.2, steps=10)
            >>> batches.map(tf.image.random_flip_left_right).feature_specs().shape
            TensorShape([40, 8, 8, 1])
        """
        public = public_input(function)
        earlier, function = self._function, public.value
        mapped = dataclasses.replace(
            self,
            _function=function if earlier is None else lambda x: function(earlier(x)),
            receipts=Receipts.merged(self.receipts, public.receipts),
        )
        for spec in tf.nest.flatten(mapped.feature_specs()):
            rows = self.buffer_size * self.group_size
            if not isinstance(spec, tf.TensorSpec) or spec.shape[:1] != (rows,):
                raise ValueError(
                    f"expected a function that returns {rows} rows, as it gets, got {spec}. Return "
                    "features of the same examples."
                )
        return mapped

    def _open(self, alt_examples: int, disjoint: bool) -> tf.data.Dataset:
        if alt_examples > self.num_examples:
            raise ValueError(
                f"expected at most {self.num_examples} public examples per step, got "
                f"{alt_examples}. Give the denoiser fewer num_examples."
            )
        for part in tf.nest.flatten(self._by_output):
            self._features.check_not_extended(len(part))
        reader = _BatchReader(
            self._features,
            self.sample_weight,
            self.buffer_size * self.group_size,
            [_OpenedLabels.of(part) for part in tf.nest.flatten(self._by_output)],
            alt_examples,
        )
        features = self._features
        spec: tuple[Any, ...] = (
            features.pack(features.specs(reader.rows)),
            tf.nest.pack_sequence_as(self._by_output, reader.label_specs()),
            tf.TensorSpec((reader.rows,), tf.float32),
        )
        if alt_examples:
            spec += (features.pack(features.specs(alt_examples)),)
        flat_spec = tf.nest.flatten(spec)
        function = self._function or (lambda part: part)
        opening = next(self._openings)
        one_ahead = _OneAhead(reader.batches(self._sampling, opening, disjoint))

        def element(step: tf.Tensor) -> tuple[Any, ...]:
            tensors = tf.numpy_function(one_ahead, [step], [part.dtype for part in flat_spec])
            for tensor, part in zip(tensors, flat_spec, strict=True):
                tensor.set_shape(part.shape)
            x, y, weights, *alt = tf.nest.pack_sequence_as(spec, tensors)
            return function(x), y, weights, *(function(part) for part in alt)

        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        return tf.data.Dataset.counter().map(element).with_options(options)

    def features_in_memory(self) -> Any:
        """Returns all features; None if they are read or mapped when needed."""
        return None if self._function else self._features.in_memory()

    def feature_specs(self) -> Any:
        """Returns the specs of the features of a batch, in their structure."""
        specs = self._features.pack(self._features.specs(self.buffer_size * self.group_size))
        if self._function is None:
            return specs

        def mapped(_: tf.Tensor) -> Any:
            some = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)
            return self._function(some)  # type: ignore[misc]

        return tf.data.Dataset.range(1).map(mapped).element_spec

    def _refuse(self, *unused: Any) -> NoReturn:
        raise TypeError(_HIDDEN)

    __iter__ = __reduce_ex__ = _refuse  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"PoissonBatches(num_examples={self.num_examples}, "
            f"sampling_probability={self.sampling_probability!r}, steps={self.steps}, "
            f"buffer_size={self.buffer_size}, privacy_unit={self.privacy_unit!r}, "
            f"group_size={self.group_size}, seeded={self.seeded})"
        )


def open_for_training(
    batches: PoissonBatches, *, alt_examples: int = 0, disjoint: bool = False
) -> tf.data.Dataset:
    """Returns the batches with their true labels; for ``LabelDPModel.fit``, which charges first.

    The dataset is endless: (x, y, weights[, alt_x]) with ``buffer_size * group_size`` rows, weights
    one for examples and zero for padding. ``alt_examples`` is the size of a second set, drawn per
    step uniformly without replacement and independently of the batch. ``disjoint`` replaces
    sampling by disjoint batches of the expected size, for steps that reveal their batch.
    """
    return batches._open(alt_examples, disjoint)


def _checked_labels(labels: Any) -> np.ndarray:
    """Returns a copy of labels without a vault; errors show none of them."""
    array = np.atleast_1d(np.array(Column.of(labels).numbers("labels")))
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"expected labels in a PrivateLabels vault or an array of numbers, got dtype "
            f"{array.dtype}. PrivateLabels(labels, Classes([...])) takes names."
        )
    with np.errstate(over="ignore"):
        array = array.astype(kept_dtype(array.dtype), copy=False)
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        raise ValueError(
            f"expected finite labels ({array.dtype}), but some are not. Leave these examples out, "
            "or fill them in, by a rule that does not look at labels."
        )
    return array


def _rows_per_user(users: UsersOfRows) -> int:
    """Returns the largest number of rows of a user, unless batches would mostly repeat rows."""
    mean = max(1.0, len(users) / max(1, users.counts.size))
    if users.most > _MOST_REPEATS * mean:
        raise ValueError(
            f"expected users with at most {_MOST_REPEATS} times the mean of {mean:.3g} rows, got "
            f"{users.most:,}: each user has as many rows in a batch, most of them repeated. Give "
            "Users(ids, at_most=k) to PrivateLabels."
        )
    return users.most


def _check_sizes(sampler: PoissonSampler) -> None:
    expected = round(sampler.expected_size, 6)  # (b / n) * n may miss b
    if expected < 1.0:
        raise ValueError(
            f"expected batches of at least one example (user) on average, got {expected:g} = "
            f"{sampler.probability:g} * {sampler.num_units}. Raise sampling_probability, or give "
            "more examples."
        )
    if sampler.buffer_size < expected:
        raise ValueError(
            f"expected buffer_size of at least the mean batch, {expected:g}, got "
            f"{sampler.buffer_size}: most batches would be emptied. Leave it out."
        )
    lost = sampler.overflow_probability
    if lost > _WARN_OVERFLOW:
        _validate.warn(
            f"{lost:.0%} of the batches will overflow buffer_size={sampler.buffer_size} and be "
            "emptied: their steps are noise alone. Leave buffer_size out."
        )
