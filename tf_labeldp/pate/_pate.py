"""PATE for private labels: teachers on shards of the labels answer for some of the examples."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, public_input
from tf_labeldp.accounting.provenance import array_digest
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.pate._confident_gnmax import NO_ANSWER, ConfidentGNMax
from tf_labeldp.vault import NoisyLabels, PrivateLabels

Teacher = Callable[[Any, np.ndarray, np.ndarray], np.ndarray]


class PATE:
    """Noisy labels of some examples, from the votes of teachers on disjoint shards of the labels.

    The labels are dealt to the teachers at random, by a public seed. Each teacher learns from its
    shard and votes on the queries, which are examples of the same set; ``ConfidentGNMax`` answers.
    A student then learns from the answers: ``FixMatch(network).fit(images, answers)``.

    Guarantee:
        That of ``ConfidentGNMax``: the answers are (epsilon, delta)-DP for the replacement of one
        label, charged to the vault before a teacher is trained. They are drawn and stored once.
        Teachers, votes and losses stay inside and are never returned, shown or saved; a teacher
        of your own must keep to that, and must depend on nothing but what it is given.

    Source: Algorithm 5 of ``tang2022`` (PATE-FM of Malek et al., 2021), whose teachers are trained
    by FixMatch: ``fix_match_teacher``. The default teacher is a logistic regression on features.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels.
        num_teachers: T, at least 2, at most one for each label.
        num_queries: M; examples that are asked about, drawn by the seed.
        max_answers: L, at most M; None for M.
        threshold: in (0, 1), the share of the teachers that must agree, up to the noise; None
            answers every query.
        teacher: ``teacher(features, labels, queries)`` with the features of all examples, their
            classes ``int64`` (n,), -1 outside of the shard, and the rows that are asked about;
            it returns classes (M,). None for a logistic regression.
        seed: of the shards and the queries, public.
        key: the name of the release in a vault.

    Example:
        >>> import tf_labeldp as ldp
        >>> truth = np.arange(900) % 3
        >>> features = 4.0 * np.eye(3)[truth] + np.random.default_rng(0).normal(size=(900, 3))
        >>> labels = ldp.PrivateLabels(truth, 3, budget=ldp.PrivacyBudget(2.0, delta=1e-4))
        >>> answers = PATE(2.0, 1e-4, num_teachers=60, num_queries=20).answer(features, labels)
        >>> len(answers), answers.guarantee().epsilon
        (20, 2.0)
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        *,
        num_teachers: int,
        num_queries: int,
        max_answers: int | None = None,
        threshold: float | None = None,
        teacher: Public[Teacher | None] = None,
        seed: int = 0,
        key: str | None = None,
    ) -> None:
        self.num_teachers = _validate.integer_at_least("num_teachers", num_teachers, 2)
        if threshold is not None:
            threshold = _validate.number_in("threshold", threshold, "(0, 1)")
        self._settings: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "num_queries": num_queries,
            "max_answers": num_queries if max_answers is None else max_answers,
            "threshold": None if threshold is None else threshold * self.num_teachers,
        }
        ConfidentGNMax(num_classes=2, **self._settings)  # raises for what is out of range
        self.teacher = logistic_teacher if teacher is None else teacher
        self.seed = seed
        self.key = key

    def answer(self, features: Public[Any], labels: Private[PrivateLabels]) -> NoisyLabels:
        """Trains the teachers, and returns the answers.

        Args:
            features: of all examples, what the teacher takes: numbers (n, ...).
            labels: a vault of classes, with a budget for (epsilon, delta).

        Returns:
            The answers as noisy labels of the examples that have one (``indices``).

        Raises:
            BudgetExceededError: the budget does not allow the answers; nothing was released.
            TypeError: labels that are not in a vault.
            ValueError: fewer labels than teachers or queries, or features of another number.
        """
        if not isinstance(labels, PrivateLabels):
            raise TypeError(
                f"labels must be a PrivateLabels, got {type(labels).__name__}. Put them into a "
                "vault, which charges the answers and stores them."
            )
        size = len(labels)
        asked = self._settings["num_queries"]
        if size < max(self.num_teachers, asked):
            raise ValueError(
                f"there are {size} labels for {self.num_teachers} teachers and {asked} queries; a "
                "teacher needs a label at least. Use fewer of them."
            )
        public = public_input(features, self.teacher)
        features, teacher = public.value
        teachers = _Teachers(features, teacher, self.num_teachers, asked, size, self.seed)
        mechanism = ConfidentGNMax(num_classes=labels.num_classes, **self._settings)
        released = labels.release(mechanism, public_input=public.with_value(teachers), key=self.key)
        answered = np.flatnonzero(released.values != NO_ANSWER)
        return NoisyLabels(
            released.values[answered],
            teachers.queries[answered],
            mechanism,  # type: ignore[arg-type]
            receipts=released.receipts,
            classes=labels.kind.names,
        )


