"""Refuses labels that a model has no output for, before a step: kernels would log them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tf_labeldp.gradients._model_checks import takes_codes, takes_rows
from tf_labeldp.training._training_plan import TrainingPlan


def check_codes(model: keras.Model, loss: Any, plan: TrainingPlan) -> None:
    """Raises a ``ValueError`` if labels are class codes that the model has no output for.

    The kernel of sparse cross-entropy would write the labels of the batch into TensorFlow's log.
    """
    shape = getattr(model, "output_shape", None)
    if not isinstance(shape, tuple) or len(shape) < 2 or not isinstance(shape[-1], int):
        return
    outputs, vault = shape[-1], plan.vault
    if vault is None:
        labels = plan.known_labels() if takes_codes(loss) else None
        came = f"some labels are not in 0..{outputs - 1}"
        fits = labels is None or bool(np.all((labels >= 0) & (labels < outputs)))
    elif vault.num_labels is not None:
        came = f"the labels are rows of {vault.num_labels}"
        fits = vault.num_labels == outputs
    elif vault.label_range is not None:
        return
    else:
        # Whatever the loss: one that wraps sparse cross-entropy can't be told from others.
        came = f"the labels have {vault.num_classes} classes"
        fits = vault.num_classes <= outputs
        fits = fits or (outputs == 1 and not takes_codes(loss))
        if fits and takes_rows(loss) and outputs > 1:
            raise ValueError(
                "the labels of a PrivateLabels are class codes, and the loss takes one-hot rows. "
                "Use keras.losses.SparseCategoricalCrossentropy, of codes."
            )
    if not fits:
        raise ValueError(
            f"{came}, but the model has {outputs} outputs. Give its last layer one unit for each "
            "class (these are numbered from zero), or for each label of a row."
        )
