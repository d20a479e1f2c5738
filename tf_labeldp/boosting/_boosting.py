"""``PrivateBoosting``: boosted trees on noisy labels, with the channel in the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.metaestimators import available_if

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp._progress import Progress
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
from tf_labeldp.boosting._lightgbm import Fold, Grown, Task
from tf_labeldp.boosting._losses import ScoreLoss
from tf_labeldp.boosting._mean_columns import with_means
from tf_labeldp.boosting._targets import TableLabels, check_loss
from tf_labeldp.boosting._trees import Trees
from tf_labeldp.features import TableCodes
from tf_labeldp.features.estimator import (
    keras_model,
    note_release,
    symbolic_inputs,
    with_encoder,
)
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads import HeadResidualRandomizer
from tf_labeldp.heads.label_source import LabelSource
from tf_labeldp.heads.one_release_head import Head
from tf_labeldp.heads.weights import class_weights
from tf_labeldp.mechanisms import ClassificationMechanism, RandomizedResponse
from tf_labeldp.vault import (
    Classes,
    LabelKind,
    LabelRandomizer,
    NoisyLabels,
    Numbers,
    Rows,
)
from tf_labeldp.vault.handed_on import with_receipts
from tf_labeldp.vault.uses import NamedUse

_SHAPES = ((3, 0.1), (15, 0.05))
"""Leaves per tree, and the learning rate: additive trees are best at small epsilon, and trees with
interactions at large epsilon. Chosen on Adult; the noisy labels weigh them."""
_FOLDS = 5
"""Parts of the examples; each model stops early by the noisy labels of one part."""
_ROWS_FOR_ALL_FOLDS = 200_000
"""Up to this many examples, each part is held out once; with five times as many, one part is."""
_LEAST_SIGNAL = 20.0
"""The fewest examples, in true labels, from which trees can learn more than the class shares."""
_SHRINKAGE = 3.0
"""L2 penalty on leaves, in information: the step of a leaf worth 3 true labels is halved."""
_STACKING_PENALTY = 3.0
"""One over the prior standard deviation of the weights of the shapes, around equal weights."""
_LEAST_START = 1e-6
"""Least probability, or share of the largest count, whose logarithm boosting starts at."""
_CLEAR = 2.0
"""Standard errors by which trees must beat the class shares on held-out noisy labels."""


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
        epsilon: finite and above zero; None for ``NoisyLabels``, which are drawn already.
        num_classes: K, for labels 0..K-1. Leave it out for a vault, which knows its labels.
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
        max_trees = _validate.integer_at_least("max_trees", self.max_trees, 1)
        _validate.one_of("loss", self.loss, ("squared_error", "poisson"))
        seed = _validate.integer_at_least("seed", self.seed, 0)
        if self.n_jobs is not None:
            _validate.integer_at_least("n_jobs", self.n_jobs, 1)
        public = public_input(X, self.class_weight, sample_weight, self.start)
        features, class_weight, sample_weight, start = public.value
        features = self._matrix(features)
        source = None
        if not isinstance(y, NoisyLabels):
            is_released = isinstance(start, HeadResidualRandomizer)
            inner = start.encoder if is_released else None
            source = LabelSource(self, y, self._mechanism, public_input(public, inner).receipts)
        coder, rows = _read(public.with_value(features), self.categorical)
        is_code = np.zeros(rows.shape[1], bool) if coder is None else coder.categorical_
        kind = y.kind if source is None else source.kind
        monotonic = _monotonic(self.monotonic_cst, coder, is_code, kind)
        if monotonic is not None and start is not None:
            raise ValueError(
                "expected monotonic_cst without start, whose scores may rise and fall, got both. "
                "Leave one of them out."
            )
        start = _checked_start(start, y if source is None else None, kind)
        # A start that can't read the features fails before the draw.
        outputs = None if start is None else _outputs(start, features)
        weights = Column.relative_weights(sample_weight, rows.shape[0])
        rows_of_labels: Any = slice(None)
        if source is None:
            noisy = _checked_noisy(y)
            receipts: tuple[Receipt, ...]
            receipts = Receipts.merged(public.receipts, public_input(noisy).receipts)
            rows_of_labels = noisy.rows_among({rows.shape[:1]})
        else:
            _validate.one_label_per_row(rows.shape[0], len(source.vault))
            used = rows.shape[0] if weights is None else int(np.count_nonzero(weights))
            self._check_worth(used, kind)
            class_weights(class_weight, kind.class_values, None)
            digests = FeatureRows(features).digests()
            mechanism = source.mechanism

            def draw(use: NamedUse, own: PublicInput[Any]) -> NoisyLabels:
                nonlocal start
                if not isinstance(mechanism, HeadResidualRandomizer):
                    return use.randomize(own.with_value(mechanism))
                inputs = own.with_value(features)
                start, drawn = mechanism.draw_with_head(use, inputs, sample_weight)
                return drawn

            noisy, receipts = source.randomize(public, digests, self._family_of_clones(), draw)
        begin = None
        if start is not None:
            if outputs is None:
                outputs = _column(noisy.shift)  # of this start
            outputs = outputs[rows_of_labels]
            _check_shift(noisy, start, outputs)
            begin = self._as_scores(start, outputs, np)
            if source is None and noisy.shift is not None:
                kind = Numbers(*start._label_range)  # Not that of the residuals.
        rows = rows[rows_of_labels]
        weights = None if weights is None else weights[rows_of_labels]
        labels = TableLabels(noisy, kind, rows_of_labels, weights)
        target = labels.target(self.loss, begin)
        if coder is not None and coder.hashed_ and target.constant.size == 1:
            coder, means = with_means(coder, features, labels, seed)
            for place, column in means.items():
                rows[:, place] = column
            is_code = coder.categorical_
        task = Task(
            rows,
            is_code,
            target.loss,
            weights,
            max_trees,
            min_rows=_min_rows(rows.shape[0]),
            shrinkage=_SHRINKAGE * target.loss.dispersion() / target.variance,
            seed=seed % 2**31,  # the largest of LightGBM
            monotonic=monotonic,
            threads=self.n_jobs or 0,
        )
        self._grown, held_out, scores = _grown(task)
        loss = target.loss.take(held_out)
        stack = _stacked(loss, scores, task.weights_of(held_out), target.variance)
        self.shape_weights_, shift, self.gain_, self.gain_stddev_ = stack
        self._constant = target.constant + shift
        self.coder_, self.start_ = coder, start
        self.noisy_labels_ = noisy
        self.receipts_ = Receipts.merged(receipts, Receipts.of_weights(sample_weight, class_weight))
        self.classes_: Any = kind.class_values
        self._label_range = kind.label_range
        self._class_weights = class_weights(class_weight, kind.class_values, target.shares)
        self._remember_columns(FeatureRows(features).columns, rows.shape[1])
        self.num_trees_ = sum(model.num_trees for models in self._grown for model in models)
        gains = np.sum([weight * model.gains() for model, weight in self._weighted()], axis=0)
        self.feature_importances_ = gains / max(float(gains.sum()), 1e-300)
        if self.gain_ < _CLEAR * self.gain_stddev_:
            _validate.warn(
                f"on held-out noisy labels, trees gain {self.gain_:.2g} nats per label over the "
                f"class shares, with a standard error of {self.gain_stddev_:.2g}: they learnt "
                "hardly more than noise. Use a larger epsilon, more examples, or a head of one "
                "release."
            )
        return self

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

    @available_if(Head._is_classifier)
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
        return [[model.booster for model in models] for models in self._grown]

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from the inputs of ``fit`` to predictions, with its receipts.

        The model of a table takes a dict of columns (m, 1) by name, that of a matrix (m, p). It
        computes ``predict_proba``, or for numbers ``predict`` as (m, 1). Import
        ``tf_labeldp.keras_layers`` before you load its file.
        """
        self._check_fitted()
        from keras import ops

        inputs, rows = with_encoder(self.coder_, self.n_features_in_)
        parts = [(model.trees, weight) for model, weight in self._weighted()]
        layer = Trees.weighted_sum(parts, self._constant).layer(name="tree_ensemble")
        scores = layer(rows)
        note_release(layer, self.receipts_)
        if self.start_ is not None:
            scores = scores + self._as_scores(self.start_, self._exported_start(inputs), ops)
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
        X = self._matrix(X, is_fitted=True)
        if self.coder_ is not None:
            rows = self.coder_.transform(X)
        elif sparse.issparse(X):
            rows = sparse.csr_matrix(X)
        else:
            raise TypeError(
                f"expected a sparse matrix, as in fit, got {type(X).__name__}. Give "
                "scipy.sparse.csr_matrix(features)."
            )
        total = np.zeros((rows.shape[0], self._constant.size)) + self._constant
        if self.start_ is not None:
            total += self._as_scores(self.start_, _outputs(self.start_, X), np)
        for model, weight in self._weighted():
            total += weight * model.scores(rows)
        return total

    def _probabilities(self, scores: Any, ops: Any) -> Any:
        """Returns class probabilities (m, K) of scores, by ``numpy`` or ``keras.ops``."""
        weights = np.asarray(self._class_weights, np.float64 if ops is np else np.float32)
        if scores.shape[1] == 1:
            scores = ops.concatenate([-0.5 * scores, 0.5 * scores], axis=1)
        p = ops.exp(scores - ops.max(scores, axis=1, keepdims=True))
        p = p * weights
        return p / ops.sum(p, axis=1, keepdims=True)

    def _exported_start(self, inputs: Any) -> Any:
        """Returns the outputs (m, C) of the start for the Keras inputs that it reads."""
        import keras

        exported = with_receipts(self.start_.to_keras(), self.receipts_)
        wanted = symbolic_inputs(exported)
        # Without the facts of a whole model, such as its classes, which are this model's.
        model = keras_model(wanted, exported.outputs[0], "start")
        if isinstance(inputs, dict):
            names = list(wanted) if isinstance(wanted, dict) else self.start_._known_columns()
            if names is not None and all(name in inputs for name in names):
                parts = {name: inputs[name] for name in names}
                if isinstance(wanted, dict):
                    return model(parts)
                if all(part.dtype == "float32" for part in parts.values()):
                    return model(keras.layers.Concatenate(dtype="float32")(list(parts.values())))
        elif not isinstance(wanted, dict):
            return model(inputs)
        raise TypeError(
            "expected a start whose exported model takes the columns of this one, got one with "
            f"the inputs {wanted!r}. Fit it on the same table."
        )

    def _as_scores(self, start: Any, outputs: Any, ops: Any) -> Any:
        """Returns the scores (m, C) of outputs of the start, by ``numpy`` or ``keras.ops``."""
        if start._is_regressor() and self.loss == "squared_error":
            return outputs
        least = _LEAST_START * np.max(start._label_range or 1.0)
        logs = ops.log(ops.maximum(outputs, least))
        # One score is enough for two classes.
        return logs[:, 1:] - logs[:, :1] if logs.shape[1] == 2 else logs

    def _weighted(self) -> list[tuple[Grown, float]]:
        """Returns each model with its weight in the scores."""
        return [
            (model, weight / len(models))
            for weight, models in zip(self.shape_weights_, self._grown, strict=True)
            for model in models
        ]


