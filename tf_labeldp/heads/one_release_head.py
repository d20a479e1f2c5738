"""``PrivateRidge``, and what all linear heads of one release share.

``OneReleaseHead.fit`` is the whole privacy argument: it scales public rows to unit norm, which sets
the sensitivity, and releases their moments with the labels once. The rest is post-processing.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from typing import Any, ClassVar, TypeVar

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    PrivacyGuarantee,
    Private,
    Public,
    Receipt,
    Setting,
    public_input,
)
from tf_labeldp.accounting.receipts import compose_receipts, merge_receipts
from tf_labeldp.features.estimator import (
    Estimator,
    keras_model,
    note_release,
    tags_of,
    with_encoder,
)
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads import _ridge_path
from tf_labeldp.heads.label_source import LabelSource
from tf_labeldp.heads.public_rows import PublicRows, Scaling, checked_norms
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.vault import LabelKind

_Self = TypeVar("_Self", bound="OneReleaseHead")
_PREDICT_ROWS = 4096
"""Rows whose predictions are made at a time."""
_INTERCEPT = 0.2
"""The constant column next to a row of length one: it costs the other features 2 % of signal, and
makes the noise on the mean of n centred codes sigma / (0.2 n)."""
_L1_STEPS = 2.0**14
"""Parts of one to which the L1 norm of the longest row is rounded up: a stored release of Laplace
noise is then found again on a machine that rounds the rows otherwise."""
_SMALL_ENTRIES, _SMALL_WIDTH = 1 << 25, 512
"""Numbers and columns of features up to which a fit is on one thread: two took 2 to 10 times its
processor time."""
_CLEAR = 0.02
"""On raw pixels of MNIST, where coefficients are alike before the spread, the risk is 2.6 to 5 %
less; on smoothed patches, where they are not, 0.9 % at most, and logistic regression lost 1.5
points of accuracy where that decided."""
_SIGNIFICANT = 3.0
"""Standard deviations of pure noise below which a release counts as noise alone."""


class Head(Estimator, abc.ABC):
    """The statement, the score and scikit-learn's conventions of all heads."""

    receipts_: tuple[Receipt, ...]
    sharpness_: float
    _label_range: tuple[float, float] | None = None  # of numbers

    @abc.abstractmethod
    def predict(self, features: Any) -> np.ndarray:
        """Returns predictions for features as in ``fit``."""

    def score(self, features: Public[Any], labels: Public[Any]) -> float:
        """Returns the share of right predictions, or R^2 for numbers.

        Args:
            features: as for ``predict``.
            labels: of the shape of the predictions, public: the score of private labels is not
                private.

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
        """Returns the statement on all releases in the head, those of its encoder included.

        Args:
            delta: of the statement; None for that of the vault's budget.
        """
        self._check_fitted()
        return compose_receipts(self.receipts_, delta)

    def _check_fitted(self) -> None:
        self._refuse_unfitted("receipts_", "fit(features, labels)")

    def _is_regressor(self) -> bool:
        return self._label_range is not None

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "receipts_")

    @property
    def _estimator_type(self) -> str:  # scikit-learn before 1.6 reads it in place of tags
        return "regressor" if self._is_regressor() else "classifier"

    def __sklearn_tags__(self) -> Any:
        return tags_of(RegressorMixin if self._is_regressor() else ClassifierMixin)


@dataclasses.dataclass(eq=False, repr=False)
class OneReleaseHead(Head):
    """A linear head on public features that sees the labels once; see ``PrivateRidge``."""

    epsilon: float
    delta: float = 0.0
    _: dataclasses.KW_ONLY
    num_classes: int | None = None
    classes: Setting[Any] = None
    low: float | None = None
    high: float | None = None
    num_labels: int | None = None
    encoder: Public[Any] = None
    penalty: str | float = "auto"
    spread: bool = True
    center: bool = True
    intercept: bool = True
    noise: str = "gaussian"
    key: str | None = None
    max_bytes: float = 8e9
    insecure_seed: int | None = None

    _sample_rows: ClassVar[int | None] = 8192
    _penalties: ClassVar[tuple[str, ...]]  # those that have a name
    _link: ClassVar[str] = "linear"  # Keras's activation of the scores, for labels that are numbers
    _has_prior = True  # whether the fit follows a prior, so that it may choose one

    def fit(self: _Self, features: Public[Any], labels: Private[Any] = None) -> _Self:
        """Releases the moments of the labels, and fits.

        Args:
            features: numbers (n, d), or what ``encoder`` takes; or a ``tf.data.Dataset`` of batches
                x or (x, y), which is read up to three times and must not be shuffled.
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
                were fitted on before; or an encoder was trained without receipts.

        Each call with an array of labels is a release of its own. Fits of one process on the same
        rows (cross-validation, a search) are recognised, and the statement covers their sum.
        """
        before = dict(vars(self))
        try:
            public = public_input(features, self.encoder)
            inputs = FeatureRows(*public.value, max_bytes=0.25 * self.max_bytes)
            rows, source = self._survey(inputs, labels)
            with _threads_that_pay(*rows.shape):
                self._design(rows, source)
                rows.scan()
                # Sensitivity: every row has L2 norm one, the mechanism's max_norm; Laplace noise is
                # for the L1 norm of the longest row. The mechanism adds the noise, in
                # source.release.
                max_l1 = math.ceil(rows.max_l1 * _L1_STEPS) / _L1_STEPS
                source.mechanism = with_max_l1(source.mechanism, max_l1)
                released, self.receipts_ = source.release(
                    public.with_value(rows), rows.digests, self._family_of_clones()
                )
                self._finish(rows, released.values, source)
        except BaseException:  # a fitted head stays as it was, with its own statement
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        return self

    def decision_function(self, features: Public[Any]) -> np.ndarray:
        """Returns scores, the larger the likelier the class.

        Args:
            features: (m, d), finite, or what ``encoder`` takes; a row of zeros, or one equal to
                the mean of the training features, gets the intercept alone.

        Returns:
            ``float64`` (m, K); (m,) for two classes, of the second one; (m, L) for rows of labels;
            for numbers (m,), the label less the middle of its range, not clipped, or, with the
            Poisson loss, the logarithm of the expected label.
        """
        scores = self._scores(features)
        return scores[:, 0] if scores.shape[1] == 1 and not self._is_of_rows else scores

    def predict(self, features: Public[Any]) -> np.ndarray:
        """Returns class values (m,), zeros and ones (m, L), or numbers (m,) within their range."""
        scores = self._scores(features)
        if self._label_range is not None:
            low, high = self._label_range
            scores = scores[:, 0]
            is_log = self._link == "exponential"
            return np.clip(np.exp(scores) if is_log else scores + 0.5 * (low + high), low, high)
        if self.classes_ is None:
            return (scores > 0.0).astype(np.int64)
        return self.classes_[np.argmax(_ridge_path.class_scores(scores), axis=1)]

    def predict_proba(self, features: Public[Any]) -> np.ndarray:
        """Returns class probabilities (m, K), or of each label (m, L): softmax of sharpened scores.

        Raises:
            TypeError: the labels are numbers.
        """
        from scipy import special

        scores = self._scores(features)
        if self._label_range is not None:
            raise TypeError("labels that are numbers have no class probabilities; use predict.")
        if self.classes_ is None:
            return special.expit(2.0 * self.sharpness_ * scores)
        return special.softmax(self.sharpness_ * _ridge_path.class_scores(scores), axis=1)

    def to_keras(self, encoder: Public[Any] = None) -> Any:
        """Returns a ``keras.Model`` with fixed weights, that saves and loads.

        Its outputs are those of ``predict_proba``, or of ``predict`` for numbers, (m, 1). Its file
        keeps the receipts. Import ``tf_labeldp.keras_layers`` before you load it in another
        program; to serve it without this package, ``model.export(folder)``.

        Args:
            encoder: a Keras model from raw inputs to the features (m, d), put in front; None for
                that of the head. Labels that it was trained on are counted.

        Raises:
            TypeError: the head was fitted with a plain function as encoder, and none is given.
            ValueError: an encoder whose outputs are not the head's features.
        """
        self._check_fitted()
        from keras import layers

        from tf_labeldp.keras_layers._released_dense import ReleasedDense

        weights, bias, activation = self._column_weights, self.intercept_, "softmax"
        shift = 0.0  # which of the label range the bias adds
        if self._label_range is not None:
            activation = self._link
            if activation == "linear":
                shift = self._label_range[0]
                bias = bias + 0.5 * sum(self._label_range) - shift
        elif self.classes_ is None:
            activation = "sigmoid"
            weights, bias = 2.0 * self.sharpness_ * weights, 2.0 * self.sharpness_ * bias
        else:
            weights = self.sharpness_ * _ridge_path.class_scores(weights)
            bias = self.sharpness_ * _ridge_path.class_scores(bias[np.newaxis])[0]
        public = public_input(self.encoder if encoder is None else encoder)
        inputs, rows = with_encoder(public.value, self._scaling.mean.size)
        dense = ReleasedDense(weights.shape[1], activation, name="head", **_FIXED)
        outputs = dense(_scaled(rows, self._scaling))
        dense.set_weights([weights.astype(np.float32), bias.astype(np.float32)])
        note_release(dense, merge_receipts(self.receipts_, public.receipts))
        if self._label_range is not None:
            low, high = self._label_range
            if shift != low:
                outputs = layers.Rescaling(1.0, -low, dtype="float32", name="above_low")(outputs)
            outputs = layers.ReLU(max_value=high - low, dtype="float32", name="clip")(outputs)
            outputs = layers.Rescaling(1.0, low, dtype="float32", name="label_range")(outputs)
        return keras_model(inputs, outputs, "one_release_head")

    @abc.abstractmethod
    def _choose(
        self, problem: _ridge_path.Problem, rows: PublicRows, prior: tuple[float, float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fits, sets what it chose, and returns weights (D, C), constant (C,) and a filter."""

    def _mechanism(self, kind: LabelKind) -> LabelMomentMechanism:
        """Returns the mechanism of the release, for rows of unit norm."""
        return LabelMomentMechanism(
            self.epsilon,
            self.delta,
            max_l1=1.0 if self.noise == "laplace" else None,  # until the rows are known
            noise=self.noise,
            **kind.mechanism_arguments(),
        )

    def _survey(self, inputs: FeatureRows, labels: Any) -> tuple[PublicRows, LabelSource]:
        if not isinstance(self.penalty, str):
            _validate.positive_finite("penalty", self.penalty)
        elif self.penalty not in self._penalties:
            words = ", ".join(map(repr, self._penalties))
            raise ValueError(
                f"penalty must be {words} or a number above zero, got {self.penalty!r}."
            )
        _validate.positive_finite("max_bytes", self.max_bytes)
        # Labels in hand are checked before the features are read.
        source = None if labels is None else LabelSource(self, labels, self._mechanism)
        if source is not None and inputs.num_rows is not None:
            source.check_length(inputs.num_rows)
        self._remember_columns(inputs.columns)
        rows = PublicRows(inputs, self.max_bytes, self._sample_rows)
        rows.survey()
        if source is None:
            if rows.labels is None:
                raise ValueError("labels are missing: pass them, or a data set of (x, y) batches.")
            source = LabelSource(self, rows.labels, self._mechanism)
        elif rows.labels is not None:
            raise ValueError("the data set has labels, and labels were given too; give one.")
        source.check_length(rows.num_rows)
        return rows, source

    def _design(self, rows: PublicRows, source: Any) -> None:
        noise_to_signal = None
        if self.spread:
            n, d = rows.shape
            width = d + bool(self.intercept)
            mechanism = with_max_l1(source.mechanism, float(width) ** 0.5)
            noise = mechanism.noise_stddev(n, width) ** 2
            noisy_columns = mechanism.num_columns - _is_one_hot(mechanism)
            noise_to_signal = noisy_columns * noise / (n**2 * source.kind.code_variance)
        rows.design(
            center=bool(self.center), intercept=self._constant(), noise_to_signal=noise_to_signal
        )

    def _constant(self) -> float:
        return _INTERCEPT if self.intercept else 0.0

    def _finish(self, rows: PublicRows, moments: np.ndarray, source: Any) -> None:
        """Sets all that is fitted, from public numbers (overwritten) and the release."""
        self._label_range = source.kind.label_range
        self._is_of_rows = source.kind.num_labels is not None
        self._scaling = rows.scaling
        self.classes_ = source.kind.class_values
        self.n_features_in_ = self._scaling.mean.size
        width = rows.gram.shape[0]
        self.noise_stddev_ = source.mechanism.noise_stddev(rows.num_rows, width)
        self.num_directions_ = width - bool(self.intercept)
        problem, prior = self._least_risk(rows, moments, source)
        spectrum = problem.spectrum
        self.signal_to_noise_, deviations = _ridge_path.signal_test(spectrum)
        if deviations < _SIGNIFICANT:
            energy = rows.num_rows * source.kind.code_variance
            best = _ridge_path.expected_signal_to_noise(spectrum, energy)
            _validate.warn(
                f"the release is indistinguishable from noise at epsilon={self.epsilon:g}: its "
                f"signal-to-noise is {self.signal_to_noise_:.2g} ({deviations:.1f} standard "
                f"deviations from none); {best:.2g} is expected where the features explain the "
                "labels fully. Use a larger epsilon, more examples, or fewer features."
            )
        if problem.scale is not None:
            rows.sample[:, : problem.scale.size] *= problem.scale.astype(np.float32)
        weights, last, filter_ = self._choose(problem, rows, prior)
        if problem.scale is not None:
            weights *= problem.scale[:, np.newaxis]
        constant = self._constant()
        part = 1.0 / np.hypot(1.0, constant)  # what the constant column left of a row's length
        self._column_weights = part * weights
        self.intercept_ = part * constant * last
        spread = self._scaling.spread
        columns = self._column_weights if spread is None else spread @ self._column_weights
        self.coef_ = np.ascontiguousarray(columns.T)
        self.coef_stddev_ = part * problem.coefficient_stddev(filter_, spread)

    def _least_risk(
        self, rows: PublicRows, moments: np.ndarray, source: Any
    ) -> tuple[_ridge_path.Problem, tuple[float, float]]:
        """Returns the release in its spectrum, and the variances of the prior.

        Coefficients have equal prior variances after the spread, or before it where that has
        clearly less risk: by more than the standard deviation that pure noise gives the estimate,
        and by a part of the risk, as the loss of a classifier follows the squared error loosely.
        """
        spread = self._scaling.spread
        scales: list[np.ndarray | None] = [None]
        if spread is not None and self._has_prior:  # its columns are orthogonal
            scales.append(1.0 / np.linalg.norm(spread.astype(np.float64), axis=0))
        found = []
        for scale in scales:
            problem = _ridge_path.decompose(
                rows.gram if scale is scales[-1] else rows.gram.copy(order="F"),
                moments,
                self.noise_stddev_,
                centred=_is_one_hot(source.mechanism),
                intercept=bool(self.intercept),
                scale=scale,
            )
            spectrum = problem.spectrum
            prior = _ridge_path.prior_variances(
                spectrum, source.kind.code_variance / spectrum.k_eff
            )
            bayes = _ridge_path.bayes_filter(spectrum, *prior)
            found.append((problem, prior, spectrum.risk(bayes), spectrum.risk_stddev(bayes)))
        first, last = found[0], found[-1]
        clearly = max(first[3], _CLEAR * abs(first[2]))
        return last[:2] if last[2] < first[2] - clearly else first[:2]

    def _scores(self, features: Any) -> np.ndarray:
        self._check_fitted()
        rows = FeatureRows(features, self.encoder, columns=self._known_columns())
        spread = self._scaling.spread
        # In double precision, so that a prediction does not depend on the rows next to it.
        wide = None if spread is None else spread.astype(np.float64)
        plain = Scaling(self._scaling.mean, wide, 0.0)
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

    def _is_regressor(self) -> bool:
        return super()._is_regressor() or self.low is not None


