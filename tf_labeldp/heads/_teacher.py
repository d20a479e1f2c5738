"""A training set from a head's probabilities, for a model that the head teaches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_labeldp import _validate


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherLabels:
    """What ``teacher_labels`` makes: targets, and the examples that they are for.

    Attributes:
        indices: the examples that were kept, in ascending order, ``int64`` (m,).
        targets: ``float32`` (m, K), rows that sum to one.
        share: m / n, the share that was kept.

    Example:
        >>> made = TeacherLabels(np.array([1]), np.array([[0.0, 1.0]], np.float32), share=0.5)
        >>> batches = made.batches(np.zeros((2, 4, 4, 1), np.float32), batch_size=8, views=3)
        >>> x, y = batches[0]
        >>> len(batches), x.shape, y.shape
        (1, (3, 4, 4, 1), (3, 2))
    """

    indices: np.ndarray
    targets: np.ndarray
    share: float

    def batches(
        self,
        inputs: Any,
        batch_size: int,
        *,
        augment: Callable[..., Any] | None = None,
        views: int = 1,
        seed: int = 0,
    ) -> Any:
        """Returns batches for ``model.fit``, in a new order each epoch.

        Every epoch shows each example in ``views`` new augmentations, all in one batch and with the
        same target: so the model is taught to agree with itself across them.

        Args:
            inputs: array (n, ...) of all n examples, kept or not.
            batch_size: examples a batch; a batch holds ``views`` times as many rows.
            augment: what changes a batch of inputs at random and keeps its shape and its class, for
                example a ``keras.Sequential`` of preprocessing layers; None for nothing. A Keras
                layer is called with ``training=True``.
            views: augmentations of an example a step, at least 1.
            seed: of the order; public.

        Returns:
            A ``keras.utils.PyDataset`` of ``ceil(m / batch_size)`` batches ``(inputs, targets)``.

        Raises:
            ValueError: sizes that are no positive integers, or too few inputs.
        """
        batch_size = _validate.integer_at_least("batch_size", batch_size, 1)
        views = _validate.integer_at_least("views", views, 1)
        inputs = np.asarray(inputs)
        if self.indices.size and len(inputs) <= self.indices[-1]:
            raise ValueError(
                f"there are {len(inputs)} inputs, and example {int(self.indices[-1])} was kept. "
                "Give the inputs of all examples, in the order of the probabilities."
            )
        rng = np.random.default_rng(_validate.integer_at_least("seed", seed, 0))
        return _batches_class()(self, inputs, batch_size, augment, views, rng)


@functools.cache
def _batches_class() -> type:
    """Returns the class of batches; here, so that importing this file does not load Keras."""
    import keras

    class TeacherBatches(keras.utils.PyDataset):
        """Batches of kept examples; see ``TeacherLabels.batches``."""

        def __init__(
            self,
            labels: TeacherLabels,
            inputs: np.ndarray,
            batch_size: int,
            augment: Callable[..., Any] | None,
            views: int,
            rng: np.random.Generator,
        ) -> None:
            super().__init__()
            self._labels, self._inputs, self._size = labels, inputs, batch_size
            self._augment, self._views, self._rng = augment, views, rng
            self.on_epoch_end()

        def __len__(self) -> int:
            return -(-self._order.size // self._size)

        def __getitem__(self, index: int) -> tuple[Any, np.ndarray]:
            places = self._order[index * self._size : (index + 1) * self._size]
            places = np.repeat(places, self._views)
            x = self._inputs[self._labels.indices[places]]
            if isinstance(self._augment, keras.layers.Layer):
                x = self._augment(x, training=True)
            elif self._augment is not None:
                x = self._augment(x)
            return keras.ops.convert_to_numpy(x), self._labels.targets[places]

        def on_epoch_end(self) -> None:
            self._order = self._rng.permutation(self._labels.indices.size)

    return TeacherBatches


def teacher_labels(
    probabilities: Any, *, confidence: float = 0.0, least_share: float = 0.1, hard: bool = False
) -> TeacherLabels:
    """Returns targets for a model (the student) that a head teaches, of the examples it is sure of.

    A student pays where it knows more of the inputs than the head: that a shifted or mirrored image
    shows the same thing, say; or where a small model is to be shipped. On the same epsilon it can't
    know more of the labels, so see ``tests/benchmarks`` for what to expect.

    The threshold drops examples near the borders of the classes, which teach most where the head
    is right. It helps where the head is often wrong; there its hard labels help too.

    Privacy: post-processing of the head; nothing is charged.

    Args:
        probabilities: of the head for the public inputs, (n, K); rows sum to one.
        confidence: in [0, 1), the least largest probability of an example that is kept.
        least_share: in [0, 1): of the examples of each predicted class at least this share is kept
            (rounded up), the surest ones, so that no class is lost.
        hard: whether targets are one-hot instead of the probabilities.

    Returns:
        What was kept, its targets, and the share of it.

    Raises:
        ValueError: not probabilities, or arguments out of range.

    Example:
        >>> made = teacher_labels([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]], confidence=0.8)
        >>> made.indices.tolist(), made.targets.argmax(axis=1).tolist(), round(made.share, 2)
        ([0, 2], [0, 1], 0.67)
    """
    confidence = _validate.probability_below_one("confidence", confidence)
    least_share = _validate.probability_below_one("least_share", least_share)
    hard = _validate.boolean("hard", hard)
    if np.ndim(probabilities) != 2 or np.shape(probabilities)[1] < 2:
        raise ValueError(
            f"probabilities must have shape (n, K), got {np.shape(probabilities)}. Pass the "
            "predict_proba of a head."
        )
    rows = _validate.prior_rows("probabilities", probabilities, None, np.shape(probabilities)[1])
    classes, surest = rows.argmax(axis=1), rows.max(axis=1)
    kept = surest >= confidence
    for one in np.unique(classes):
        members = np.flatnonzero(classes == one)
        fewest = int(np.ceil(least_share * members.size))
        kept[members[np.argsort(-surest[members], kind="stable")[:fewest]]] = True
    indices = np.flatnonzero(kept)
    targets = np.eye(rows.shape[1])[classes[indices]] if hard else rows[indices]
    share = indices.size / max(1, rows.shape[0])
    return TeacherLabels(indices, targets.astype(np.float32), share)