def _checked_noisy(noisy: NoisyLabels) -> NoisyLabels:
    if not noisy.receipts:
        raise ValueError(
            "expected noisy labels with receipts, got none. Give the result of "
            "PrivateLabels.randomize, or of NoisyLabels.load."
        )
    if len(noisy) < _LEAST_SIGNAL:
        raise ValueError(
            f"expected at least {_LEAST_SIGNAL:g} noisy labels, got {len(noisy)}. Draw more."
        )
    if noisy.values.ndim == 2 and isinstance(noisy.mechanism, ClassificationMechanism):
        raise ValueError(
            "expected one noisy label per example, got rows of labels. Fit one model per column."
        )
    return noisy


def _checked_start(start: Any, noisy: NoisyLabels | None, kind: LabelKind) -> Any:
    """Returns the fitted estimator where boosting starts; None without, or if it is released."""
    if noisy is not None and noisy.shift is not None and start is None:
        raise ValueError(
            "expected start=head with noisy residuals, the head whose numbers were subtracted, "
            "got None. Fit it again with key='<key>/head', which costs nothing."
        )
    if start is None or (isinstance(start, HeadResidualRandomizer) and noisy is None):
        return None
    if not isinstance(start, Head):
        raise TypeError(
            "expected start as a fitted estimator of this library, got "
            f"{type(start).__name__}. Give a head, such as PrivateRidge(...).fit(X, y)."
        )
    start._check_fitted()
    classes: Any = kind.class_values
    own: Any = None if start._is_regressor() else start.classes_
    if own is None and not start._is_regressor():
        raise ValueError("expected a start for classes or numbers, got one for rows of labels.")
    if (own is None) != (classes is None) or not np.array_equal(own, classes):
        kinds = [
            "numbers" if found is None else f"the classes {found.tolist()}"
            for found in (classes, own)
        ]
        raise ValueError(
            f"expected a start for {kinds[0]}, got one for {kinds[1]}. Fit it on these labels."
        )
    return start


