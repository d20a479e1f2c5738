"""PATE for private labels: teachers on shards of the labels vote on some of the examples."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._progress import without_output, without_retracing_warnings
from tf_labeldp.accounting import Private, Public, PublicInput, public_input
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.pate._confident_gnmax import NO_ANSWER, ConfidentGNMax
from tf_labeldp.vault import NoisyLabels, PrivateLabels

Teacher = Callable[[Any, np.ndarray, np.ndarray], np.ndarray]


class PATE:
    """Draws noisy labels of some examples by the votes of teachers on shards of the labels.

    A public seed deals the labels to the teachers. Each teacher learns from its shard and votes on
    the queries, which are examples of the same set; ``ConfidentGNMax`` answers. A student then
    learns from the answers: ``FixMatch(network).fit(images, answers)``.

    Guarantee:
        That of ``ConfidentGNMax``: the answers are (epsilon, delta)-DP for the replacement of one
        label. They are charged to the vault before a teacher is trained, and drawn and stored once.
        Teachers, votes and losses stay inside: they are never returned, shown or saved. Warnings,
        logs and whatever a teacher prints are dropped. A teacher that fails on its shard votes for
        class 0, so that its failure moves no more than a vote does; before the charge, a teacher is
        tried on made-up labels of all classes, where it must not fail. Your own teacher must depend
        on nothing but its arguments, and write no files.

    Source: Algorithm 5 of ``tang2022`` (PATE-FM of Malek et al., 2021), whose teachers are trained
    by FixMatch: ``fix_match_teacher``. The default teacher is a logistic regression on features.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels.
        num_teachers: T, at least 2, at most the number of labels.
        num_queries: M, number of examples that teachers vote on, drawn by the seed.
        max_answers: L, at most M; None for M.
        threshold: share of teachers that must agree, up to the noise, in (0, 1); None answers every
            query.
        teacher: ``teacher(features, labels, queries)``, given the features of all examples, their
            classes ``int64`` (n,) with -1 outside the shard, and the rows of the queries; it
            returns classes (M,). None for a logistic regression.
        seed: public seed of the shards and the queries.
        key: name of the release in a vault.

    Example:
        >>> import tf_labeldp as ldp
        >>> truth = np.arange(900) % 3
        >>> features = 4.0 * np.eye(3)[truth] + np.random.default_rng(0).normal(size=(900, 3))
        >>> labels = ldp.PrivateLabels(truth, 3, budget=ldp.PrivacyBudget(2.0, delta=1e-4))
        >>> answers = PATE(2.0, 1e-4, num_teachers=60, num_queries=20).answer(features, labels)
        >>> len(answers), answers.guarantee().epsilon
        (20, 2.0)
    """

    def __init__(  # noqa: PLR0913 (the paper's parameters)
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
        # Checks the ranges early; the number of classes is known when labels are.
        ConfidentGNMax(num_classes=2, **self._settings)
        self.teacher = logistic_teacher if teacher is None else teacher
        self.seed = seed
        self.key = key

    @_validate.clears_frames
    def answer(self, features: Public[Any], labels: Private[PrivateLabels]) -> NoisyLabels:
        """Trains the teachers and returns the answers.

        Args:
            features: features of all examples for the teacher, numbers (n, ...).
            labels: a vault of classes, with a budget for (epsilon, delta).

        Returns:
            The answers as noisy labels of the answered examples (``indices``).

        Raises:
            BudgetExceededError: the budget does not allow the answers; nothing was released.
            TypeError: labels that are not in a vault.
            ValueError: fewer labels than teachers or queries, another number of features, or a
                teacher that fails on made-up labels, such as one with fewer outputs than classes;
                nothing was released.
        """
        if not isinstance(labels, PrivateLabels):
            raise TypeError(
                f"labels must be a PrivateLabels, got {type(labels).__name__}. Put them into a "
                "vault, which charges and stores the answers."
            )
        size = len(labels)
        num_queries = self._settings["num_queries"]
        if size < max(self.num_teachers, num_queries):
            raise ValueError(
                f"expected a label per teacher and per query, got {size} labels for "
                f"{self.num_teachers} teachers and {num_queries} queries. Use fewer of them."
            )
        public = public_input(features, self.teacher)
        features, teacher = public.value
        mechanism = ConfidentGNMax(num_classes=labels.num_classes, **self._settings)
        teachers = _Teachers(features, teacher, mechanism, self.num_teachers, size, self.seed)
        if not labels.has_draw(self.key):
            teachers.try_one()
        released = labels.release(mechanism, public_input=public.with_value(teachers), key=self.key)
        answered = np.flatnonzero(released.values != NO_ANSWER)
        answers = NoisyLabels(
            released.values[answered],
            teachers.queries[answered],
            mechanism,  # type: ignore[arg-type]
            receipts=released.receipts,
            classes=labels.kind.names,
            of_part=bool(np.any(labels.indices != np.arange(size))),
        )
        return answers.recorded()


class _Teachers:
    """The public part of the teachers, which the mechanism asks for votes."""

    def __init__(
        self,
        features: Any,
        teacher: Teacher,
        mechanism: ConfidentGNMax,
        count: int,
        size: int,
        seed: int,
    ) -> None:
        self._features = np.asarray(features)
        _validate.one_label_per_row(len(self._features), size)
        self._teacher = teacher
        rng = np.random.default_rng(seed)
        self._shard_of = rng.permutation(size) % count
        self._count, self._num_classes = count, mechanism.num_classes
        self.queries = np.sort(rng.choice(size, mechanism.num_queries, replace=False))

    def votes(self, labels: np.ndarray) -> np.ndarray:
        """Returns the class that each teacher votes for, (teachers, queries)."""
        votes = []
        for rows in self._shards():
            try:
                votes.append(self._votes_of_one(rows, labels[rows]))
            except (Exception, SystemExit):
                # Whether a teacher fails may depend on a label of its shard, as its votes do.
                votes.append(np.zeros(len(self.queries), np.uint8))
        return np.stack(votes)

    def try_one(self) -> None:
        """Raises if the first teacher fails on made-up labels, which have every class."""
        rows, most = self._shards()[0], self._num_classes - 1
        try:
            with without_output():
                # The largest class comes first, since a shard may have fewer rows than classes.
                self._votes_of_one(rows, (most - np.arange(len(rows))) % self._num_classes)
        except Exception as error:
            raise ValueError(
                f"expected a teacher for the classes 0..{most}, which votes for one of them at "
                f"each of {len(self.queries)} queries, got {type(error).__name__} on made-up "
                "labels. Mend the teacher, or the number of its network's outputs."
            ) from error

    def _shards(self) -> list[np.ndarray]:
        # Every shard has a row more than the next, or as many.
        return np.array_split(np.argsort(self._shard_of, kind="stable"), self._count)

    def _votes_of_one(self, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
        shard = np.full(len(self._shard_of), NO_ANSWER, dtype=np.int64)
        shard[rows] = labels
        votes = np.asarray(self._teacher(self._features, shard, self.queries))
        if votes.shape != self.queries.shape:
            raise ValueError(f"votes of shape {votes.shape}.")
        classes = _validate.class_indices("votes", votes, self._num_classes)
        return classes.astype(np.min_scalar_type(self._num_classes - 1))

    def digest(self) -> str:
        """Returns the digest that a stored release is bound to."""
        teacher = np.frombuffer(_identity(self._teacher).encode(), np.uint8)
        return PublicInput.digest_of(self._features, self._shard_of, self.queries, teacher)

    def matches(self, digest: str) -> bool:
        before_0_3 = PublicInput.digest_of(self._features, self._shard_of, self.queries)
        return digest in (self.digest(), before_0_3)


def _setting_identity(value: Any) -> str:
    # The name of a Keras layer counts the layers of its process, so it is left out.
    if hasattr(value, "get_config"):
        config = {name: part for name, part in value.get_config().items() if name != "name"}
        return f"{type(value).__qualname__} {config}"
    return _identity(value) if callable(value) else repr(value)


def _identity(teacher: Any) -> str:
    """Returns a text that is equal for the same teacher in any process."""
    if hasattr(teacher, "describe"):
        return str(teacher.describe())
    named = teacher if hasattr(teacher, "__qualname__") else type(teacher)
    source = ""
    # An edit of the library's teacher must not cost its stored answers. Built-in functions and
    # those of interactive sessions have no source.
    if named is not logistic_teacher:
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(named)
    return f"{named.__module__}.{named.__qualname__} {source}"


def logistic_teacher(features: Any, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Returns the votes (M,) of a logistic regression on the labelled rows of features."""
    from sklearn.linear_model import LogisticRegression

    rows = np.flatnonzero(labels >= 0)
    classes = np.unique(labels[rows])
    if len(classes) == 1:
        return np.full(len(queries), classes[0])
    flat = FeatureRows(features, flatten=True)
    model = LogisticRegression(max_iter=200).fit(flat.take(rows), labels[rows])
    return model.predict(flat.take(queries))


