"""``randomize_labels``: noisy labels in a tf.data pipeline, drawn once for the life of a run."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    Assumption,
    PrivacyBudget,
    PrivacyGuarantee,
    Public,
    PublicInput,
    Receipt,
    public_input,
)
from tf_labeldp.data._elements import (
    LabelSlot,
    check_label_spec,
    check_no_repeat,
    check_order,
    checked_id_fn,
    read_labels,
    replace_labels,
)
from tf_labeldp.mechanisms import ALIBI, LabelMechanism, PeerToPeerRandomizedResponse
from tf_labeldp.vault import LabelKind, NoisyLabels, PrivateLabels, Randomizer
from tf_labeldp.vault.ledger import Ledger

_ASSUMPTIONS = (
    Assumption(
        "public-columns",
        "holder",
        "Features, sample weights, ids, every other column, and the order of the examples were "
        "made without the labels.",
    ),
    Assumption(
        "distinct-examples", "holder", "No example comes twice in the dataset that was randomized."
    ),
)


def randomize_labels(  # noqa: PLR0913 (a vault and its draw in one call)
    mechanism: Public[LabelMechanism | Randomizer],
    *,
    label_key: str = "label",
    id_fn: Public[Callable[[Any], Any] | None] = None,
    priors: Public[Any] = None,
    clusters: Public[Any] = None,
    low: float | None = None,
    high: float | None = None,
    budget: PrivacyBudget | None = None,
    store: str | os.PathLike[str] | None = None,
    insecure_seed: int | None = None,
    verbose: bool = True,
) -> LabelRandomization:
    """Returns a transform for ``dataset.apply`` that replaces each true label by a noisy one.

    ``apply`` reads the labels in one pass into a ``PrivateLabels`` vault, draws one noisy label per
    example, and returns a dataset with the noisy labels. Every later epoch, shuffle, batch, shard,
    repeat, cache or prefetch has the same draw; a ``map`` that draws noise would spend epsilon
    again in each epoch.

    Examples are identified by their place in the source, which must give the same elements in the
    same order each time, which each pass checks, or by ``id_fn``. Apply the transform directly to
    the source, before maps that decode or augment. A transform is for one dataset.

    Guarantee:
        The dataset that ``apply`` returns is (epsilon, delta)-label-DP under replacement of one
        label, with the mechanism's epsilon and delta, however often it is iterated. It rests on the
        vault's assumptions (``guarantee().assumptions``), and on features, sample weights, ids and
        order that were made without the labels: first drop columns that reveal the label, such as a
        coarser class. The returned elements do not contain the true label; an example that has no
        noisy label raises. No file written from the returned dataset contains it: TensorFlow
        refuses checkpoints of its iterators, and its graph does not contain the source, since
        buffers and constants of the source do. The source still has the true labels, and so have
        files that it writes itself, such as those of ``cache(filename)``: train on the returned
        dataset.

    Args:
        mechanism: as for ``PrivateLabels.randomize``, except ``PeerToPeerRandomizedResponse``,
            which draws for some examples alone, and ``HeadPriorRandomizer``, which needs the
            features in memory. Labels are integers 0..K-1 or, for numbers, floats in the range
            (clip them in a ``map`` before). ``ALIBI`` turns labels into rows ``float32`` (K,).
        label_key: key of the label, for elements that are dicts (as TFDS gives them). Elements
            ``(x, y)`` and ``(x, y, sample_weight)`` have it in second place.
        id_fn: maps the features of one element, x of a tuple or the dict without its label, to a
            scalar integer or string tensor that no other example has. Needed for sources whose
            order varies (shuffled, read in parallel). Write it in TensorFlow operations:
            ``tf.vectorized_map`` calls it.
        priors: probabilities for mechanisms that use them: (K,), or (n, K) in the order of the
            source (not with ``id_fn``).
        clusters: the cluster of each example, integers (n,) in the order of the source (not with
            ``id_fn``), for ``ClusterRandomizedResponse``.
        low: the smallest label, public, for ``LabelRandomizer``.
        high: the largest label, public, for ``LabelRandomizer``.
        budget: the most that may be spent on one label. None takes the store's budget, or the cost
            of the mechanism.
        store: folder that keeps the draw, in the order of the source or of the sorted ids: a second
            run reads it and spends nothing.
        insecure_seed: makes the draw repeatable; the guarantee is then "not private: seeded".
        verbose: whether to report the progress of a long pass on stderr.

    Returns:
        A ``LabelRandomization``, a function of a dataset of single examples: ``(x, y)``,
        ``(x, y, sample_weight)`` or a dict, x any structure of tensors, y a scalar. It keeps their
        order and ``element_spec``, except for the labels of ``ALIBI``. After ``apply`` it has
        ``guarantee()``, the ``noisy_labels``, and their ``private_labels`` vault, in the order of
        the source or of the sorted ids. Several workers share elements, not files. For checkpoints
        of iterators zip features and ``noisy_labels.values``, in a data set without true labels.

    Raises:
        TypeError: another type than above; on ``apply`` also of labels and ids.
        ValueError: ``priors`` or ``clusters`` by row with ``id_fn``; on ``apply``: labels or
            another argument out of range, batches in place of examples, an empty or endless
            dataset, an order that changes, ids that repeat.
        RuntimeError: Keras runs on another backend than TensorFlow; a second ``apply``, or one
            inside a ``tf.function``.
        BudgetExceededError: on ``apply``, the budget is too small; nothing was drawn.
        LabelStoreError: on ``apply``, the store has other labels or settings, or is damaged.

    Example:
        >>> import tensorflow as tf
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> source = tf.data.Dataset.from_tensor_slices(([[0.5], [1.5], [2.5]], [0, 2, 1]))
        >>> private = randomize_labels(RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> dataset = source.apply(private)
        >>> batches = dataset.shuffle(3).batch(2).repeat(10)
        >>> private.guarantee().epsilon, len(private.noisy_labels)
        (1.0, 3)
    """
    _validate.keras_on_tensorflow("randomize_labels")
    public = public_input(mechanism, id_fn, priors, clusters)
    mechanism, id_fn, priors, clusters = public.value
    if not isinstance(mechanism, Randomizer):
        LabelMechanism.checked(mechanism)
    is_partial = isinstance(mechanism, PeerToPeerRandomizedResponse)
    if is_partial or mechanism.public_input == "features":
        raise TypeError(
            f"{type(mechanism).__name__} can't be used in a pipeline. Use "
            "PrivateLabels(labels, ...).randomize."
        )
    if id_fn is not None and (clusters is not None or np.ndim(priors) > 1):
        raise ValueError(
            "expected one prior (K,) for all examples with id_fn, got priors or clusters by row. "
            "Leave id_fn out for a source in a fixed order."
        )
    if low is None and high is None and hasattr(mechanism, "label_range"):
        low, high = mechanism.label_range()
    cost = PrivacyBudget(mechanism.epsilon, getattr(mechanism, "delta", 0.0))
    make_vault = functools.partial(
        PrivateLabels,
        kind=LabelKind.of(getattr(mechanism, "num_classes", None), low=low, high=high),
        budget=budget or Ledger.budget_for(store, cost),
        store=store,
        insecure_seed=insecure_seed,
    )
    inputs = {"priors": priors, "clusters": clusters}
    made_by = PublicInput(mechanism, public.receipts)
    return LabelRandomization(made_by, inputs, make_vault, label_key, id_fn, verbose)


@dataclasses.dataclass(repr=False, eq=False)
class LabelRandomization:
    """The transform that ``randomize_labels`` returns."""

    _mechanism: PublicInput[LabelMechanism | Randomizer]
    _inputs: dict[str, Any]
    _make_vault: Callable[[np.ndarray], PrivateLabels]
    _label_key: str
    _id_fn: Callable[[Any], Any] | None
    _verbose: bool
    private_labels: PrivateLabels | None = None
    noisy_labels: NoisyLabels | None = None

    @property
    def mechanism(self) -> LabelMechanism | Randomizer:
        """The mechanism of the draw."""
        return self._mechanism.value

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the mechanism and of its public inputs."""
        return self._mechanism.receipts

    def guarantee(self) -> PrivacyGuarantee:
        """Returns the guarantee of the labels in the returned dataset: one draw per label."""
        if self.noisy_labels is None:
            raise RuntimeError(
                "expected randomized labels, got none yet. Apply the transform first: "
                "dataset.apply(transform)."
            )
        return self.noisy_labels.guarantee()

    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset with a noisy label for each element; ``dataset.apply`` calls it."""
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"expected a tf.data.Dataset, got {type(dataset).__name__}. For arrays use "
                "PrivateLabels(labels, ...).randomize(mechanism)."
            )
        if self.private_labels is not None:
            raise RuntimeError(
                "expected a new transform, got one that has been applied: a second draw would be "
                "a second charge. Use the dataset that it returned; for other data make another."
            )
        if not tf.executing_eagerly():
            raise RuntimeError("randomize_labels needs eager execution, outside of tf.function.")
        slot = LabelSlot.of(dataset.element_spec, self._label_key)
        dtype = check_label_spec(slot.label(dataset.element_spec), self.mechanism)
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("the dataset is endless. Apply randomize_labels before .repeat().")
        check_no_repeat(dataset)
        id_of = None if self._id_fn is None else checked_id_fn(self._id_fn)
        if id_of is None:
            check_order(dataset, slot)
        labels, ids = read_labels(dataset, slot, id_of, self._verbose)
        if id_of is not None:
            # The order of a store does not depend on that of the source.
            order = np.argsort(ids, kind="stable")
            labels, ids = labels[order], ids[order]
        vault = self._make_vault(labels)
        made_by: Any = self._mechanism
        noisy_labels = vault.randomize(made_by, **self._inputs)
        self.noisy_labels = dataclasses.replace(noisy_labels, assumptions=_ASSUMPTIONS)
        self.private_labels = vault
        values = noisy_labels.values
        if not isinstance(self.mechanism, ALIBI):
            values = values.astype(dtype.as_numpy_dtype)
        return replace_labels(dataset, slot, values, id_of, ids)

    def __repr__(self) -> str:
        return f"LabelRandomization({self.mechanism!r}, applied={self.private_labels is not None})"
