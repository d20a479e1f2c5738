"""Heads that serve another model: as priors for noisy labels, or as targets.

``HeadPriorRandomizer`` spends one budget on a head and on a draw with its probabilities as priors,
``HeadResidualRandomizer`` on a head and on a draw of what its numbers leave; ``teacher_labels``
turns the probabilities alone into a training set.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, PublicInput, Receipt, public_input
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads._logistic import PrivateLogisticRegression
from tf_labeldp.heads.one_release_head import OneReleaseHead, PrivateRidge
from tf_labeldp.mechanisms import InformativeRR, Mechanism, PriorMechanism, Priors, RRWithPrior
from tf_labeldp.mechanisms.classes import top_k_members
from tf_labeldp.vault import (
    Classes,
    LabelRandomizer,
    NoisyLabels,
    Numbers,
    PrivateLabels,
    Randomizer,
)
from tf_labeldp.vault.records import DrawSettingsError
from tf_labeldp.vault.uses import NamedUse

_DRAW_PAYS = 2.5
"""The epsilon from which noisy labels help more than a larger release."""
_NUM_RESIDUALS = 17
"""Values of residuals, the odd number with the least loss on storms and bike: a finer grid has a
costlier prior."""
_SHARES = ((4.0, 0.15), (0.0, 0.3))
"""The head's share of epsilon, from an epsilon of a label on."""
_OTHER_PRIORS = 0.01
"""Share of noisy labels that rounding on another machine may move out of their top-k set."""


def _check_head(randomizer: HeadPriorRandomizer | HeadResidualRandomizer) -> None:
    _validate.positive_finite("epsilon", randomizer.epsilon)
    if randomizer.head_share is not None:
        share = _validate.positive_finite("head_share", randomizer.head_share)
        if share >= 1.0:
            raise ValueError(
                f"head_share must be below 1, got {share:g}: the draw needs a share. To spend all "
                "on the head, fit it alone and use its predictions."
            )
    head = randomizer.head
    if not (isinstance(head, type) and issubclass(head, OneReleaseHead)):
        raise TypeError(
            "head must be a class, PrivateLogisticRegression or PrivateRidge, got "
            f"{type(head).__name__}. Pass its arguments next to it."
        )


def _refuse_classes(labels: PrivateLabels) -> None:
    if not isinstance(labels.kind, Numbers):
        raise ValueError(
            f"HeadResidualRandomizer expected numbers, got {labels.kind.describe()}. Use "
            "HeadPriorRandomizer."
        )


def _refuse_dataset(features: Any) -> None:
    if FeatureRows(features).is_dataset:
        raise TypeError(
            "features must be an array or a table, whose order the noisy labels follow, got a "
            "data set. Give its arrays."
        )