def fix_match_teacher(
    network: Public[Any],
    *,
    optimizer: Public[Any] = None,
    epochs: int = 1,
    steps_per_epoch: int = 500,
    batch_size: int = 32,
    **settings: Public[Any],
) -> Teacher:
    """Returns a teacher that trains a network by FixMatch, as in PATE-FM.

    Args:
        network: a built Keras model from images to logits (n, K); each teacher starts from its
            weights.
        optimizer: a Keras optimizer or its name; each teacher gets a new one with these settings.
            None for Adam with a learning rate of 1e-3.
        epochs: epochs of ``steps_per_epoch`` steps each.
        steps_per_epoch: steps per epoch.
        batch_size: size of the labelled batch.
        **settings: further arguments of ``FixMatch``.

    Example:
        >>> import keras
        >>> network = keras.Sequential(
        ...     [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(2)]
        ... )
        >>> rate = keras.optimizers.schedules.CosineDecay(0.03, 500)
        >>> teacher = fix_match_teacher(network, optimizer=keras.optimizers.SGD(rate, momentum=0.9))
        >>> pate = PATE(1.0, 1e-5, num_teachers=5, num_queries=9, teacher=teacher)
    """
    training = (epochs, steps_per_epoch, batch_size)
    return _FixMatchTeacher(network, optimizer, training, settings)


