"""Logistic regression on public features from one private release of the labels."""

from __future__ import annotations

import math

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.heads import _ridge_path
from tf_labeldp.heads._label_source import LabelSource
from tf_labeldp.heads._logistic import Likelihood, LogisticFit, LogisticProblem
from tf_labeldp.heads._one_release_head import OneReleaseHead
from tf_labeldp.heads._public_rows import Scan


class PrivateLogisticRegression(OneReleaseHead):
    """A linear head with the logistic loss that sees the labels once, through noisy ``X^T Y``.

    In logistic regression too, labels enter the likelihood through their moments with the features
    alone (its link is canonical), so the release that serves ``PrivateRidge`` serves it as well:
    all Newton steps, penalties and probabilities are computed from that one release and the public
    features. Releasing again for each step would not help: k releases that cost as much as one,
    averaged, are as noisy as that one, and noisier for Laplace noise.

    Privacy: as of ``PrivateRidge``: everything that comes out is (epsilon, delta)-DP for the
    replacement of one label, by one release.

    Source: ``_logistic`` derives the penalty and its choice; ``_allocation`` the spread.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels; 0 with ``noise="laplace"``.
        num_classes: as for ``PrivateRidge``, like all arguments that are not below.
        penalty: ``"auto"`` for the multiple of the Bayes penalty of ridge, a power of two, that has
            the least estimated log-loss on the training set (by Stein's identity, without labels);
            or that multiple.
        max_bytes: the most memory. If the rows, ``float32``, do not fit in a quarter of it, the
            sum over rows in the likelihood is taken over a uniform sample of them.

    Attributes:
        coef_: ``float64`` (K, d), of the centred features over the length of their spread row;
            (1, d) for two classes. For two classes and for rows of labels, halves of log-odds.
        intercept_: ``float64`` (K,) or (1,).
        coef_stddev_: the standard error (d,) that the noise of the release alone gives a
            coefficient, given the penalty: to first order, and divided over the features as if the
            loss curved alike in all directions; right in total, but for single ones a rough guide.
        penalty_: the multiple.
        risk_: the estimate of the mean log-loss on the training set.
        risk_path_: (multiples, estimates) of those that were tried, ascending.
        sharpness_: what scores are multiplied by for probabilities.
        noise_stddev_: as in ``PrivateRidge``, like ``num_directions_``, ``signal_to_noise_``,
            ``classes_`` and ``n_features_in_``.

    Raises:
        ValueError: ``fit`` on arguments out of range, features that are not finite, or labels that
            are numbers.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> features = rng.normal(size=(3000, 5))
        >>> labels = (features[:, 0] > 0).astype(int)
        >>> head = PrivateLogisticRegression(1.0, delta=1e-5, num_classes=2, insecure_seed=0)
        >>> head.fit(features, labels).score(features, labels) > 0.9
        True
    """

    _sample_rows = None

    def _check_arguments(self) -> None:
        if self.low is not None or self.high is not None:
            raise ValueError(
                "PrivateLogisticRegression is for classes, but low or high was given. Use "
                "PrivateRidge for labels that are numbers."
            )
        if not isinstance(self.penalty, str):
            _validate.positive_finite("penalty", self.penalty)
        elif self.penalty != "auto":
            raise ValueError(
                f"penalty must be 'auto' or a number above zero, got {self.penalty!r}."
            )

    def _check_kind(self, source: LabelSource) -> None:
        if source.label_range is not None:
            raise ValueError(
                "the labels of the PrivateLabels are numbers, and PrivateLogisticRegression is for "
                "classes. Use PrivateRidge. Nothing was released."
            )

    def _choose(
        self, problem: _ridge_path.Problem, scan: Scan, prior: tuple[float, float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        bayes = _ridge_path.bayes_filter(problem.spectrum, *prior)
        logistic, start, kept = _logistic_problem(problem, scan, bayes, self.classes_)
        fit, path = _fit(logistic, start, scan.num_rows, self.penalty)
        self.penalty_, self.risk_, self.sharpness_ = fit.multiple, fit.log_loss, fit.sharpness
        self.risk_path_ = (np.array(list(path)), np.array(list(path.values())))
        # Log-odds s are kept as s / 2, the scores of two classes being s / 2 and -s / 2.
        half = 1.0 if logistic.likelihood.softmax else 0.5
        vectors = problem.spectrum.vectors[:, kept]
        weights = half * (vectors @ fit.coefficients[: int(kept.sum())])
        last = np.zeros(weights.shape[1])
        if self.intercept:
            last = half * fit.coefficients[-1] - problem.column @ weights
        filter_ = _first_order_filter(logistic, fit, kept, problem.spectrum.k_eff)
        return weights, last, half * filter_


def _logistic_problem(
    problem: _ridge_path.Problem, scan: Scan, bayes: np.ndarray, classes: np.ndarray | None
) -> tuple[LogisticProblem, np.ndarray, np.ndarray]:
    """Returns the problem in the eigenvectors of the Gram matrix, a start, and which are kept."""
    spectrum = problem.spectrum
    kept = bayes > 0.0
    width, columns = spectrum.values.size, spectrum.moments.shape[1]
    rows = scan.sample
    for begin in range(0, len(rows), 8192):  # in place
        block = rows[begin : begin + 8192]
        if problem.count:
            block[:, :width] -= block[:, width:] * problem.column.astype(np.float32)
        block[:, :width] = block[:, :width] @ spectrum.vectors.astype(np.float32)
    softmax = classes is not None and len(classes) > 2
    keep = kept if not problem.count else np.append(kept, True)
    likelihood = Likelihood(
        rows if np.all(keep) else rows[:, keep], scan.num_rows / len(rows), softmax
    )
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
    return LogisticProblem(likelihood, moments, noise, values, penalties, fixed), start, kept


def _fit(
    logistic: LogisticProblem, start: np.ndarray, num_rows: int, penalty: str | float
) -> tuple[LogisticFit, dict[float, float]]:
    if penalty == "auto":
        return logistic.best(start, num_rows)
    fit = logistic.assess(float(penalty), start, num_rows)
    return fit, {fit.multiple: fit.log_loss}


def _first_order_filter(
    logistic: LogisticProblem, fit: LogisticFit, kept: np.ndarray, k_eff: int
) -> np.ndarray:
    """Returns ``1 / (h l + c p)`` (d,) with the mean curvature h of the loss at the fit.

    The loss is curved least along the coefficients, where noise then moves them most, so that the
    filter is scaled to give the total variance that the fit found.
    """
    likelihood = logistic.likelihood
    scores = likelihood.scores(fit.coefficients)
    scores -= scores.max(axis=1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=1, keepdims=True)
    curvature = float((shares * (1.0 - shares)).sum(axis=1).mean())
    curvature /= scores.shape[1] - 1.0 if likelihood.softmax else 2.0
    number = int(kept.sum())
    denominator = curvature * logistic.eigenvalues + fit.multiple * logistic.penalties
    filter_ = np.zeros(kept.size)
    filter_[kept] = 1.0 / denominator[:number]
    variance = k_eff * float(np.square(filter_[kept]) @ logistic.noise[:number])
    if variance > 0.0:
        filter_ *= math.sqrt(float(fit.variance[:number].sum()) / variance)
    return filter_
