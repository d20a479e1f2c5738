"""``PrivateLogisticRegression``: its fit and its penalty, from one noisy release of moments.

Labels enter the likelihood through ``B = X^T Y`` alone, so the one release serves every Newton
step. ``docs/theory.md`` derives the penalties, the choice of their multiple, and the sharpness.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np

from tf_labeldp._progress import num_cores
from tf_labeldp.accounting import Public, Setting
from tf_labeldp.heads import _ridge_path
from tf_labeldp.heads.design import Design, Solution, Solver
from tf_labeldp.heads.one_release_head import OneReleaseHead
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.vault import LabelKind, Numbers

_ENTRIES = 1 << 18
"""Numbers of rows, or scores, at a time: the second product reads both from a core's cache."""
_BLOCKS = 8
"""Blocks that a thread adds up at a time."""
_CHOICE_ROWS, _CHOICE_ROWS_PER_FEATURE = 1 << 14, 16
"""The least rows, and rows per feature, of the sample on which the penalty is chosen."""
_LOSS_SCORES = 1 << 24
"""The most scores of rows with which the loss of a multiple is estimated."""
_STEP = 0.3
"""The step of the finite difference, in standard deviations of the noise."""
_LEAST, _MOST = 0.25, 4096.0
"""The range of multiples that the search may try."""
_PROBE_ENTRIES, _MOST_PROBES = 256, 16
"""Total entries of all probes, and the most probes: short probes need more of them."""


class LikelihoodSolver(Solver):
    """A fit by maximum penalised likelihood; stores nothing."""

    def _maximise(
        self,
        problem: _ridge_path.Problem,
        design: Design,
        prior: tuple[float, float],
        make: Callable[..., Any],
        *,
        unit: float = 1.0,
        offset: float | None = None,
        least: float = 0.0,
    ) -> Solution:
        """Returns the solution, in units of ``unit`` likelihood coefficients.

        The fit and the constant start at the offset, if there is one; ``least`` is subtracted from
        losses.
        """
        likelihood, start, kept = likelihood_problem(
            problem, design, problem.spectrum.bayes_filter(*prior), make
        )
        if offset is not None:
            start[-1] = 0.0
        fit, path = likelihood.chosen(self.penalty, start, design.num_rows)
        coefficients = likelihood.axes.directions @ fit.coefficients
        risks = np.array(list(path.values())) - least
        sharpness = fit.sharpness
        weights, last = unit * coefficients, np.zeros(coefficients.shape[1])
        if design.terms.intercept:
            weights, last = weights[:-1], weights[-1] + (offset or 0.0)
        if design.terms.kind.label_range is None:
            scores = design.scores(unit * coefficients)
            last, sharpness = design.matched(problem, scores, last, sharpness)
        filter_ = first_order_filter(likelihood, fit, kept, problem.spectrum.k_eff)
        chosen = {
            "penalty_": fit.multiple,
            "risk_": fit.loss - least,
            "sharpness_": sharpness,
            "risk_path_": (np.array(list(path)), risks),
        }
        return Solution(weights, last, unit * filter_, chosen)


class LogisticSolver(LikelihoodSolver):
    def solve(
        self, problem: _ridge_path.Problem, design: Design, prior: tuple[float, float]
    ) -> Solution:
        classes = design.terms.kind.class_values
        softmax = classes is not None and len(classes) > 2
        make = functools.partial(Likelihood, softmax=softmax)
        # The fit stores half the log-odds s: the scores of two classes are s / 2 and -s / 2.
        return self._maximise(problem, design, prior, make, unit=1.0 if softmax else 0.5)


