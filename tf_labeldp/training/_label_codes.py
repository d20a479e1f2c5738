"""Whether class codes fit a model's outputs, found before TensorFlow would print the labels."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tf_labeldp.training._training_plan import TrainingPlan


def check_codes(model: keras.Model, loss: Any, plan: TrainingPlan) -> None:
    """Raises if labels are class codes that the model has no output for.

    The kernel of sparse cross-entropy would raise as well, and write the labels of the batch into
    its message and into TensorFlow's log.

    Args:
        model: whose last axis has one output a class.
        loss: as compiled.
        plan: which says where the labels come from.

    Raises:
        ValueError: a code outside of 0..K-1; no label is shown.
    """
    shape = getattr(model, "output_shape", None)
    if not isinstance(shape, tuple) or len(shape) < 2:
        return
    outputs, vault = shape[-1], plan.vault
    if not isinstance(outputs, int):
        return
    if vault is not None:
        if vault.num_labels is not None:
            if vault.num_labels != outputs:
                raise ValueError(
                    f"the labels are rows of {vault.num_labels}, but the model has {outputs} "
                    "outputs. Give its last layer one unit for each label of a row."
                )
            return
        # Whatever the loss: one that wraps sparse cross-entropy can't be told from others.
        one_score = outputs == 1 and not _is_sparse_cross_entropy(loss)
        if vault.label_range is None and vault.num_classes > outputs and not one_score:
            raise ValueError(
                f"the labels have {vault.num_classes} classes, but the model {outputs} outputs. "
                "Give its last layer one unit for each class."
            )
        return
    labels = plan.known_labels() if _is_sparse_cross_entropy(loss) else None
    if labels is None:
        return
    if not np.all((labels >= 0) & (labels < outputs)):
        raise ValueError(
            f"labels must lie in 0..{outputs - 1}, as the model has {outputs} outputs, but "
            f"some do not. Give its last layer one unit for each class, or renumber "
            "the classes from zero."
        )


def _is_sparse_cross_entropy(loss: Any) -> bool:
    loss = keras.losses.get(loss) if isinstance(loss, (str, dict)) else loss
    if getattr(loss, "ignore_class", None) is not None:
        return False
    function = keras.losses.sparse_categorical_crossentropy
    return (
        isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
        or loss is function
        or getattr(loss, "fn", None) is function
    )
