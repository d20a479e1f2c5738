"""``PrivateBoosting``: boosted trees on noisy labels, with the channel in the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.metaestimators import available_if

from tf_labeldp import _checks, _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import (
    Private,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.boosting import _lightgbm
from tf_labeldp.boosting._coded_table import CodedTable
from tf_labeldp.boosting._ensemble import Ensemble
from tf_labeldp.boosting._lightgbm import TreeInputs
from tf_labeldp.boosting._start import Start
from tf_labeldp.boosting._targets import TableLabels, check_loss
from tf_labeldp.features.estimator import (
    keras_model,
    note_release,
    with_encoder,
)
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads import HeadResidualRandomizer
from tf_labeldp.heads.label_source import LabelSource
from tf_labeldp.heads.one_release_head import Head
from tf_labeldp.mechanisms import ClassificationMechanism, RandomizedResponse
from tf_labeldp.vault import (
    Classes,
    LabelKind,
    LabelRandomizer,
    NoisyLabels,
    Numbers,
    Rows,
)
from tf_labeldp.vault.uses import NamedUse

_LEAST_SIGNAL = 20.0
"""The fewest examples, in true labels, from which trees can learn more than the class shares."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Prepared:
    """A fit before its draw: all but the labels is public."""

    public: PublicInput[Any]  # features, class_weight and sample_weight
    labels: LabelSource | NoisyLabels
    kind: LabelKind
    table: CodedTable
    monotonic: list[int] | None
    weights: np.ndarray | None  # (n,), with mean one
    start: Start | None
    outputs: np.ndarray | None  # of the start, for all rows

    @property
    def features(self) -> Any:
        return self.public.value[0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Drawn:
    """The noisy labels of a fit, with the receipts and the scores where boosting starts."""

    labels: TableLabels
    receipts: tuple[Receipt, ...]
    start: Start | None
    begin: np.ndarray | None  # (n, C)


@dataclasses.dataclass(eq=False, repr=False)
class PrivateBoosting(Head):
    """Gradient boosting on noisy labels: the most accurate model for tables with large budgets.

    Each label is randomized once, and trees maximise the likelihood of the noisy labels through the
    known channel. The noisy labels also stop the training, weigh small and large trees, and
    calibrate the scores. A head of one release is better while ``n tanh(epsilon / 2)^2`` is below
    about 3,000, and ``PrivateClassifier`` chooses.

    Guarantee:
        (epsilon, 0)-label-DP for the replacement of one label, by one draw of randomized response,
        or for numbers of ``LabelRandomizer``; the trees post-process it. Assumes that the features,
        the weights and the number of examples are public. With ``NoisyLabels`` the guarantee is
        that of their draw.

    Source: boosting by Friedman 2001, and the forward-corrected loss of Patrini et al. 2017; ours:
    the Fisher information of the channel as hessian, and stopping and stacking on noisy labels.

    Args:
        epsilon: finite and above zero; None, or that of the draw, for ``NoisyLabels``.
        num_classes: K, for labels 0..K-1. Leave it out for a vault, which has it.
        classes: class values in the order of their codes, public, if they are not 0..K-1.
        low: smallest label of a regression task, public.
        high: largest label of a regression task, public.
        loss: for numbers ``"squared_error"``, or ``"poisson"`` for counts and amounts.
        start: a fitted head, or another estimator of this library, where boosting starts: trees add
            to its numbers, or to the logarithms of its probabilities. For numbers also a
            ``heads.HeadResidualRandomizer``, whose head is released first, with this model's
            epsilon for head and draw together. None starts at the mean.
        class_weight: for classes: weights by class value, public; or ``"balanced"``, which takes
            the class shares from the noisy labels and spends no budget. Probabilities are those of
            a population with so weighted classes.
        max_trees: the most trees per model.
        categorical: the categorical columns, by name or by place in an array; None for columns of
            texts and categories. A column of more than 254 categories is hashed; of more than 381,
            for two classes and for numbers, each category counts as the mean of its noisy labels,
            shrunken to the mean of all, if it has five rows or more, and rarer ones together.
        monotonic_cst: by column name or place, 1 for scores that never fall and -1 for scores that
            never rise as the column's numbers rise; for two classes and for numbers. Public
            knowledge.
        n_jobs: threads of LightGBM; None for all cores.
        key: name of the draw in a vault.
        seed: public seed of folds and trees.
        insecure_seed: makes the draw repeatable, and the statement "not private: seeded".

    Attributes:
        start_: the fitted estimator where boosting starts, or None.
        noisy_labels_: the noisy labels; any number of models may use them at no further cost.
        boosters_: LightGBM's boosters, a list by shape of trees of lists by fold. Scores are their
            means over folds, weighted by ``shape_weights_``, plus a constant. Such a booster has no
            receipts: the statement is that of this model.
        feature_importances_: the share of each column in the gain of all splits, (p,).
        classes_: class values (K,); for classes.
        shape_weights_: weights of trees with 3 and with 15 leaves, estimated from noisy labels.
        gain_: estimated mean decrease of the loss per noisy label, compared to a model that ignores
            the features, or to ``start``, on held-out noisy labels; and ``gain_stddev_``, its
            standard error.
        num_trees_: number of trees in total.
        coder_: the ``TableCodes`` of the columns; None for sparse rows. With means of noisy labels,
            it has their receipts.
        n_features_in_: number of columns.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> table = {"age": rng.uniform(18, 90, 3000), "job": rng.choice(["a", "b"], 3000)}
        >>> ill = ((table["age"] > 60) ^ (table["job"] == "a")).astype(int)
        >>> model = PrivateBoosting(2.0, num_classes=2).fit(table, ill)
        >>> model.score(table, ill) > 0.9, model.guarantee().epsilon
        (True, 2.0)
    """

    epsilon: float | None = None
    _: dataclasses.KW_ONLY
    num_classes: int | None = None
    classes: Setting[Any] = None
    low: float | None = None
    high: float | None = None
    loss: str = "squared_error"
    start: Public[Any] = None
    class_weight: Public[Any] = None
    max_trees: int = 600
    categorical: Sequence[str | int] | None = None
    monotonic_cst: Mapping[str | int, int] | None = None
    n_jobs: int | None = None
    key: str | None = None
    seed: int = 0
    insecure_seed: int | None = None

    _takes_tables = True

    @_validate.clears_frames
    def fit(
        self, X: Public[Any], y: Private[Any], sample_weight: Public[Any] = None
    ) -> PrivateBoosting:
        """Draws noisy labels, unless they are given, and fits trees to them.

        Args:
            X: public: a table (data frame, dict of columns), whose texts are categories and
                whose numbers may be missing (NaN); numbers (n, p); or a sparse matrix.
            y: a ``PrivateLabels``, which charges the draw; an array (n,), which gets a vault
                with the budget epsilon; or ``NoisyLabels`` with a channel that is known.
            sample_weight: public weights (n,), at least zero.

        Returns:
            The model itself.

        Raises:
            BudgetExceededError: a vault's budget does not allow the draw; nothing was drawn.
            ImportError: LightGBM can't be loaded.
            TypeError: X, y or weights have a wrong type.
            ValueError: arguments out of range; fewer examples than this epsilon needs; a channel
                that does not depend on the labels. Nothing was drawn.
            RuntimeError: labels are an array in a worker process (``n_jobs``).

        Warns:
            UserWarning: trees are no better than the class shares on held-out noisy labels; or an
                earlier fit of this process used these rows with an array of labels.
        """
        _lightgbm.load()
        prepared = self._prepared(X, y, sample_weight)
        drawn = self._drawn(prepared)
        labels, table = drawn.labels, prepared.table.take(drawn.labels.places)
        target = labels.target(self.loss, drawn.begin)
        if target.constant.size == 1:
            table = table.with_means(prepared.features, labels, int(self.seed))
        inputs = TreeInputs(
            table,
            target,
            labels.weights,
            int(self.max_trees),
            seed=int(self.seed) % 2**31,
            monotonic=prepared.monotonic,
            threads=self.n_jobs or 0,
        )
        self._keep(prepared, drawn, inputs, Ensemble.grow(inputs))
        self._check_model(FeatureRows(prepared.features), drawn.labels.kind)
        return self

    def _prepared(self, X: Any, y: Any, sample_weight: Any) -> _Prepared:
        _validate.integer_at_least("max_trees", self.max_trees, 1)
        _validate.one_of("loss", self.loss, ("squared_error", "poisson"))
        _validate.integer_at_least("seed", self.seed, 0)
        if self.n_jobs is not None:
            _validate.integer_at_least("n_jobs", self.n_jobs, 1)
        public = public_input(X, self.class_weight, sample_weight, self.start)
        features, class_weight, sample_weight, start = public.value
        features = self._checked_inputs(features)
        noisy = y if isinstance(y, NoisyLabels) else None
        source: Any = None
        if noisy is None:
            is_released = isinstance(start, HeadResidualRandomizer)
            made_of = public_input(public, start.encoder if is_released else None).receipts
            source = LabelSource(self, y, self._mechanism, made_of)
        kind = source.kind if noisy is None else noisy.kind
        table = CodedTable.read(public.with_value(features), self.categorical)
        FeatureRows(features).check_columns()
        monotonic = table.monotonic(self.monotonic_cst, kind)
        if monotonic is not None and start is not None:
            raise ValueError(
                "expected monotonic_cst without start, whose scores may rise and fall, got both. "
                "Leave one of them out."
            )
        start = Start.of(start, noisy, kind, self.loss)
        # A start that can't read the features fails before the draw.
        outputs = None if start is None else start.outputs(features)
        weights = Column.relative_weights(sample_weight, table.rows.shape[0])
        return _Prepared(
            public.with_value((features, class_weight, sample_weight)),
            source if noisy is None else self._checked_noisy(noisy),
            kind,
            table,
            monotonic,
            weights,
            start,
            outputs,
        )

    def _checked_noisy(self, noisy: NoisyLabels) -> NoisyLabels:
        if not noisy.receipts:
            raise ValueError(
                "expected noisy labels with receipts, got none. Give the result of "
                "PrivateLabels.randomize, or of NoisyLabels.load."
            )
        drawn = (noisy.mechanism.epsilon, noisy.guarantee().epsilon)
        epsilon = self.epsilon
        if epsilon is not None and not any(math.isclose(epsilon, each) for each in drawn):
            raise ValueError(
                f"expected no epsilon with NoisyLabels, which were drawn at {drawn[0]:g}, got "
                f"{epsilon:g}. Leave it out, or fit the PrivateLabels for a draw of its own."
            )
        if len(noisy) < _LEAST_SIGNAL:
            raise ValueError(
                f"expected at least {_LEAST_SIGNAL:g} noisy labels, got {len(noisy)}. Draw more."
            )
        if noisy.values.ndim == 2 and isinstance(noisy.mechanism, ClassificationMechanism):
            raise ValueError(
                "expected one noisy label per example, got rows of labels. Fit one model per "
                "column."
            )
        arguments = LabelSource.arguments_of(self)
        # Residuals have another range than the numbers.
        if noisy.kind.label_range is not None:
            arguments = {name: arguments[name] for name in arguments if name not in ("low", "high")}
        if noisy.values.ndim == 1:
            LabelSource.check_arguments(arguments, noisy.kind, "noisy labels")
        return noisy

    def _drawn(self, prepared: _Prepared) -> _Drawn:
        """Draws the noisy labels, unless they are given."""
        source, kind, start = prepared.labels, prepared.kind, prepared.start
        places: Any = slice(None)
        receipts: tuple[Receipt, ...]
        if isinstance(source, NoisyLabels):
            noisy = source
            receipts = Receipts.merged(prepared.public.receipts, public_input(noisy).receipts)
            places = noisy.rows_among({prepared.table.rows.shape[:1]})
            if start is not None and noisy.shift is not None:
                kind = Numbers(*start.model._label_range)  # Not that of the residuals.
        else:
            features, class_weight, sample_weight = prepared.public.value
            number = prepared.table.rows.shape[0]
            _validate.one_label_per_row(number, len(source.vault))
            used = number if prepared.weights is None else int(np.count_nonzero(prepared.weights))
            self._check_worth(used, kind)
            kind.class_weights(class_weight)

            def draw(use: NamedUse, own: PublicInput[Any]) -> NoisyLabels:
                nonlocal start
                mechanism = source.mechanism
                if not isinstance(mechanism, HeadResidualRandomizer):
                    return use.randomize(own.with_value(mechanism))
                head, drawn = mechanism.draw_with_head(use, own.with_value(features), sample_weight)
                start = Start(head, self.loss)
                return drawn

            digests = FeatureRows(features).digests()
            noisy, receipts = source.randomize(
                prepared.public, digests, self._family_of_clones(), draw
            )
        begin = None
        if start is not None:
            # The shift has the numbers of a head that was released with these labels.
            shift: Any = noisy.shift
            outputs = shift[:, np.newaxis] if prepared.outputs is None else prepared.outputs
            outputs = outputs[places]
            start.check_shift(noisy, outputs)
            begin = start.scores(outputs, np)
        weights = None if prepared.weights is None else prepared.weights[places]
        return _Drawn(TableLabels(noisy, kind, places, weights), receipts, start, begin)

    def _keep(
        self, prepared: _Prepared, drawn: _Drawn, inputs: TreeInputs, ensemble: Ensemble
    ) -> None:
        """Sets all fitted attributes."""
        features, class_weight, sample_weight = prepared.public.value
        kind, coder = drawn.labels.kind, inputs.table.coder
        weights_of_classes = kind.class_weights(class_weight, inputs.target.shares)
        importances = ensemble.importances()
        self._ensemble = ensemble
        self.shape_weights_ = ensemble.shape_weights
        self.gain_, self.gain_stddev_ = ensemble.gain, ensemble.gain_stddev
        self.num_trees_, self.feature_importances_ = ensemble.num_trees, importances
        self.coder_, self.start_ = coder, None if drawn.start is None else drawn.start.model
        self.noisy_labels_ = drawn.labels.noisy
        of_weights = Receipts.of_weights(sample_weight, class_weight)
        self.receipts_ = Receipts.merged(drawn.receipts, of_weights)
        self.classes_: Any = kind.class_values
        self._label_range = kind.label_range
        self._class_weights = weights_of_classes
        self._remember_columns(FeatureRows(features).columns, inputs.table.rows.shape[1])
        ensemble.warn_if_unclear()

    def predict(self, X: Public[Any]) -> np.ndarray:
        """Returns class values (m,), or numbers (m,) within their range.

        Args:
            X: as in ``fit``; missing and unknown categories count as missing values.
        """
        self._check_fitted()
        if not self._is_regressor():
            return self.classes_[self.predict_proba(X).argmax(axis=1)]
        scores = self._scores(X)[:, 0]
        low, high = self._label_range or (0.0, 0.0)
        return np.clip(np.exp(scores) if self.loss == "poisson" else scores, low, high)

    @available_if(lambda self: not self._is_regressor())
    def predict_proba(self, X: Public[Any]) -> np.ndarray:
        """Returns probabilities of the classes, ``float64`` (m, K).

        Models of numbers have no such method.
        """
        return self._probabilities(self._scores(X), np)

    @staticmethod
    def is_available() -> bool:
        """Returns whether ``fit`` can load LightGBM here."""
        return _lightgbm.is_available()

    @staticmethod
    def worth(num_labels: int, epsilon: float, num_classes: int = 2) -> float:
        """Returns the number of true labels that noisy labels of randomized response are worth.

        If classes have equal shares, the share of one, estimated from n noisy labels, has the
        variance of an estimate from ``n c^2`` true labels, with
        ``c = (e^epsilon - 1) / (e^epsilon + K - 1)``; for two classes c is ``tanh(epsilon / 2)``. A
        rare class is worth less.

        Args:
            num_labels: n.
            epsilon: of one label's draw.
            num_classes: K; two for numbers.

        Example:
            >>> round(PrivateBoosting.worth(30_000, epsilon=1.0))
            6407
        """
        # For a large epsilon the exponential overflows, and c is one.
        surplus = math.expm1(min(epsilon, 500.0))
        return num_labels * (surplus / (surplus + num_classes)) ** 2

    @property
    def boosters_(self) -> list[list[Any]]:
        """LightGBM's boosters, by shape of trees and by fold."""
        self._check_fitted()
        return [[model.booster for model in models] for models in self._ensemble.models]

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from the inputs of ``fit`` to predictions, with its receipts.

        The model of a table takes a dict of columns (m, 1) by name, that of a matrix (m, p). It
        computes ``predict_proba``, or for numbers ``predict`` as (m, 1). Import
        ``tf_labeldp.keras_layers`` before you load its file.
        """
        self._check_fitted()
        from keras import ops

        inputs, rows = with_encoder(self.coder_, self.n_features_in_)
        layer = self._ensemble.trees().layer(name="tree_ensemble")
        scores = layer(rows)
        note_release(layer, self.receipts_)
        if self.start_ is not None:
            start = Start(self.start_, self.loss)
            scores = scores + start.scores(start.exported(inputs, self.receipts_), ops)
        if self._is_regressor():
            numbers = ops.exp(scores) if self.loss == "poisson" else scores
            low, high = self._label_range or (0.0, 0.0)
            outputs = ops.clip(numbers, low, high)
        else:
            outputs = self._probabilities(scores, ops)
        model = self._with_facts(keras_model(inputs, outputs, "private_boosting"))
        return self._recorded(model, None if self.start_ is None else self.start_.encoder_)

    def _is_regressor(self) -> bool:
        return super()._is_regressor() or self.low is not None

    def _check_worth(self, number: int, kind: LabelKind) -> None:
        epsilon = _validate.positive_finite("epsilon", self.epsilon)
        signal = self.worth(number, epsilon, kind.num_classes or 2)
        if signal < _LEAST_SIGNAL:
            head = _validate.Argument("method", "head", "PrivateLogisticRegression")
            raise ValueError(
                _validate.Message.of(
                    f"expected noisy labels worth at least {_LEAST_SIGNAL:g} true ones, got "
                    f"{number} labels at epsilon={epsilon:g}, worth {signal:.2g}: trees would "
                    "answer the class shares. Use ",
                    head,
                    " or a larger epsilon. Nothing was drawn.",
                )
            )

    def _mechanism(self, kind: LabelKind) -> Any:
        if isinstance(kind, Rows):
            raise ValueError(
                f"PrivateBoosting expected classes or numbers, got {kind.describe()}. Fit one "
                "model per column. Nothing was drawn."
            )
        epsilon = _validate.positive_finite("epsilon", self.epsilon)
        is_released = isinstance(start := PublicInput.bare(self.start), HeadResidualRandomizer)
        if isinstance(kind, Classes):
            if is_released:
                raise ValueError(
                    "expected numbers with start=HeadResidualRandomizer(...), got "
                    f"{kind.describe()}. Give a fitted head as start. Nothing was drawn."
                )
            return RandomizedResponse(epsilon, kind.num_classes)
        check_loss(self.loss, kind)
        if is_released:
            return dataclasses.replace(start, epsilon=epsilon)
        return LabelRandomizer(epsilon)

    def _scores(self, X: Any) -> np.ndarray:
        """Returns scores (m, C): the weighted sum of the means over folds."""
        self._check_fitted()
        X = self._checked_inputs(X, is_fitted=True)
        _checks.run("range", self._fitted_ends, FeatureRows(X).ends())
        if self.coder_ is not None:
            rows = self.coder_.transform(X)
        elif sparse.issparse(X):
            rows = sparse.csr_matrix(X)
        else:
            raise TypeError(
                f"expected a sparse matrix, as in fit, got {type(X).__name__}. Give "
                "scipy.sparse.csr_matrix(features)."
            )
        begin = None
        if self.start_ is not None:
            start = Start(self.start_, self.loss)
            begin = start.scores(start.outputs(X), np)
        return self._ensemble.scores(rows, begin)

    def _probabilities(self, scores: Any, ops: Any) -> Any:
        """Returns class probabilities (m, K) of scores, by ``numpy`` or ``keras.ops``."""
        weights = np.asarray(self._class_weights, np.float64 if ops is np else np.float32)
        if scores.shape[1] == 1:
            scores = ops.concatenate([-0.5 * scores, 0.5 * scores], axis=1)
        p = ops.exp(scores - ops.max(scores, axis=1, keepdims=True))
        p = p * weights
        return p / ops.sum(p, axis=1, keepdims=True)