class _Teachers:
    """What the mechanism asks for votes: all that is public of the teachers."""

    def __init__(
        self, features: Any, teacher: Teacher, count: int, asked: int, size: int, seed: int
    ) -> None:
        self._features = np.asarray(features)
        if len(self._features) != size:
            raise ValueError(
                f"there are {len(self._features)} rows of features and {size} labels. Give the "
                "features of all examples, in the order of the labels."
            )
        self._teacher = teacher
        rng = np.random.default_rng(seed)
        self._shard_of = rng.permutation(size) % count
        self._count = count
        self.queries = np.sort(rng.choice(size, asked, replace=False))

    def votes(self, labels: np.ndarray) -> np.ndarray:
        """Returns the class that each teacher votes for, (teachers, queries)."""
        found = []
        for number in range(self._count):
            own = np.where(self._shard_of == number, labels, NO_ANSWER)
            found.append(np.asarray(self._teacher(self._features, own, self.queries)))
        return np.stack(found)

    def digest(self) -> str:
        """Returns what a stored release is known by: features, shards, queries and teacher."""
        made_of = np.frombuffer(_in_words(self._teacher).encode(), np.uint8)
        return array_digest(self._features, self._shard_of, self.queries, made_of)

    def matches(self, digest: str) -> bool:
        before_0_3 = array_digest(self._features, self._shard_of, self.queries)
        return digest in (self.digest(), before_0_3)


def _setting_in_words(value: Any) -> str:
    """Returns what tells a setting of a learner from others, in this process and the next."""
    if hasattr(value, "get_config"):  # a layer, whose name depends on how many were made before
        config = {name: part for name, part in value.get_config().items() if name != "name"}
        return f"{type(value).__qualname__} {config}"
    return _in_words(value) if callable(value) else repr(value)


def _in_words(teacher: Any) -> str:
    """Returns what tells a teacher from others: its ``describe()``, or its name and source."""
    if hasattr(teacher, "describe"):
        return str(teacher.describe())
    named = teacher if hasattr(teacher, "__qualname__") else type(teacher)
    source = ""
    with contextlib.suppress(OSError, TypeError):  # of an interactive session, or built in
        source = inspect.getsource(named)
    return f"{named.__module__}.{named.__qualname__} {source}"


def logistic_teacher(features: Any, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Returns the votes of a logistic regression on the labelled rows of features.

    Args:
        features: numbers (n, d), or (n, ...), which are flattened.
        labels: classes ``int64`` (n,), -1 for rows without.
        queries: rows that are asked about, (M,).

    Returns:
        Classes (M,).
    """
    from sklearn.linear_model import LogisticRegression

    rows = np.flatnonzero(labels >= 0)
    known = np.unique(labels[rows])
    if len(known) == 1:
        return np.full(len(queries), known[0])
    flat = FeatureRows(features, flatten=True)
    model = LogisticRegression(max_iter=200).fit(flat.take(rows), labels[rows])
    return model.predict(flat.take(queries))


def fix_match_teacher(
    network: Public[Any],
    *,
    epochs: int = 1,
    steps_per_epoch: int = 500,
    batch_size: int = 32,
    **settings: Public[Any],
) -> Teacher:
    """Returns a teacher that is a network trained by FixMatch, as PATE-FM has them.

    Args:
        network: a built Keras model from images to logits (n, K); each teacher starts from its
            weights.
        epochs: of ``steps_per_epoch`` steps each.
        steps_per_epoch: of each epoch.
        batch_size: of the labelled stream.
        **settings: further arguments of ``FixMatch``.

    Example:
        >>> import keras
        >>> network = keras.Sequential(
        ...     [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(2)]
        ... )
        >>> teacher = fix_match_teacher(network)
        >>> pate = PATE(1.0, 1e-5, num_teachers=5, num_queries=9, teacher=teacher)
    """
    return _FixMatchTeacher(network, epochs, steps_per_epoch, batch_size, settings)


class _FixMatchTeacher:
    """A teacher that starts from the weights that a network has now."""

    def __init__(
        self, network: Any, epochs: int, steps: int, batch_size: int, settings: dict[str, Any]
    ) -> None:
        public = public_input(network, settings)
        self._network, self._settings = public.value
        self.receipts = public.receipts
        self._start = self._network.get_weights()
        self._training = (epochs, steps, batch_size)

    def __call__(self, features: Any, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
        import keras

        from tf_labeldp.semi_supervised import FixMatch
        from tf_labeldp.semi_supervised.targets import Targets

        epochs, steps, batch_size = self._training
        own = keras.models.clone_model(self._network)
        own.set_weights(self._start)
        model = FixMatch(own, **self._settings)
        loss = keras.losses.CategoricalCrossentropy(from_logits=model.from_logits)
        model.compile(keras.optimizers.Adam(1e-3), loss)
        # A shard may lack a class, which `fit` would refuse, and so reveal.
        rows = np.flatnonzero(labels >= 0)
        targets = np.eye(model.num_classes, dtype=np.float32)[labels[rows]]
        shard = Targets(rows, targets, np.ones(len(rows), np.float32), None)
        model.fit_targets(features, shard, batch_size, steps, 0, epochs=epochs, verbose=0)
        return model.predict(np.asarray(features)[queries], verbose=0).argmax(axis=1)

    def describe(self) -> str:
        settings = sorted((name, _setting_in_words(one)) for name, one in self._settings.items())
        return f"{self._network.to_json()} {array_digest(*self._start)} {self._training} {settings}"
