"""Priors from noisy histograms and from models, and the public grids of numbers they are over."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms._losses import Loss, checked_loss


def histogram_prior(histogram: Any) -> np.ndarray:
    """Returns a noisy histogram as probabilities: negative counts to zero, rows normalised.

    A row without any positive count becomes uniform; the papers leave this case open.

    Guarantee:
        Post-processing of noisy counts: no charge.

    Source: the last steps of Algorithm 4 of ``ghazi2023`` (appendix C.1).

    Example:
        >>> histogram_prior([[6, -1, 2], [-3, 0, -1]]).round(4).tolist()
        [[0.75, 0.0, 0.25], [0.3333, 0.3333, 0.3333]]
    """
    counts = np.asarray(histogram, dtype=np.float64)
    if counts.ndim not in (1, 2) or counts.shape[-1] == 0:
        raise ValueError(
            f"histogram must have shape (K,) or (G, K), got {counts.shape}: counts, not labels."
        )
    bad = int(np.count_nonzero(~np.isfinite(counts)))
    if bad:
        raise ValueError(f"histogram must be finite, but {bad} count(s) are NaN or infinite.")
    clipped = np.maximum(counts, 0.0)
    total = clipped.sum(axis=-1, keepdims=True)
    empty = total == 0.0
    return np.where(empty, 1.0 / counts.shape[-1], clipped / np.where(empty, 1.0, total))


def prior_from_logits(logits: Any, temperature: float = 1.0) -> np.ndarray:
    """Returns ``softmax(logits / temperature)``, the prior of LP-MST (``ghazi2021``, appendix B).

    Args:
        logits: array (K,) or (n, K); finite.
        temperature: above zero; below one sharpens the prior, above one flattens it.

    Returns:
        ``float64`` array of the same shape whose last axis sums to one.

    Raises:
        ValueError: the temperature is out of range or a logit is not finite.

    Example:
        >>> prior_from_logits([2.0, 1.0, 0.0]).round(4).tolist()
        [0.6652, 0.2447, 0.09]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    array = np.asarray(logits, dtype=np.float64)
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise ValueError(
            f"logits must be finite, but {bad} are NaN or infinite. The model has diverged: lower "
            "its learning rate."
        )
    return _softmax(array / temperature)


