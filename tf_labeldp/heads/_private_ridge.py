"""Ridge regression on public features from one private release of the labels."""

from __future__ import annotations

import math
import warnings
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Charge, PrivacyBudget, PrivacyGuarantee, compose_charges
from tf_labeldp.estimation import LabelMomentMechanism
from tf_labeldp.heads import _ridge_path
from tf_labeldp.heads._estimator import Estimator
from tf_labeldp.heads._gram import PublicRows, Scan, checked_features, unit_rows
from tf_labeldp.heads._keras_export import export_head
from tf_labeldp.heads._probabilities import class_scores, softmax_sharpness
from tf_labeldp.private_labels import PrivateLabels

_Self = TypeVar("_Self", bound="PrivateRidge")
_PREDICT_ROWS = 4096
_INTERCEPT = 0.2
"""The constant column beside a row of length one: it costs the other features 2 % of signal, and
makes the noise on the mean of n centred codes sigma / (0.2 n)."""
_SIGNIFICANT = 3.0
"""Standard deviations of pure noise below which a release counts as nothing but noise."""


class PrivateRidge(Estimator):
    """A linear head that sees the labels once, through noisy moments ``X^T Y``.

    The features are public, so a least-squares fit needs of the labels only their moments with the
    features, ``LabelMomentMechanism``. They are released once; the penalty, the probabilities, the
    standard errors and all predictions are computed from that release and the features.

    Privacy: everything that comes out is (epsilon, delta)-DP for the replacement of one label, by
    one release; the rest is post-processing. Assumes that the features, the order and the number of
    the examples, and all arguments are public: the classes and the range are never taken from the
    labels, and a feature map must not have been trained with them. ``guarantee()`` says so too.

    The mean of all rows of features is subtracted, each row is scaled to unit norm by its own
    length, and gets a constant column for the intercept; its length is one again after that.
    ``scikit-learn``'s conventions hold: a transformer may come before it in a pipeline, ``clone``
    and ``set_params`` work.

    Source: ``_ridge_path`` derives the risk estimate and the prior; releasing the moments is
    "sufficient statistics perturbation" (Vu and Slavkovic 2009), here with the Gram matrix public.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels; 0 with ``noise="laplace"``.
        num_classes: K, for labels 0..K-1. Leave it out for a vault, which knows its labels.
        classes: the class values in the order of their codes, for other labels; public.
        low: the smallest label of a regression task, public.
        high: the largest label of a regression task, public.
        num_labels: L, for labels that are rows (n, L) of zeros and ones; one person's whole row is
            then protected.
        penalty: ``"bayes"`` for a normal prior whose variances maximise the likelihood of the
            release; ``"risk"`` for the ridge penalty of least unbiased risk; or a ridge penalty, in
            units of the Gram matrix of unit rows (whose trace is n).
        center: whether to subtract the mean of the features, in one more pass over them.
        intercept: whether to add the constant column; its coefficient is not penalised.
        noise: ``"gaussian"``, or ``"laplace"`` for a pure guarantee, which is for a handful of
            features.
        key: the name of the release in a vault.
        max_bytes: the most memory for the Gram matrix and its eigenvectors.
        seed: makes the fit repeatable, and the statement "not private: seeded".

    Attributes:
        coef_: ``float64`` (K, d), for rows of unit norm; (1, d) for two classes and for numbers.
        intercept_: ``float64`` (K,) or (1,).
        coef_stddev_: the standard error (d,) that the noise of the release alone gives a
            coefficient, given the penalty; the same in each row of ``coef_``.
        penalty_: the ridge penalty; None for ``"bayes"``.
        prior_: for ``"bayes"``, the chosen standard deviations of coefficients and residuals.
        risk_: the unbiased estimate of the squared error on the training set, less a constant.
        risk_path_: (penalties, risks) of ridge, each (121,).
        noise_stddev_: the standard deviation of the noise on each moment.
        signal_to_noise_: energy of the labels' signal over that of the noise in the release, as
            estimated from it; about zero if there is none.
        classes_: class values (K,); for classes.
        n_features_in_: d.

    Raises:
        ValueError: ``fit`` on arguments out of range or features that are not finite.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> features = rng.normal(size=(3000, 5))
        >>> labels = (features[:, 0] > 0).astype(int)
        >>> head = PrivateRidge(epsilon=1.0, delta=1e-5, num_classes=2, seed=0)
        >>> head.fit(features, labels).score(features, labels) > 0.9
        True
        >>> print(head.guarantee().epsilon, head.guarantee().delta)
        1.0 1e-05
    """

    def __init__(
        self,
        epsilon: float,
        delta: float = 0.0,
        *,
        num_classes: int | None = None,
        classes: Any = None,
        low: float | None = None,
        high: float | None = None,
        num_labels: int | None = None,
        penalty: str | float = "bayes",
        center: bool = True,
        intercept: bool = True,
        noise: str = "gaussian",
        key: str | None = None,
        max_bytes: float = 8e9,
        seed: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.num_classes = num_classes
        self.classes = classes
        self.low = low
        self.high = high
        self.num_labels = num_labels
        self.penalty = penalty
        self.center = center
        self.intercept = intercept
        self.noise = noise
        self.key = key
        self.max_bytes = max_bytes
        self.seed = seed

    def fit(self: _Self, features: Any, labels: Any = None) -> _Self:
        """Releases the moments of the labels, and fits.

        Args:
            features: numbers (n, d); or a ``tf.data.Dataset`` of batches x (m, d) or (x, y), read
                three times (twice with ``center=False``), and so never shuffled.
            labels: (n,) classes or numbers, or (n, L) zeros and ones, from which a vault with the
                budget (epsilon, delta) is made; or a ``PrivateLabels``, which charges the release
                to its own budget. None for a data set of pairs.

        Returns:
            The head itself.

        Raises:
            BudgetExceededError: a vault's budget does not allow the release; nothing was released.
            TypeError: features or labels of a wrong kind.
            ValueError: features not finite, all zero in a row or too many; labels outside of the
                classes or the range; arguments out of range.

        Warns:
            UserWarning: nothing but noise can be told in the release.
        """
        self._check_arguments()
        rows = PublicRows(
            features,
            center=self.center,
            intercept=_INTERCEPT if self.intercept else 0.0,
            max_bytes=self.max_bytes,
        )
        n = None if hasattr(features, "as_numpy_iterator") else len(features)
        source = None if labels is None else self._label_source(labels, n)
        scan = rows.scan()
        if source is None:
            if scan.labels is None:
                raise ValueError("labels are missing: pass them, or a data set of (x, y) batches.")
            source = self._label_source(scan.labels, scan.num_rows)
        elif scan.labels is not None:
            raise ValueError("the data set has labels, and labels were given too; give one.")
        mechanism = source.mechanism(scan.max_l1)
        moments = source.release(mechanism, rows)
        self._guarantee = source.guarantee(mechanism)
        self._set_labels(source)
        self._solve(scan, moments, mechanism)
        return self

    def decision_function(self, features: Any) -> np.ndarray:
        """Returns scores: least-squares estimates of P(class | x) less 1/K (1/2 for two).

        Args:
            features: (m, d), finite; a row of zeros gets the intercept alone.

        Returns:
            ``float64`` (m, K); (m,) for two classes, of the second one; (m, L) for rows of labels;
            for numbers (m,), the label less the middle of its range, not clipped.
        """
        scores = self._scores(features)
        return scores[:, 0] if scores.shape[1] == 1 and self.num_labels is None else scores

    def predict(self, features: Any) -> np.ndarray:
        """Returns class values (m,), zeros and ones (m, L), or numbers (m,) within their range."""
        scores = self._scores(features)
        if self._label_range is not None:
            low, high = self._label_range
            return np.clip(scores[:, 0] + 0.5 * (low + high), low, high)
        if self.classes_ is None:
            return (scores > 0.0).astype(np.int64)
        return self.classes_[np.argmax(class_scores(scores), axis=1)]

    def predict_proba(self, features: Any) -> np.ndarray:
        """Returns class probabilities (m, K), or of each label (m, L): softmax of sharpened scores.

        The sharpness is the one of greatest likelihood given the release, and needs no label beyond
        it (see ``_probabilities``).

        Raises:
            TypeError: the labels are numbers.
        """
        from scipy import special

        scores = self._scores(features)
        if self._label_range is not None:
            raise TypeError("labels that are numbers have no class probabilities; use predict.")
        if self.classes_ is None:
            return special.expit(2.0 * self.sharpness_ * scores)
        return special.softmax(self.sharpness_ * class_scores(scores), axis=1)

    def score(self, features: Any, labels: Any) -> float:
        """Returns the share of right predictions, or R^2 for numbers; the labels may be seen."""
        labels = np.asarray(labels)
        predicted = self.predict(features)
        if self._label_range is None:
            return float(np.mean(predicted == labels))
        return float(1.0 - np.mean((labels - predicted) ** 2) / np.var(labels))

    def guarantee(self) -> PrivacyGuarantee:
        """Returns the privacy statement, as it was after ``fit``: of all that a vault has given."""
        self._check_fitted()
        return self._guarantee

    def to_keras(self, encoder: Any = None) -> Any:
        """Returns a ``keras.Model`` of built-in layers with fixed weights; it saves and loads.

        Args:
            encoder: a Keras model from raw inputs to the features (m, d), put in front. It must not
                have been trained with these labels, or its training counts as well.

        Returns:
            A model whose outputs are those of ``predict_proba``, or of ``predict`` for numbers, of
            shape (m, 1).
        """
        self._check_fitted()
        weights, bias = self.coef_.T, self.intercept_
        activation, clip_to = "softmax", None
        if self._label_range is not None:
            activation, clip_to = "linear", self._label_range
            bias = bias + 0.5 * sum(self._label_range)
        elif self.classes_ is None:
            activation = "sigmoid"
            weights, bias = 2.0 * self.sharpness_ * weights, 2.0 * self.sharpness_ * bias
        else:
            weights = self.sharpness_ * class_scores(weights)
            bias = self.sharpness_ * class_scores(bias[np.newaxis])[0]
        return export_head(
            weights,
            bias,
            activation=activation,
            mean=self.feature_mean_,
            scale=self._feature_scale,
            clip_to=clip_to,
            encoder=encoder,
        )

    def _check_arguments(self) -> None:
        if isinstance(self.penalty, str):
            if self.penalty not in ("bayes", "risk"):
                raise ValueError(
                    f"penalty must be 'bayes', 'risk' or a number above zero, got {self.penalty!r}."
                )
        else:
            _validate.positive_finite("penalty", self.penalty)
        _validate.positive_finite("max_bytes", self.max_bytes)

    def _label_source(self, labels: Any, num_rows: int | None) -> _LabelSource:
        source = _LabelSource(self, labels)
        if num_rows is not None and len(source) != num_rows:
            raise ValueError(
                f"there are {num_rows} rows of features and {len(source)} labels; give one row a "
                "label, in the same order."
            )
        return source

    def _set_labels(self, source: _LabelSource) -> None:
        self._label_range = source.label_range
        self.classes_ = source.class_values
        self._code_variance = source.code_variance

    def _solve(self, scan: Scan, moments: np.ndarray, mechanism: LabelMomentMechanism) -> None:
        """Sets all that is fitted, from public numbers and the release."""
        width = scan.gram.shape[0]
        self.n_features_in_ = width - bool(self.intercept)
        self.feature_mean_ = scan.mean
        self._feature_scale = scan.scale
        self.noise_stddev_ = mechanism.noise_stddev(scan.num_rows, width)
        one_hot = mechanism.num_classes is not None and mechanism.num_classes > 2
        problem = _ridge_path.decompose(
            scan.gram, moments, self.noise_stddev_, centred=one_hot, intercept=self.intercept
        )
        spectrum = problem.spectrum
        self._warn_if_noise(spectrum, scan.num_rows)
        self.risk_path_ = _ridge_path.risk_path(spectrum)
        prior = _ridge_path.prior_variances(spectrum, self._code_variance / spectrum.k_eff)
        chosen = self._filter(spectrum, prior)
        self.risk_ = spectrum.risk(chosen)
        weights, last = problem.solve(chosen)
        constant = _INTERCEPT if self.intercept else 0.0
        part = 1.0 / math.hypot(1.0, constant)  # what the constant column left of a row's length
        self.coef_ = np.ascontiguousarray(part * weights.T)
        self.coef_stddev_ = part * problem.coefficient_stddev(chosen)
        self.intercept_ = part * constant * last
        if self._label_range is None:
            scores = scan.sample[:, : self.n_features_in_] @ weights + part * constant * last
            self._sharpen(scores, problem.cross_moment(chosen, *prior) / scan.num_rows)

    def _sharpen(self, scores: np.ndarray, agreement: float) -> None:
        """Chooses the sharpness, from public scores and an estimate of their mean on the labels."""
        if self.classes_ is None:  # one sharpness for all labels
            agreement /= scores.shape[1]
            scores = scores.reshape(-1, 1)
        if scores.shape[1] == 1:  # s and -s, of the label that is there and of the one that is not
            agreement *= 2.0
        self.sharpness_ = softmax_sharpness(class_scores(scores), agreement)

    def _filter(self, spectrum: _ridge_path.Spectrum, prior: tuple[float, float]) -> np.ndarray:
        self.prior_: dict[str, float] | None = None
        self.penalty_: float | None = None
        if self.penalty == "bayes":
            t, s = map(math.sqrt, prior)
            self.prior_ = {"coefficient_stddev": t, "residual_stddev": s}
            return _ridge_path.bayes_filter(spectrum, *prior)
        if self.penalty == "risk":
            self.penalty_ = _ridge_path.least_risk(spectrum, self.risk_path_[0])
        else:
            self.penalty_ = float(self.penalty)
        return _ridge_path.ridge_filter(spectrum, self.penalty_)

    def _warn_if_noise(self, spectrum: _ridge_path.Spectrum, num_rows: int) -> None:
        self.signal_to_noise_, deviations = _ridge_path.signal_test(spectrum)
        if deviations < _SIGNIFICANT:
            best = _ridge_path.expected_signal_to_noise(spectrum, num_rows * self._code_variance)
            warnings.warn(
                f"nothing but noise can be told in the release at epsilon={self.epsilon:g}: its "
                f"signal-to-noise is {self.signal_to_noise_:.2g} ({deviations:.1f} standard "
                f"deviations from none); {best:.2g} is expected where the features explain the "
                "labels fully. Predictions will be little better than guesses: use a larger "
                "epsilon, more examples, or fewer features.",
                UserWarning,
                stacklevel=4,
            )

    def _scores(self, features: Any) -> np.ndarray:
        self._check_fitted()
        array = checked_features(features)
        if array.shape[1] != self.n_features_in_:
            raise ValueError(
                f"features have {array.shape[1]} columns, the head was fitted on "
                f"{self.n_features_in_}."
            )
        parts = [
            unit_rows(array[start : start + _PREDICT_ROWS], self.feature_mean_) @ self.coef_.T
            + self.intercept_
            for start in range(0, array.shape[0], _PREDICT_ROWS)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, self.intercept_.size))

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise ValueError("this PrivateRidge is not fitted; call fit(features, labels) first.")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "coef_")

    def __sklearn_tags__(self) -> Any:
        from sklearn import utils

        is_number = self.low is not None
        return utils.Tags(
            estimator_type="regressor" if is_number else "classifier",
            target_tags=utils.TargetTags(required=True),
            classifier_tags=None if is_number else utils.ClassifierTags(),
            regressor_tags=utils.RegressorTags() if is_number else None,
        )


