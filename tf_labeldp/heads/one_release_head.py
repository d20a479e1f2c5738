"""``PrivateRidge``, and ``OneReleaseHead``, the base of all linear heads.

Privacy rests on ``OneReleaseHead.fit`` alone: it scales public rows to unit norm, which sets the
sensitivity, and releases their moments with the labels once. The rest is post-processing.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
from typing import Any, ClassVar, TypeVar

import numpy as np
from sklearn.utils.metaestimators import available_if

from tf_labeldp import _checks, _validate
from tf_labeldp.accounting import (
    PrivacyGuarantee,
    Private,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.features.estimator import (
    Estimator,
    FeatureMap,
    keras_model,
    note_release,
    with_encoder,
)
from tf_labeldp.features.public_encoder import fitted_encoder
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads import _ridge_path
from tf_labeldp.heads.design import Design, Fit, HeadTerms, Solution, Solver
from tf_labeldp.heads.label_source import LabelSource, mechanism_for_users
from tf_labeldp.heads.public_rows import PublicRows, ScaledRows, Scaling
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.vault import Classes, LabelKind, Numbers, PrivateLabels, Rows
from tf_labeldp.vault.handed_on import with_receipts
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.model_history import ModelFacts, TrainedModel
from tf_labeldp.vault.uses import NamedUse

_AnyHead = TypeVar("_AnyHead", bound="Head")
_Self = TypeVar("_Self", bound="OneReleaseHead")
_PREDICT_ROWS = 4096
"""Rows predicted at a time."""
_SMALL_ENTRIES, _SMALL_WIDTH = 1 << 25, 512
"""The most numbers and columns of features for a fit on one thread: two threads took 2 to 10 times
its processor time."""


class Head(Estimator, abc.ABC):
    """The statement, the score and scikit-learn's conventions of all heads."""

    key: str | None = None
    receipts_: tuple[Receipt, ...]
    classes_: Any  # class values (K,); None for numbers and for rows of labels
    encoder_: Any = None  # the encoder in front of a fitted head
    low: float | None = None  # of a head that takes numbers
    class_weight: Any = None  # of a head that takes classes
    _label_range: tuple[float, float] | None = None  # (low, high) for labels that are numbers
    _mechanism: Any = None  # of a head of one release: from a kind of labels to its mechanism

    @_validate.clears_frames
    def parts(self, labels: Private[PrivateLabels | NamedUse]) -> dict[str | None, Any]:
        """Returns the mechanisms of the releases of ``fit``, for ``PrivateLabels.reserve``.

        They are named as the draws in the vault; a use names that of a head without a key.

        Raises:
            TypeError: the releases of this estimator depend on its features.
        """
        if self._mechanism is None:
            raise TypeError(
                f"expected a head or PrivateBoosting, got {type(self).__name__}, whose releases "
                "depend on the features. Call fit, which reserves them."
            )
        use = NamedUse.of(labels)
        mechanism = mechanism_for_users(use.labels, self._mechanism(use.labels.kind))
        return {self.key or use.key: mechanism}

    @abc.abstractmethod
    def predict(self, X: Any) -> np.ndarray:
        """Returns predictions for features as in ``fit``."""

    @available_if(lambda self: not self._is_regressor())
    def predict_log_proba(self, X: Public[Any]) -> np.ndarray:
        """Returns the logarithms of ``predict_proba``; minus infinity where that is zero."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def score(self, X: Public[Any], y: Public[Any], sample_weight: Public[Any] = None) -> float:
        """Returns scikit-learn's score: the accuracy, or R^2 for numbers.

        A row of several labels counts as right if all of its labels are.

        Args:
            X: as in ``predict``.
            y: public labels as in ``fit``, in any of its types; numbers may be of any range.
            sample_weight: weights (m,) of the examples; None for equal weights.

        Raises:
            TypeError: private labels, which a score would reveal.
            ValueError: labels of another shape, missing ones, or others than the classes of
                ``fit``.
        """
        if isinstance(y, PrivateLabels):
            raise TypeError(
                "expected public labels, got a PrivateLabels: a score would reveal its labels. Use "
                "labels.evaluate(predictions, metric, epsilon)."
            )
        from sklearn.metrics import accuracy_score, r2_score

        predictions = self.predict(X)
        y, weights = PublicInput.bare(y), PublicInput.bare(sample_weight)
        kind: LabelKind
        if self._label_range is not None:
            kind, y = Numbers(*self._label_range), LabelSource.vector(y)
        elif self.classes_ is not None:
            kind, y = Classes(self.classes_.tolist()), LabelSource.vector(y)
        else:
            kind = Rows(predictions.shape[1])
        # Metrics of scikit-learn take few types of class values, and all codes.
        metric = r2_score if self._is_regressor() else accuracy_score
        found = kind.comparable(predictions)
        return float(metric(kind.comparable(y), found, sample_weight=weights))

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement on all releases in the head, its encoder's releases included.

        Args:
            delta: the delta of the statement; None for the delta of the vault's budget.
        """
        self._check_fitted()
        return Receipts(self.receipts_).guarantee(delta)

    def _check_model(self, rows: FeatureRows, kind: LabelKind) -> None:
        """Warns of columns that may be copies of the label, by the model, at no cost.

        It keeps the range of the numbers, with which those of predictions are compared.
        """
        self._fitted_ends = rows.ends()
        if self.classes_ is not None or self._label_range is not None:
            rows.check_model(functools.partial(kind.outputs_of, self), kind.label_range)

    def _check_fitted(self) -> None:
        self._refuse_unfitted("receipts_")

    def _with_facts(self, model: Any) -> Any:
        """Returns an exported model with all receipts of this object.

        Its file names its classes or range, and its columns.
        """
        in_model = {receipt.id for receipt in public_input(model).receipts}
        if missing := [receipt for receipt in self.receipts_ if receipt.id not in in_model]:
            with_receipts(model, missing)
        facts = ModelFacts(columns=self._known_columns())
        if self._label_range is not None:
            facts["range"] = list(map(float, self._label_range))
        elif self.classes_ is not None:
            facts["classes"] = [
                name if isinstance(name, (bool, int, float)) else str(name)
                for name in self.classes_.tolist()
            ]
        TrainedModel(model).note_facts(facts)
        Ledger.record_digests([facts.digest()], self.receipts_)
        return model

    def _recorded(self, model: Any, encoder: Any) -> Any:
        """Returns an exported model; the store records it, unless an encoder is of other code.

        Verification compares the public layers in its file with this record.
        """
        if _is_of_this_library(encoder):
            Ledger.record_digests([TrainedModel(model).digest()], self.receipts_)
        return model

    def _is_regressor(self) -> bool:
        return self._label_range is not None

    def __sklearn_clone__(self: _AnyHead) -> _AnyHead:
        LabelSource.check_order_for_scikit_learn(self)
        return super().__sklearn_clone__()

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, RegressorTags  # from 1.6 on, which asks for them

        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        if self._is_regressor():
            tags.estimator_type = "regressor"
            # A private model of numbers may explain little of a few hundred examples.
            tags.regressor_tags = RegressorTags(poor_score=True)
        else:
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        return tags


