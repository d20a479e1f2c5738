"""Where boosting starts: a fitted estimator, whose scores the trees add to."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from tf_labeldp.accounting import Receipt
from tf_labeldp.features.estimator import keras_model
from tf_labeldp.features.tables import symbolic_inputs
from tf_labeldp.heads import HeadResidualRandomizer
from tf_labeldp.heads.one_release_head import Head
from tf_labeldp.vault import LabelKind, NoisyLabels
from tf_labeldp.vault.handed_on import with_receipts

_LEAST = 1e-6
"""Least probability, or share of the largest count, whose logarithm boosting starts at."""


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """A fitted estimator, and the loss of the trees that start there."""

    model: Any
    loss: str

    @classmethod
    def of(cls, start: Any, noisy: NoisyLabels | None, kind: LabelKind, loss: str) -> Start | None:
        """Returns the start of trees for labels of a kind, or for a draw of noisy labels.

        It is None without a start, or if its head is released with the labels.
        """
        if noisy is not None and noisy.shift is not None and start is None:
            raise ValueError(
                "expected start=head with noisy residuals, the head whose numbers were subtracted, "
                "got None. Fit it again with key='<key>/head', which costs nothing."
            )
        if start is None or (isinstance(start, HeadResidualRandomizer) and noisy is None):
            return None
        if not isinstance(start, Head):
            raise TypeError(
                "expected start as a fitted estimator of this library, got "
                f"{type(start).__name__}. Give a head, such as PrivateRidge(...).fit(X, y)."
            )
        check_is_fitted(start, "receipts_", msg="this %(name)s is not fitted. Call fit first.")
        classes: Any = kind.class_values
        own: Any = None if start._is_regressor() else start.classes_
        if own is None and not start._is_regressor():
            raise ValueError("expected a start for classes or numbers, got one for rows of labels.")
        if (own is None) != (classes is None) or not np.array_equal(own, classes):
            kinds = [
                "numbers" if found is None else f"the classes {found.tolist()}"
                for found in (classes, own)
            ]
            raise ValueError(
                f"expected a start for {kinds[0]}, got one for {kinds[1]}. Fit it on these labels."
            )
        return cls(start, loss)

    def outputs(self, X: Any) -> np.ndarray:
        """Returns the numbers (m, 1) or probabilities (m, K) of the model."""
        if self.model._is_regressor():
            return np.asarray(self.model.predict(X))[:, np.newaxis]
        return self.model.predict_proba(X)

    def scores(self, outputs: Any, ops: Any) -> Any:
        """Returns the scores (m, C) of outputs of the model, by ``numpy`` or ``keras.ops``."""
        if self.model._is_regressor() and self.loss == "squared_error":
            return outputs
        least = _LEAST * np.max(self.model._label_range or 1.0)
        logs = ops.log(ops.maximum(outputs, least))
        # One score is enough for two classes.
        return logs[:, 1:] - logs[:, :1] if logs.shape[1] == 2 else logs

    def check_shift(self, noisy: NoisyLabels, outputs: np.ndarray) -> None:
        """Raises if a draw of residuals subtracted other numbers from the labels."""
        if noisy.shift is None:
            return
        low, high = self.model._label_range
        if not np.allclose(outputs[:, 0], noisy.shift, rtol=0.0, atol=1e-3 * (high - low)):
            raise ValueError(
                "expected start as the head whose numbers the draw subtracted, got another one, or "
                "other features. Give both as they were in the draw."
            )

    def exported(self, inputs: Any, receipts: tuple[Receipt, ...]) -> Any:
        """Returns the outputs (m, C) for Keras inputs, from layers with these receipts."""
        import keras

        exported = with_receipts(self.model.to_keras(), receipts)
        wanted = symbolic_inputs(exported)
        # Without the facts of a whole model, such as its classes, which are those of the trees.
        model = keras_model(wanted, exported.outputs[0], "start")
        if isinstance(inputs, dict):
            names = list(wanted) if isinstance(wanted, dict) else self.model._known_columns()
            if names is not None and all(name in inputs for name in names):
                parts = {name: inputs[name] for name in names}
                if isinstance(wanted, dict):
                    return model(parts)
                if all(part.dtype == "float32" for part in parts.values()):
                    return model(keras.layers.Concatenate(dtype="float32")(list(parts.values())))
        elif not isinstance(wanted, dict):
            return model(inputs)
        raise TypeError(
            "expected a start whose exported model takes the columns of this one, got one with "
            f"the inputs {wanted!r}. Fit it on the same table."
        )