class _LabelSource:
    """Where the labels of one fit are: a vault, given or made; or rows of zeros and ones."""

    def __init__(self, head: PrivateRidge, labels: Any) -> None:
        self._head = head
        self.class_values: np.ndarray | None = None
        self.label_range: tuple[float, float] | None = None
        self._rows: np.ndarray | None = None
        if head.num_labels is not None:
            self._open_rows(labels)
            return
        if isinstance(labels, PrivateLabels):
            self._vault = labels
            self._check_vault()
        else:
            self.mechanism(1.0)  # its arguments first: labels are not looked at for a bad delta
            self._vault = PrivateLabels(
                labels,
                head.num_classes,
                classes=head.classes,
                low=head.low,
                high=head.high,
                budget=PrivacyBudget(head.epsilon, head.delta),
                seed=head.seed,
            )
        self.label_range = self._vault.label_range
        if self.label_range is None:
            self.class_values = self._vault.decode(np.arange(self._vault.num_classes))
        if head.key is None or not self._vault.has_draw(head.key):
            self._vault.check_budget(self.mechanism(1.0))

    def __len__(self) -> int:
        return len(self._vault) if self._rows is None else self._rows.shape[0]

    @property
    def code_variance(self) -> float:
        """The largest variance of the code of a label, summed over the columns."""
        if self._rows is not None:
            return 0.25 * self._rows.shape[1]
        if self.label_range is not None:
            return 0.25 * (self.label_range[1] - self.label_range[0]) ** 2
        k = self._vault.num_classes
        return 0.25 if k == 2 else 1.0 - 1.0 / k

    def mechanism(self, max_l1: float) -> LabelMomentMechanism:
        """Returns the mechanism of the release, for rows of unit norm."""
        head = self._head
        kind: dict[str, Any] = {"num_labels": head.num_labels}
        if head.num_labels is None:
            vault = getattr(self, "_vault", None)
            if vault is None:
                known = head.num_classes
                if known is None and head.classes is not None:
                    known = len(head.classes)
                kind = {"num_classes": known, "low": head.low, "high": head.high}
            elif vault.label_range is not None:
                kind = {"low": vault.label_range[0], "high": vault.label_range[1]}
            else:
                kind = {"num_classes": vault.num_classes}
        is_laplace = head.noise == "laplace"
        return LabelMomentMechanism(
            head.epsilon,
            head.delta,
            max_l1=max_l1 if is_laplace else None,
            noise=head.noise,
            **kind,
        )

    def release(self, mechanism: LabelMomentMechanism, rows: PublicRows) -> np.ndarray:
        """Returns the noisy moments, charged to the vault."""
        if self._rows is None:
            return self._vault.release(mechanism, public_input=rows, key=self._head.key)
        seed = self._head.seed
        rng = None if seed is None else np.random.default_rng(seed)
        return mechanism.release(self._rows, rows, rng=rng)

    def guarantee(self, mechanism: LabelMomentMechanism) -> PrivacyGuarantee:
        """Returns the statement of the vault, or of the one release."""
        if self._rows is None:
            return self._vault.guarantee()
        one = compose_charges([Charge.of(mechanism)], mechanism.delta)
        return PrivacyGuarantee(
            one.epsilon,
            one.delta,
            unit="the whole row of labels of one training example",
            assumptions=(
                "the features are public, and each person has one example",
                "this fit is the only use of these labels: no vault keeps account of them",
            ),
            seeded=self._head.seed is not None,
        )

    def _open_rows(self, labels: Any) -> None:
        if isinstance(labels, PrivateLabels):
            raise TypeError(
                "a PrivateLabels holds one label an example, not rows of labels; leave out "
                "num_labels, or pass the rows (n, L) themselves."
            )
        self._rows = np.asarray(labels)
        if self._rows.ndim != 2:
            raise ValueError(
                f"labels must have shape (n, {self._head.num_labels}), got {self._rows.shape}."
            )

    def _check_vault(self) -> None:
        head, vault = self._head, self._vault
        if head.seed is not None:
            raise ValueError(
                "seed must be None with a PrivateLabels: it has its own source of random bits. Use "
                "PrivateLabels(..., seed=...) for a repeatable run."
            )
        if vault.label_range is None:
            found: dict[str, Any] = {"num_classes": vault.num_classes, "classes": vault.classes}
        else:
            found = {"low": vault.label_range[0], "high": vault.label_range[1]}
        for name in ("num_classes", "classes", "low", "high"):
            given = getattr(head, name)
            given = tuple(given) if name == "classes" and given is not None else given
            if given is not None and given != found.get(name):
                raise ValueError(
                    f"{name} is not that of the PrivateLabels, which has {found}. Leave it out: "
                    "the vault knows its labels."
                )
