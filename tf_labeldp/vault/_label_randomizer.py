"""Algorithm 3 of ``ghazi2023``: releases a private prior, then draws labels on its best bins."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, PublicInput, Receipt, Receipts, public_input
from tf_labeldp.estimation import debiased
from tf_labeldp.estimation.priors import ordered_prior
from tf_labeldp.mechanisms import (
    ChannelMechanism,
    HistogramMechanism,
    Mechanism,
    Priors,
    RROnBins,
    optimal_bins,
    optimal_unbiased,
)
from tf_labeldp.mechanisms.bin_losses import checked_loss, unbiased_range
from tf_labeldp.vault.noisy_labels import NoisyLabels
from tf_labeldp.vault.private_labels import PrivateLabels, Randomizer
from tf_labeldp.vault.records import DrawSettingsError
from tf_labeldp.vault.uses import NamedUse

_TIMES_THEOREM_7 = 4.0
"""Theorem 7 bounds the error of single labels; their mean needs a better prior."""
_SIMULATIONS = 100
"""Simulations per total, which leave its standard error 7 % off."""


@dataclasses.dataclass(frozen=True)
class LabelRandomizer(Randomizer):
    """Releases a private prior of numeric labels, and draws noisy labels on the best bins for it.

    Guarantee:
        (epsilon, 0)-label-DP for the replacement of one label, prior and draw together
        (``ghazi2023``, Theorem 6). The noisy histogram costs ``prior_epsilon``, the draw the rest.
        The vault is charged for both, and refuses before the first if they do not fit.

    Source: ``ghazi2023``, Algorithm 3, with three changes that reduce the error of totals
    (``benchmarks``): ``prior_epsilon`` is four times that of Theorem 7, ``4 sqrt(k / n)`` for
    k values and n labels, at most ``epsilon / 4``; values are denser where amounts are small; and
    negative counts are not just set to zero, which would move mass into the empty tail.

    Attributes:
        epsilon: the total for prior and draw, finite and above zero.
        loss: the loss that the bins minimise, as for ``optimal_bins``. Use the training loss.
        prior_epsilon: the part for the prior, below epsilon; None for the rule above.
        max_values: the largest number of distinct values. More values round less and cost more for
            the prior.
        whole_numbers: whether the labels are counts or other whole numbers.
        values: the values themselves, from the low end of the label range to the high end; None
            for a grid.
        prior: public probabilities of ``values``; the whole epsilon then goes to the draw.
        unbiased: whether the draw is ``optimal_unbiased`` instead of the best bins, for the squared
            error alone. Take it for totals of large groups whose labels differ from the others':
            debiased bins put each label at the mean of its bin, and such a total was 1 to 11 % off
            at epsilon 1 to 4 (``benchmarks``). Keep the bins for a model, for groups below some
            thousands, and for counts that are mostly zero: their labels are far less noisy. It
            takes up to 15 s with 64 values, a minute with 128, the most.

    Raises:
        ValueError: nothing is left for the draw, or the arguments contradict each other.

    Example:
        >>> from tf_labeldp.accounting import PrivacyBudget
        >>> from tf_labeldp.vault import Numbers, PrivateLabels
        >>> weeks = PrivateLabels([52, 40, 13] * 99, Numbers(0, 52), budget=PrivacyBudget(2.0))
        >>> noisy = weeks.randomize(LabelRandomizer(epsilon=2.0))
        >>> noisy.values.shape, noisy.posterior().shape, noisy.guarantee().epsilon
        ((297,), (297,), 2.0)
    """

    default_key = "label-randomizer"

    epsilon: float
    loss: str = "squared_error"
    prior_epsilon: float | None = None
    max_values: int = 64
    whole_numbers: bool = False
    values: Public[tuple[float, ...] | None] = None
    prior: Public[tuple[float, ...] | None] = None
    unbiased: bool = False
    receipts: tuple[Receipt, ...] = dataclasses.field(
        default=(), repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        public = public_input(self.values, self.prior)
        values, prior = public.value
        _validate.positive_finite("epsilon", self.epsilon)
        checked_loss(self.loss)
        if self.unbiased and self.loss != "squared_error":
            raise ValueError(
                f"expected loss='squared_error' with unbiased=True, got {self.loss!r}. Leave loss "
                "out."
            )
        _validate.integer_at_least("max_values", self.max_values, 2)
        if self.prior_epsilon is not None:
            spent = _validate.positive_finite("prior_epsilon", self.prior_epsilon)
            if spent >= self.epsilon:
                raise ValueError(
                    f"prior_epsilon={spent:g} leaves nothing of epsilon={self.epsilon:g} for the "
                    "draw. Lower it, or leave it out."
                )
        if values is not None:
            values = tuple(_validate.increasing_numbers("values", values).tolist())
        if prior is not None:
            if values is None or self.prior_epsilon is not None:
                raise ValueError(
                    "a public prior needs its values, and no prior_epsilon. Give values=."
                )
            prior = tuple(_validate.prior_rows("prior", prior, None, len(values))[0].tolist())
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "prior", prior)
        object.__setattr__(self, "receipts", Receipts.merged(self.receipts, public.receipts))

    def split(self, num_labels: int, low: float, high: float) -> tuple[np.ndarray, float]:
        """Returns the distinct values (k,) and the epsilon of their prior, zero if it is public.

        Args:
            num_labels: n, at least 1.
            low: the smallest possible label; the values must reach from it to ``high``.
            high: the largest possible label.
        """
        if self.values is None:
            values = Priors.rounding_grid(
                low, high, self.max_values, whole_numbers=self.whole_numbers
            )
        else:
            values = np.asarray(self.values)
            if values[0] > low or values[-1] < high:
                raise ValueError(
                    f"values reach from {values[0]:g} to {values[-1]:g}, the labels from {low:g} "
                    f"to {high:g}. Give values that cover the range."
                )
        if self.prior is not None:
            return values, 0.0
        if self.prior_epsilon is not None:
            return values, float(self.prior_epsilon)
        num_labels = _validate.integer_at_least("num_labels", num_labels, 1)
        rule = _TIMES_THEOREM_7 * math.sqrt(values.size / num_labels)
        return values, min(rule, self.epsilon / 4.0)

    @_validate.takes_old_arguments
    def total(self, noisy: Public[NoisyLabels], seed: int = 0) -> tuple[float, float]:
        """Returns an estimate of the sum of the true labels, and its standard error.

        The estimate is the sum of ``noisy.debiased()``. The error covers prior and draw for these
        bins; it is simulated on labels that follow the prior.

        Guarantee:
            Post-processing of the noisy labels and their prior: no charge.

        Args:
            noisy: labels that this randomizer drew.

        Raises:
            ValueError: the noisy labels were not drawn by a ``LabelRandomizer`` of this epsilon.

        Example:
            >>> from tf_labeldp.accounting import PrivacyBudget
            >>> from tf_labeldp.vault import Numbers, PrivateLabels
            >>> hours = PrivateLabels([9, 2, 4] * 999, Numbers(0, 10), budget=PrivacyBudget(1.0))
            >>> randomizer = LabelRandomizer(epsilon=1.0)
            >>> total, error = randomizer.total(hours.randomize(randomizer))
            >>> abs(total - 14985) < 6 * error
            True
        """
        mechanism, prior = noisy.mechanism, noisy.priors
        spent = prior.receipts[-1].charge.epsilon if prior and self.prior is None else 0.0
        if (
            not isinstance(mechanism, self._kind)
            or prior is None
            or not math.isclose(mechanism.epsilon + spent, self.epsilon, rel_tol=1e-9)
        ):
            raise ValueError(
                f"expected labels drawn by this LabelRandomizer of epsilon={self.epsilon:g}, got "
                f"labels drawn by {mechanism!r}. Pass what it drew."
            )
        values, shares = np.asarray(prior.values), np.asarray(prior.probabilities)
        if isinstance(mechanism, ChannelMechanism):  # The squared error is the variance.
            variance = len(noisy) * mechanism.expected_loss(shares)
            return float(noisy.debiased().sum()), math.sqrt(variance)
        used, firsts = np.unique(mechanism.bin_of_input, return_index=True)
        channel = mechanism.transition_matrix()[firsts]  # (bins, outputs)
        histogram = self._histogram(values, spent) if spent else None
        rng = np.random.default_rng(seed)
        errors = []
        for _ in range(_SIMULATIONS):
            counts = rng.multinomial(len(noisy), shares)
            estimate = shares
            if histogram is not None:
                released = histogram.add_noise(counts, rng=rng)
                estimate = ordered_prior(released, len(noisy), histogram.noise_stddev)
            in_bins = np.bincount(mechanism.bin_of_input, counts)[used]
            outputs = rng.multinomial(in_bins.astype(np.int64), channel).sum(axis=0)
            targets = debiased(mechanism, mechanism.outputs, Priors(estimate, values=values))
            errors.append(outputs @ targets - counts @ values)
        return float(noisy.debiased().sum()), float(np.sqrt(np.mean(np.square(errors))))

    @_validate.clears_frames
    def parts(self, labels: Private[PrivateLabels | NamedUse]) -> dict[str, Mechanism]:
        """Returns the mechanism of the prior, and one with the cost of the draw."""
        use = NamedUse.of(labels).or_named(self.default_key)
        values, prior_epsilon = self.split(len(use.labels), *_checked_range(use.labels))
        ends = (values[0], values[-1])
        # The cost of a draw does not depend on its bins, which are chosen after the release.
        draw: dict[str, Mechanism] = {
            use.name: RROnBins(self.epsilon - prior_epsilon, ends, ends, (0, 1))
        }
        if self.prior is not None:
            return draw
        return {use.part("prior").name: self._histogram(values, prior_epsilon), **draw}

    @_validate.clears_frames
    def draw_from(self, use: Private[NamedUse], public: PublicInput[Any]) -> NoisyLabels:
        """Releases the prior as ``key/prior``, finds the bins, and draws as ``key``.

        The key is ``"label-randomizer"`` by default.
        """
        labels = use.labels
        values, prior_epsilon = self.split(len(labels), *_checked_range(labels))
        checked_loss(self.loss, values)
        rest = self.epsilon - prior_epsilon
        if self.unbiased:
            unbiased_range(values, rest)
        stored = self._stored_bins(use, values, rest)
        with use.reserve(public.with_value(self)):
            if self.prior is not None:
                prior = Priors(np.asarray(self.prior), values=values, receipts=public.receipts)
            else:
                histogram = self._histogram(values, prior_epsilon)
                prior = use.part("prior").release(histogram).priors()
            noisy = use.randomize(self._best_draw(use, stored, values, prior, rest))
        receipts = Receipts.merged(public.receipts, prior.receipts, noisy.receipts)
        shift = use.shift
        priors = dataclasses.replace(prior, shift=shift)
        noisy = dataclasses.replace(noisy, priors=priors, receipts=receipts)
        return noisy if prior.receipts and shift is None else noisy.recorded()

    def _best_draw(
        self, use: NamedUse, stored: Any, values: np.ndarray, prior: Priors, epsilon: float
    ) -> Any:
        """Returns the best mechanism for this prior; a stored one, if it is as good."""
        if self.unbiased:
            mechanism: Any = optimal_unbiased(values, prior, epsilon)
        else:
            mechanism = optimal_bins(values, prior, epsilon, self.loss)
        if stored is None:
            return mechanism
        # Machines round differently and may choose other bins among equally good ones.
        losses = [
            bins.expected_loss(prior.probabilities, self.loss) for bins in (stored, mechanism)
        ]
        if not math.isclose(*losses, rel_tol=1e-6, abs_tol=1e-12):
            why = f"the stored channel is not optimal for loss={self.loss!r}"
            raise _other_settings(use, f"{mechanism!r}, and {why}")
        return stored

    def _histogram(self, values: np.ndarray, epsilon: float) -> HistogramMechanism:
        return HistogramMechanism(epsilon, values=tuple(values.tolist()), receipts=self.receipts)

    @property
    def _kind(self) -> type[RROnBins | ChannelMechanism]:
        return ChannelMechanism if self.unbiased else RROnBins

    def _stored_bins(
        self, use: NamedUse, values: np.ndarray, epsilon: float
    ) -> RROnBins | ChannelMechanism | None:
        if not use.is_recorded:
            return None
        stored = use.mechanism
        if (
            not isinstance(stored, self._kind)
            or not math.isclose(stored.epsilon, epsilon, rel_tol=1e-9)
            or stored.inputs != tuple(values.tolist())
        ):
            raise _other_settings(use, f"epsilon={epsilon:g} on {values.size} values")
        return stored


def _checked_range(labels: PrivateLabels) -> tuple[float, float]:
    if labels.label_range is None:
        raise ValueError(
            "LabelRandomizer is for numbers, these labels are classes. Use RandomizedResponse, or "
            "make PrivateLabels with low and high."
        )
    return labels.label_range


def _other_settings(use: NamedUse, requested: str) -> DrawSettingsError:
    return DrawSettingsError(
        f"draw {use.key!r} exists and was made with other settings (stored: {use.mechanism!r}; "
        f"requested: {requested}). Use the settings of the stored draw, or another key."
    )