class _FixMatchTeacher:
    """A teacher that starts from the network's weights at construction."""

    def __init__(
        self, network: Any, optimizer: Any, training: tuple[int, int, int], settings: dict[str, Any]
    ) -> None:
        import keras

        public = public_input(network, optimizer, settings)
        self._network, optimizer, self._settings = public.value
        self._optimizer = None if optimizer is None else keras.optimizers.get(optimizer)
        self.receipts = public.receipts
        self._start = self._network.get_weights()
        self._training = training

    @without_retracing_warnings()
    def __call__(self, features: Any, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
        import keras

        from tf_labeldp.semi_supervised import FixMatch
        from tf_labeldp.semi_supervised.targets import Targets

        epochs, steps, batch_size = self._training
        own = keras.models.clone_model(self._network)
        own.set_weights(self._start)
        published = {"threshold": 0.95, "temperature": None, "priors": None}
        model = FixMatch(own, **{**published, **self._settings})
        loss = keras.losses.CategoricalCrossentropy(from_logits=model.from_logits)
        optimizer = self._optimizer or keras.optimizers.Adam(1e-3)
        model.compile(type(optimizer).from_config(optimizer.get_config()), loss)
        # A shard may lack a class, which the error of `fit` would reveal.
        rows = np.flatnonzero(labels >= 0)
        targets = np.eye(model.num_classes, dtype=np.float32)[labels[rows]]
        shard = Targets(rows, targets, np.ones(len(rows), np.float32), None)
        model.fit_targets(features, shard, batch_size, steps, 0, epochs=epochs, verbose=0)
        return model.predict(np.asarray(features)[queries], verbose=0).argmax(axis=1)

    def describe(self) -> str:
        settings = sorted(
            (name, _setting_identity(value)) for name, value in self._settings.items()
        )
        # Stored answers of earlier versions have no optimizer in their digest.
        optimizer = [] if self._optimizer is None else [_setting_identity(self._optimizer)]
        parts = [
            self._network.to_json(),
            PublicInput.digest_of(*self._start),
            self._training,
            settings,
        ]
        return " ".join(map(str, parts + optimizer))