@dataclasses.dataclass(eq=False, repr=False)
class PrivateLogisticRegression(OneReleaseHead):
    """A linear head with the logistic loss, fitted from one release of noisy ``X^T Y``.

    In logistic regression, too, labels enter the likelihood through their moments with the features
    alone (its link is canonical). All Newton steps, penalties and probabilities are computed from
    the public features and the same release as in ``PrivateRidge``.

    Guarantee:
        As for ``PrivateRidge``: the head, with all its attributes and predictions, is
        (epsilon, delta)-DP for the replacement of one label, by one release.

    Source: ``docs/theory.md`` derives the penalty, its choice and the spread.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels; 0 with ``noise="laplace"``.
        num_classes: as in ``PrivateRidge``, like all arguments that are not listed here.
        penalty: a multiple of the Bayes penalty for ridge; ``"auto"`` for the power of two with
            the least estimated log-loss on the training set (by Stein's identity).
        max_bytes: the most memory. If the ``float32`` rows need more than a quarter of it, the
            likelihood sums over a uniform sample of them.

    Attributes:
        coef_: as in ``PrivateRidge``, like all attributes that are not listed here. For two classes
            and for rows of labels, half the log-odds.
        coef_stddev_: standard errors to first order; right in total over the features, rough for a
            single feature.
        penalty_: the multiple.
        risk_: the estimated mean log-loss on the training set.
        risk_path_: the multiples that were tried, ascending, and their estimates.

    Raises:
        ValueError: ``fit`` gets arguments out of range, features that are not finite, or labels
            that are numbers.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> features = rng.normal(size=(3000, 5))
        >>> labels = (features[:, 0] > 0).astype(int)
        >>> head = PrivateLogisticRegression(1.0, delta=1e-5, num_classes=2, insecure_seed=0)
        >>> head.fit(features, labels).score(features, labels) > 0.9
        True
    """

    _: dataclasses.KW_ONLY
    num_classes: int | None = None
    classes: Setting[Any] = None
    num_labels: int | None = None
    class_weight: Public[Any] = None

    _solver = LogisticSolver

    def _mechanism(self, kind: LabelKind) -> LabelMomentMechanism:
        if isinstance(kind, Numbers):
            raise ValueError(
                "PrivateLogisticRegression expected classes, got numbers. Use PrivateRidge. "
                "Nothing was released."
            )
        return super()._mechanism(kind)


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The public part of the log-likelihood: ``sum_i lse(s_i)`` over a sample of the rows."""

    rows: np.ndarray  # float32 (m, d)
    weight: float  # n / m
    softmax: bool  # whether columns are mutually exclusive classes
    weights: np.ndarray | None = None  # (m,) of the rows, with mean one

    def curvature(self, columns: int) -> float:
        """Returns h, a row's Hessian at zero in the directions that change the probabilities."""
        return 1.0 / columns if self.softmax else 0.25

    def mean_curvature(self, coefficients: np.ndarray) -> float:
        """Returns the mean of h over the rows at a fit; along the coefficients it is less."""
        scores = self.scores(coefficients)
        curvature = np.empty(len(scores.values))
        for places, shares, _ in scores.softmax_parts():
            curvature[places] = 1.0 - np.square(shares).sum(axis=0)
        mean = float(np.average(curvature, weights=scores.weights))
        return mean / (scores.values.shape[1] - 1.0 if self.softmax else 2.0)

    def first_multiple(self, columns: int) -> float:
        return 2.0 ** round(math.log2(1.2 / self.curvature(columns)))

    def value_and_gradient(self, coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the sum, and its gradient (d, C)."""
        u = np.ascontiguousarray(coefficients.T, np.float32)
        rows = max(1, _ENTRIES // max(u.shape))
        starts = range(0, len(self.rows), _BLOCKS * rows)
        total = functools.partial(self._sum_of_blocks, u, rows)
        if len(starts) == 1:
            parts = [total(0)]
        else:
            one_each = _blas().limit(limits=1)
            with one_each, futures.ThreadPoolExecutor(num_cores()) as threads:
                parts = list(threads.map(total, starts))
        # The order of the sum does not depend on the number of cores.
        values, gradients = zip(*parts, strict=True)
        return self.weight * sum(values), self.weight * np.sum(gradients, axis=0).T

    def _sum_of_blocks(self, u: np.ndarray, rows: int, first: int) -> tuple[float, np.ndarray]:
        """Returns the unweighted sum and gradient (C, d) of ``_BLOCKS`` blocks of rows."""
        value, gradient = 0.0, np.zeros(u.shape)
        for start in range(first, min(first + _BLOCKS * rows, len(self.rows)), rows):
            block = self.rows[start : start + rows]
            scores = u @ block.T
            if self.softmax:
                top = scores.max(axis=0)
                scores -= top
                np.exp(scores, out=scores)
                total = scores.sum(axis=0)
                losses = np.log(total) + top
                scores /= total
            else:
                scores *= 0.5
                size = np.abs(scores)  # log(e^x + e^-x) = |x| + log1p(e^(-2 |x|))
                losses = size + np.log1p(np.exp(-2.0 * size))
                np.tanh(scores, out=scores)
                scores *= 0.5
            # Scores are in single precision, and the sums over blocks in double: a sum of millions
            # of losses in single precision would hide the differences that the search compares.
            if self.weights is not None:
                weights = self.weights[start : start + rows].astype(np.float32)
                losses, scores = weights * losses, weights * scores
            value += float(losses.sum(dtype=np.float64))
            gradient += scores @ block
        return value, gradient

    def worth(
        self, u: np.ndarray, agreement: float, error: float, num_rows: int
    ) -> tuple[float, float]:
        del num_rows
        scores = self.scores(u)
        if not self.softmax:
            agreement, error = agreement / u.shape[1], error / u.shape[1]
        agreement = scores.believable_agreement(agreement, error)
        trusted = agreement - error**2 / agreement if agreement > error else 0.0
        sharpness = scores.sharpness(trusted)
        return sharpness, scores.log_loss(agreement, sharpness)

    def scores(self, coefficients: np.ndarray) -> _ridge_path.SampleScores:
        """Returns scores whose softmax gives probabilities; log-odds s become (-s/2, s/2)."""
        scores = self.rows @ coefficients.astype(np.float32)
        if self.softmax:
            return _ridge_path.SampleScores(scores, self.weights)
        halves = 0.5 * scores.reshape(len(scores), -1)
        return _ridge_path.SampleScores(halves, self.weights).of_labels()


@functools.cache
def _blas() -> Any:
    """Returns the controller of linear algebra's threads; to find the libraries takes long."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController().select(user_api="blas")


@dataclasses.dataclass(frozen=True)
class LikelihoodFit:
    coefficients: np.ndarray  # U (d, C)
    changes: list[np.ndarray]  # of U (d, C), by each probe
    multiple: float  # c
    sharpness: float  # beta
    loss: float  # estimated mean on the training set
    variance: np.ndarray  # (d,), total variance that the noise adds to a row of U, to first order


@dataclasses.dataclass(frozen=True)
class Axes:
    """Coordinates in which penalties are diagonal, and what is public of each."""

    directions: np.ndarray  # (D, d), from these coordinates to coefficients of the rows
    noise: np.ndarray  # (d,), variances of the moments
    eigenvalues: np.ndarray  # l (d,)
    penalties: np.ndarray  # p (d,), finite
    fixed: np.ndarray  # (d,), true where c does not multiply the penalty (the constant column)

    def multiplied(self, multiple: float) -> np.ndarray:
        """Returns the penalties (d,) for a multiple c."""
        return np.where(self.fixed, 1.0, multiple) * self.penalties


@dataclasses.dataclass(frozen=True)
class LikelihoodProblem:
    """A release in coordinates in which penalties are diagonal."""

    likelihood: Likelihood
    axes: Axes
    moments: np.ndarray  # float64 (d, C); rows sum to zero over classes
    tilt: np.ndarray | float = 0.0  # (d, C), added to the likelihood's gradient
    other: Likelihood | None = None  # of rows for losses, if ``likelihood`` is of a sample

    def fit(self, multiple: float, moments: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Returns the coefficients (d, C) for a multiple of the penalty, from other moments."""
        from scipy import optimize

        penalties = self.axes.multiplied(multiple)
        curvature = self.likelihood.curvature(moments.shape[1])
        # The Hessian at zero is diagonal in these coordinates. In units of its root all directions
        # curve alike: features of very different lengths would take the solver many more steps.
        scale = 1.0 / np.sqrt(curvature * self.axes.eigenvalues + penalties)[:, np.newaxis]
        penalties = penalties[:, np.newaxis]
        linear = moments - self.tilt

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            u = flat.reshape(moments.shape) * scale
            value, gradient = self._value_and_gradient(u)
            value += 0.5 * float((penalties * u * u).sum()) - float((u * linear).sum())
            # Classes share one direction that no probability depends on: it stays zero.
            gradient = self._centred(gradient - linear + penalties * u)
            return value, (gradient * scale).ravel()

        found = optimize.minimize(
            objective,
            (start / scale).ravel(),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 200, "maxcor": 20, "ftol": 1e-7, "gtol": 1e-6},
        )
        return self._centred(found.x.reshape(moments.shape) * scale)

    def _value_and_gradient(self, u: np.ndarray) -> tuple[float, np.ndarray]:
        directions = self.axes.directions
        value, gradient = self.likelihood.value_and_gradient(directions @ u)
        return value, directions.T @ gradient

    def assess(
        self, multiple: float, start: np.ndarray | LikelihoodFit, num_rows: int, seed: int = 0
    ) -> LikelihoodFit:
        """Returns the fit for a multiple, with its sharpness and estimated log-loss.

        Stein's identity gives ``tr(U^T B) / n``; random probes estimate the divergence of the fit.
        """
        near = start if isinstance(start, LikelihoodFit) else None
        first = start if isinstance(start, np.ndarray) else start.coefficients
        u = self.fit(multiple, self.moments, first)
        # With the same probes, the comparison of multiples hardly depends on the draw.
        rng = np.random.default_rng(seed)
        number = min(_MOST_PROBES, math.ceil(_PROBE_ENTRIES / self.moments.size))
        overlap, variance, changes = 0.0, np.zeros(len(u)), []
        for place in range(number):
            probe = rng.choice([-1.0, 1.0], size=self.moments.shape)
            probe = self._centred(probe * np.sqrt(self.axes.noise)[:, np.newaxis])
            begin = u if near is None else u + _STEP * near.changes[place]
            change = (self.fit(multiple, self.moments + _STEP * probe, begin) - u) / _STEP
            overlap += float((probe * change).sum()) / number
            variance += np.square(change).sum(axis=1) / number
            changes.append(change)
        agreement = (float((u * self.moments).sum()) - overlap) / num_rows
        spread = np.square(u).sum(axis=1) + variance
        error = math.sqrt(float(self.axes.noise @ spread)) / num_rows
        likelihood = self.likelihood if self.other is None else self.other
        sharpness, loss = likelihood.worth(self.axes.directions @ u, agreement, error, num_rows)
        return LikelihoodFit(u, changes, multiple, sharpness, loss, variance)

    def chosen(
        self, penalty: str | float, start: np.ndarray, num_rows: int
    ) -> tuple[LikelihoodFit, dict[float, float]]:
        """Returns the fit for the best multiple, or a fixed one, and the losses of all tried.

        With many rows, the multiples are compared by fits to a sample of them.
        """
        first = self.likelihood.first_multiple(self.moments.shape[1])
        first = first if penalty == "auto" else float(penalty)
        small = self._of_a_sample(first, start)
        tried: dict[float, LikelihoodFit] = {}

        def at(multiple: float) -> float:
            if multiple not in tried:
                near = min(tried, key=lambda m: abs(math.log(m / multiple)), default=None)
                begin = start if near is None else tried[near]
                tried[multiple] = small.assess(multiple, begin, num_rows)
            return tried[multiple].loss

        at(first)
        best = _descend(at, first) if penalty == "auto" else first
        if small is not self:
            tried[best] = self.assess(best, tried[best], num_rows)
        return tried[best], {multiple: tried[multiple].loss for multiple in sorted(tried)}

    def _of_a_sample(self, multiple: float, start: np.ndarray) -> LikelihoodProblem:
        """Returns the problem with fewer rows and, near its fit for a multiple, the same gradient.

        So its fits differ from those of all rows in the second order of what the sample lacks.

        Source: Shamir, Srebro and Zhang 2014, "Communication-efficient distributed optimization
        using an approximate Newton-type method".
        """
        rows = self.likelihood.rows
        most = max(_CHOICE_ROWS, _CHOICE_ROWS_PER_FEATURE * rows.shape[1])
        if len(rows) <= 2 * most:
            return self
        number = max(most, _LOSS_SCORES // self.moments.shape[1])
        # The fits know the sample, and its loss would be too small.
        sizes = [most, number] if len(rows) > number else [most]
        sample, *unseen = _samples(self.likelihood, sizes)
        small = dataclasses.replace(self, likelihood=sample)
        u = small.fit(multiple, self.moments, start)
        tilt = self._value_and_gradient(u)[1] - small._value_and_gradient(u)[1]
        return dataclasses.replace(small, tilt=tilt, other=(unseen or [self.likelihood])[0])

    def _centred(self, values: np.ndarray) -> np.ndarray:
        if not self.likelihood.softmax:
            return values
        return values - values.mean(axis=1, keepdims=True)


def _samples(likelihood: Any, sizes: list[int]) -> list[Any]:
    """Returns the likelihood, estimated from disjoint random samples of its rows."""
    order = np.random.default_rng(0).permutation(len(likelihood.rows))
    found = []
    for part in np.split(order, np.cumsum(sizes))[:-1]:
        rows, weights = np.sort(part), likelihood.weights
        if weights is not None:
            weights = weights[rows] / weights[rows].mean()
        weight = likelihood.weight * len(likelihood.rows) / len(rows)
        fields = {"rows": likelihood.rows[rows], "weight": weight, "weights": weights}
        found.append(dataclasses.replace(likelihood, **fields))
    return found


def _descend(loss: Callable[[float], float], best: float) -> float:
    """Returns a power of two with less loss than its neighbours, descending from ``best``."""
    factor = 0.5 if loss(best / 2.0) < loss(best) else 2.0
    while _LEAST <= best * factor <= _MOST and loss(best * factor) < loss(best):
        best *= factor
    return best


def likelihood_problem(
    problem: _ridge_path.Problem,
    design: Design,
    bayes: np.ndarray,
    make: Callable[..., Any],
) -> tuple[LikelihoodProblem, np.ndarray, np.ndarray]:
    """Returns the problem in the Gram matrix's eigenvectors, a start, and the kept directions."""
    spectrum = problem.spectrum
    kept = bayes > 0.0
    columns = spectrum.moments.shape[1]
    directions = spectrum.vectors[:, kept]
    if problem.count:  # the constant column, which carries the mean
        directions = np.vstack([directions, -problem.column @ directions])
        directions = np.column_stack([directions, np.eye(len(directions))[-1]])
    sample = design.sample
    weight = design.num_rows / len(sample.rows)
    likelihood = make(sample.rows, weight, weights=sample.weights)
    curvature = likelihood.curvature(columns)
    values, moments, noise = spectrum.values[kept], spectrum.moments[kept], spectrum.noise[kept]
    penalties = curvature * np.maximum(1.0 / bayes[kept] - values, 0.0)
    start = bayes[kept, np.newaxis] * moments / curvature
    if problem.count:
        share = max(problem.kept(), 1e-9)
        values = np.append(values, problem.count)
        moments = np.vstack([moments, problem.count * problem.last])
        noise = np.append(noise, problem.sigma**2)
        penalties = np.append(penalties, curvature * problem.count * (1.0 / share - 1.0))
        start = np.vstack([start, share * problem.last / curvature])
    fixed = np.zeros(values.size, bool)
    fixed[kept.sum() :] = True
    axes = Axes(directions, noise, values, penalties, fixed)
    return LikelihoodProblem(likelihood, axes, moments), start, kept


def first_order_filter(
    problem: LikelihoodProblem, fit: LikelihoodFit, kept: np.ndarray, k_eff: int
) -> np.ndarray:
    """Returns ``1 / (h l + c p)`` (d,), scaled to the total variance of the fit.

    h is the mean curvature of the loss at the fit.
    """
    axes = problem.axes
    curvature = problem.likelihood.mean_curvature(axes.directions @ fit.coefficients)
    number = int(kept.sum())
    denominator = curvature * axes.eigenvalues + fit.multiple * axes.penalties
    filter_ = np.zeros(kept.size)
    filter_[kept] = 1.0 / denominator[:number]
    variance = k_eff * float(np.square(filter_[kept]) @ axes.noise[:number])
    if variance > 0.0:
        filter_ *= math.sqrt(float(fit.variance[:number].sum()) / variance)
    return filter_