@dataclasses.dataclass(eq=False, repr=False)
class OneReleaseHead(Head):
    """A linear head on public features, fitted from one release; see ``PrivateRidge``.

    A head of one kind of labels adds the arguments that describe them.
    """

    epsilon: float
    delta: float = 0.0
    _: dataclasses.KW_ONLY
    encoder: Public[Any] = None
    penalty: str | float = "auto"
    spread: bool | str = True
    center: bool = True
    intercept: bool = True
    noise: str = "gaussian"
    key: str | None = None
    max_bytes: float = 8e9
    insecure_seed: int | None = None

    _solver: ClassVar[type[Solver]]
    _link: ClassVar[str] = "linear"  # Keras activation of the scores, for labels that are numbers

    @_validate.clears_frames
    def fit(
        self: _Self, X: Public[Any], y: Private[Any] = None, sample_weight: Public[Any] = None
    ) -> _Self:
        """Releases the moments of the labels, and fits the head to them.

        Args:
            X: numbers (n, d), or inputs of ``encoder``; or a ``tf.data.Dataset`` of batches
                x or (x, y), which is read up to three times and must not be shuffled.
            y: a ``PrivateLabels``, which charges the release to its own budget; or an array of
                classes or numbers (n,), or of zeros and ones (n, L), which is put into a vault with
                the budget (epsilon, delta). None for a data set of pairs. Whole numbers are codes
                if no class value is a number: then the head has the codes as its classes.
            sample_weight: public weights (n,) of the examples, finite, at least zero; only their
                ratios count. A weight multiplies the share of its example in the release, so the
                noise grows with the largest weight over the mean.

        Returns:
            The head itself.

        Raises:
            BudgetExceededError: a vault's budget does not allow the release; nothing was released.
            TypeError: features or labels have a wrong type.
            ValueError: features are not finite, too many, or all equal; labels are outside the
                classes or the range; arguments are out of range.
            RuntimeError: labels are an array in a worker process (``n_jobs``).

        Warns:
            UserWarning: the release is indistinguishable from noise; delta is above 1/n; there was
                an earlier fit on these rows; an encoder was trained without receipts; or labels
                are codes of classes with other values.

        Each call with an array of labels makes a new release. Fits of a process on the same rows
        (cross-validation, a search), on overlapping parts of one array, and on other arrays of as
        many labels count as fits on the same people, and the statement composes them. Give labels
        of other people a ``PrivateLabels`` of their own, with ``people``.
        """
        arguments = public_input(X, sample_weight, self.class_weight)
        X, sample_weight, _ = arguments.value
        X = self._checked_inputs(X, encoder=self.encoder)
        # Reading features takes time, so labels in an array or a vault are checked first.
        self._check_arguments()
        source = None if y is None else self._source(y)
        takes_raw = self.encoder is not None and not FeatureMap.is_own(self.encoder)
        raw = FeatureRows(X)
        if source is not None and takes_raw and not raw.is_dataset:
            _validate.one_label_per_row(raw.num_inputs, len(source.vault))
        public = public_input(arguments, fitted_encoder(self.encoder, arguments.with_value(X)))
        encoder = public.value[1]
        inputs = FeatureRows(X, encoder, max_bytes=0.25 * self.max_bytes, weights=sample_weight)
        if source is not None and inputs.num_rows is not None:
            _validate.one_label_per_row(inputs.num_rows, len(source.vault))
        rows, sample = PublicRows.survey(inputs, self.max_bytes)
        if source is None:
            source = self._source(rows.labels)
        elif rows.labels is not None:
            raise ValueError("expected labels once, got them in the data set too. Leave out one.")
        vault = source.vault
        _validate.one_label_per_row(rows.num_rows, len(vault))
        # Features with receipts, as of a network, have learnt from the labels.
        is_checked = not (arguments.receipts or raw.is_dataset)
        if is_checked:
            raw.check_columns(are_plain=encoder is None)
        terms = HeadTerms.of(self, source.kind).for_rows(rows, vault.mean_group_size)
        width = sample.rows.shape[1]
        with _threads_that_pay(rows.num_rows, width):
            scaling = terms.scaling(rows, sample)
            # It may be as large as the sample of the scan.
            del sample
            fit, receipts = self._release(terms, rows.scaled(scaling), source, public)
        fit.keep_in(self, receipts, encoder, inputs.columns, raw.width(width))
        if is_checked:
            self._check_model(raw, source.kind)
        else:
            self._fitted_ends = None
        return self

    def _release(
        self, terms: HeadTerms, scaled: ScaledRows, source: LabelSource, public: PublicInput[Any]
    ) -> tuple[Fit, tuple[Receipt, ...]]:
        """Releases the moments of the labels with these rows; returns the fit and its receipts.

        Sensitivity: the moments are a sum over examples of a row times the code of its label. A
        replaced label changes one term, by the norm of its row times the distance of two codes.
        Rows have L2 norm one, times their weight; the mechanism's max_norm is the largest weight,
        or bounds the change by all labels of a user. Laplace noise uses the L1 norm of the longest
        row. In source.release the mechanism refuses a longer row, and adds the noise.
        """
        by_user = source.vault.unit == "user"
        if by_user:
            terms, scaled = terms.for_users(scaled, np.asarray(source.vault.users))
        # Scaling and scan read features and weights, and no label. So all that they find is public:
        # norms may set the noise, and Gram matrix and sample serve the fit, at no cost.
        scanned = scaled.scan(terms.solver.sample_rows)
        if not by_user:
            terms = terms.for_l1(scanned.max_l1)
        released, receipts = source.release(
            terms.mechanism,
            public.with_value(scanned),
            scaled.rows.digests,
            self._family_of_clones(),
        )
        design = terms.design(scanned)
        # The rows that the scan kept for the release leave their memory to the fit.
        del scanned
        return design.fit(released.values), receipts

    @available_if(lambda self: not self._is_regressor())
    def decision_function(self, X: Public[Any]) -> np.ndarray:
        """Returns scores; a larger score means a likelier class.

        Args:
            X: finite numbers (m, d), or inputs of ``encoder``; a row of zeros, or a row
                equal to the mean of the training features, gets the intercept alone.

        Returns:
            ``float64`` (m, K); for two classes (m,), the scores of the second; for rows of labels
            (m, L). Models of numbers have no such method.
        """
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 and not self._is_of_rows else scores

    def predict(self, X: Public[Any]) -> np.ndarray:
        """Returns class values (m,), zeros and ones (m, L), or numbers (m,) within their range."""
        scores = self._scores(X)
        if self._label_range is not None:
            low, high = self._label_range
            scores = scores[:, 0]
            is_log = self._link == "exponential"
            return np.clip(np.exp(scores) if is_log else scores + 0.5 * (low + high), low, high)
        if self.classes_ is None:
            return (scores > 0.0).astype(np.int64)
        return self.classes_[np.argmax(_ridge_path.class_scores(scores), axis=1)]

    @available_if(lambda self: not self._is_regressor())
    def predict_proba(self, X: Public[Any]) -> np.ndarray:
        """Returns probabilities of the classes (m, K) or labels (m, L): sharpened softmax.

        Models of numbers have no such method.
        """
        from scipy import special

        scores = self._scores(X)
        if self.classes_ is None:
            return special.expit(2.0 * self.sharpness_ * scores)
        return special.softmax(self.sharpness_ * _ridge_path.class_scores(scores), axis=1)

    def to_keras(self, encoder: Public[Any] = None) -> Any:
        """Returns a ``keras.Model`` with fixed weights; it saves and loads.

        It computes ``predict_proba``, or for numbers ``predict`` as (m, 1). Its file keeps the
        receipts. Import ``tf_labeldp.keras_layers`` before you load it in another program. Use
        ``model.export(folder)`` to serve it without this package.

        Args:
            encoder: a Keras model from raw inputs to the features (m, d), put in front; None for
                the head's encoder. Its receipts are added.

        Raises:
            TypeError: the head's encoder is a plain function; pass ``encoder``.
            ValueError: the encoder's outputs are not the head's features.
        """
        self._check_fitted()
        from keras import layers

        from tf_labeldp.keras_layers._released_dense import ReleasedDense

        weights, bias, activation = self._column_weights, self.intercept_, "softmax"
        shift = 0.0  # the part of ``low`` that the bias subtracts
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
        public = public_input(self.encoder_ if encoder is None else encoder)
        inputs, rows = with_encoder(public.value, self._scaling.mean.size)
        dense = ReleasedDense(weights.shape[1], activation, name="head", **_FIXED)
        outputs = dense(_scaled(rows, self._scaling))
        dense.set_weights([weights.astype(np.float32), bias.astype(np.float32)])
        note_release(dense, Receipts.merged(self.receipts_, public.receipts))
        if self._label_range is not None:
            low, high = self._label_range
            if shift != low:
                outputs = layers.Rescaling(1.0, -low, dtype="float32", name="above_low")(outputs)
            outputs = layers.ReLU(max_value=high - low, dtype="float32", name="clip")(outputs)
            outputs = layers.Rescaling(1.0, low, dtype="float32", name="label_range")(outputs)
        model = self._with_facts(keras_model(inputs, outputs, "one_release_head"))
        return self._recorded(model, public.value)

    def _mechanism(self, kind: LabelKind) -> LabelMomentMechanism:
        """Returns the mechanism for a release of rows with unit norm; checks the arguments."""
        kind.class_weights(PublicInput.bare(self.class_weight))
        if PublicInput.bare(self.class_weight) is not None and not self.intercept:
            raise ValueError(
                "class_weight needs an intercept, which carries it. Leave intercept out."
            )
        return LabelMomentMechanism(
            self.epsilon,
            self.delta,
            max_l1=1.0 if self.noise == "laplace" else None,  # fit replaces it
            noise=self.noise,
            **kind.mechanism_arguments(),
        )

    def _source(self, labels: Any) -> LabelSource:
        return LabelSource(self, labels, self._mechanism)

    def _check_arguments(self) -> None:
        self._solver(self.penalty)
        if isinstance(self.spread, str):
            _validate.one_of("spread", self.spread, ("half",))
        _validate.positive_finite("max_bytes", self.max_bytes)

    def _scores(self, X: Any) -> np.ndarray:
        self._check_fitted()
        encoder = self.encoder_
        X = self._checked_inputs(X, encoder=encoder, is_fitted=True)
        rows = FeatureRows(X, encoder, columns=self._known_columns())
        _checks.run("range", self._fitted_ends, rows.ends())
        spread = self._scaling.spread
        # In single precision, a prediction would depend on the other rows of its block.
        wide = None if spread is None else spread.astype(np.float64)
        plain = Scaling(self._scaling.mean, wide, 0.0)
        parts = []
        for start in range(0, max(len(rows), 1), _PREDICT_ROWS):
            block = rows.take(slice(start, start + _PREDICT_ROWS))
            self._check_width(block.shape[1], self._scaling.mean.size)
            PublicRows.check_norms(block, start)
            parts.append(plain.rows(block) @ self._column_weights + self.intercept_)
        return np.concatenate(parts)

    def _is_regressor(self) -> bool:
        return super()._is_regressor() or self.low is not None


