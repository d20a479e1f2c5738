"""K-ary randomized response."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import randomized_response_event
from tf_labeldp.mechanisms import _top_k
from tf_labeldp.mechanisms._base import FrozenClassification

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent


@dataclasses.dataclass(frozen=True)
class RandomizedResponse(FrozenClassification):
    """Keeps the label with probability ``e^eps / (e^eps + K - 1)``, else answers another uniformly.

    Privacy: (epsilon, 0)-DP for the replacement of one label; the worst log-ratio equals epsilon.

    Source: Warner 1965; ``ghazi2021``, section 2 (RR). It equals RRTop-k with k = K.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.

    Example:
        >>> import numpy as np
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=10)
        >>> round(float(mechanism.transition_matrix()[0, 0]), 6)
        0.231969
        >>> mechanism.randomize(np.array([3, 7])).shape
        (2,)
    """

    def randomize(
        self, labels: Any, priors: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns one noisy label for each label.

        Args:
            labels: integers of shape (n,) in 0..K-1.
            priors: must be None; randomized response has no use for a prior.
            rng: a generator for repeatable (not private) runs; None takes secure random bits.

        Returns:
            ``int64`` array of shape (n,) in 0..K-1.

        Raises:
            TypeError: the labels are not integers.
            ValueError: labels out of range or of a wrong shape, or priors given.
        """
        self._refuse_public(priors)
        labels = _validate.class_indices("labels", labels, self.num_classes)
        size = np.full(labels.shape, self.num_classes, dtype=np.int64)
        return _top_k.draw_ranks(labels, size, self.epsilon, rng)

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]``, ``float64`` (K, K); ``prior`` must be None."""
        if prior is not None:
            raise ValueError("RandomizedResponse has one channel for every prior; pass none.")
        uniform = np.full(self.num_classes, 1.0 / self.num_classes)
        return _top_k.top_k_transition_matrix(uniform, self.num_classes, self.epsilon)

    def dp_event(self) -> DpEvent:
        """Returns the randomized response event over K values."""
        return randomized_response_event(self.epsilon, self.num_classes)
