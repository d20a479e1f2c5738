"""Algorithm 3 of ``ghazi2023``: the prior is released privately, then bins are made and drawn."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._label_store import DrawSettingsError
from tf_labeldp.estimation import (
    HistogramMechanism,
    debiased_labels,
    histogram_prior,
    posterior_mean,
    rounding_grid,
)
from tf_labeldp.mechanisms import RROnBins, optimal_bins
from tf_labeldp.mechanisms._losses import check_domain, checked_loss
from tf_labeldp.mechanisms._segment_costs import segment_costs

if TYPE_CHECKING:
    from tf_labeldp.private_labels import PrivateLabels

_FEWEST_VALUES = 16
"""Fewer values would say too little of where the labels lie, however much budget that saves."""
_LARGEST = 1e6
"""An epsilon that nobody has, of which the square is still a number."""


@dataclasses.dataclass(frozen=True, eq=False)
class RandomizedLabels:
    """What ``LabelRandomizer`` hands out: all of it may be published.

    Attributes:
        noisy_labels: ``float64`` (n,).
        mechanism: the RR-on-Bins that drew them.
        values: the labels that were told apart, ``float64`` (k,).
        prior: their probabilities, released privately or public, ``float64`` (k,).
        prior_epsilon: what the prior cost; zero if it was public.

    Example:
        >>> mechanism = RROnBins(1.0, inputs=[0, 1], outputs=[0.25, 0.75], bin_of_input=[0, 1])
        >>> noisy, values, prior = np.array([0.25]), np.array([0.0, 1.0]), np.array([0.5, 0.5])
        >>> made = RandomizedLabels(noisy, mechanism, values, prior, prior_epsilon=0.0)
        >>> made.posterior_mean().round(4).tolist()
        [0.2689]
    """

    noisy_labels: np.ndarray
    mechanism: RROnBins
    values: np.ndarray
    prior: np.ndarray
    prior_epsilon: float

    def posterior_mean(self) -> np.ndarray:
        """Returns the mean of the true label given each noisy one, ``float64`` (n,).

        Post-processing, so it costs nothing; see ``estimation.posterior_mean`` for when to use it.
        """
        return posterior_mean(self.mechanism, self.noisy_labels, self.values, self.prior)

    def debiased_labels(self) -> np.ndarray:
        """Returns labels without the pull to the overall mean, ``float64`` (n,).

        Post-processing, so it costs nothing; see ``estimation.debiased_labels`` for when to use it.
        """
        return debiased_labels(self.mechanism, self.noisy_labels, self.values, self.prior)


@dataclasses.dataclass(frozen=True)
class LabelRandomizer:
    """Turns private numeric labels into one message: a private prior, and noisy labels made by it.

    Guarantee:
        (epsilon, 0)-label-DP for the replacement of one label, prior and draw together
        (``ghazi2023``, Theorem 6): the noisy histogram costs ``prior_epsilon``, the draw the rest,
        and both are charged to the vault, which refuses before either if they do not fit.

    Source: ``ghazi2023``, Algorithm 3, with the split of Theorem 7: ``prior_epsilon = sqrt(k / n)``
    for k values and n labels. The theorem needs ``n > k / epsilon^2``, and is of use where n is
    well above. So the prior costs ``epsilon / 2`` at most: below ``n = 4 k / epsilon^2`` the grid
    gets coarser, down to 16 values.

    Attributes:
        epsilon: the whole, finite and above zero.
        loss: what the bins are optimal for, as for ``optimal_bins``. Take the loss of training.
        prior_epsilon: the part for the prior, below epsilon; None for the rule above.
        max_values: the largest number of values that are told apart (``rounding_grid``). More of
            them round less and spend more on the prior; ``tests/benchmarks`` compares 16 to 1,024.
        whole_numbers: whether the labels are counts or other whole numbers, so that nothing between
            them needs to be told apart.
        values: the values themselves, from the low end of the labels' range to the high one; None
            for a grid.
        prior: known public probabilities of ``values``; then the whole epsilon goes to the draw.
        noise: of the histogram, ``"discrete_laplace"`` or ``"laplace"``.

    Raises:
        ValueError: nothing is left for the draw, or the arguments contradict each other.

    Example:
        >>> from tf_labeldp.accounting import PrivacyBudget
        >>> from tf_labeldp.private_labels import PrivateLabels
        >>> weeks = PrivateLabels([52, 40, 13] * 99, low=0, high=52, budget=PrivacyBudget(2.0))
        >>> made = LabelRandomizer(epsilon=2.0).randomize(weeks)
        >>> made.noisy_labels.shape, weeks.guarantee().epsilon
        ((297,), 2.0)
    """

    epsilon: float
    loss: Any = "squared_error"
    prior_epsilon: float | None = None
    max_values: int = 64
    whole_numbers: bool = False
    values: tuple[float, ...] | None = None
    prior: tuple[float, ...] | None = None
    noise: str = "discrete_laplace"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        _validate.positive_finite("epsilon", self.epsilon)
        checked_loss(self.loss)
        HistogramMechanism(self.epsilon, num_classes=2, noise=self.noise)  # checks the noise
        _validate.integer_at_least("max_values", self.max_values, 2)
        if self.prior_epsilon is not None:
            spent = _validate.positive_finite("prior_epsilon", self.prior_epsilon)
            if spent >= self.epsilon:
                raise ValueError(
                    f"prior_epsilon={spent:g} leaves nothing of epsilon={self.epsilon:g} for the "
                    "draw. Give the prior less, or leave prior_epsilon out."
                )
        if self.values is not None:
            values = _validate.increasing_numbers("values", self.values)
            object.__setattr__(self, "values", tuple(values.tolist()))
        if self.prior is not None:
            if self.values is None or self.prior_epsilon is not None:
                raise ValueError(
                    "a public prior needs the values that it belongs to, and costs nothing: give "
                    "prior and values, without prior_epsilon."
                )
            prior = _validate.prior_rows("prior", self.prior, None, len(self.values))[0]
            object.__setattr__(self, "prior", tuple(prior.tolist()))

    def split(self, num_labels: int, low: float, high: float) -> tuple[np.ndarray, float]:
        """Returns the values that are told apart, and the epsilon of their prior.

        Args:
            num_labels: n.
            low: the smallest possible label.
            high: the largest possible label.

        Returns:
            Values (k,), and ``prior_epsilon`` (zero for a public prior).

        Raises:
            ValueError: the values do not reach from ``low`` to ``high``.
        """
        num_labels = _validate.integer_at_least("num_labels", num_labels, 1)
        most = min(self.epsilon / 2.0, _LARGEST)
        if self.values is not None:
            values = np.asarray(self.values)
            if values[0] > low or values[-1] < high:
                raise ValueError(
                    f"values reach from {values[0]:g} to {values[-1]:g}, the labels from {low:g} "
                    f"to {high:g}. Give values that cover the range."
                )
        else:
            size = self.max_values
            if self.prior_epsilon is None:
                size = min(size, max(_FEWEST_VALUES, int(num_labels * most**2)))
            grid = rounding_grid(low, high, size, whole_numbers=self.whole_numbers)
            values = np.asarray(grid.values)
        if self.prior is not None:
            return values, 0.0
        if self.prior_epsilon is not None:
            return values, float(self.prior_epsilon)
        return values, min(math.sqrt(values.size / num_labels), most)

    def randomize(
        self, labels: PrivateLabels, *, key: str = "label-randomizer"
    ) -> RandomizedLabels:
        """Releases the prior, finds the bins, and draws.

        Args:
            labels: the vault, made with ``low`` and ``high``.
            key: a name for the two draws, ``key/prior`` and ``key``. With a name used before, the
                stored results come back and nothing is charged.

        Returns:
            Noisy labels, and what is needed to interpret them.

        Raises:
            BudgetExceededError: prior and draw together would pass the budget; nothing was drawn.
            LabelStoreError: the stored draws of this name were made with other settings.
            TypeError: the labels are in no vault.
            ValueError: the vault holds classes, or is empty, or the loss is refused.
        """
        if not hasattr(labels, "label_range"):
            raise TypeError(
                f"labels must be a PrivateLabels, got {type(labels).__name__}. Make one: "
                "PrivateLabels(labels, low=0.0, high=400.0, budget=PrivacyBudget(epsilon))."
            )
        if not len(labels):
            raise ValueError("the vault has no labels; there is nothing to randomize.")
        if labels.label_range is None:
            raise ValueError(
                "LabelRandomizer is for numbers, these labels are classes. Use RandomizedResponse "
                "or RRWithPrior, or make PrivateLabels with low and high."
            )
        check_domain(self.loss, labels.label_range[0])
        values, prior_epsilon = self.split(len(labels), *labels.label_range)
        rest = self.epsilon - prior_epsilon
        if callable(self.loss):  # one that is refused is so for any prior, before any is paid for
            segment_costs(self.loss, values, np.full(values.size, 1.0 / values.size), rest)
        stored = _stored_bins(labels, key, values, rest)
        if self.prior is not None:
            prior = np.asarray(self.prior)
        else:
            prior = self._released_prior(labels, values, prior_epsilon, stored is not None, key)
        mechanism = optimal_bins(values, prior, rest, self.loss)
        if stored is not None:
            self._check_as_good(stored, mechanism, prior, key)
            mechanism = stored
        noisy = labels.randomize(mechanism, key=key)
        return RandomizedLabels(noisy, mechanism, values, prior, prior_epsilon)

    def _released_prior(
        self,
        labels: PrivateLabels,
        values: np.ndarray,
        epsilon: float,
        drawn: bool,
        key: str,
    ) -> np.ndarray:
        """Returns the private prior, paid for only if the budget has room for the draw too."""
        histogram = HistogramMechanism(epsilon, values=tuple(values.tolist()), noise=self.noise)
        prior_key = f"{key}/prior"
        if not labels.has_draw(prior_key):
            ends = (values[0], values[-1])
            # Of the price of the draw, whatever its bins will be.
            draw = RROnBins(self.epsilon - epsilon, ends, ends, (0, 1))
            labels.check_budget([histogram] if drawn else [histogram, draw])
        return histogram_prior(labels.release(histogram, key=prior_key))

    def _check_as_good(self, stored: RROnBins, made: RROnBins, prior: np.ndarray, key: str) -> None:
        """Raises unless the bins of the stored draw are as good as those that are made now.

        Another machine may round another way and choose other bins among equally good ones; labels
        that were drawn stay as they are.
        """
        losses = [one.expected_loss(prior, self.loss) for one in (stored, made)]
        if not math.isclose(*losses, rel_tol=1e-6, abs_tol=1e-12):
            raise DrawSettingsError(
                f"draw {key!r} exists and was made with other settings, since it is not optimal "
                f"for loss={self.loss!r} (stored: {stored!r}; asked: {made!r}). Ask with the "
                "settings of the stored draw, or give another key."
            )


def _stored_bins(
    labels: PrivateLabels, key: str, values: np.ndarray, epsilon: float
) -> RROnBins | None:
    """Returns the mechanism of the draw of this name, or None if there is none.

    Raises:
        DrawSettingsError: it is of another kind, epsilon or values.
    """
    if not labels.has_draw(key):
        return None
    stored = labels.mechanism(key)
    if (
        isinstance(stored, RROnBins)
        and math.isclose(stored.epsilon, epsilon, rel_tol=1e-9)
        and stored.inputs == tuple(values.tolist())
    ):
        return stored
    raise DrawSettingsError(
        f"draw {stored!r} exists and was made with other settings (asked: epsilon={epsilon:g} on "
        f"{values.size} values). Ask with the settings of the stored draw, or give another key."
    )