def _outputs(start: Any, X: Any) -> np.ndarray:
    """Returns the numbers (m, 1) or probabilities (m, K) of the model where boosting starts."""
    return _column(start.predict(X)) if start._is_regressor() else start.predict_proba(X)


def _column(numbers: Any) -> np.ndarray:
    return np.asarray(numbers)[:, np.newaxis]


def _check_shift(noisy: NoisyLabels, start: Any, outputs: np.ndarray) -> None:
    """Raises if another model's numbers were subtracted from the labels of a draw of residuals."""
    if noisy.shift is None:
        return
    low, high = start._label_range
    if not np.allclose(outputs[:, 0], noisy.shift, rtol=0.0, atol=1e-3 * (high - low)):
        raise ValueError(
            "expected start as the head whose numbers the draw subtracted, got another one, or "
            "other features. Give both as they were in the draw."
        )


def _read(
    public: PublicInput[Any], categorical: Sequence[str | int] | None
) -> tuple[TableCodes | None, Any]:
    """Returns the coder of a table and its ``float32`` rows; sparse rows have no coder."""
    features = public.value
    if sparse.issparse(features):
        coder, rows = None, sparse.csr_matrix(features, dtype=np.float32)
        if np.isinf(rows.data).any():
            raise ValueError(
                "expected finite features, got infinite ones in a sparse matrix. Make them "
                "numbers, or NaN where they are missing. Nothing was drawn."
            )
    else:
        coder = TableCodes(categorical).fit(public)
        rows = coder.transform(features)
    # Each fold must have examples on both sides of a split.
    least = 2 * _min_rows(rows.shape[0])
    columns = rows if coder is not None else rows.tocsc()
    if not any(_least_common(columns, place) >= least for place in range(rows.shape[1])):
        raise ValueError(
            f"expected a column in which at least {least} examples differ from the others, got "
            f"constant columns alone, or nearly constant ones (n_samples={rows.shape[0]}). Check "
            "how they were computed. Nothing was drawn."
        )
    return coder, rows