def sharpen_prior(prior: Any, temperature: float) -> np.ndarray:
    """Returns ``prior^(1 / temperature)``, normalised: the temperature of a prior without logits.

    It equals ``prior_from_logits(log(prior), temperature)``; a probability of zero stays zero.

    Args:
        prior: probabilities (K,) or (n, K); rows sum to one (tolerance 1e-4).
        temperature: above zero; below one sharpens, above one flattens.

    Returns:
        ``float64`` array of the same shape whose last axis sums to one.

    Raises:
        ValueError: not probabilities, or the temperature is out of range.

    Example:
        >>> sharpen_prior([0.5, 0.3, 0.2], temperature=0.5).round(4).tolist()
        [0.6579, 0.2368, 0.1053]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    shape = np.shape(prior)
    if len(shape) not in (1, 2):
        raise ValueError(f"prior must have shape (K,) or (n, K), got {shape}.")
    rows = _validate.prior_rows("prior", prior, None, shape[-1])
    with np.errstate(divide="ignore"):
        return _softmax(np.log(rows) / temperature).reshape(shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    from scipy import special  # not loaded with the vault, which imports this part

    return special.softmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True)
class RoundingGrid:
    """Equally spaced values in the range of the labels, made by ``rounding_grid``.

    Attributes:
        values: strictly increasing, from the low end of the range to the high end.
        step: the distance of two neighbours.
        error_bound: the expected loss of rounding, then running the optimal mechanism for rounded
            labels, is at most this much above that of the best epsilon-DP mechanism on the labels
            themselves, whatever epsilon and the distribution; ``inf`` where the loss has no
            Lipschitz constant, None where it is unknown.

    Example:
        >>> RoundingGrid(values=(0.0, 0.5, 1.0), step=0.5, error_bound=1.0).step
        0.5
    """

    values: tuple[float, ...]
    step: float
    error_bound: float | None


def rounding_grid(
    low: float,
    high: float,
    max_values: int,
    loss: Loss = "squared_error",
    *,
    whole_numbers: bool = False,
) -> RoundingGrid:
    """Returns values to round labels in [low, high] to, and a bound on what it costs.

    The grid is ``max_values`` equally spaced values with both ends; or fewer, so that the integers
    are among them, if both ends are whole and no more than ``max_values`` integers lie between
    them. If the labels are known to be ``whole_numbers``, these integers alone are the grid.

    The bound is ``L * step``, where L is the Lipschitz constant of ``loss(y_hat, y)`` in y for both
    in [low, high]. Let ``rho`` round to the nearest value, so ``|y - rho(y)| <= step / 2``; let M
    be the optimal epsilon-DP mechanism for rounded labels, and N any epsilon-DP mechanism on the
    labels.

    - Inequality (12): ``E loss(M(rho(y)), y) <= E loss(M(rho(y)), rho(y)) + L step / 2``, as the
      second argument moves by step / 2 at most.
    - Inequality (13): the mechanism that redraws y from the labels that round to the given value
      and runs N on it is epsilon-DP (a mixture), and M is no worse than it, so
      ``E loss(M(rho(y)), rho(y)) <= E loss(N(y), y) + L step / 2``.

    Together ``E loss(M(rho(y)), y) <= E loss(N(y), y) + L step``: lemma 16 of ``ghazi2023``
    (appendix A.1), whose grid has the step ``gamma / L`` for an excess of gamma. Outputs outside of
    [low, high] only lose. L is 2 (high - low) for ``"squared_error"``, 1 for ``"absolute_error"``,
    and log(high / low) for ``"poisson"``, infinite for low <= 0: its deviance form
    ``y_hat - y log(y_hat) + y log(y) - y`` differs by a function of y alone, which cancels in the
    excess, and has the derivative ``log(y / y_hat)`` in y.

    Guarantee:
        Looks at no label; low and high are public.

    Example:
        >>> rounding_grid(0, 3, max_values=64, whole_numbers=True).values
        (0.0, 1.0, 2.0, 3.0)
        >>> rounding_grid(0, 3, max_values=8).values
        (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
        >>> grid = rounding_grid(0.0, 400.0, max_values=101, loss="absolute_error")
        >>> len(grid.values), grid.step, grid.error_bound
        (101, 4.0, 4.0)
    """
    low, high = _validate.number_range(low, high)
    most = _validate.integer_at_least("max_values", max_values, 2)
    width = high - low
    if not math.isfinite(width):
        raise ValueError(f"the range from {low:g} to {high:g} is too wide for a double.")
    number = most
    if low.is_integer() and high.is_integer() and width + 1.0 <= most:
        parts = 1 if whole_numbers else int((most - 1) // width)  # of each unit
        number = int(width) * parts + 1
    values = np.linspace(low, high, number)
    if np.any(np.diff(values) <= 0.0):
        raise ValueError(
            f"there are not {number} different doubles from {low!r} to {high!r}. Lower max_values, "
            "or subtract low from the labels first."
        )
    step = width / (number - 1)
    constant = _lipschitz_constant(loss, low, high)
    bound = None if constant is None else constant * step
    return RoundingGrid(tuple(values.tolist()), step, bound)


def _lipschitz_constant(loss: Loss, low: float, high: float) -> float | None:
    """Returns the Lipschitz constant of a loss in its second argument, None if unknown."""
    if loss == "squared_error":
        return 2.0 * (high - low)
    if loss == "absolute_error":
        return 1.0
    if loss == "poisson":
        return math.log(high / low) if low > 0.0 else math.inf
    checked_loss(loss)
    return None
