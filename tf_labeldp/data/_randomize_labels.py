"""``randomize_labels``: noisy labels in a tf.data pipeline, drawn once for the life of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import PrivacyBudget, PrivacyGuarantee
from tf_labeldp.data._elements import check_label_spec, find_label
from tf_labeldp.data._read import (
    check_no_repeat,
    check_order,
    checked_id_fn,
    read_labels,
)
from tf_labeldp.data._replace import replace_by_id, replace_in_order
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    LabelMechanism,
    RegressionMechanism,
    checked_mechanism,
)
from tf_labeldp.private_labels import PrivateLabels

_ASSUMPTIONS = (
    "features, sample weights, ids, every other column, and which examples come in which order, "
    "were made without the labels",
    "no example comes twice in the dataset that was randomized",
)


def randomize_labels(
    mechanism: LabelMechanism,
    *,
    label_key: str = "label",
    id_fn: Callable[[Any], Any] | None = None,
    priors: Any = None,
    budget: PrivacyBudget | None = None,
    store: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    verbose: bool = True,
) -> LabelRandomization:
    """Returns a transform for ``dataset.apply`` that replaces each true label by a noisy one.

    ``apply`` reads the labels in one pass into a ``PrivateLabels`` vault, draws one noisy label for
    each example, and returns a dataset with those. Every epoch, and every shuffle, batch, shard,
    repeat, cache or prefetch that follows, sees the same draw. A ``map`` that draws noise would run
    again in each epoch: over ten epochs an adversary sees ten draws of each label, and ten times
    epsilon is spent.

    Guarantee:
        The dataset that ``apply`` returns is (mechanism.epsilon, mechanism.delta)-label-DP for the
        replacement of one label, however often it is iterated. It rests on the vault's assumptions
        (``guarantee().assumptions``), and on features, sample weights, ids and order that were made
        without the labels: drop columns that say the label again, such as a coarser class, first.
        The true label is not in the returned elements; an example that has no noisy label raises.
        The source dataset still has the true labels: train on the returned one.

    Examples are told apart by their place in the source, which must then give the same elements in
    the same order each time, or by ``id_fn``. Apply the transform directly on the source, before
    maps that decode or augment: the pass over the labels then runs none of them.

    Args:
        mechanism: how a label is randomized; labels are integers 0..K-1 with its K, or, for a
            mechanism of numbers, floats in its range (clip them to it in a ``map`` before).
        label_key: key of the label, for elements that are dicts (as TFDS gives them). Elements
            ``(x, y)`` and ``(x, y, sample_weight)`` have it in second place.
        id_fn: maps the features of one element, x of a tuple or the dict without its label, to a
            scalar integer or string tensor that no other example has. Needed for sources in an
            order of their own each time (shuffled, read in parallel), and for pipelines that
            distribute files among workers. It is called on blocks of examples through
            ``tf.vectorized_map``, so it should be made of TensorFlow operations.
        priors: probabilities for mechanisms that use them: (K,), or (n, K) in the order of the
            source (not with ``id_fn``).
        budget: the most that may be spent on one label; the mechanism's epsilon and delta if None.
        store: folder that keeps the draw, so that a second run reads it and spends nothing. Written
            in the order of the source, or of the sorted ids, whatever the order of the source is.
        seed: makes the draw repeatable; the statement then says "not private: seeded".
        verbose: print a line to stderr every few seconds of a long pass.

    Raises:
        TypeError: ``mechanism`` is not a mechanism, ``id_fn`` not callable, ``budget`` no budget.
        ValueError: priors missing, not wanted, or of a wrong shape.

    Example:
        >>> import tensorflow as tf
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> source = tf.data.Dataset.from_tensor_slices(([[0.5], [1.5], [2.5]], [0, 2, 1]))
        >>> private = randomize_labels(RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> dataset = source.apply(private)
        >>> batches = dataset.shuffle(3).batch(2).repeat(10)
        >>> private.guarantee().epsilon
        1.0
    """
    return LabelRandomization(
        mechanism,
        label_key=label_key,
        id_fn=id_fn,
        priors=priors,
        budget=budget,
        store=store,
        seed=seed,
        verbose=verbose,
    )


class LabelRandomization:
    """The transform that ``randomize_labels`` makes; its arguments are there.

    Good for one dataset: a second one would need a draw, and a charge, of its own.

    Guarantee:
        ``guarantee()`` is that of the vault made by ``apply``: one draw a label, whatever the
        number of epochs.

    Example:
        >>> import tensorflow as tf
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> transform = LabelRandomization(RandomizedResponse(epsilon=2.0, num_classes=2))
        >>> dataset = tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [0, 1])).apply(transform)
        >>> transform.private_labels.guarantee().epsilon
        2.0
    """

    def __init__(
        self,
        mechanism: LabelMechanism,
        *,
        label_key: str = "label",
        id_fn: Callable[[Any], Any] | None = None,
        priors: Any = None,
        budget: PrivacyBudget | None = None,
        store: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        verbose: bool = True,
    ) -> None:
        if id_fn is not None and not callable(id_fn):
            raise TypeError(
                f"id_fn must be a function of an example's features, got {type(id_fn).__name__}, "
                'for example id_fn=lambda x: x["id"].'
            )
        if budget is not None and not isinstance(budget, PrivacyBudget):
            raise TypeError(
                f"budget must be a PrivacyBudget, got {type(budget).__name__}. Write "
                "budget=PrivacyBudget(epsilon=1.0), or leave it out."
            )
        self._mechanism = checked_mechanism(mechanism, LabelMechanism)
        self._label_key = label_key
        self._id_fn = id_fn
        self._priors = _checked_priors(mechanism, priors, with_ids=id_fn is not None)
        self._budget = budget or PrivacyBudget(mechanism.epsilon, mechanism.delta)
        self._store = store
        self._seed = seed
        self._verbose = bool(verbose)
        self._private_labels: PrivateLabels | None = None

    @property
    def mechanism(self) -> LabelMechanism:
        """The mechanism."""
        return self._mechanism

    @property
    def private_labels(self) -> PrivateLabels | None:
        """The vault that ``apply`` made, in the order of the source or of the sorted ids, or None.

        Further draws from it are charged to the same examples.
        """
        return self._private_labels

    def guarantee(self) -> PrivacyGuarantee:
        """Returns the statement on the labels of the dataset that was returned.

        Raises:
            RuntimeError: the transform has not been applied.
        """
        if self._private_labels is None:
            raise RuntimeError(
                "no label has been randomized yet, so there is nothing to state. Apply the "
                "transform first: dataset = dataset.apply(transform)."
            )
        return self._private_labels.guarantee().with_assumptions(_ASSUMPTIONS)

    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Draws a noisy label for each element; called by ``dataset.apply``.

        Args:
            dataset: single examples, ``(x, y)``, ``(x, y, sample_weight)`` or a dict, x any
                structure of tensors, y a scalar integer in 0..K-1, or a scalar float for a
                mechanism of numbers.

        Returns:
            A dataset with the same ``element_spec`` and order.

        Raises:
            TypeError: not a ``tf.data.Dataset``, labels of a wrong type, ids that are neither
                integers nor strings.
            ValueError: no labels, batches in the place of examples, labels outside the classes or
                the range, an empty or endless dataset, an order that changes, ids that repeat.
            RuntimeError: applied before, or inside a ``tf.function``.
            BudgetExceededError: the budget is below the mechanism's epsilon; nothing was drawn.
            LabelStoreError: the store is of other labels or settings, or damaged.
        """
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"a tf.data.Dataset is expected, got {type(dataset).__name__}. For arrays, use "
                "PrivateLabels(labels, ...).randomize(mechanism)."
            )
        if self._private_labels is not None:
            raise RuntimeError(
                "this transform has been applied already; a second draw would be a second charge. "
                "Use the dataset that it returned for every epoch and every pipeline; for other "
                "data make a new transform with randomize_labels."
            )
        if not tf.executing_eagerly():
            raise RuntimeError(
                "randomize_labels reads the labels when it is applied, which needs eager "
                "execution. Apply it outside tf.function and outside other datasets' functions."
            )
        slot = find_label(dataset.element_spec, self._label_key)
        spec = slot.label(dataset.element_spec)
        dtype = check_label_spec(spec, _num_classes(self._mechanism))
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "the dataset is endless, so its labels cannot be read. Apply randomize_labels "
                "before .repeat()."
            )
        check_no_repeat(dataset)
        id_of = None if self._id_fn is None else checked_id_fn(self._id_fn)
        if id_of is None:
            check_order(dataset, slot)
        labels, ids = read_labels(dataset, slot, id_of, self._verbose)
        if ids is not None:  # a canonical order: the store knows the labels again in any other
            order = np.argsort(ids, kind="stable")
            labels, ids = labels[order], ids[order]
        noisy = self._draw(labels).astype(dtype.as_numpy_dtype)
        if id_of is None or ids is None:
            return replace_in_order(dataset, slot, noisy)
        return replace_by_id(dataset, slot, id_of, ids, noisy)

    def _draw(self, labels: np.ndarray) -> np.ndarray:
        low, high = (
            self._mechanism.label_range()
            if isinstance(self._mechanism, RegressionMechanism)
            else (None, None)
        )
        vault = PrivateLabels(
            labels,
            _num_classes(self._mechanism),
            low=low,
            high=high,
            budget=self._budget,
            store=self._store,
            seed=self._seed,
        )
        noisy = vault.randomize(self._mechanism, priors=self._priors)
        self._private_labels = vault
        return noisy

    def __repr__(self) -> str:
        """Returns the mechanism and whether it has been applied, never a label."""
        return (
            f"LabelRandomization({self._mechanism!r}, applied={self._private_labels is not None})"
        )


def _num_classes(mechanism: LabelMechanism) -> int | None:
    """Returns K, or None for a mechanism of numbers."""
    if isinstance(mechanism, RegressionMechanism):
        return None
    return checked_mechanism(mechanism, ClassificationMechanism).num_classes


def _checked_priors(mechanism: LabelMechanism, priors: Any, with_ids: bool) -> np.ndarray | None:
    name = type(mechanism).__name__
    if priors is not None and not mechanism.uses_priors:
        raise ValueError(f"{name} takes no priors. Use RRWithPrior, or leave priors out.")
    if not mechanism.uses_priors:
        return None
    num_classes = checked_mechanism(mechanism, ClassificationMechanism).num_classes
    if priors is None:
        raise ValueError(
            f"{name} needs priors= of shape ({num_classes},) or "
            f"(n, {num_classes}). Without any, use RandomizedResponse."
        )
    if with_ids and np.ndim(priors) != 1:
        raise ValueError(
            f"with id_fn, priors must be one row of shape ({num_classes},), got "
            f"{np.shape(priors)}: rows would have to follow the order of the source. Leave id_fn "
            "out for a source in a fixed order."
        )
    _validate.prior_rows("priors", priors, None, num_classes)
    return np.array(priors, dtype=np.float64)
