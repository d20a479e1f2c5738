"""``PrivatePoissonRegression``, from the same release of moments as the other linear heads."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tf_labeldp.heads import _ridge_path
from tf_labeldp.heads._logistic import LikelihoodSolver
from tf_labeldp.heads.design import Design, Solution
from tf_labeldp.heads.one_release_head import OneReleaseHead
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.vault import LabelKind, Numbers


class PoissonSolver(LikelihoodSolver):
    def solve(
        self, problem: _ridge_path.Problem, design: Design, prior: tuple[float, float]
    ) -> Solution:
        low, high = design.terms.kind.label_range or (0.0, 0.0)
        constant = design.scaling.intercept
        constant = constant / math.hypot(1.0, constant)  # after unit scaling
        middle = 0.5 * (low + high)
        # The noise can push the mean to zero or below, where it has no logarithm.
        error = problem.sigma / (design.num_rows * constant)
        rate = min(max(middle + constant * float(problem.last[0]), low, error), high)
        problem = dataclasses.replace(problem, last=np.array([(rate - middle) / constant]))
        make = functools.partial(CountLikelihood, rate=rate, middle=middle, high=high)
        offset, least = math.log(rate) / constant, rate * math.log(rate)
        return self._maximise(problem, design, prior, make, offset=offset, least=least)


@dataclasses.dataclass(eq=False, repr=False)
class PrivatePoissonRegression(OneReleaseHead):
    """A linear head with the Poisson loss, for counts and amounts, from one noisy ``X^T Y``.

    It predicts ``exp(x w + b)``: effects multiply, no prediction is below zero, and the weight of
    large labels grows in proportion to them, not to their square. Labels enter the likelihood as
    they do in ``PrivateLogisticRegression``.

    Guarantee:
        As for ``PrivateRidge``: the head, with all its attributes and predictions, is
        (epsilon, delta)-DP for the replacement of one label, by one release.

    Source: ``docs/theory.md`` derives the penalty and its choice.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels; 0 with ``noise="laplace"``.
        low: the smallest label, zero or more, public. Leave it out for a vault.
        high: the largest label, public.
        penalty: as in ``PrivateLogisticRegression``, with the Poisson loss for the log-loss. All
            other arguments are as in ``PrivateRidge``; there is always an intercept.

    Attributes:
        coef_: ``float64`` (1, d), the rise in the logarithm of the expected label per unit of a
            centred feature, divided by the length of its spread row.
        intercept_: ``float64`` (1,).
        risk_: the estimated mean Poisson loss ``y_hat - y log(y_hat)`` on the training set.
        risk_path_: the multiples that were tried, ascending, and their estimates.
        penalty_: the multiple; all other attributes are as in ``PrivateLogisticRegression``.

    Raises:
        ValueError: ``fit`` gets arguments out of range, features that are not finite, labels that
            are no numbers, or a range that begins below zero.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> features = rng.normal(size=(3000, 3))
        >>> claims = rng.poisson(np.exp(features[:, 0] - 1.0)).clip(0, 8)
        >>> head = PrivatePoissonRegression(2.0, delta=1e-5, low=0, high=8, insecure_seed=0)
        >>> head.fit(features, claims).score(features, claims) > 0.2
        True
    """

    _: dataclasses.KW_ONLY
    low: float | None = None
    high: float | None = None

    _solver = PoissonSolver
    _link = "exponential"

    def _is_regressor(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _mechanism(self, kind: LabelKind) -> LabelMomentMechanism:
        if not isinstance(kind, Numbers) or kind.low < 0.0:
            raise ValueError(
                f"PrivatePoissonRegression expected numbers of zero or more, got "
                f"{kind.describe()}. Use PrivateRidge for other numbers, PrivateLogisticRegression "
                "for classes. Nothing was released."
            )
        if not self.intercept:
            raise ValueError("PrivatePoissonRegression needs an intercept. Leave intercept out.")
        return super()._mechanism(kind)


@dataclasses.dataclass(frozen=True)
class CountLikelihood:
    """The public part of the Poisson loss for labels ``middle + code``, over a sample of the rows.

    It is ``sum_i rate e^s_i - middle s_i``; the other part is the moments of the codes. Above
    ``high``, at which predictions are clipped, the loss is linear.
    """

    rows: np.ndarray  # float32 (m, d)
    weight: float  # n / m
    rate: float
    middle: float
    high: float
    weights: np.ndarray | None = None  # (m,) of the rows, with mean one
    softmax: bool = False

    def curvature(self, columns: int) -> float:
        del columns
        return self.rate

    def mean_curvature(self, coefficients: np.ndarray) -> float:
        rates = self._rates(self._scores(coefficients))
        return float(np.average(rates, weights=self.weights))

    def first_multiple(self, columns: int) -> float:
        del columns
        return 1.0

    def value_and_gradient(self, coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        scores = self._scores(coefficients)
        rates = self._rates(scores)
        over = np.maximum(scores - math.log(self.high / self.rate), 0.0)
        values, slopes = rates * (1.0 + over) - self.middle * scores, rates - self.middle
        if self.weights is not None:
            values, slopes = self.weights * values, self.weights * slopes
        value, slopes = float(values.sum(dtype=np.float64)), slopes.astype(np.float32)
        gradient = (self.rows.T @ slopes)[:, np.newaxis].astype(np.float64)
        return self.weight * value, self.weight * gradient

    def worth(
        self, u: np.ndarray, agreement: float, error: float, num_rows: int
    ) -> tuple[float, float]:
        """Returns a sharpness of one, since rates need no sharpening, and the mean loss."""
        del error
        return 1.0, self.value_and_gradient(u)[0] / num_rows - agreement

    def _scores(self, coefficients: np.ndarray) -> np.ndarray:
        return (self.rows @ coefficients[:, 0].astype(np.float32)).astype(np.float64)

    def _rates(self, scores: np.ndarray) -> np.ndarray:
        return self.rate * np.exp(np.minimum(scores, math.log(self.high / self.rate)))