def _monotonic(
    constraints: Mapping[str | int, int] | None,
    coder: TableCodes | None,
    is_code: np.ndarray,
    kind: LabelKind,
) -> list[int] | None:
    """Returns -1, 0 or 1 for each column; None without constraints."""
    if constraints is None:
        return None
    if (kind.num_classes or 2) > 2:
        raise ValueError(
            f"expected two classes or numbers with monotonic_cst, got {kind.describe()}, whose "
            "probabilities sum to one. Leave it out."
        )
    names = range(is_code.size) if coder is None else [column.name for column in coder.columns_]
    places = {name: place for place, name in enumerate(names)}
    found = [0] * is_code.size
    for name, sign in constraints.items():
        if name not in places or is_code[places[name]] or sign not in (-1, 0, 1):
            raise ValueError(
                "expected monotonic_cst as a dict of -1, 0 or 1 by columns of numbers, got "
                f"{name!r}: {sign!r}. Choose from "
                f"{', '.join(repr(n) for n, place in places.items() if not is_code[place])}."
            )
        found[places[name]] = sign
    return found


def _min_rows(size: int) -> int:
    """Returns the fewest examples per leaf."""
    return int(np.clip(size // 50, 5, 100))


def _least_common(columns: Any, place: int) -> int:
    """Returns the number of examples that differ from the median of a column."""
    column = columns[:, [place]]
    column = (column.toarray() if sparse.issparse(column) else column).ravel()
    missing = np.isnan(column)
    if missing.all():
        return 0
    return int(np.count_nonzero(missing | (column != np.median(column[~missing]))))


def _grown(task: Task) -> tuple[list[list[Grown]], np.ndarray, np.ndarray]:
    """Returns models by shape and fold, the held-out rows, and their scores (shapes, m, C)."""
    # LightGBM refuses a part whose weights are all zero.
    used = np.arange(task.rows.shape[0])
    used = used if task.weights is None else used[task.weights > 0.0]
    size = len(used)
    parts = np.array_split(np.random.default_rng(task.seed).permutation(used), _FOLDS)
    parts = parts[: int(np.clip(_FOLDS * _ROWS_FOR_ALL_FOLDS // size, 1, _FOLDS))]
    members: list[list[Grown]] = [[] for _ in _SHAPES]
    scores: list[list[np.ndarray]] = [[] for _ in _SHAPES]
    with Progress("Growing trees", len(parts) * len(_SHAPES) * size) as progress:
        for part in parts:
            held_out = np.sort(part)
            fold = Fold(task, np.setdiff1d(used, held_out, assume_unique=True), held_out)
            for shape, (leaves, rate) in enumerate(_SHAPES):
                members[shape].append(fold.grow(leaves, rate))
                scores[shape].append(members[shape][-1].scores(task.rows[held_out]))
                progress.advance(size)
    rows = np.concatenate([np.sort(part) for part in parts])
    return members, rows, np.stack([np.concatenate(found) for found in scores])


def _stacked(
    loss: ScoreLoss, scores: np.ndarray, row_weights: np.ndarray | None, variance: float
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Returns weights of the shapes, a shift (C,), the gain per row, and its standard error.

    The weighted sum of the shapes' scores minimises the loss on held-out rows, with normal priors:
    equal weights, and a shift of the start by about the standard deviation of labels.
    """
    from scipy import optimize

    number, size, outputs = scores.shape
    row_weights = np.ones(size) if row_weights is None else row_weights
    dispersion = loss.dispersion()

    def total(parameters: np.ndarray) -> np.ndarray:
        return loss.start + parameters[number:] + np.tensordot(parameters[:number], scores, 1)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        found, away = total(parameters), (parameters - begin) * scale
        slopes = loss.derivatives(found)[0] * row_weights[:, np.newaxis] / dispersion
        value = float(row_weights @ loss.values(found)) / dispersion
        gradient = np.concatenate([np.tensordot(scores, slopes, 2), slopes.sum(axis=0)])
        return value + 0.5 * float(away @ away), gradient + scale * away

    scale = np.repeat([_STACKING_PENALTY, variance**-0.5], [number, outputs])
    begin = np.concatenate([np.full(number, 1.0 / number), np.zeros(outputs)])
    bounds = [(0.0, 2.0)] * number + [(None, None)] * outputs
    found = optimize.minimize(objective, begin, jac=True, bounds=bounds, method="L-BFGS-B").x
    gains = row_weights * (loss.values(loss.start) - loss.values(total(found)))
    error = float(gains.std()) / math.sqrt(size)
    return found[:number], found[number:], float(gains.mean()), error
