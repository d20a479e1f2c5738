"""Public grids for real labels, with what rounding to them costs."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms._losses import Loss, checked_loss


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
    in [low, high]. Let ``rho`` round to the nearest value, so ``|y - rho(y)| <= step / 2``, and let
    M be the optimal epsilon-DP mechanism for rounded labels.

    - Inequality (12): ``E loss(M(rho(y)), y) <= E loss(M(rho(y)), rho(y)) + L step / 2``, as the
      second argument moved by step / 2 at most.
    - Inequality (13): for any epsilon-DP mechanism N on the labels, the mechanism that redraws y
      from the labels that round to the given value and runs N on it is epsilon-DP (a mixture), and
      for it ``E loss(N(y), rho(y)) <= E loss(N(y), y) + L step / 2``. By optimality, M is no worse.

    Together ``E loss(M(rho(y)), y) <= E loss(N(y), y) + L step``. This is lemma 16 of ``ghazi2023``
    (appendix A.1), whose grid has the step ``gamma / L`` for an excess of gamma. Outputs outside of
    [low, high] need no thought: moving them to the nearer end lowers the loss. Labels that lie on
    the grid already lose nothing.

    - ``"squared_error"``: ``|d/dy (y_hat - y)^2| = 2 |y_hat - y|``, so L = 2 (high - low).
    - ``"absolute_error"``: L = 1.
    - ``"poisson"``: ``y_hat - y log(y_hat)`` differs from the deviance form
      ``y_hat - y log(y_hat) + y log(y) - y`` by a function of y alone, which cancels in the excess.
      The derivatives of that are ``log(y / y_hat)`` in y, so L = log(high / low), infinite for
      low <= 0, and ``1 - y / y_hat`` in y_hat, at most ``high / low - 1``, which neither (12) nor
      (13) needs.

    Privacy: looks at no label; low and high are public.

    Args:
        low: the smallest label, public, finite.
        high: the largest label, public, above ``low``.
        max_values: the largest number of values, at least 2.
        loss: ``"squared_error"``, ``"absolute_error"``, ``"poisson"``, or a callable
            ``loss(y_hat, y)``, for which ``error_bound`` is None: it is not estimated.
        whole_numbers: whether labels are counts or other whole numbers. Public knowledge: it is not
            found out from the labels. More than ``max_values`` of them are rounded all the same.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of range, an unknown loss, or a range with too few doubles.

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
