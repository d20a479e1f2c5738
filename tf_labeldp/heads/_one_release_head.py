"""What all linear heads of one release share: the passes, the release, predictions, export."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import PrivacyGuarantee, Receipt, compose_receipts
from tf_labeldp.accounting._receipts import standing
from tf_labeldp.features._estimator import Estimator, supervised_tags
from tf_labeldp.features._reader import FeatureSource, Rows
from tf_labeldp.heads import _keras_export, _ridge_path
from tf_labeldp.heads._label_source import LabelArguments, LabelSource
from tf_labeldp.heads._probabilities import class_scores
from tf_labeldp.heads._public_rows import PublicRows, Scaling, Scan, checked_norms
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.vault._carried import receipts_of

_Self = TypeVar("_Self", bound="OneReleaseHead")
_PREDICT_ROWS = 4096
_INTERCEPT = 0.2
"""The constant column beside a row of length one: it costs the other features 2 % of signal, and
makes the noise on the mean of n centred codes sigma / (0.2 n)."""
_L1_STEPS = 2.0**14
"""Parts of one to which the L1 norm of the longest row is rounded up: a stored release of Laplace
noise is asked for by it, also on a machine that rounds the rows otherwise."""
_SIGNIFICANT = 3.0
"""Standard deviations of pure noise below which a release counts as nothing but noise."""


class OneReleaseHead(Estimator, abc.ABC):
    """A linear head on public features that sees the labels once; see ``PrivateRidge``."""

    sharpness_: float
    receipts_: tuple[Receipt, ...]

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
        encoder: Any = None,
        penalty: str | float = "auto",
        spread: bool = True,
        center: bool = True,
        intercept: bool = True,
        noise: str = "gaussian",
        key: str | None = None,
        max_bytes: float = 8e9,
        insecure_seed: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.num_classes = num_classes
        self.classes = classes
        self.low = low
        self.high = high
        self.num_labels = num_labels
        self.encoder = encoder
        self.penalty = penalty
        self.spread = spread
        self.center = center
        self.intercept = intercept
        self.noise = noise
        self.key = key
        self.max_bytes = max_bytes
        self.insecure_seed = insecure_seed

    def fit(self: _Self, features: Any, labels: Any = None) -> _Self:
        """Releases the moments of the labels, and fits.

        Args:
            features: numbers (n, d), or what ``encoder`` takes; or a ``tf.data.Dataset`` of batches
                x or (x, y), read three times and so never shuffled.
            labels: a ``PrivateLabels``, which charges the release to its own budget; or (n,)
                classes or numbers, or (n, L) zeros and ones, from which a vault with the budget
                (epsilon, delta) is made. None for a data set of pairs.

        Returns:
            The head itself.

        Raises:
            BudgetExceededError: a vault's budget does not allow the release; nothing was released.
            TypeError: features or labels of a wrong kind.
            ValueError: features not finite, all zero in a row or too many; labels outside of the
                classes or the range; arguments out of range.
            RuntimeError: an array of labels in a process that another one started (``n_jobs``).

        Warns:
            UserWarning: the release is indistinguishable from noise; delta is above 1/n; these rows
                were fitted on before; or an encoder was trained in the clear.

        Each call with an array of labels is a release of its own. Fits of one process on the same
        rows (cross-validation, a search over arguments) are recognised, and the statement is of
        their sum. One ``PrivateLabels`` for all of them refuses to pass its budget as well.
        """
        before = dict(vars(self))
        try:
            rows, scan, source = self._read(features, labels)
            mechanism = source.mechanism(math.ceil(scan.max_l1 * _L1_STEPS) / _L1_STEPS)
            made, self.receipts_ = source.release(
                mechanism, rows, self._carried, rows.digests(), self._family_of_clones()
            )
            del self._carried
            self._finish(scan, made.values, mechanism, source)
        except BaseException:  # a head that was fitted stays as it was, with its own statement
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        return self

    def decision_function(self, features: Any) -> np.ndarray:
        """Returns scores, the larger the likelier the class.

        Args:
            features: (m, d), finite, or what ``encoder`` takes; a row of zeros, or one equal to
                the mean of the training features, gets the intercept alone.

        Returns:
            ``float64`` (m, K); (m,) for two classes, of the second one; (m, L) for rows of labels;
            for numbers (m,), the label less the middle of its range, not clipped.
        """
        scores = self._scores(features)
        return scores[:, 0] if scores.shape[1] == 1 and not self._is_of_rows else scores

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
        """Returns the share of right predictions, or R^2 for numbers.

        Args:
            features: as for ``predict``.
            labels: of the shape of ``predict``'s values; they are compared as they are, so they
                must be public, and the score of private ones is not private.

        Raises:
            ValueError: labels of another shape.
        """
        labels = np.asarray(labels)
        predicted = self.predict(features)
        if labels.shape != predicted.shape:
            raise ValueError(
                f"labels must have shape {predicted.shape}, as predictions have, got "
                f"{labels.shape}. Turn columns into vectors with .ravel()."
            )
        if self._label_range is None:
            return float(np.mean(predicted == labels))
        return float(1.0 - np.mean((labels - predicted) ** 2) / np.var(labels))

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of all that the head was made of, encoder included.

        Args:
            delta: of the statement; None for that of the vault's budget.
        """
        self._check_fitted()
        return compose_receipts(self.receipts_, delta)

    def to_keras(self, encoder: Any = None) -> Any:
        """Returns a ``keras.Model`` with fixed weights, that saves and loads.

        Its file keeps the receipts: ``guarantee`` of the model that is loaded says what this head
        says. Before it is loaded in another program, ``import tf_labeldp.keras_layers``; to serve
        the model without this package, ``model.export(folder)`` writes a TensorFlow SavedModel.

        Args:
            encoder: a Keras model from raw inputs to the features (m, d), put in front; None takes
                the one the head was fitted with. It must not have been trained with these labels,
                or its training counts as well.

        Returns:
            A model whose outputs are those of ``predict_proba``, or of ``predict`` for numbers, of
            shape (m, 1).

        Raises:
            TypeError: the head was fitted with a plain function as encoder, and none is given.
            ValueError: an encoder whose outputs are not the head's features.
        """
        self._check_fitted()
        weights, bias = self._column_weights, self.intercept_
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
        return _keras_export.export_head(
            weights,
            bias,
            activation=activation,
            scaling=self._scaling,
            clip_to=clip_to,
            encoder=self.encoder if encoder is None else encoder,
            receipts=self.receipts_,
        )

    _sample_rows: int | None = 8192

    def _read(self, features: Any, labels: Any) -> tuple[PublicRows, Scan, LabelSource]:
        """Returns what a release needs: all of it public, but for the labels in their source."""
        self._check_arguments()
        _validate.positive_finite("max_bytes", self.max_bytes)
        self._carried = receipts_of([self.encoder, features])
        self._warn_of_unknown()
        source = None if labels is None else LabelSource(self._told(), labels)
        given = FeatureSource(features, self.encoder, 0.25 * self.max_bytes)
        self._remember_columns(given.columns)
        if source is not None:
            if given.num_rows is not None:
                source.check_length(given.num_rows)
            self._check_kind(source)
        rows = PublicRows(given, self.max_bytes)
        survey = rows.survey()
        if source is None:
            if survey.labels is None:
                raise ValueError("labels are missing: pass them, or a data set of (x, y) batches.")
            source = LabelSource(self._told(), survey.labels)
        elif survey.labels is not None:
            raise ValueError("the data set has labels, and labels were given too; give one.")
        source.check_length(survey.num_rows)
        noise_to_signal = None
        if self.spread:
            noise_to_signal = self._noise_to_signal(source, survey.num_rows, survey.num_features)
        self._scaling = rows.design(
            survey,
            center=bool(self.center),
            intercept=_INTERCEPT if self.intercept else 0.0,
            noise_to_signal=noise_to_signal,
        )
        del survey  # its sample of rows is large
        return rows, rows.scan(self._sample_rows), source

    def _check_arguments(self) -> None:
        """Raises for arguments that only this head knows."""

    def _check_kind(self, source: LabelSource) -> None:
        """Raises for labels of a vault that this head can't learn, before they are released."""

    @abc.abstractmethod
    def _choose(
        self, problem: _ridge_path.Problem, scan: Scan, prior: tuple[float, float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fits, sets what it chose, and returns weights (D, C), constant (C,) and a filter."""

    def _told(self) -> LabelArguments:
        names = (field.name for field in dataclasses.fields(LabelArguments))
        return LabelArguments(**{name: getattr(self, name) for name in names})

    def _noise_to_signal(self, source: LabelSource, n: int, d: int) -> float:
        """Returns what ``spread_shares`` needs, from public numbers."""
        width = d + bool(self.intercept)
        mechanism = source.mechanism(float(width) ** 0.5)
        sigma = mechanism.noise_stddev(n, width)
        noisy_columns = mechanism.num_columns - _is_one_hot(mechanism)
        return noisy_columns * sigma**2 / (n**2 * source.code_variance)

    def _finish(
        self, scan: Scan, moments: np.ndarray, mechanism: LabelMomentMechanism, source: LabelSource
    ) -> None:
        """Sets all that is fitted, from public numbers (overwritten) and the release."""
        self._label_range = source.label_range
        self._is_of_rows = source.num_labels is not None
        self.classes_ = source.class_values
        self.n_features_in_ = self._scaling.mean.size
        width = scan.gram.shape[0]
        self.noise_stddev_ = mechanism.noise_stddev(scan.num_rows, width)
        self.num_directions_ = width - bool(self.intercept)
        problem = _ridge_path.decompose(
            scan.gram,
            moments,
            self.noise_stddev_,
            centred=_is_one_hot(mechanism),
            intercept=bool(self.intercept),
        )
        spectrum = problem.spectrum
        self._warn_if_noise(spectrum, scan.num_rows * source.code_variance)
        prior = _ridge_path.prior_variances(spectrum, source.code_variance / spectrum.k_eff)
        weights, last, filter_ = self._choose(problem, scan, prior)
        constant = _INTERCEPT if self.intercept else 0.0
        part = 1.0 / np.hypot(1.0, constant)  # what the constant column left of a row's length
        self._column_weights = part * weights
        self.intercept_ = part * constant * last
        spread = self._scaling.spread
        columns = self._column_weights if spread is None else spread @ self._column_weights
        self.coef_ = np.ascontiguousarray(columns.T)
        self.coef_stddev_ = part * problem.coefficient_stddev(filter_, spread)

    def _warn_of_unknown(self) -> None:
        for one in standing(self._carried):
            if one.kind == "unknown":
                _validate.warn(f"{one.charge.assumptions[0]}.")

    def _warn_if_noise(self, spectrum: _ridge_path.Spectrum, label_energy: float) -> None:
        self.signal_to_noise_, deviations = _ridge_path.signal_test(spectrum)
        if deviations < _SIGNIFICANT:
            best = _ridge_path.expected_signal_to_noise(spectrum, label_energy)
            _validate.warn(
                f"the release is indistinguishable from noise at epsilon={self.epsilon:g}: its "
                f"signal-to-noise is {self.signal_to_noise_:.2g} ({deviations:.1f} standard "
                f"deviations from none); {best:.2g} is expected where the features explain the "
                "labels fully. Predictions will be little better than guesses: use a larger "
                "epsilon, more examples, or fewer features."
            )

    def _scores(self, features: Any) -> np.ndarray:
        self._check_fitted()
        rows = Rows(features, self.encoder, columns=self._known_columns())
        spread = self._scaling.spread
        # In double precision, so that a prediction does not depend on the rows beside it.
        plain = Scaling(
            self._scaling.mean, None if spread is None else spread.astype(np.float64), 0.0
        )
        parts = []
        for start in range(0, max(len(rows), 1), _PREDICT_ROWS):
            block = rows.take(slice(start, start + _PREDICT_ROWS))
            if block.shape[1] != self.n_features_in_:
                raise ValueError(
                    f"features have {block.shape[1]} columns, the head was fitted on "
                    f"{self.n_features_in_}."
                )
            checked_norms(block, start)
            parts.append(plain.rows(block) @ self._column_weights + self.intercept_)
        return np.concatenate(parts)

    def _check_fitted(self) -> None:
        self._refuse_unfitted("coef_", "fit(features, labels)")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "coef_")

    @property
    def _estimator_type(self) -> str:  # what scikit-learn before 1.6 asks for, in place of tags
        return "regressor" if self._is_regressor() else "classifier"

    def _is_regressor(self) -> bool:
        """Returns whether labels are numbers, as ``low`` says, or the vault of ``fit``."""
        return getattr(self, "_label_range", None) is not None or self.low is not None

    def __sklearn_tags__(self) -> Any:
        return supervised_tags(is_number=self._is_regressor())


def _is_one_hot(mechanism: LabelMomentMechanism) -> bool:
    """Returns whether the codes of labels are one-hot, so that one direction of them is no news."""
    return mechanism.num_classes is not None and mechanism.num_classes > 2