@dataclasses.dataclass(frozen=True)
class _RidgeSolver(Solver):
    """Least squares with a normal prior, or with a ridge penalty."""

    sample_rows = 1 << 16

    @property
    def has_prior(self) -> bool:
        return self.penalty == "auto"

    def solve(
        self, problem: _ridge_path.Problem, design: Design, prior: tuple[float, float]
    ) -> Solution:
        spectrum = problem.spectrum
        chosen: dict[str, Any] = {"prior_": None, "penalty_": None}
        if self.has_prior:
            t, s = map(math.sqrt, prior)
            chosen["prior_"] = {"coefficient_stddev": t, "residual_stddev": s}
            filter_ = spectrum.bayes_filter(*prior)
        else:
            chosen["penalty_"] = float(self.penalty)
            filter_ = spectrum.ridge_filter(float(self.penalty))
        chosen["risk_"] = spectrum.risk(filter_)
        weights, last = problem.solve(filter_)
        if design.terms.kind.label_range is None:
            scores = design.scores(
                np.vstack([weights, last]) if design.terms.intercept else weights
            )
            sharpness = _sharpness(
                scores,
                design.terms.kind.class_values is None,
                problem.cross_moment(filter_, *prior) / design.num_rows,
                problem.cross_moment_error(filter_) / design.num_rows,
            )
            last, chosen["sharpness_"] = design.matched(problem, scores, last, sharpness)
        return Solution(weights, last, filter_, chosen)


