"""One budget for two: a head is released, and its probabilities are the priors of a draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.heads._one_release_head import OneReleaseHead
from tf_labeldp.heads._private_logistic_regression import PrivateLogisticRegression
from tf_labeldp.mechanisms import LabelMomentMechanism, Priors, RRWithPrior, serialize
from tf_labeldp.mechanisms._base import Mechanism
from tf_labeldp.mechanisms._classes import top_k_members
from tf_labeldp.vault import NoisyLabels, PrivateLabels
from tf_labeldp.vault._private_labels import Randomizer
from tf_labeldp.vault._store import DrawSettingsError

_DRAW_PAYS = 2.5
"""The epsilon from which labels drawn one by one tell more than a larger release would."""
_OTHER_PRIORS = 0.01
"""Share of noisy labels that other rounding may carry out of their prior's top-k set."""


@dataclasses.dataclass(frozen=True)
class HeadPriorRandomizer(Randomizer):
    """Releases a head, and draws every label by RRWithPrior with the head's probabilities.

    The noisy labels are right far more often than those of plain randomized response at the same
    epsilon, and a deep model can learn from them what the head can't.

    When it pays: at epsilon 3 and above. A release gathers what all labels say together, so its
    worth saturates early; a draw tells of each label apart, and its worth grows like e^epsilon.
    So below 2 or 3 the whole epsilon is best spent on the head alone, above a small part suffices.
    Measured on Fashion-MNIST (60,000 labels, smoothed patch features): mean negative log-posterior
    of the true labels, by the part of the head,

    ===========  =====  =====  =====  =====
    epsilon        2      3      4      6
    ===========  =====  =====  =====  =====
    head 0.25    0.319  0.250  0.172  0.060
    head 0.5     0.297  0.237  0.165  0.059
    head 1       0.287  0.249  0.186  0.076
    head 2       0.268  0.260  0.222  0.107
    ===========  =====  =====  =====  =====

    By default the head gets 90 % of an epsilon below 2.5, where the draw is worth little however it
    is paid, and 15 % from there on (0.45 to 0.9 of an epsilon of 3 to 6). Fewer labels need more.

    Guarantee:
        (epsilon, delta)-label-DP for the replacement of one label, head, priors and noisy labels
        together: the head costs ``head_share * epsilon`` and delta, the draw the rest of epsilon
        (basic composition; the prior of a label depends on that label through the release of the
        head alone, which is charged). Both are charged to the vault, which refuses before either if
        they do not fit.

    Source: RRWithPrior, ``ghazi2021``, Algorithm 2; there the priors come from a model trained on
    another part of the labels, here from one release of all of them.

    Attributes:
        epsilon: the whole, finite and above zero.
        delta: of the head's release, in (0, 1), below 1/n; 0 with ``options={"noise": "laplace"}``.
        head_share: the part of epsilon for the head, between 0 and 1; None for the default above.
        head: the class of the head, ``PrivateLogisticRegression`` or ``PrivateRidge``.
        options: further arguments of the head by name, such as ``encoder``.

    Raises:
        TypeError: ``head`` is no class of a head.
        ValueError: an argument out of range, or an option that is set here or does not exist.

    Example:
        >>> import numpy as np
        >>> from tf_labeldp.accounting import PrivacyBudget
        >>> from tf_labeldp import PrivateLabels
        >>> features = np.random.default_rng(0).normal(size=(3000, 5))
        >>> budget = PrivacyBudget(4.0, 1e-5)
        >>> labels = PrivateLabels((features[:, 0] > 0).astype(int), 2, budget=budget)
        >>> noisy = labels.randomize(HeadPriorRandomizer(4.0, delta=1e-5), features=features)
        >>> noisy.values.shape, noisy.posterior().shape, noisy.guarantee().epsilon <= 4.0
        ((3000,), (3000, 2), True)
    """

    public_input = "features"

    epsilon: float
    delta: float = 0.0
    head_share: float | None = None
    head: type[OneReleaseHead] = PrivateLogisticRegression
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the arguments."""
        _validate.positive_finite("epsilon", self.epsilon)
        if self.head_share is not None:
            share = _validate.positive_finite("head_share", self.head_share)
            if share >= 1.0:
                raise ValueError(
                    f"head_share must be below 1, got {share:g}: nothing is left for the draw. To "
                    "spend all on the head, fit it alone and take its predict_proba as targets."
                )
        if not (isinstance(self.head, type) and issubclass(self.head, OneReleaseHead)):
            raise TypeError(
                "head must be a class, PrivateLogisticRegression or PrivateRidge, got "
                f"{type(self.head).__name__}. Pass its arguments as options."
            )
        taken = {"epsilon", "delta", "key"} & set(self.options)
        if taken:
            raise ValueError(
                f"options must not name {sorted(taken)}: these follow from the randomizer's own "
                "arguments."
            )
        try:
            head = self._new_head(None)
        except TypeError:
            raise ValueError(
                f"options {sorted(self.options)} are not all arguments of {self.head.__name__}."
            ) from None
        self._release(head, num_classes=2)  # checks delta, and that it fits the noise

    def split(self) -> tuple[float, float]:
        """Returns the epsilons of the head and of the draw; their sum is no larger than epsilon."""
        share = self.head_share
        if share is None:
            share = 0.9 if self.epsilon < _DRAW_PAYS else 0.15
        head = share * self.epsilon
        return head, self.epsilon - head

    def parts(self, labels: PrivateLabels) -> list[Mechanism]:
        """Returns the mechanisms of the head's release and of the draw."""
        head = self._release(self._new_head(None), labels.num_classes)
        return [head, RRWithPrior(self.split()[1], labels.num_classes)]

    def draw_from(self, labels: PrivateLabels, key: str | None, **public: Any) -> NoisyLabels:
        """Fits the head, and draws; ``PrivateLabels.randomize`` calls it.

        Args:
            labels: the vault, of n classes.
            key: a name for the two draws, ``key/head`` and ``key``; None for ``"head-prior"``. With
                a name used before, the stored results come back and nothing is charged; what was
                not drawn yet is drawn.
            public: ``features``, numbers (n, d), or what the option ``encoder`` takes.

        Returns:
            Noisy labels, whose ``priors`` are the head's probabilities.

        Raises:
            BudgetExceededError: head and draw together would pass the budget; nothing was drawn.
            LabelStoreError: the stored draws of this name were made with other settings or
                features.
            TypeError: the features are in a data set.
            ValueError: the vault holds numbers, features are missing, or as for the head's ``fit``.
        """
        if set(public) != {"features"}:
            raise ValueError(
                "HeadPriorRandomizer needs features=, and takes nothing else; got "
                f"{' and '.join(sorted(public)) or 'nothing'}."
            )
        features = public["features"]
        key = "head-prior" if key is None else key
        if labels.label_range is not None:
            raise ValueError(
                "HeadPriorRandomizer is for classes, these labels are numbers. Use "
                "LabelRandomizer, or fit a PrivateRidge."
            )
        if hasattr(features, "as_numpy_iterator"):
            raise TypeError(
                "features must be an array or a table of columns, not a data set: the noisy labels "
                "come in the order of its rows."
            )
        head = self._new_head(f"{key}/head")
        mechanism = RRWithPrior(self.split()[1], labels.num_classes)
        self._check_budget(head, mechanism, labels, key)
        head.fit(features, labels)
        priors = Priors(head.predict_proba(features), receipts=head.receipts_)
        drawn = labels.has_draw(key)
        noisy = labels.randomize(mechanism, priors=priors, key=key)
        if drawn:
            _check_same_priors(mechanism, noisy.values, priors.probabilities, key)
        return noisy

    def _new_head(self, key: str | None) -> OneReleaseHead:
        return self.head(self.split()[0], self.delta, key=key, **self.options)

    def _release(self, head: OneReleaseHead, num_classes: int) -> LabelMomentMechanism:
        """Returns a mechanism of the price of the head's release."""
        return LabelMomentMechanism(
            head.epsilon, head.delta, num_classes=num_classes, noise=head.noise
        )

    def _check_budget(
        self, head: OneReleaseHead, mechanism: RRWithPrior, labels: PrivateLabels, key: str
    ) -> None:
        """Raises unless all that is still to be drawn fits, before any of it is."""
        missing: list[Any] = []
        if not labels.has_draw(f"{key}/head"):
            missing.append(self._release(head, labels.num_classes))
        if not labels.has_draw(key):
            missing.append(mechanism)
        else:
            stored = labels.mechanism(key)
            if missing or serialize(stored) != serialize(mechanism):
                raise DrawSettingsError(
                    f"draw {key!r} exists and was made with other settings (stored: {stored!r}; "
                    f"asked: {mechanism!r} after a head named {f'{key}/head'!r}). Ask with the "
                    "settings of the stored draw, or give another key."
                )
        if missing:
            labels.check_budget(missing)


def _check_same_priors(
    mechanism: RRWithPrior, noisy: np.ndarray, priors: np.ndarray, key: str
) -> None:
    """Raises if stored labels can't have been drawn under these priors.

    Another machine may round another way, so a few may lie outside of their set.
    """
    members = top_k_members(priors, mechanism.set_sizes(priors))
    outside = 1.0 - float(np.mean(members[np.arange(noisy.size), noisy]))
    if outside > _OTHER_PRIORS:
        raise DrawSettingsError(
            f"draw {key!r} exists, and {outside:.0%} of its noisy labels can't come from the "
            "priors that these features give, so it was made with other features or options. Ask "
            "with those of the stored draw, or give another key."
        )
