"""The losses between a noisy label and the true one: three by name, and any other as a callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Loss = str | Callable[[Any, Any], Any]
"""``"squared_error"``, ``"absolute_error"``, ``"poisson"``, or ``loss(y_hat, y)`` on arrays."""

NAMED_LOSSES = ("squared_error", "absolute_error", "poisson")


def checked_loss(loss: Any) -> Loss:
    """Returns ``loss`` if it is one, or raises."""
    if callable(loss) or loss in NAMED_LOSSES:
        return loss
    raise ValueError(
        f"loss must be one of {', '.join(map(repr, NAMED_LOSSES))} or a callable loss(y_hat, y), "
        f"got {loss!r}."
    )


def loss_values(loss: Loss, y_hat: Any, y: Any) -> np.ndarray:
    """Returns the loss of outputs ``y_hat`` for labels ``y``, broadcast against each other.

    ``(y_hat - y)^2``, ``|y_hat - y|``, or ``y_hat - y log(y_hat)`` (``ghazi2023``, section 2; the
    squared error without its factor 1/2).
    """
    y_hat, y = np.asarray(y_hat, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if loss == "squared_error":
        return np.square(y_hat - y)
    if loss == "absolute_error":
        return np.abs(y_hat - y)
    if loss == "poisson":
        return y_hat - xlogy(y, y_hat)
    if not callable(loss):
        checked_loss(loss)
        raise TypeError(f"loss {loss!r} cannot be called.")
    shape = np.broadcast_shapes(y_hat.shape, y.shape)
    values = np.asarray(loss(y_hat, y), dtype=np.float64)
    if values.shape != shape:
        raise ValueError(
            f"loss(y_hat, y) must broadcast: for shapes {y_hat.shape} and {y.shape} it gave "
            f"{values.shape}, expected {shape}. Write it with NumPy functions."
        )
    return values


def xlogy(x: Any, y: Any) -> np.ndarray:
    """Returns ``x log(y)``, and zero where x is zero."""
    from scipy import special  # takes longer to load than all of the mechanisms

    return special.xlogy(x, y)


def check_domain(loss: Loss, low: float) -> None:
    """Raises if the loss has no meaning for labels as small as ``low``."""
    if loss == "poisson" and low < 0.0:
        raise ValueError(
            f"the Poisson loss is for labels of zero or more, got values from {low:g} on. Use "
            "loss='squared_error', or shift the labels."
        )


def expected_loss(
    columns: Iterable[np.ndarray],
    outputs: Iterable[float],
    loss: Loss,
    inputs: np.ndarray,
    prior: np.ndarray,
) -> float:
    """Returns ``E loss(output, input)`` of a channel under a prior (k,) of its inputs.

    Args:
        columns: the probabilities of each output, (k,) each: a generator need not hold them all.
        outputs: of the channel, one a column.
        loss: the loss.
        inputs: of the channel, (k,).
        prior: of the inputs, (k,).
    """
    total = 0.0
    for output, column in zip(outputs, columns, strict=True):
        weights = prior * column
        used = weights > 0.0  # 0 * inf, where the loss of an impossible pair is infinite
        total += float(np.dot(weights[used], loss_values(loss, output, inputs[used])))
    return total