@dataclasses.dataclass(frozen=True)
class HeadPriorRandomizer(Randomizer):
    """Releases a head, and draws every label by RRWithPrior with the head's probabilities.

    The noisy labels are right far more often than with plain randomized response at the same
    epsilon, and a deep model can learn from them what the head can't. To train on ``posterior()``,
    give ``draw=InformativeRR``: the log-loss of its posteriors is lower, at epsilon 3 by about a
    quarter, while the noisy labels are wrong more often.

    Use it at epsilon 3 and above: the value of the release, an aggregate of all labels, saturates
    early, and the value of the draw grows like e^epsilon. By default the head gets 90 % of epsilon
    below 2.5, and 15 % from there on; fewer labels need more (``docs/theory.md`` has measurements).

    Guarantee:
        Head, priors and noisy labels together are (epsilon, delta)-label-DP for the replacement of
        one label: the head costs ``head_share * epsilon`` and delta, the draw the rest of epsilon
        (basic composition; the prior of a label depends on that label only through the head's
        release, which is charged). The vault is charged for both, and refuses before either if its
        budget is too small.

    Source: RRWithPrior, ``ghazi2021``, Algorithm 2; there the priors come from a model trained on
    another part of the labels, here from one release of all of them.

    Attributes:
        epsilon: the epsilon of head and draw together, finite and above zero.
        delta: the delta of the head's release, in (0, 1), below 1/n; 0 with ``noise="laplace"``.
        head_share: the part of epsilon for the head, between 0 and 1; None for the default above.
        head: the class of the head, ``PrivateLogisticRegression`` or ``PrivateRidge``.
        encoder: maps raw inputs to features, as for heads; None if the inputs are features.
        penalty: ``"auto"``, or another penalty of ``head``.
        noise: ``"gaussian"``, or ``"laplace"`` for a pure guarantee.
        draw: the class of the draw: ``RRWithPrior``, whose noisy labels are right most often, or
            ``mechanisms.InformativeRR``, whose posteriors have the lower log-loss.

    Raises:
        TypeError: ``head`` or ``draw`` is none of the two classes.
        ValueError: an argument is out of range.

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
    default_key = "head-prior"

    epsilon: float
    delta: float = 0.0
    head_share: float | None = None
    head: type[OneReleaseHead] = PrivateLogisticRegression
    _: dataclasses.KW_ONLY
    encoder: Public[Any] = None
    penalty: str | float = "auto"
    noise: str = "gaussian"
    draw: type[PriorMechanism] = RRWithPrior

    def __post_init__(self) -> None:
        _check_head(self)
        if self.draw not in (RRWithPrior, InformativeRR):
            raise TypeError(
                f"draw must be the class RRWithPrior or InformativeRR, got {self.draw!r}."
            )
        # The head's mechanism checks that delta fits the noise.
        self._new_head()._mechanism(Classes(2))

    def split(self) -> tuple[float, float]:
        """Returns the epsilons of head and draw, whose sum is at most epsilon."""
        share = self.head_share
        if share is None:
            share = 0.9 if self.epsilon < _DRAW_PAYS else 0.15
        head = share * self.epsilon
        return head, self.epsilon - head

    @_validate.clears_frames
    def parts(self, labels: Private[PrivateLabels | NamedUse]) -> dict[str, Mechanism]:
        """Returns the mechanisms of the head's release and the draw."""
        use = NamedUse.of(labels).or_named(self.default_key)
        head, draw = self._new_head(), self.draw(self.split()[1], use.labels.num_classes)
        return {use.part("head").name: head._mechanism(use.labels.kind), use.name: draw}

    @_validate.clears_frames
    def draw_from(self, use: Private[NamedUse], public: PublicInput[Any]) -> NoisyLabels:
        """Returns noisy labels with the head's ``priors``; ``PrivateLabels.randomize`` calls it.

        Args:
            use: the vault with the classes of n examples. Its key, by default ``"head-prior"``,
                names the release, ``key/head``, and the draw, ``key``. If either is stored, it is
                returned without a charge, and the other is made.
            public: the features, numbers (n, d), or inputs of the encoder.

        Raises:
            BudgetExceededError: head and draw together would exceed the budget; nothing was drawn.
            LabelStoreError: the stored draws of this name were made with other settings or
                features.
            TypeError: the features are in a data set.
            ValueError: the labels are numbers, features are missing, or the head's ``fit`` fails.
        """
        labels = use.labels
        if isinstance(labels.kind, Numbers):
            raise ValueError(
                "HeadPriorRandomizer expected classes, got numbers. Use HeadResidualRandomizer."
            )
        _refuse_dataset(public.value)
        mechanism = self.draw(self.split()[1], labels.num_classes)
        self._check_settings(mechanism, use)
        with use.reserve(public.with_value(self)):
            head = self._new_head().set_params(key=use.part("head").key).fit(public, labels)
            priors = Priors(head.predict_proba(public.value), receipts=head.receipts_)
            is_stored = use.is_recorded
            noisy = use.randomize(mechanism, priors=priors)
        if is_stored:
            _check_same_priors(use, noisy, priors.probabilities)
        return noisy

    def _new_head(self) -> OneReleaseHead:
        options = {"encoder": self.encoder, "penalty": self.penalty, "noise": self.noise}
        return self.head(self.split()[0], self.delta, **options)

    def _check_settings(self, draw: PriorMechanism, use: NamedUse) -> None:
        if not use.is_recorded:
            return
        head, stored = use.part("head"), use.mechanism
        if not head.is_recorded or stored.to_json(with_receipts=False) != draw.to_json(
            with_receipts=False
        ):
            raise DrawSettingsError(
                f"draw {use.key!r} was stored with other settings: expected {stored!r}, got "
                f"{draw!r} after a head named {head.key!r}. Use the stored settings, or another "
                "key."
            )


