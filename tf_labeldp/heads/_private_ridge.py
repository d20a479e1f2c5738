"""Ridge regression on public features from one private release of the labels."""

from __future__ import annotations

import math

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.heads import _ridge_path
from tf_labeldp.heads._one_release_head import OneReleaseHead
from tf_labeldp.heads._probabilities import believable_agreement, class_scores, softmax_sharpness
from tf_labeldp.heads._public_rows import Scan


class PrivateRidge(OneReleaseHead):
    """A linear least-squares head that sees the labels once, through noisy moments ``X^T Y``.

    The features are public, so a least-squares fit needs of the labels only their moments with the
    features, ``LabelMomentMechanism``. They are released once; the penalty, the probabilities, the
    standard errors and all predictions are computed from that release and the features. For
    classes, ``PrivateLogisticRegression`` makes more of the same release at all but the smallest
    budgets.

    Privacy: everything that comes out is (epsilon, delta)-DP for the replacement of one label, by
    one release; the rest is post-processing. Assumes that the features, the order and the number of
    the examples, and all arguments are public: the classes and the range are never taken from the
    labels, and a feature map or an encoder must not have been trained with them. ``guarantee()``
    says so too.

    The mean of all rows of features is subtracted, each row is scaled to unit norm by its own
    length, spread over the principal directions of the features as suits the noise (``spread``),
    scaled to unit norm again, and gets a constant column for the intercept; its length is one again
    after that. So a row tells by its direction alone: where its length matters (a single column, a
    label that grows with all of them), put ``RandomFourierFeatures`` in front.

    ``scikit-learn``'s conventions hold: a transformer may come before it in a pipeline, ``clone``
    and ``set_params`` work. But each ``fit`` on an array of labels is a release of its own: a grid
    search, cross-validation or calibration releases many times, which the statements of its heads
    add up, and scores on true labels, which they do not. Given a ``PrivateLabels``, they fail
    instead.

    Source: ``_ridge_path`` derives the risk estimate and the prior, ``_allocation`` the spread;
    releasing the moments is "sufficient statistics perturbation" (Vu and Slavkovic 2009), here with
    the Gram matrix public.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels; 0 with ``noise="laplace"``.
        num_classes: K, for labels 0..K-1. Leave it out for a vault, which knows its labels.
        classes: the class values in the order of their codes, for other labels; public.
        low: the smallest label of a regression task, public.
        high: the largest label of a regression task, public.
        num_labels: L, for labels that are rows (n, L) of zeros and ones; one person's whole row is
            then protected.
        encoder: what makes features of raw inputs: a fitted feature map, a Keras model, a callable
            from raw inputs to (m, d); ``fit``, ``predict`` and ``to_keras`` then take raw inputs.
            None for features as they are.
        penalty: ``"auto"``, which is ``"bayes"``: a normal prior whose variances maximise the
            likelihood of the release; ``"risk"`` for the ridge penalty of least unbiased risk; or a
            ridge penalty, in units of the Gram matrix of unit rows (whose trace is n).
        spread: whether to spend the release over the principal directions by water-filling, from
            the features, epsilon and n alone; directions that the noise would drown get nothing.
            False leaves the features as they are.
        center: whether to subtract the mean of the features.
        intercept: whether to add the constant column; its coefficient is not penalised.
        noise: ``"gaussian"``, or ``"laplace"`` for a pure guarantee, which is for a handful of
            features.
        key: the name of the release in a vault.
        max_bytes: the most memory for matrices and samples of rows.
        insecure_seed: makes the fit repeatable, and the statement "not private: seeded".

    Attributes:
        coef_: ``float64`` (K, d), of the centred features over the length of their spread row;
            (1, d) for two classes and for numbers.
        intercept_: ``float64`` (K,) or (1,).
        coef_stddev_: the standard error (d,) that the noise of the release alone gives a
            coefficient, given the penalty; the same in each row of ``coef_``.
        num_directions_: how many directions got a share of the release.
        penalty_: the ridge penalty; None for ``"bayes"``.
        prior_: for ``"bayes"``, the chosen standard deviations of coefficients and residuals.
        risk_: the unbiased estimate of the squared error on the training set, less a constant.
        risk_path_: (penalties, risks) of ridge, each (121,).
        sharpness_: of the probabilities; for classes.
        noise_stddev_: the standard deviation of the noise on each moment.
        signal_to_noise_: energy of the labels' signal over that of the noise in the release, as
            estimated from it; about zero if there is none.
        classes_: class values (K,); for classes.
        n_features_in_: d.

    Raises:
        ValueError: ``fit`` on arguments out of range or features that are not finite.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(1)
        >>> features = rng.normal(size=(3000, 5))
        >>> labels = (features[:, 0] > 0).astype(int)
        >>> head = PrivateRidge(epsilon=1.0, delta=1e-5, num_classes=2, insecure_seed=0)
        >>> head.fit(features, labels).score(features, labels) > 0.9
        True
        >>> print(head.guarantee().epsilon, head.guarantee().delta)
        1.0 1e-05
    """

    def _check_arguments(self) -> None:
        if not isinstance(self.penalty, str):
            _validate.positive_finite("penalty", self.penalty)
        elif self.penalty not in ("auto", "bayes", "risk"):
            raise ValueError(
                "penalty must be 'auto', 'bayes', 'risk' or a number above zero, got "
                f"{self.penalty!r}."
            )

    def _choose(
        self, problem: _ridge_path.Problem, scan: Scan, prior: tuple[float, float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        spectrum = problem.spectrum
        self.risk_path_ = _ridge_path.risk_path(spectrum)
        chosen = self._filter(spectrum, prior)
        self.risk_ = spectrum.risk(chosen)
        weights, last = problem.solve(chosen)
        if self._label_range is None:
            coefficients = np.vstack([weights, last]) if self.intercept else weights
            scores = scan.sample @ coefficients
            self.sharpness_ = self._sharpness(
                scores,
                problem.cross_moment(chosen, *prior) / scan.num_rows,
                problem.cross_moment_error(chosen) / scan.num_rows,
            )
        return weights, last, chosen

    def _sharpness(self, scores: np.ndarray, agreement: float, error: float) -> float:
        """Returns the sharpness, from public scores and an estimate of their mean on the labels."""
        # One column is s and -s, of the label that is there and of the one that is not; several
        # labels have one sharpness.
        factor = 1.0
        if self.classes_ is None:
            factor, scores = 2.0 / scores.shape[1], scores.reshape(-1, 1)
        elif scores.shape[1] == 1:
            factor = 2.0
        scores = class_scores(scores)
        believed = believable_agreement(scores, factor * agreement, factor * error)
        return softmax_sharpness(scores, believed)

    def _filter(self, spectrum: _ridge_path.Spectrum, prior: tuple[float, float]) -> np.ndarray:
        self.prior_: dict[str, float] | None = None
        self.penalty_: float | None = None
        if self.penalty in ("auto", "bayes"):
            t, s = map(math.sqrt, prior)
            self.prior_ = {"coefficient_stddev": t, "residual_stddev": s}
            return _ridge_path.bayes_filter(spectrum, *prior)
        if self.penalty == "risk":
            self.penalty_ = _ridge_path.least_risk(spectrum, self.risk_path_[0])
        else:
            self.penalty_ = float(self.penalty)
        return _ridge_path.ridge_filter(spectrum, self.penalty_)