def _sharpness(
    scores: _ridge_path.SampleScores, are_labels: bool, agreement: float, error: float
) -> float:
    # A single column s stands for the scores s and -s of a label and its absence. Several labels
    # share one sharpness.
    columns = scores.values.shape[1]
    factor = 2.0 / columns if are_labels or columns == 1 else 1.0
    scores = scores.of_labels() if are_labels else scores.of_classes()
    agreement, error = factor * agreement, factor * error
    return scores.sharpness(scores.believable_agreement(agreement, error))


@dataclasses.dataclass(eq=False, repr=False)
class PrivateRidge(OneReleaseHead):
    """A linear least-squares head, fitted from one release of noisy moments ``X^T Y``.

    A least-squares fit on public features depends on the labels only through these moments
    (``LabelMomentMechanism``). Penalty, probabilities, standard errors and predictions are computed
    from the release and the features. For classes, ``PrivateLogisticRegression`` is more accurate
    with the same release, except at the smallest budgets.

    Guarantee:
        The head, with all its attributes and predictions, is (epsilon, delta)-DP for the
        replacement of one label, by one release; the rest is post-processing. On a vault with
        ``users`` it is so for all labels of one user: the noise is for the largest change of the
        moments by the labels of a user (docs/theory.md, users). Assumes that the
        features, the order and the number of the examples, and all arguments are public: the
        classes and the range are never taken from the labels, and a feature map or an encoder must
        not have been trained with them. ``guarantee()`` names these assumptions.

    Rows of features are centred, scaled to unit norm, spread over the principal directions of the
    features to suit the noise (``spread``), scaled again, and get a constant column for the
    intercept. Only the direction of a row counts: if its length matters (a single column, a label
    that grows with all columns), put ``RandomFourierFeatures`` in front.

    Pipelines, ``clone`` and ``set_params`` of scikit-learn work. But each ``fit`` on an array of
    labels makes a new release: a grid search releases many times, and the statements of its heads
    compose all releases, but not scores on true labels. With a ``PrivateLabels`` it fails once the
    budget is spent.

    Source: "sufficient statistics perturbation" (Vu and Slavkovic 2009), with the Gram matrix
    public. ``docs/theory.md`` derives the risk estimate, the prior and the spread.

    Args:
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels; 0 with ``noise="laplace"``.
        num_classes: K, for labels 0..K-1. Leave it out for a vault, which has it.
        classes: the class values in the order of their codes, for other labels; public.
        low: the smallest label of a regression task, public.
        high: the largest label of a regression task, public.
        num_labels: L, for labels that are rows (n, L) of zeros and ones; a person's whole row is
            then protected.
        encoder: a fitted feature map, or what ``features.PublicEncoder`` takes: a Keras model, a
            name of ``keras.applications``, a fitted transformer, or a function from raw inputs to
            (m, d); ``fit``, ``predict`` and ``to_keras`` then take raw inputs. None for features.
        penalty: ``"auto"`` for a normal prior whose variances maximise the likelihood of the
            release; or a ridge penalty, in units of the Gram matrix of unit rows (whose trace is
            n).
        spread: whether to divide the release between the principal directions by water-filling,
            from the features, epsilon and n alone; directions below the noise get no share. The
            fit assumes equal prior variances after or before the spread, as the release suggests.
            ``"half"``, for tables, gives each direction the mean of that share and its own, at most
            four times its own. False leaves the features unchanged.
        center: whether to subtract the mean of the features.
        intercept: whether to add the constant column; its coefficient is not penalised. For classes
            it makes the mean probabilities equal the released class means.
        noise: ``"gaussian"``, or ``"laplace"`` for a pure guarantee with a handful of features.
        class_weight: for classes: public weights above zero by class value, or ``"balanced"``,
            which divides by the released class shares and spends no more budget. They multiply the
            probabilities after the fit: these are those of a population with so weighted classes.
        key: the name of the release in a vault.
        max_bytes: the most memory for matrices and samples of rows.
        insecure_seed: makes the fit repeatable, and the statement "not private: seeded".

    Attributes:
        coef_: ``float64`` (K, d), coefficients of the centred features, which are divided by the
            length of their spread row; (1, d) for two classes and for numbers.
        intercept_: ``float64`` (K,) or (1,).
        coef_stddev_: standard errors (d,) of the coefficients in each row of ``coef_``, due to the
            noise of the release alone and for the chosen penalty.
        num_directions_: the number of directions with a share of the release.
        penalty_: the ridge penalty; None for ``"auto"``.
        prior_: for ``"auto"``, the chosen standard deviations of coefficients and residuals.
        risk_: the unbiased estimate of the squared error on the training set, minus a constant.
        sharpness_: the factor on the scores in the softmax; for classes.
        noise_stddev_: the standard deviation of the noise on each moment.
        signal_to_noise_: the ratio of signal energy to noise energy, estimated from the release;
            about zero without a signal.
        classes_: class values (K,); for classes.
        n_features_in_: the number of columns, before the encoder; and ``feature_names_in_``, their
            names, if the inputs have any.

    Raises:
        ValueError: ``fit`` gets arguments out of range or features that are not finite.

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

    _: dataclasses.KW_ONLY
    num_classes: int | None = None
    classes: Setting[Any] = None
    low: float | None = None
    high: float | None = None
    num_labels: int | None = None
    class_weight: Public[Any] = None

    _solver = _RidgeSolver


def _threads_that_pay(num_rows: int, width: int) -> contextlib.AbstractContextManager[Any]:
    """Keeps small linear algebra on one thread, where waiting for more threads costs time."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    if num_rows * width > _SMALL_ENTRIES or width > _SMALL_WIDTH:
        return contextlib.nullcontext()
    return threadpool_limits(1, user_api="blas")