class PrivateRidge(OneReleaseHead):
    """A linear least-squares head that sees the labels once, through noisy moments ``X^T Y``.

    A least-squares fit on public features needs of the labels only these moments
    (``LabelMomentMechanism``). Penalty, probabilities, standard errors and predictions are computed
    from the release and the features. For classes, ``PrivateLogisticRegression`` makes more of the
    same release at all but the smallest budgets.

    Guarantee:
        The head, with all its attributes and predictions, is (epsilon, delta)-DP for the
        replacement of one label, by one release; the rest is post-processing. Assumes that the
        features, the order and the number of the examples, and all arguments are public: the
        classes and the range are never taken from the labels, and a feature map or an encoder must
        not have been trained with them. ``guarantee()`` names these assumptions.

    Rows of features are centred, scaled to unit norm, spread over the principal directions of the
    features as suits the noise (``spread``), scaled again, and get a constant column for the
    intercept. So only the direction of a row counts: where its length matters (a single column, a
    label that grows with all of them), put ``RandomFourierFeatures`` in front.

    Pipelines, ``clone`` and ``set_params`` of scikit-learn work. But each ``fit`` on an array of
    labels is a release of its own: a grid search releases many times, which the statements of its
    heads add up; scores on true labels are not counted. With a ``PrivateLabels`` it fails once the
    budget is spent.

    Source: "sufficient statistics perturbation" (Vu and Slavkovic 2009), with the Gram matrix
    public. ``docs/heads.md`` derives the risk estimate, the prior and the spread.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels; 0 with ``noise="laplace"``.
        num_classes: K, for labels 0..K-1. Leave it out for a vault, which knows its labels.
        classes: the class values in the order of their codes, for other labels; public.
        low: the smallest label of a regression task, public.
        high: the largest label of a regression task, public.
        num_labels: L, for labels that are rows (n, L) of zeros and ones; one person's whole row is
            then protected.
        encoder: a fitted feature map, a Keras model, or a callable from raw inputs to (m, d);
            ``fit``, ``predict`` and ``to_keras`` then take raw inputs. None for features.
        penalty: ``"auto"``, which is ``"bayes"``: a normal prior whose variances maximise the
            likelihood of the release; ``"risk"`` for the ridge penalty of least unbiased risk; or a
            ridge penalty, in units of the Gram matrix of unit rows (whose trace is n).
        spread: whether to spend the release over the principal directions by water-filling, from
            the features, epsilon and n alone; directions that the noise would drown get nothing.
            The fit takes the coefficients to be alike after the spread or before it, as the release
            suggests. False leaves the features as they are.
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
        coef_stddev_: the standard error (d,) of the coefficients in each row of ``coef_``, by the
            noise of the release alone and given the penalty.
        num_directions_: how many directions got a share of the release.
        penalty_: the ridge penalty; None for ``"bayes"``.
        prior_: for ``"bayes"``, the chosen standard deviations of coefficients and residuals.
        risk_: the unbiased estimate of the squared error on the training set, less a constant.
        risk_path_: (penalties, risks) of ridge, each (121,).
        sharpness_: of the probabilities; for classes.
        noise_stddev_: the standard deviation of the noise on each moment.
        signal_to_noise_: the energy of signal over noise in the release, as estimated from it;
            about zero without a signal.
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

    _penalties = ("auto", "bayes", "risk")

    @property
    def _has_prior(self) -> bool:  # type: ignore[override]
        return self.penalty in ("auto", "bayes")

    def _choose(
        self, problem: _ridge_path.Problem, rows: PublicRows, prior: tuple[float, float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        spectrum = problem.spectrum
        self.risk_path_ = _ridge_path.risk_path(spectrum)
        self.prior_: dict[str, float] | None = None
        self.penalty_: float | None = None
        if self._has_prior:
            t, s = map(math.sqrt, prior)
            self.prior_ = {"coefficient_stddev": t, "residual_stddev": s}
            filter_ = _ridge_path.bayes_filter(spectrum, *prior)
        else:
            is_risk = self.penalty == "risk"
            least = _ridge_path.least_risk(spectrum, self.risk_path_[0]) if is_risk else 0.0
            self.penalty_ = least if is_risk else float(self.penalty)
            filter_ = _ridge_path.ridge_filter(spectrum, self.penalty_)
        self.risk_ = spectrum.risk(filter_)
        weights, last = problem.solve(filter_)
        if self._label_range is None:
            coefficients = np.vstack([weights, last]) if self.intercept else weights
            self.sharpness_ = self._sharpness(
                rows.sample @ coefficients,
                problem.cross_moment(filter_, *prior) / rows.num_rows,
                problem.cross_moment_error(filter_) / rows.num_rows,
            )
        return weights, last, filter_

    def _sharpness(self, scores: np.ndarray, agreement: float, error: float) -> float:
        # One column is s and -s, of the label that is there and of the one that is not; several
        # labels have one sharpness.
        factor = 1.0
        if self.classes_ is None:
            factor, scores = 2.0 / scores.shape[1], scores.reshape(-1, 1)
        elif scores.shape[1] == 1:
            factor = 2.0
        scores = _ridge_path.class_scores(scores)
        credible = _ridge_path.believable_agreement(scores, factor * agreement, factor * error)
        return _ridge_path.softmax_sharpness(scores, credible)


def _threads_that_pay(num_rows: int, width: int) -> contextlib.AbstractContextManager[Any]:
    """Keeps small linear algebra on one thread: waiting for others costs more than they do."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    if num_rows * width > _SMALL_ENTRIES or width > _SMALL_WIDTH:
        return contextlib.nullcontext()
    return threadpool_limits(1, user_api="blas")