@dataclasses.dataclass(frozen=True)
class HeadResidualRandomizer(Randomizer):
    """Releases a head, and draws for every label what the head's number leaves, by bins.

    The head takes the part of the labels that a linear model of the features explains, at the small
    noise of one release. Residuals are far narrower than labels, so that bins of a noisy residual
    carry more information: trees on them, from the head on, beat trees on noisy labels. One draw
    serves any number of models; ``noisy.debiased()`` and ``posterior()`` estimate the labels.

    Guarantee:
        Head, its predictions and noisy labels together are (epsilon, delta)-label-DP for the
        replacement of one label, or of all labels of one user: the head costs ``head_share *
        epsilon`` and delta, the draw the rest (basic composition; given the released head, whose
        predictions are a function of it and of public features, a label moves its own residual
        alone, and residuals are clipped to a public range, so that the draw is one of
        ``LabelRandomizer``). Of a user with m labels the draw has m times the epsilon of a label,
        and the head counts once. The vault is charged for both, and refuses before either if its
        budget is too small.

    Source: ours; the draw is that of ``ghazi2023``, Algorithm 3, and boosting from a linear model
    an old idea.

    Attributes:
        epsilon: the epsilon of head and draw together, finite and above zero; for a user, of all
            her labels.
        delta: the delta of the head's release, in (0, 1), below 1/n; 0 with ``noise="laplace"``.
        head_share: the part of epsilon for the head, between 0 and 1. None takes 0.3, and 0.15 from
            an epsilon of 4 per label on: the draw then reveals more, and the head adds less.
        head: the class of the head, ``PrivateRidge`` or ``PrivatePoissonRegression``.
        residual_range: the largest residual, as a share of the label range, in (0, 1]. Others are
            clipped, a bias where labels have long tails; its bins follow the released residuals, so
            that a wide range costs little.
        encoder: maps raw inputs to features, as for heads; None if the inputs are features.
        penalty: ``"auto"``, or another penalty of ``head``.
        noise: ``"gaussian"``, or ``"laplace"`` for a pure guarantee.
        spread: as for ``PrivateRidge``.

    Raises:
        TypeError: ``head`` is no class of a head.
        ValueError: an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from tf_labeldp import PrivacyBudget, PrivateBoosting, PrivateLabels
        >>> from tf_labeldp.vault import Numbers
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(3000, 2))
        >>> y = np.clip(2 * x[:, 0] + np.abs(x[:, 1]), -2, 3)
        >>> labels = PrivateLabels(y, Numbers(-2, 3), budget=PrivacyBudget(4.0, 1e-5))
        >>> noisy = labels.randomize(HeadResidualRandomizer(4.0, delta=1e-5), features=x)
        >>> bool(np.mean((noisy.posterior() - y) ** 2) < 0.5 * y.var()), noisy.guarantee().epsilon
        (True, 4.0)
    """

    public_input = "features"
    default_key = "head-residual"
    is_for_users = True

    epsilon: float
    delta: float = 0.0
    head_share: float | None = None
    head: type[OneReleaseHead] = PrivateRidge
    _: dataclasses.KW_ONLY
    residual_range: float = 0.5
    encoder: Public[Any] = None
    penalty: str | float = "auto"
    noise: str = "gaussian"
    spread: bool | str = True

    def __post_init__(self) -> None:
        _check_head(self)
        _validate.number_in("residual_range", self.residual_range, "(0, 1]")

    def split(self, group_size: int = 1) -> tuple[float, float]:
        """Returns the epsilon of the head and that of each draw of a user with some labels."""
        each = self.epsilon / group_size
        share = self.head_share
        if share is None:
            share = next(share for least, share in _SHARES if each >= least)
        head = share * self.epsilon
        return head, (self.epsilon - head) / group_size

    @_validate.clears_frames
    def parts(self, labels: Private[PrivateLabels | NamedUse]) -> dict[str, Mechanism]:
        """Returns the mechanisms of the head's release, and of the residuals' prior and draw."""
        use = NamedUse.of(labels).or_named(self.default_key)
        vault = use.labels
        _refuse_classes(vault)
        draw, largest = self._draw(vault)
        residuals = use.residuals(np.zeros(len(vault)), largest)
        head = self._new_head(use)._mechanism(vault.kind)
        return {use.part("head").name: head, **draw.parts(residuals)}

    @_validate.clears_frames
    def draw_from(self, use: Private[NamedUse], public: PublicInput[Any]) -> NoisyLabels:
        """Returns noisy residuals, whose ``priors.shift`` has the head's numbers.

        ``PrivateLabels.randomize`` calls it. The key is ``"head-residual"`` by default.

        Raises:
            BudgetExceededError: head and draw together would exceed the budget; nothing was drawn.
            LabelStoreError: the stored draws of this name were made with other settings or
                features.
            TypeError: the features are in a data set.
            ValueError: the labels are classes, features are missing, or the head's ``fit`` fails.
        """
        return self.draw_with_head(use, public)[1]

    @_validate.clears_frames
    def draw_with_head(
        self,
        labels: Private[PrivateLabels | NamedUse],
        public: PublicInput[Any],
        sample_weight: Public[Any] = None,
    ) -> tuple[Any, NoisyLabels]:
        """Returns the fitted head and the noisy residuals; ``sample_weight`` is for the head."""
        use = NamedUse.of(labels).or_named(self.default_key)
        _refuse_classes(use.labels)
        _refuse_dataset(public.value)
        draw, largest = self._draw(use.labels)
        self._check_recorded(use, draw)
        with use.reserve(public.with_value(self)):
            head = self._new_head(use.part("head"))
            head.fit(public, use.labels, sample_weight=sample_weight)
            shift = PublicInput(head.predict(public.value), head.receipts_)
            return head, use.residuals(shift, largest).randomize(draw)

    def _check_recorded(self, use: NamedUse, draw: LabelRandomizer) -> None:
        """Raises before the head's release if another draw has its name."""
        if not use.is_recorded:
            return
        stored, own, head = use.mechanism, self.parts(use)[use.name], use.part("head")
        is_same = getattr(stored, "inputs", None) == draw.values and math.isclose(
            stored.epsilon, own.epsilon, rel_tol=1e-9
        )
        if not is_same or not head.is_recorded:
            raise DrawSettingsError(
                f"draw {use.key!r} was stored with other settings: expected residuals of a head "
                f"{head.key!r} at epsilon={own.epsilon:g}, got {stored!r}. Use the stored "
                "settings, or another key."
            )

    def _draw(self, labels: PrivateLabels) -> tuple[LabelRandomizer, float]:
        """Returns the randomizer of residuals, and the largest one."""
        low, high = labels.label_range or (0.0, 0.0)
        largest = self.residual_range * (high - low)
        # Denser around zero, where most residuals are.
        places = np.linspace(-1.0, 1.0, _NUM_RESIDUALS)
        values = tuple((largest * places * np.abs(places)).tolist())
        return LabelRandomizer(self.split(labels.group_size)[1], values=values), largest

    def _new_head(self, use: NamedUse) -> OneReleaseHead:
        return self.head(
            self.split(use.labels.group_size)[0],
            self.delta,
            key=use.key,
            encoder=self.encoder,
            penalty=self.penalty,
            noise=self.noise,
            spread=self.spread,
        )