def _is_of_this_library(encoder: Any) -> bool:
    encoder = PublicInput.bare(encoder)
    if isinstance(encoder, FeatureMap) and FeatureMap.is_own(encoder):
        return all(map(_is_of_this_library, (encoder.encoder, *encoder.maps)))
    return encoder is None or FeatureMap.is_own(encoder)


_FIXED: dict[str, Any] = {"trainable": False, "dtype": "float32"}
"""Settings of a layer with fixed weights; half precision overflows at 65,504."""


def _scaled(rows: Any, scaling: Scaling) -> Any:
    """Applies ``scaling.rows`` to a Keras tensor (m, d), without the constant column."""
    from keras import layers

    from tf_labeldp.keras_layers._released_dense import WideDense

    # Division by their size keeps tiny numbers above the constant in Keras's normalisation.
    offset = (-scaling.mean / scaling.size).tolist() if np.any(scaling.mean) else 0.0
    name = "public_center_and_scale"
    rows = layers.Rescaling(1.0 / scaling.size, offset, dtype="float32", name=name)(rows)
    rows = layers.UnitNormalization(axis=-1, dtype="float32", name="unit_rows")(rows)
    if scaling.spread is None:
        return rows
    spread = WideDense(scaling.spread.shape[1], use_bias=False, name="spread", **_FIXED)
    rows = spread(rows)
    spread.set_weights([scaling.spread])
    return layers.UnitNormalization(axis=-1, dtype="float32", name="unit_spread_rows")(rows)
