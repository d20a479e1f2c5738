"""A search over the arguments of a private estimator, which pays for every fit and the choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import ParameterGrid

from tf_labeldp import _validate
from tf_labeldp.accounting import Charge, Private, Public, public_input
from tf_labeldp.accounting.events import gaussian_event, pure_dp_event
from tf_labeldp.accounting.gaussian import gaussian_share, gaussian_sigma
from tf_labeldp.accounting.receipts import merge_receipts
from tf_labeldp.front_door._estimators import predictions_for_metrics, rows_of
from tf_labeldp.heads.one_release_head import Head
from tf_labeldp.vault import PrivateLabels
from tf_labeldp.vault.evaluation import release_choice, selection_mechanism

_FREE = frozenset(["penalty"])
"""Arguments that come after the release: fits that differ in them alone share one."""
_OWN = frozenset(["epsilon", "delta", "key", "insecure_seed"])
_MARGIN = 1e-6
"""The sum of the fits is composed numerically, and has to stay below epsilon."""


@dataclasses.dataclass(eq=False, repr=False)
class PrivateSearchCV(Head):
    """Finds the best arguments of a private estimator on held-out labels, at one epsilon in all.

    Every candidate is fitted on the examples that are not held out; the fits share (epsilon,
    delta). The best on the held-out examples is chosen by one release that costs epsilon there
    (``select``). Both are charged to one vault, and compose in parallel. Candidates that differ in
    ``penalty`` alone share one release: a search over penalties divides nothing.

    Fewer candidates are better: each of m gets what epsilon / sqrt(m) buys, about, and a fifth of
    the examples is lost to the choice. ``penalty="auto"`` needs no search at all.

    Guarantee:
        (epsilon, delta)-label-DP for the replacement of one label, of the chosen estimator and of
        all others together. Assumes what the estimator assumes, and that the grid is public.

    Args:
        estimator: with the arguments ``epsilon``, ``delta`` and ``key``, a ``fit`` on a
            ``PrivateLabels`` by one release and ``receipts_``: a head of one release,
            ``PrivateClassifier`` or ``PrivateRegressor``.
        param_grid: lists of values by argument, or a list of such dicts, as for scikit-learn's
            ``GridSearchCV``.
        epsilon: finite and above zero.
        delta: in [0, 1); None for that of the vault's budget. Above zero the fits have Gaussian
            noise and compose as one release; at zero each gets epsilon / m.
        held_out: the share of the examples that choose, in (0, 1).
        metric: by which is chosen; as for ``select``.
        key: begins the names of the releases in the vault: a search that was interrupted finds its
            fits there.
        seed: of the split; public.

    Attributes:
        best_estimator_: fitted on the examples that were not held out.
        best_index_: its number among ``candidates_``, and ``best_params_`` its arguments.
        candidates_: the arguments of all candidates.
        epsilon_of_fit_: of each release of a fit by itself.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, PrivateRidge
        >>> x = np.random.default_rng(0).normal(size=(3000, 4))
        >>> y = PrivateLabels(x[:, 0] > 0, classes=[False, True], budget=PrivacyBudget(1.0, 1e-5))
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

    def fit(self, features: Public[Any], labels: Private[PrivateLabels]) -> PrivateSearchCV:
        """Fits all candidates and chooses one.

        Args:
            features: public, as the estimator takes them; arrays, sparse matrices, data frames, or
                dicts of columns.
            labels: a ``PrivateLabels``, which charges every release.

        Returns:
            The search itself.

        Raises:
            BudgetExceededError: the budget does not allow all of it; nothing was released.
            TypeError: labels that are no ``PrivateLabels``.
            ValueError: a grid of other arguments, or arguments out of range.
        """
        if not isinstance(labels, PrivateLabels):
            raise TypeError(
                f"labels must be a PrivateLabels, got {type(labels).__name__}: every fit and the "
                "choice are charged to it."
            )
        public = public_input(features, self.estimator, self.param_grid)
        features, estimator, grid = public.value
        candidates = list(ParameterGrid(grid))
        if taken := sorted(_OWN & {name for one in candidates for name in one}):
            raise ValueError(
                f"the grid has {', '.join(taken)}, which the search sets itself. Search over other "
                "arguments; fits at several epsilons can't be compared at one price."
            )
        # A grid has each value once: candidates with the same object are candidates alike.
        releases = [
            tuple(sorted((name, id(value)) for name, value in one.items() if name not in _FREE))
            for one in candidates
        ]
        numbers = {release: number for number, release in enumerate(dict.fromkeys(releases))}
        epsilon = _validate.positive_finite("epsilon", self.epsilon)
        delta = labels.budget.delta if self.delta is None else self.delta
        fit = _charge_of_fit(epsilon, delta, len(numbers))
        train, held_out = labels.split(self.held_out, seed=self.seed)
        keys = [f"{self.key}/{number}" for number in range(len(numbers))]
        train.check_budget([fit] * sum(not labels.has_draw(key) for key in keys))
        choice = f"{self.key}/choice"
        if not labels.has_draw(choice):
            held_out.check_budget(selection_mechanism(held_out, epsilon, self.metric))
        features_of = [rows_of(features, part.indices) for part in (train, held_out)]
        fitted = [
            clone(estimator).set_params(
                **arguments, epsilon=fit.epsilon, delta=delta, key=keys[numbers[release]]
            )
            for arguments, release in zip(candidates, releases, strict=True)
        ]
        predictions = []
        for one in fitted:
            one.fit(public.with_value(features_of[0]), train)
            predictions.append(predictions_for_metrics(one, features_of[1]))
        made = release_choice(
            public.with_value(predictions), held_out, epsilon, self.metric, choice
        )
        self.best_index_ = int(made.values)
        self.best_estimator_ = fitted[self.best_index_]
        self.best_params_, self.candidates_ = candidates[self.best_index_], candidates
        self.epsilon_of_fit_ = fit.epsilon
        self.receipts_ = merge_receipts(*(one.receipts_ for one in fitted), made.receipts)
        self._label_range = labels.label_range
        return self

    def predict(self, features: Public[Any]) -> np.ndarray:
        """Returns what the chosen estimator predicts."""
        self._check_fitted()
        return self.best_estimator_.predict(features)

    def predict_proba(self, features: Public[Any]) -> np.ndarray:
        """Returns the class probabilities of the chosen estimator, (m, K)."""
        self._check_fitted()
        return self.best_estimator_.predict_proba(features)


def _charge_of_fit(epsilon: float, delta: float, number: int) -> Charge:
    """Returns what each of several releases may cost that cost (epsilon, delta) together."""
    if delta == 0.0:
        return Charge(epsilon / number, 0.0, pure_dp_event(epsilon / number))
    each = gaussian_share(epsilon * (1.0 - _MARGIN), delta, 1.0 / number)
    return Charge(each, delta, gaussian_event(gaussian_sigma(each, delta, 1.0)))
