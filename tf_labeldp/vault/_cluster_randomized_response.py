"""Cluster-based randomized response: labels resampled within public clusters of examples."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, PublicInput, Receipts, Setting
from tf_labeldp.mechanisms import HistogramMechanism, Mechanism, Priors
from tf_labeldp.mechanisms.clusters import PriorResampling
from tf_labeldp.vault._draws import assignments_of
from tf_labeldp.vault.noisy_labels import NoisyLabels
from tf_labeldp.vault.private_labels import PrivateLabels, Randomizer
from tf_labeldp.vault.uses import NamedUse

_DRAW_EPSILONS = (1.0, 1.75, 3.75)
_THRESHOLDS = (0.1, 0.4, 0.9)
"""Default thresholds in units of 1/K at these epsilons of the draw, interpolated between them.

At a small epsilon nearly all labels are resampled, which needs sharp distributions; at a larger
epsilon resampled labels should spread over all classes (``benchmarks``).
"""
_MOST_FOR_COUNTS = 0.25
"""The largest default epsilon of the counts, which have a standard error of 11 there."""


@dataclasses.dataclass(frozen=True)
class ClusterRandomizedResponse(Randomizer):
    """Randomized response that replaces labels by draws from their cluster's distribution.

    Noisy counts of the labels in each cluster give its distribution, and a draw resamples labels
    from it; both are charged. Call ``labels.randomize(mechanism, clusters=...)``; train on the
    ``posterior()`` of the noisy labels, or on their ``debiased()`` weights, the paper's loss.

    Guarantee:
        (epsilon, 0)-label-DP for the replacement of one label, counts and draw together, if the
        clusters do not depend on the labels; cluster sizes are public. The draw costs
        ``draw_epsilon``, or ``log(1 + (1 - lambda) / (lambda tau))``, and is charged before the
        distributions are released; a remark in the statement has their smaller loss (a privacy
        odometer, Rogers et al. 2016). The counts cost 2 / sigma, not the 1 / sigma of Theorem 1: a
        changed label moves two frequencies of its cluster, each with independent noise
        Laplace(sigma / n_c).

    Source: ``esfandiari2022``, Algorithm 1.

    Attributes:
        num_classes: K, at least 2.
        threshold: tau, the least entry of a distribution, in (0, 1/K].
        noise_scale: sigma, above zero. Infinity makes the distributions uniform, at no cost and
            without reading labels; it needs ``threshold=1/K``.
        resampling_probability: lambda, in (0, 1], for every cluster. With 1 the noisy labels are
            drawn from the released distributions alone, at no further cost.
        draw_epsilon: the cost of the draw, instead of lambda: each cluster uses the smallest lambda
            that its released distribution allows. Give exactly one of the two.
        bias_correction: beta, in [0, 1), for the corrected loss; None uses lambda, which makes the
            loss unbiased. Smaller values trade bias for variance; 0 keeps the noisy labels.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of range, or arguments that contradict each other.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> mechanism = ClusterRandomizedResponse.for_epsilon(1.0, num_classes=3)
        >>> clusters = np.repeat([0, 1], 500)
        >>> labels = PrivateLabels(clusters + 1, 3, budget=PrivacyBudget(1.0), insecure_seed=0)
        >>> noisy = labels.randomize(mechanism, clusters=clusters)
        >>> noisy.priors.probabilities.round(2).tolist()
        [[0.03, 0.93, 0.03], [0.03, 0.03, 0.93]]
        >>> mechanism.epsilon, noisy.values.shape
        (1.0, (1000,))
    """

    public_input = "clusters"

    default_key = "cluster-rr"

    num_classes: int
    threshold: float
    noise_scale: float
    resampling_probability: float | None = None
    draw_epsilon: float | None = None
    bias_correction: float | None = None

    def __post_init__(self) -> None:
        classes = _validate.integer_at_least("num_classes", self.num_classes, 2)
        tau = PriorResampling.checked_threshold(self.threshold, classes)
        if tau <= 0.0:
            raise ValueError("threshold must be above zero: at 0 a class may reveal its label.")
        sigma = _validate.real_number("noise_scale", self.noise_scale, "a number above zero")
        if not sigma > 0.0 or math.isinf(2.0 / sigma):
            raise ValueError(
                f"noise_scale must be above zero, got {sigma:g}. The counts cost epsilon 2 / sigma."
            )
        if math.isinf(sigma) and tau < 1.0 / classes:
            raise ValueError(
                f"noise_scale=inf makes the distributions uniform, so threshold must be 1/K = "
                f"{1.0 / classes:.6g}, got {tau:.6g}. Use ClusterRandomizedResponse.uniform."
            )
        resampled, draw, beta = self.resampling_probability, self.draw_epsilon, self.bias_correction
        if (resampled is None) == (draw is None):
            raise ValueError(
                "give exactly one of resampling_probability and draw_epsilon, got "
                f"resampling_probability={resampled}, draw_epsilon={draw}."
            )
        if resampled is None:
            draw = _validate.positive_finite("draw_epsilon", draw)
        else:
            resampled = PriorResampling.checked_resampling_probability(resampled)
            if beta is None:
                PriorResampling.checked_bias_correction(resampled)
        if beta is not None:
            beta = PriorResampling.checked_bias_correction(beta)
        checked = (classes, tau, sigma, resampled, draw, beta)
        for field, value in zip(dataclasses.fields(self), checked, strict=True):
            object.__setattr__(self, field.name, value)
        if self.draw is None and self.histogram is None:
            raise ValueError(
                "noise_scale=inf and resampling_probability=1 use no label. Lower one of them."
            )

    @classmethod
    def uniform(cls, epsilon: float, num_classes: int) -> ClusterRandomizedResponse:
        """Returns plain randomized response: tau = 1/K, lambda = beta = K / (K - 1 + e^epsilon).

        Source: ``esfandiari2022``, Corollary 1, "UniformRR".

        Example:
            >>> mechanism = ClusterRandomizedResponse.uniform(epsilon=1.0, num_classes=3)
            >>> mechanism.transition_matrix([1 / 3] * 3)[0].round(4).tolist()
            [0.5761, 0.2119, 0.2119]
        """
        classes = _validate.integer_at_least("num_classes", num_classes, 2)
        epsilon = _validate.positive_finite("epsilon", epsilon)
        # This lambda is the smallest that the uniform distribution allows.
        return cls(classes, 1.0 / classes, math.inf, draw_epsilon=epsilon)

    @classmethod
    def from_heterogeneity(
        cls, epsilon: float, num_classes: int, heterogeneity: float
    ) -> ClusterRandomizedResponse:
        """Returns the setting for clusters with a known heterogeneity phi.

        It uses tau = phi, beta = 0, ``lambda = 1 / (1 + (e^epsilon - 1) phi)`` and sigma =
        1 / epsilon, and costs *three times* ``epsilon``: twice for the counts, once for the draw.

        Source: ``esfandiari2022``, Corollary 2, "ClusterRR", which states O(epsilon).

        Args:
            epsilon: finite and above zero.
            num_classes: K.
            heterogeneity: phi, public, in (0, 1/K].

        Example:
            >>> mechanism = ClusterRandomizedResponse.from_heterogeneity(0.5, 10, 0.05)
            >>> round(mechanism.epsilon, 12)
            1.5
        """
        epsilon = _validate.positive_finite("epsilon", epsilon)
        phi = PriorResampling.checked_threshold(heterogeneity, num_classes)
        shrink = math.exp(-epsilon)
        resampled = shrink / (shrink - math.expm1(-epsilon) * phi)
        return cls(num_classes, phi, 1.0 / epsilon, resampled, bias_correction=0.0)

    @classmethod
    @_validate.takes_old_arguments
    def for_epsilon(
        cls,
        epsilon: float,
        num_classes: int,
        *,
        threshold: float | None = None,
        distribution_share: float | None = None,
        bias_correction: float | None = 0.0,
    ) -> ClusterRandomizedResponse:
        """Returns a setting with total cost ``epsilon``; each cluster uses its smallest lambda.

        The threshold tau is 0.1 / K for a draw with epsilon up to 1, rising to 0.9 / K at epsilon
        3.75: a small one allows sharp distributions of pure clusters, a large one keeps more
        labels. The bias correction is 0: undoing the small bias of good distributions adds much
        variance.

        Args:
            epsilon: the total, finite and above zero.
            num_classes: K.
            distribution_share: the share of epsilon for the counts, in (0, 1); the draw gets the
                rest. None uses half of epsilon, at most 0.25.

        Example:
            >>> mechanism = ClusterRandomizedResponse.for_epsilon(1.0, 10, distribution_share=0.25)
            >>> mechanism.noise_scale, mechanism.draw_epsilon, mechanism.epsilon
            (8.0, 0.75, 1.0)
        """
        epsilon = _validate.positive_finite("epsilon", epsilon)
        classes = _validate.integer_at_least("num_classes", num_classes, 2)
        counts = min(0.5 * epsilon, _MOST_FOR_COUNTS)
        if distribution_share is not None:
            share = _validate.number_in("distribution_share", distribution_share, "(0, 1)")
            counts = epsilon * share
        draw = epsilon - counts
        if threshold is None:
            threshold = float(np.interp(draw, _DRAW_EPSILONS, _THRESHOLDS)) / classes
        beta = bias_correction
        return cls(classes, threshold, 2.0 / counts, draw_epsilon=draw, bias_correction=beta)

    @property
    def histogram(self) -> HistogramMechanism | None:
        """The mechanism of the counts, at epsilon 2 / sigma; None if sigma is infinite."""
        if math.isinf(self.noise_scale):
            return None
        return HistogramMechanism(2.0 / self.noise_scale, self.num_classes, noise="laplace")

    @property
    def draw(self) -> PriorResampling | None:
        """The mechanism of the draw, at its largest cost; None if lambda is 1."""
        if self.draw_epsilon is not None:
            return PriorResampling(self.draw_epsilon, self.num_classes, None, self.threshold)
        probability = self.resampling_probability or 1.0
        if probability == 1.0:
            return None
        epsilon = math.log1p((1.0 - probability) / probability / self.threshold)
        return PriorResampling(epsilon, self.num_classes, probability, self.threshold)

    @property
    def distribution_epsilon(self) -> float:
        """The cost of the counts: 2 / sigma."""
        return 2.0 / self.noise_scale

    @property
    def epsilon(self) -> float:  # type: ignore[override]
        """The total cost, fixed before any label is read."""
        return self.distribution_epsilon + (0.0 if self.draw is None else self.draw.epsilon)

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument; ``noise_scale`` may be infinite."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> ClusterRandomizedResponse:
        """Returns the mechanism of a ``get_config``."""
        return cls(**config)

    def transition_matrix(self, distribution: Public[Any]) -> np.ndarray:
        """Returns ``P[noisy label | label]``, (K, K), for a cluster with this distribution.

        Raises:
            ValueError: not a distribution (K,), or an entry below the threshold.
        """
        return (self.draw or self._sampler).transition_matrix(distribution)

    @_validate.clears_frames
    def parts(self, labels: Private[PrivateLabels | NamedUse]) -> dict[str, Mechanism]:
        """Returns the mechanisms of the counts and of the draw, at its largest cost."""
        use = NamedUse.of(labels).or_named(self.default_key)
        both = {use.part("distributions").name: self.histogram, use.name: self.draw}
        return {name: part for name, part in both.items() if part is not None}

    @_validate.clears_frames
    def draw_from(self, use: Private[NamedUse], public: PublicInput[Any]) -> NoisyLabels:
        """Releases the distributions as ``key/distributions``, and draws as ``key``.

        The key is ``"cluster-rr"`` by default. The noisy labels' ``priors`` contains the released
        distributions (C, K) and the clusters.
        """
        labels = use.labels
        labels.kind.check_release(self)
        if not len(labels):
            raise ValueError("expected at least one label to randomize, got none.")
        clusters = assignments_of(public.value)
        clusters = _validate.group_vector("clusters", clusters, len(labels))
        table = int(clusters.max()) + 1, self.num_classes
        renumber = "Number clusters 0..C-1: np.unique(clusters, return_inverse=True)[1]."
        _validate.check_size("a table of clusters and classes", table, renumber)
        with use.reserve(public.with_value(self)):
            return self._draw_within(use, clusters, public)

    def _draw_within(
        self, use: NamedUse, clusters: np.ndarray, public: PublicInput[Any]
    ) -> NoisyLabels:
        """Releases and draws what is reserved."""
        sizes, receipts = np.bincount(clusters), public.receipts
        distributions = np.full((sizes.size, self.num_classes), 1.0 / self.num_classes)
        if self.histogram is not None:
            released = use.part("distributions")
            counts = released.release(self.histogram, public.with_value(clusters))
            distributions = PriorResampling.cluster_distributions(
                counts.values, sizes, self.threshold
            )
            receipts = Receipts.merged(receipts, counts.receipts)
        priors = Priors(distributions, clusters, receipts=receipts)
        if self.draw is None:
            # The seed is public, a digest of the released distributions, so runs repeat.
            content = use.name.encode() + distributions.tobytes()
            rng = np.random.default_rng(int.from_bytes(hashlib.sha256(content).digest(), "big"))
            values = self._sampler.randomize(np.zeros_like(clusters), priors, rng=rng)
            every = np.arange(len(use.labels))
            beta = self.bias_correction
            noisy = NoisyLabels(values, every, self._sampler, priors, receipts, beta)
            return noisy.recorded()
        noisy = use.randomize(self._stored_or(self.draw, use), priors=priors)
        noisy = dataclasses.replace(
            noisy,
            priors=priors,
            receipts=Receipts.merged(receipts, noisy.receipts),
            bias_correction=self.bias_correction,
            remarks=self._remarks(float(distributions[sizes > 0].min())),
        )
        return noisy.recorded()

    @staticmethod
    def _stored_or(draw: PriorResampling, use: NamedUse) -> PriorResampling:
        stored = use.mechanism if use.is_recorded else None
        if isinstance(stored, PriorResampling):
            same = dataclasses.replace(stored, epsilon=draw.epsilon) == draw
            if same and math.isclose(stored.epsilon, draw.epsilon, rel_tol=1e-9):
                return stored
        return draw

    def _remarks(self, least: float) -> tuple[str, ...]:
        """Returns a remark on this draw's loss if it is smaller than the promise."""
        if self.resampling_probability is None or least <= self.threshold:
            return ()
        odds = (1.0 - self.resampling_probability) / self.resampling_probability
        lost = self.distribution_epsilon + math.log1p(odds / least)
        return (
            f"the promise is epsilon={self.epsilon:.6g}, made before the draw; with the released "
            f"distributions this draw lost at most {lost:.6g} (a privacy odometer, Rogers et al. "
            "2016)",
        )

    @property
    def _sampler(self) -> PriorResampling:
        """Draws from the distributions alone, which costs nothing at any epsilon."""
        return PriorResampling(1.0, self.num_classes, 1.0, self.threshold)