def _is_one_hot(mechanism: LabelMomentMechanism) -> bool:
    return mechanism.num_classes is not None and mechanism.num_classes > 2


def with_max_l1(mechanism: Any, max_l1: float) -> LabelMomentMechanism:
    """Returns the mechanism for rows of this L1 norm, which Laplace noise alone depends on."""
    if mechanism.noise == "laplace":
        return dataclasses.replace(mechanism, max_l1=max_l1)
    return mechanism


_FIXED: dict[str, Any] = {"trainable": False, "dtype": "float32"}
"""Settings of a layer of fixed weights; half precision ends at 65,504."""


def _scaled(rows: Any, scaling: Scaling) -> Any:
    """Returns ``scaling.rows`` of a Keras tensor (m, d), without the constant column."""
    from keras import layers

    # Divided by a size of theirs, tiny numbers do not meet the constant in Keras's normalisation.
    offset = (-scaling.mean / scaling.size).tolist() if np.any(scaling.mean) else 0.0
    name = "public_center_and_scale"
    rows = layers.Rescaling(1.0 / scaling.size, offset, dtype="float32", name=name)(rows)
    rows = layers.UnitNormalization(axis=-1, dtype="float32", name="unit_rows")(rows)
    if scaling.spread is None:
        return rows
    spread = layers.Dense(scaling.spread.shape[1], use_bias=False, name="spread", **_FIXED)
    rows = spread(rows)
    spread.set_weights([scaling.spread])
    return layers.UnitNormalization(axis=-1, dtype="float32", name="unit_spread_rows")(rows)
