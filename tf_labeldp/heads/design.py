"""A fit from one release as values: its public design, a solver, and the fit.

``HeadTerms`` are fixed before a row is read, a ``Design`` adds the rows, and its ``fit`` turns
one release of moments into all that an estimator keeps: on one machine and in an engine. Nothing
here reads a label: moments come with their noise.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import PublicInput, Receipt
from tf_labeldp.heads._ridge_path import Problem, SampleScores
from tf_labeldp.heads.public_rows import PublicRows, RowSample, ScaledRows, Scaling, ScannedRows
from tf_labeldp.heads.weights import user_weights
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.vault import LabelKind, Rows

_INTERCEPT = 0.2
"""The constant column, relative to a row of length one: it costs the other features 2 % of signal;
the mean of n centred codes then has noise sigma / (0.2 n)."""
_NORM_STEPS = 2.0**14
"""The largest weight, and for Laplace noise the L1 norm of the longest row, are rounded up to
multiples of 1 / 2^14, so that a machine with other rounding finds a stored release."""
_CLEAR = 0.02
"""The share of the risk by which equal variances before the spread must win. On raw pixels of MNIST
they win by 2.6 to 5 %, rightly. On smoothed patches they win by 0.9 % at most, and choosing them
cost logistic regression 1.5 points of accuracy."""
_LEAST_SHARPNESS = 1e-3
"""The least sharpness times the size of the scores, if an intercept carries the class means."""
_SIGNIFICANT = 3.0
"""A release closer to pure noise, in standard deviations, counts as noise alone."""


@dataclasses.dataclass(frozen=True)
class Solver(abc.ABC):
    """A way to fit coefficients to a release."""

    penalty: str | float

    sample_rows: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if not isinstance(self.penalty, str):
            _validate.positive_finite("penalty", self.penalty)
        elif self.penalty != "auto":
            raise ValueError(
                f"penalty must be 'auto' or a number above zero, got {self.penalty!r}."
            )

    @property
    def has_prior(self) -> bool:
        """Whether the fit uses a prior, before or after the spread."""
        return True

    @abc.abstractmethod
    def solve(self, problem: Problem, design: Design, prior: tuple[float, float]) -> Solution:
        """Returns the solution for the variances of a prior; the columns have its scale."""


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """Coefficients of scaled columns, as a solver found them."""

    weights: np.ndarray  # (D, C)
    last: np.ndarray  # (C,), of the constant column
    filter: np.ndarray  # f (d,), by the directions of the Gram matrix
    chosen: dict[str, Any]  # fitted attributes by name: the penalty, its risk, the sharpness


@dataclasses.dataclass(frozen=True, eq=False)
class HeadTerms:
    """The public arguments of a head for one kind of labels, and the noise that they mean."""

    kind: LabelKind
    mechanism: LabelMomentMechanism  # for rows of norm one, until rows are known
    solver: Solver
    center: bool
    intercept: bool
    spread: bool | str
    class_weight: Any

    @classmethod
    def of(cls, head: Any, kind: LabelKind) -> HeadTerms:
        """Returns the terms of a ``OneReleaseHead``; raises for bad arguments."""
        head._check_arguments()
        return cls(
            kind=kind,
            mechanism=head._mechanism(kind),
            solver=head._solver(head.penalty),
            center=bool(head.center),
            intercept=bool(head.intercept),
            spread=head.spread,
            class_weight=PublicInput.bare(head.class_weight),
        )

    def for_rows(self, rows: PublicRows, group_size: float = 1.0) -> HeadTerms:
        """Returns the terms with noise for the longest row, or for ``group_size`` rows of a user.

        The noise for users follows the design, which takes their rows to be at right angles.
        """
        longest = _rounded_up(rows.max_weight * math.sqrt(group_size))
        return self._with(dataclasses.replace(self.mechanism, max_norm=longest))

    def for_l1(self, max_l1: float) -> HeadTerms:
        """Returns the terms with noise for rows of this L1 norm, rounded up."""
        return self._with(_with_max_l1(self.mechanism, _rounded_up(max_l1)))

    def for_width(self, width: int) -> HeadTerms:
        """Returns the terms with noise for any rows of norm ``max_norm`` and of this width."""
        longest = self.mechanism.max_norm * float(width) ** 0.5
        return self._with(_with_max_l1(self.mechanism, longest))

    def for_users(self, scaled: ScaledRows, users: np.ndarray) -> tuple[HeadTerms, ScaledRows]:
        """Returns the terms with noise for all labels of a user, and rows weighted by user.

        Users are numbers (n,). Rows, users and weights are public; no label is read.
        """
        rows, width = scaled.rows, scaled.scaling.width
        n, weights = rows.num_rows, rows.weights
        weights = np.ones(n) if weights is None else weights
        of_one = _with_max_l1(dataclasses.replace(self.mechanism, max_norm=1.0), 1.0)
        norms = of_one.user_norms(users, scaled.blocks(), width)
        noise = of_one.noise_stddev(n, width) ** 2 * width * of_one.num_columns
        totals = np.bincount(users, weights=weights)
        factors = user_weights(norms, totals, noise, self.kind.code_variance)
        mean = float(np.mean(factors[users] * weights))
        rows = dataclasses.replace(rows, weights=factors[users] * weights / mean)
        mechanism = dataclasses.replace(of_one, max_norm=_rounded_up(rows.max_weight))
        mechanism = mechanism.for_users(factors * norms / mean, np.bincount(users), width)
        longest = _rounded_up(mechanism.max_norm)
        mechanism = _with_max_l1(mechanism, _rounded_up(mechanism.max_l1 or 1.0))
        terms = self._with(dataclasses.replace(mechanism, max_norm=longest))
        return terms, rows.scaled(scaled.scaling)

    def scaling(self, rows: PublicRows, sample: RowSample) -> Scaling:
        """Returns the scaling for these terms, from the sample of a survey."""
        noise_to_signal = None
        if self.spread:
            n, width = rows.num_rows, sample.rows.shape[1] + self.intercept
            mechanism = self.for_width(width).mechanism
            noise = mechanism.noise_stddev(n, width) ** 2
            noisy_columns = mechanism.num_columns - self.is_one_hot
            noise_to_signal = noisy_columns * noise / (n**2 * self.kind.code_variance)
        return rows.scaling(
            sample,
            center=self.center,
            intercept=_INTERCEPT if self.intercept else 0.0,
            noise_to_signal=noise_to_signal,
            half=self.spread == "half",
        )

    def design(self, rows: ScannedRows) -> Design:
        """Returns the design of scanned rows, without the rows kept for the release."""
        return Design(self, rows.rows.num_rows, rows.scaling, rows.gram, rows.sample)

    @property
    def is_one_hot(self) -> bool:
        """Whether the codes of a label sum to zero over the columns."""
        return self.mechanism.num_classes is not None and self.mechanism.num_classes > 2

    def _with(self, mechanism: LabelMomentMechanism) -> HeadTerms:
        return dataclasses.replace(self, mechanism=mechanism)


@dataclasses.dataclass(frozen=True, eq=False)
class Design:
    """All that is public about a fit: its terms, and what survey and scan found."""

    terms: HeadTerms
    num_rows: int
    scaling: Scaling
    gram: np.ndarray  # as in ScannedRows
    sample: RowSample  # likewise

    @property
    def noise_stddev(self) -> float:
        """The standard deviation of the noise on each moment."""
        return self.terms.mechanism.noise_stddev(self.num_rows, self.gram.shape[0])

    def fit(self, moments: np.ndarray) -> Fit:
        """Returns the fit to released moments (D, C); warns if they are noise alone."""
        terms, scaling = self.terms, self.scaling
        problem, prior = self.least_risk(moments)
        signal_to_noise, deviations = problem.spectrum.signal_test()
        if deviations < _SIGNIFICANT:
            energy = self.num_rows * terms.kind.code_variance
            best = problem.spectrum.expected_signal_to_noise(energy)
            _validate.warn(
                f"the release is indistinguishable from noise at epsilon="
                f"{terms.mechanism.epsilon:g}: its signal-to-noise is {signal_to_noise:.2g} "
                f"({deviations:.1f} standard deviations from none); features that explain the "
                f"labels fully would reach {best:.2g}. Use a larger epsilon, more examples, or "
                "fewer features."
            )
        solution = terms.solver.solve(problem, self.with_scale(problem.scale), prior)
        weights = solution.weights
        if problem.scale is not None:
            weights = weights * problem.scale[:, np.newaxis]
        part = 1.0 / np.hypot(1.0, scaling.intercept)  # a row's length without its constant column
        return Fit(
            terms.kind,
            scaling,
            self.noise_stddev,
            signal_to_noise,
            part * weights,
            part * scaling.intercept * solution.last,
            part * problem.coefficient_stddev(solution.filter, scaling.spread),
            solution.chosen,
        )

    def least_risk(self, moments: np.ndarray) -> tuple[Problem, tuple[float, float]]:
        """Returns a release in its spectrum, and the variances of the prior.

        Coefficients have equal prior variances after the spread, or before it if that has clearly
        less risk: by more than the estimate's standard deviation under pure noise, and by a share
        of the risk, because a classifier's loss follows the squared error only loosely.
        """
        terms, spread = self.terms, self.scaling.spread
        scales: list[np.ndarray | None] = [None]
        if spread is not None and terms.solver.has_prior:  # its columns are orthogonal
            scales.append(1.0 / np.linalg.norm(spread.astype(np.float64), axis=0))
        found = []
        for scale in scales:
            problem = Problem.of(
                self.gram.copy(order="F"),
                moments,
                self.noise_stddev,
                centred=terms.is_one_hot,
                intercept=terms.intercept,
                scale=scale,
            )
            spectrum = problem.spectrum
            prior = spectrum.prior_variances(terms.kind.code_variance / spectrum.k_eff)
            bayes = spectrum.bayes_filter(*prior)
            found.append((problem, prior, spectrum.risk(bayes), spectrum.risk_stddev(bayes)))
        first, last = found[0], found[-1]
        clearly = max(first[3], _CLEAR * abs(first[2]))
        return last[:2] if last[2] < first[2] - clearly else first[:2]

    def with_scale(self, scale: np.ndarray | None) -> Design:
        """Returns the design with these factors on the columns of its sample."""
        if scale is None:
            return self
        rows = self.sample.rows.copy()
        rows[:, : scale.size] *= scale.astype(np.float32)
        return dataclasses.replace(self, sample=dataclasses.replace(self.sample, rows=rows))

    def scores(self, coefficients: np.ndarray) -> SampleScores:
        """Returns the scores of the sample for coefficients (D, C)."""
        values = self.sample.rows @ coefficients.astype(np.float32)
        return SampleScores(values, self.sample.weights)

    def matched(
        self, problem: Problem, scores: SampleScores, last: np.ndarray, sharpness: float
    ) -> tuple[np.ndarray, float]:
        """Returns the constant (C,) with which mean probabilities equal the released class means.

        And the sharpness: zero, with which all classes would be equally likely, becomes a small
        one. Class weights multiply the probabilities: they are added to the constant. ``scores``
        are those with the old constant.
        """
        terms, n = self.terms, self.num_rows
        if not terms.intercept:
            return last, sharpness
        size = float(np.sqrt(np.mean(np.square(scores.values)))) or 1.0
        sharpness = max(sharpness, _LEAST_SHARPNESS / size)
        column = math.sqrt(problem.count / n)
        sharp = dataclasses.replace(scores, values=sharpness * scores.values)
        shifts = sharp.matching_shifts(
            column * problem.kept() * problem.last,
            problem.sigma / (n * column),
            are_labels=isinstance(terms.kind, Rows),
        )
        if terms.class_weight is not None:
            shifted = dataclasses.replace(sharp, values=sharp.values + shifts)
            shares = shifted.of_classes().mean_probabilities()
            weights: Any = terms.kind.class_weights(terms.class_weight, shares)
            logs = np.log(weights)
            # A single column has half the log-odds.
            shifts = shifts + (logs - logs.mean() if shifts.size > 1 else 0.5 * np.diff(logs))
        return last + shifts / (sharpness * column), sharpness


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """A linear predictor, by post-processing of one release for a design."""

    kind: LabelKind
    scaling: Scaling
    noise_stddev: float
    signal_to_noise: float
    weights: np.ndarray  # (D, C), of a row of the scaling without its constant column
    intercept: np.ndarray  # (C,)
    coef_stddev: np.ndarray  # (d,)
    chosen: dict[str, Any]  # as in Solution

    @property
    def num_directions(self) -> int:
        """The number of directions with a share of the release."""
        return self.scaling.width - bool(self.scaling.intercept)

    @property
    def coef(self) -> np.ndarray:
        """The coefficients (C, d) of centred features, over the length of their spread row."""
        spread = self.scaling.spread
        return np.ascontiguousarray((self.weights if spread is None else spread @ self.weights).T)

    def keep_in(
        self,
        head: Any,
        receipts: tuple[Receipt, ...],
        encoder: Any = None,
        columns: tuple[str, ...] | None = None,
        width: int | None = None,
    ) -> None:
        """Sets all fitted attributes of a ``OneReleaseHead``.

        It runs after all that can fail, so that a failed fit changes neither a fitted head nor its
        statement. Columns and width are those before the encoder; None for those of the rows.
        """
        head._set_fitted(
            columns,
            self.scaling.mean.size if width is None else width,
            receipts_=receipts,
            encoder_=encoder,
            classes_=self.kind.class_values,
            coef_=self.coef,
            intercept_=self.intercept,
            coef_stddev_=self.coef_stddev,
            noise_stddev_=self.noise_stddev,
            signal_to_noise_=self.signal_to_noise,
            num_directions_=self.num_directions,
            **self.chosen,
        )
        head._label_range, head._is_of_rows = self.kind.label_range, isinstance(self.kind, Rows)
        head._scaling, head._column_weights = self.scaling, self.weights


def _rounded_up(norm: float) -> float:
    return math.ceil(norm * _NORM_STEPS) / _NORM_STEPS


def _with_max_l1(mechanism: Any, max_l1: float) -> LabelMomentMechanism:
    """Returns the mechanism for rows of this L1 norm, on which only Laplace noise depends."""
    if mechanism.noise == "laplace":
        return dataclasses.replace(mechanism, max_l1=max_l1)
    return mechanism