def _check_same_priors(use: NamedUse, noisy: NoisyLabels, priors: np.ndarray) -> None:
    """Raises if stored labels can't have been drawn under these priors, up to rounding."""
    mechanism: Any = noisy.mechanism
    members = top_k_members(priors, mechanism.set_sizes(priors))
    outside = 1.0 - float(np.mean(members[np.arange(len(noisy)), noisy.values]))
    if outside > _OTHER_PRIORS:
        raise DrawSettingsError(
            f"draw {use.key!r} was stored with other features or arguments: {outside:.0%} of its "
            "noisy labels are impossible under these priors. Use the features and arguments of the "
            "stored draw, or another key."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherLabels:
    """Targets from ``teacher_labels``.

    Attributes:
        targets: ``float32`` (n, K), rows that sum to one.
        receipts: the receipts of the probabilities.

    Example:
        >>> taught = TeacherLabels(np.array([[0.0, 1.0], [0.5, 0.5]], np.float32))
        >>> batches = taught.batches(np.zeros((2, 4, 4, 1), np.float32), batch_size=8)
        >>> x, y = batches[0]
        >>> len(batches), x.shape, y.shape
        (1, (2, 4, 4, 1), (2, 2))
    """

    targets: np.ndarray
    receipts: tuple[Receipt, ...] = ()

    def batches(
        self,
        inputs: Public[Any],
        batch_size: int,
        *,
        augment: Public[Callable[..., Any] | None] = None,
        seed: int = 0,
    ) -> Any:
        """Returns batches for ``model.fit``, in a new order each epoch.

        Args:
            inputs: array (n, ...), or a dict or tuple of arrays, in the order of the probabilities.
            batch_size: examples per batch.
            augment: changes a batch of inputs at random but not its shape and classes, for example
                a ``keras.Sequential`` of preprocessing layers; None for no augmentation. A Keras
                layer is called with ``training=True``.
            seed: draws the order; public.

        Returns:
            A ``keras.utils.PyDataset`` of ``ceil(n / batch_size)`` batches ``(inputs, targets)``.

        Raises:
            ValueError: sizes are no positive integers, or there is another number of inputs.
        """
        batch_size = _validate.integer_at_least("batch_size", batch_size, 1)
        public = public_input(self, inputs, augment)
        _, inputs, augment = public.value
        rows_of_inputs = FeatureRows(FeatureRows(inputs).arrays())
        size = rows_of_inputs.num_inputs
        if size != len(self.targets):
            raise ValueError(
                f"expected {len(self.targets)} inputs, one per row of probabilities, got "
                f"{size}. Give them in the same order."
            )
        rng = np.random.default_rng(_validate.integer_at_least("seed", seed, 0))
        import keras

        if isinstance(augment, keras.layers.Layer):
            augment = functools.partial(augment, training=True)

        def load(rows: np.ndarray) -> tuple[Any, np.ndarray]:
            x = rows_of_inputs.raw(rows)
            if augment is not None:
                x = keras.tree.map_structure(keras.ops.convert_to_numpy, augment(x))
            return x, self.targets[rows]

        batches = _shuffled_batches()(load, size, batch_size, rng)
        batches.receipts = public.receipts
        return batches


@functools.cache
def _shuffled_batches() -> type:
    """Returns the class of batches; a function, so that importing this file loads no Keras."""
    import keras

    class ShuffledBatches(keras.utils.PyDataset):
        def __init__(self, load: Any, number: int, size: int, rng: np.random.Generator) -> None:
            super().__init__()
            self._load, self._number, self._size, self._rng = load, number, size, rng
            self.on_epoch_end()

        def __len__(self) -> int:
            return -(-self._number // self._size)

        def __getitem__(self, index: int) -> Any:
            return self._load(self._order[index * self._size : (index + 1) * self._size])

        def on_epoch_end(self) -> None:
            self._order = self._rng.permutation(self._number)

    return ShuffledBatches


def teacher_labels(probabilities: Public[Any]) -> TeacherLabels:
    """Returns targets for a student model, from the predictions of a head.

    Train a student if it can use the inputs better than the head (for example, because a mirrored
    image shows the same thing), or to ship a small model; it has no more information on the labels
    than the head.

    Guarantee:
        Post-processing of the probabilities; nothing is charged.

    Args:
        probabilities: the head's probabilities for the public inputs, (n, K); rows sum to one.

    Raises:
        ValueError: rows are no probabilities.

    Example:
        >>> teacher_labels([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]).targets.argmax(axis=1).tolist()
        [0, 0, 1]
    """
    public = public_input(probabilities)
    shape = np.shape(public.value)
    if len(shape) != 2 or shape[1] < 2:
        raise ValueError(
            f"probabilities must have shape (n, K), got {shape}. Pass a head's predict_proba."
        )
    rows = _validate.prior_rows("probabilities", public.value, None, shape[1])
    return TeacherLabels(rows.astype(np.float32), public.receipts)
