"""A search over the arguments of a private estimator, charged for every fit and the choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from sklearn.base import clone, is_regressor
from sklearn.model_selection import ParameterGrid
from sklearn.utils.metaestimators import available_if

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import (
    Charge,
    Private,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    public_input,
)
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.features.public_encoder import fitted_encoder
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.front_door._estimators import (
    num_rows,
    places_in,
    refuse_noisy_labels,
)
from tf_labeldp.heads.label_source import LabelSource
from tf_labeldp.heads.one_release_head import Head
from tf_labeldp.vault import PrivateLabels
from tf_labeldp.vault.handed_on import with_receipts
from tf_labeldp.vault.uses import LabelsTogether, NamedUse

_SET_HERE = frozenset(["epsilon", "delta", "key", "insecure_seed"])
_MARGIN = 1e-6
"""Relative slack for the numerical composition, which must stay below epsilon."""


def _exports(search: PrivateSearchCV) -> bool:
    return hasattr(PublicInput.bare(search.estimator), "to_keras")


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidates:
    """The arguments of all candidates, and the number of the release behind each."""

    arguments: list[dict[str, Any]]
    releases: list[int]
    num_releases: int

    @classmethod
    def of(cls, grid: Any) -> _Candidates:
        candidates = list(ParameterGrid(grid))
        searched = {name for candidate in candidates for name in candidate}
        if refused := sorted(_SET_HERE & searched):
            raise ValueError(
                f"param_grid has {', '.join(refused)}, which the search sets. Search over other "
                "arguments: fits at different epsilons have no common price."
            )
        # The penalty applies after the release: fits that differ in it alone share one.
        # A grid repeats each value as one object, so equal identities mean equal arguments.
        releases = [
            tuple(
                sorted((name, id(value)) for name, value in candidate.items() if name != "penalty")
            )
            for candidate in candidates
        ]
        numbers = {release: number for number, release in enumerate(dict.fromkeys(releases))}
        return cls(candidates, [numbers[release] for release in releases], len(numbers))


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """The labels of some examples, with their rows."""

    labels: PrivateLabels
    features: Any
    weights: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _PlannedSearch:
    """A search whose releases are planned, and none is drawn."""

    public: PublicInput[Any]
    candidates: _Candidates
    models: list[Any]  # estimators to fit, by candidate
    fits: list[NamedUse]  # the releases behind them
    charge: Charge  # of each of these releases
    choice: Any  # the mechanism that chooses
    train: _Part
    held_out: _Part

    def run(self, of_choice: NamedUse) -> tuple[tuple[Receipt, ...], int]:
        """Fits the models; returns the receipts of all, and the index of the best."""
        weights = self.train.weights
        weighted = {} if weights is None else {"sample_weight": weights}
        # Each charge covers the releases of one fit, whose names begin with its own.
        uses = [*((use, self.charge) for use in self.fits), (of_choice, self.choice)]
        with LabelsTogether.reserve(uses, self.public):
            labels, predictions = self.held_out.labels, []
            for model in self.models:
                rows = self.public.with_value(self.train.features)
                model.fit(rows, self.train.labels, **weighted)
                predictions.append(labels.kind.outputs_of(model, self.held_out.features))
            # The choice depends on all fits, and another outcome of it leaves another estimator.
            of_fits = Receipts.merged(*(model.receipts_ for model in self.models))
            stacked = labels.kind.stacked_predictions(predictions, self.choice.metric, len(labels))
            released = of_choice.release(self.choice, PublicInput(stacked, of_fits))
        return Receipts.merged(of_fits, released.receipts), int(released.values)


@dataclasses.dataclass(eq=False, repr=False)
class PrivateSearchCV(Head):
    """Finds the best arguments of a private estimator on held-out labels, at one total epsilon.

    Every candidate is fitted on the examples that are not held out; the fits share (epsilon,
    delta). One release on the held-out examples (``select``), at epsilon, chooses the best. Both
    are charged to one vault and compose in parallel. Candidates that differ in ``penalty`` alone
    share one release, so a search over penalties does not divide epsilon.

    Fewer candidates are better: each of m has about the noise of epsilon / sqrt(m), and the choice
    takes a fifth of the examples. ``penalty="auto"`` needs no search at all.

    Guarantee:
        (epsilon, delta)-label-DP for the replacement of one label, of the chosen estimator and all
        others together. Assumes what the estimator assumes, and that the grid is public.

    Args:
        estimator: a head of one release, ``PrivateClassifier`` or ``PrivateRegressor``; or an
            estimator with the arguments ``epsilon``, ``delta`` and ``key``, the attribute
            ``receipts_``, and a ``fit`` that makes one release from a ``PrivateLabels``.
        param_grid: lists of values by argument, or a list of such dicts, as for scikit-learn's
            ``GridSearchCV``.
        epsilon: finite and above zero.
        delta: in [0, 1); None takes the vault's. Above zero the fits use Gaussian noise and
            compose as one release; at zero each gets epsilon / m. ``PrivateBoosting`` has no delta:
            each fit gets epsilon / m.
        held_out: share of the examples for the choice, in (0, 1).
        metric: metric to choose by, as for ``select``.
        key: prefix of the releases' names in the vault. An interrupted search finds its fits there.
        seed: seed of the split; public.

    Attributes:
        best_estimator_: the best estimator, fitted on the examples that were not held out. Its
            statement, and that of each of its parts, is that of the search: it depends on the
            choice, and the choice on all fits.
        best_index_: its position in ``candidates_``, with its arguments in ``best_params_``.
        candidates_: arguments of all candidates.
        epsilon_of_fit_: epsilon of one fit's release alone.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, PrivateRidge
        >>> x = np.random.default_rng(0).normal(size=(3000, 4))
        >>> y = PrivateLabels(x[:, 0] > 0, 2, budget=PrivacyBudget(1.0, 1e-5))
        >>> search = PrivateSearchCV(PrivateRidge(1.0, 1e-5), {"penalty": [1.0, 10.0]}, 1.0)
        >>> search.fit(x, y).guarantee().epsilon, search.epsilon_of_fit_ > 0.99
        (1.0, True)
    """

    estimator: Public[Any]
    param_grid: Public[Any]
    epsilon: float
    delta: float | None = None
    _: dataclasses.KW_ONLY
    held_out: float = 0.2
    metric: str | None = None
    key: str = "search"
    seed: int = 0

    @_validate.clears_frames
    def fit(
        self, X: Public[Any], y: Private[PrivateLabels], sample_weight: Public[Any] = None
    ) -> PrivateSearchCV:
        """Fits all candidates and chooses one.

        Args:
            X: public, as the estimator takes them: arrays, sparse matrices, data frames, or
                dicts of columns.
            y: a ``PrivateLabels``, which charges every release.
            sample_weight: public weights (n,) of the examples, for the fits alone, if the estimator
                takes them; the choice weighs all held-out examples equally.

        Returns:
            The search itself.

        Raises:
            BudgetExceededError: the budget does not allow all releases; nothing was released.
            TypeError: labels that are not a ``PrivateLabels``.
            ValueError: a grid with unknown arguments, or arguments out of range.
        """
        LabelSource.refuse_missing(self, y)
        if not isinstance(y, PrivateLabels):
            raise TypeError(
                f"labels must be a PrivateLabels, got {type(y).__name__}. Put them into a "
                "vault, which charges every fit and the choice."
            )
        planned = self._planned(X, y, sample_weight)
        receipts, index = planned.run(NamedUse(planned.held_out.labels, self.key).part("choice"))
        best: Any = with_receipts(planned.models[index], receipts)
        self.receipts_ = receipts
        self.best_index_, self.best_estimator_ = index, best
        self.candidates_ = planned.candidates.arguments
        self.best_params_ = self.candidates_[index]
        self.epsilon_of_fit_ = planned.charge.epsilon
        self._label_range = y.label_range
        self.classes_ = y.kind.class_values
        self._remember_columns(best._known_columns(), best.n_features_in_)
        return self

    def _planned(self, X: Any, y: PrivateLabels, sample_weight: Any) -> _PlannedSearch:
        public = public_input(X, self.estimator, self.param_grid, sample_weight)
        features, estimator, grid, sample_weight = public.value
        arguments = estimator.get_params(deep=False)
        encoder = arguments.get("encoder")
        features = self._checked_inputs(features, encoder=encoder)
        _validate.one_label_per_row(num_rows(features), len(y))
        if encoder is not None:  # once for all candidates
            encoder = fitted_encoder(encoder, public.with_value(features))
            estimator = clone(estimator).set_params(encoder=encoder)
        candidates = _Candidates.of(grid)
        epsilon = _validate.positive_finite("epsilon", self.epsilon)
        delta = y.budget.delta if self.delta is None else self.delta
        if "delta" not in arguments:
            delta = 0.0  # such an estimator, as PrivateBoosting, uses no Gaussian noise
        charge = _charge_of_fit(epsilon, delta, candidates.num_releases)
        train, held_out = y.split(self.held_out, seed=self.seed)
        names = map(str, range(candidates.num_releases))
        fits = [NamedUse(train, self.key).part(name) for name in names]
        choice = held_out.kind.selection(held_out.epsilon_of_one_label(epsilon), self.metric)
        weights = Column.relative_weights(sample_weight, len(y))
        if weights is not None:
            weights = weights[places_in(y, train)]
        rows = [FeatureRows(features).raw(places_in(y, part)) for part in (train, held_out)]
        shares: dict[str, Any] = {"epsilon": charge.epsilon}
        if "delta" in arguments:
            shares["delta"] = delta
        models = [
            clone(estimator).set_params(**own, **shares, key=fits[number].key)
            for own, number in zip(candidates.arguments, candidates.releases, strict=True)
        ]
        if delta > 0.0 and candidates.num_releases > 1:
            for model in models:
                refuse_noisy_labels(model, rows[0], train)
        parts = _Part(train, rows[0], weights), _Part(held_out, rows[1])
        return _PlannedSearch(public, candidates, models, fits, charge, choice, *parts)

    def predict(self, X: Public[Any]) -> np.ndarray:
        """Returns the chosen estimator's predictions (m,)."""
        self._check_fitted()
        return self.best_estimator_.predict(X)

    @available_if(lambda self: not self._is_regressor())
    def predict_proba(self, X: Public[Any]) -> np.ndarray:
        """Returns the chosen estimator's class probabilities (m, K)."""
        self._check_fitted()
        return self.best_estimator_.predict_proba(X)

    @available_if(_exports)
    def to_keras(self) -> Any:
        """Returns the chosen estimator's ``keras.Model``, with the receipts of the whole search."""
        self._check_fitted()
        return self._with_facts(self.best_estimator_.to_keras())

    def _is_regressor(self) -> bool:
        return super()._is_regressor() or is_regressor(PublicInput.bare(self.estimator))

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import get_tags  # from 1.6 on, which asks for tags

        tags = super().__sklearn_tags__()
        tags.input_tags = get_tags(PublicInput.bare(self.estimator)).input_tags
        return tags


def _charge_of_fit(epsilon: float, delta: float, number: int) -> Charge:
    """Returns the charge of each of ``number`` releases that together cost (epsilon, delta)."""
    if delta == 0.0:
        return Charge(epsilon / number, 0.0, EventFields.randomized_response(epsilon / number))
    return Charge.gaussian_share(epsilon * (1.0 - _MARGIN), delta, 1.0 / number)
