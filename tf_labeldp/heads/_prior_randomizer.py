"""What a head gives to a deep model: priors of noisy labels, or targets.

``HeadPriorRandomizer`` spends one budget on a head and on a draw by its probabilities;
``teacher_labels`` makes a training set of the probabilities alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, PublicInput, Setting, public_input
from tf_labeldp.accounting._receipts import Receipts
from tf_labeldp.heads._logistic import PrivateLogisticRegression
from tf_labeldp.heads._one_release_head import OneReleaseHead
from tf_labeldp.mechanisms import InformativeRR, PriorMechanism, Priors, RRWithPrior
from tf_labeldp.mechanisms._base import Mechanism, settings
from tf_labeldp.mechanisms._classes import top_k_members
from tf_labeldp.vault import Classes, NoisyLabels, PrivateLabels
from tf_labeldp.vault._private_labels import Randomizer
from tf_labeldp.vault._records import DrawSettingsError

_DRAW_PAYS = 2.5
"""The epsilon from which labels drawn one by one tell more than a larger release would."""
_OTHER_PRIORS = 0.01
"""Share of noisy labels that other rounding may carry out of their prior's top-k set."""
_OF_THE_HEAD: tuple[str, ...] = ("num_classes", "classes", "encoder", "penalty", "spread", "center")
_OF_THE_HEAD += ("intercept", "noise", "max_bytes")
"""Arguments that go to the head as they are."""


@dataclasses.dataclass(frozen=True)
class HeadPriorRandomizer(Randomizer):
    """Releases a head, and draws every label by RRWithPrior with the head's probabilities.

    The noisy labels are right far more often than those of plain randomized response at the same
    epsilon, and a deep model can learn from them what the head can't. To train on ``posterior()``,
    give ``draw=InformativeRR``: the log-loss of these posteriors is lower, at epsilon 3 by about a
    quarter, while the noisy labels are wrong more often.

    It pays at epsilon 3 and above: the value of the release, an aggregate of all labels, saturates
    early, and that of the draw grows like e^epsilon. By default the head gets 90 % of an epsilon
    below 2.5, and 15 % from there on; fewer labels need more (``docs/heads.md`` has measurements).

    Guarantee:
        Head, priors and noisy labels together are (epsilon, delta)-label-DP for the replacement of
        one label: the head costs ``head_share * epsilon`` and delta, the draw the rest of epsilon
        (basic composition; the prior of a label depends on that label only through the release of
        the head, which is charged). Both are charged to the vault, which refuses before either if
        they do not fit.

    Source: RRWithPrior, ``ghazi2021``, Algorithm 2; there the priors come from a model trained on
    another part of the labels, here from one release of all of them.

    Attributes:
        epsilon: the whole, finite and above zero.
        delta: of the head's release, in (0, 1), below 1/n; 0 with ``noise="laplace"``.
        head_share: the part of epsilon for the head, between 0 and 1; None for the default above.
        head: the class of the head, ``PrivateLogisticRegression`` or ``PrivateRidge``.
        options: the arguments below in a mapping, for what was written before they had names.
        num_classes: of the head, as all that follow; see ``PrivateRidge``. The vault knows it.
        classes: the class values, which the vault knows too.
        encoder: what makes features of raw inputs; None for features as they are.
        penalty: ``"auto"``, or what ``head`` takes.
        spread: whether to spend the release over the principal directions of the features.
        center: whether to subtract the mean of the features.
        intercept: whether to add a constant column.
        noise: ``"gaussian"``, or ``"laplace"`` for a pure guarantee.
        max_bytes: the most memory for matrices and samples of rows.
        draw: the class of the draw: ``RRWithPrior``, whose noisy labels are right most often, or
            ``mechanisms.InformativeRR``, whose posteriors have the lower log-loss.

    Raises:
        TypeError: ``head`` is no class of a head, or ``draw`` is none of the two.
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
    options: dataclasses.InitVar[Public[Mapping[str, Any] | None]] = None
    _: dataclasses.KW_ONLY
    num_classes: int | None = None
    classes: Setting[Any] = None
    encoder: Public[Any] = None
    penalty: str | float = "auto"
    spread: bool = True
    center: bool = True
    intercept: bool = True
    noise: str = "gaussian"
    max_bytes: float = 8e9
    draw: type[PriorMechanism] = RRWithPrior

    def __post_init__(self, options: Mapping[str, Any] | None) -> None:
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
                f"{type(self.head).__name__}. Pass its arguments beside it."
            )
        if self.draw not in (RRWithPrior, InformativeRR):
            raise TypeError(
                f"draw must be the class RRWithPrior or InformativeRR, got {self.draw!r}."
            )
        public = public_input(options)
        object.__setattr__(self, "receipts", public.receipts)  # with which ``randomize`` finds them
        self._set_options(public.value or {})
        # Checks delta, and that it fits the noise.
        self._new_head(None)._mechanism(Classes(2))

    def split(self) -> tuple[float, float]:
        """Returns the epsilons of the head and of the draw; their sum is no larger than epsilon."""
        share = self.head_share
        if share is None:
            share = 0.9 if self.epsilon < _DRAW_PAYS else 0.15
        head = share * self.epsilon
        return head, self.epsilon - head

    def parts(self, labels: Private[PrivateLabels]) -> list[Mechanism]:
        """Returns the mechanisms of the head's release and of the draw."""
        head = self._new_head(None)._mechanism(labels.kind)
        return [head, self.draw(self.split()[1], labels.num_classes)]

    def draw_from(
        self, labels: Private[PrivateLabels], key: str | None, public: PublicInput[Any]
    ) -> NoisyLabels:
        """Fits the head, and draws; ``PrivateLabels.randomize`` calls it.

        Args:
            labels: the vault, of n classes.
            key: a name for the two draws, ``key/head`` and ``key``; None for ``"head-prior"``. With
                a name used before, the stored results come back and nothing is charged; what was
                not drawn yet is drawn.
            public: the features, numbers (n, d), or what the option ``encoder`` takes.

        Returns:
            Noisy labels, whose ``priors`` are the head's probabilities.

        Raises:
            BudgetExceededError: head and draw together would pass the budget; nothing was drawn.
            LabelStoreError: the stored draws of this name were made with other settings or
                features.
            TypeError: the features are in a data set.
            ValueError: the vault holds numbers, features are missing, or as for the head's ``fit``.
        """
        features = public.value
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
        mechanism = self.draw(self.split()[1], labels.num_classes)
        self._check_budget(mechanism, labels, key)
        head = self._new_head(f"{key}/head").fit(public, labels)
        priors = Priors(head.predict_proba(features), receipts=head.receipts_)
        drawn = labels.has_draw(key)
        noisy = labels.randomize(mechanism, priors=priors, key=key)
        if drawn:
            _check_same_priors(mechanism, noisy.values, priors.probabilities, key)
        return noisy

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = state.pop("options", None)  # what was pickled before the arguments had names
        vars(self).update(state)
        self._set_options(options or {})

    def _set_options(self, options: Mapping[str, Any]) -> None:
        taken = {"epsilon", "delta", "key"} & set(options)
        if taken:
            raise ValueError(
                f"options must not name {sorted(taken)}: these follow from the randomizer's own "
                "arguments."
            )
        if not set(options) <= set(_OF_THE_HEAD):
            raise ValueError(
                f"options {sorted(options)} are not all arguments of {self.head.__name__}; it "
                f"takes {', '.join(_OF_THE_HEAD)} here."
            )
        for name, value in options.items():
            object.__setattr__(self, name, value)

    def _new_head(self, key: str | None) -> OneReleaseHead:
        arguments = {name: getattr(self, name) for name in _OF_THE_HEAD}
        return self.head(self.split()[0], self.delta, key=key, **arguments)

    def _check_budget(self, draw: PriorMechanism, labels: PrivateLabels, key: str) -> None:
        """Raises unless all that is still to be drawn fits, before any of it is."""
        release, _ = self.parts(labels)
        missing = [] if labels.has_draw(f"{key}/head") else [release]
        if not labels.has_draw(key):
            missing.append(draw)
        else:
            stored = labels.mechanism(key)
            if missing or settings(stored) != settings(draw):
                raise DrawSettingsError(
                    f"draw {key!r} exists and was made with other settings (stored: {stored!r}; "
                    f"asked: {draw!r} after a head named {f'{key}/head'!r}). Ask with the "
                    "settings of the stored draw, or give another key."
                )
        if missing:
            labels.check_budget(missing)


def _check_same_priors(
    mechanism: PriorMechanism, noisy: np.ndarray, priors: np.ndarray, key: str
) -> None:
    """Raises if stored labels can't have been drawn under these priors, but for rounding."""
    members = top_k_members(priors, mechanism.set_sizes(priors))
    outside = 1.0 - float(np.mean(members[np.arange(noisy.size), noisy]))
    if outside > _OTHER_PRIORS:
        raise DrawSettingsError(
            f"draw {key!r} exists, and {outside:.0%} of its noisy labels can't come from the "
            "priors of these features, so it was made with other features or arguments. Ask with "
            "those of the stored draw, or give another key."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherLabels:
    """What ``teacher_labels`` makes: targets, and the examples that they are for.

    Attributes:
        indices: the examples that were kept, in ascending order, ``int64`` (m,).
        targets: ``float32`` (m, K), rows that sum to one.
        share: m / n, the share that was kept.
        receipts: of the uses of labels that the probabilities were made of.

    Example:
        >>> made = TeacherLabels(np.array([1]), np.array([[0.0, 1.0]], np.float32), share=0.5)
        >>> batches = made.batches(np.zeros((2, 4, 4, 1), np.float32), batch_size=8, views=3)
        >>> x, y = batches[0]
        >>> len(batches), x.shape, y.shape
        (1, (3, 4, 4, 1), (3, 2))
    """

    indices: np.ndarray
    targets: np.ndarray
    share: float
    receipts: Receipts = ()

    def batches(
        self,
        inputs: Public[Any],
        batch_size: int,
        *,
        augment: Public[Callable[..., Any] | None] = None,
        views: int = 1,
        seed: int = 0,
    ) -> Any:
        """Returns batches for ``model.fit``, in a new order each epoch.

        Every epoch shows each example in ``views`` new augmentations, all in one batch and with the
        same target, so that the model learns to agree with itself across them.

        Args:
            inputs: array (n, ...) of all n examples, kept or not.
            batch_size: examples a batch; a batch holds ``views`` times as many rows.
            augment: what changes a batch of inputs at random and keeps its shape and its class, for
                example a ``keras.Sequential`` of preprocessing layers; None for nothing. A Keras
                layer is called with ``training=True``.
            views: augmentations of an example a step, at least 1.
            seed: of the order; public.

        Returns:
            A ``keras.utils.PyDataset`` of ``ceil(m / batch_size)`` batches ``(inputs, targets)``.

        Raises:
            ValueError: sizes that are no positive integers, or too few inputs.
        """
        batch_size = _validate.integer_at_least("batch_size", batch_size, 1)
        views = _validate.integer_at_least("views", views, 1)
        public = public_input(self, inputs, augment)
        _, inputs, augment = public.value
        inputs = np.asarray(inputs)
        if self.indices.size and len(inputs) <= self.indices[-1]:
            raise ValueError(
                f"there are {len(inputs)} inputs, and example {int(self.indices[-1])} was kept. "
                "Give the inputs of all examples, in the order of the probabilities."
            )
        rng = np.random.default_rng(_validate.integer_at_least("seed", seed, 0))
        import keras

        if augment is None:
            augment = np.asarray
        elif isinstance(augment, keras.layers.Layer):
            augment = functools.partial(augment, training=True)
        made = _batches_class()(self, inputs, batch_size, augment, views, rng)
        made.receipts = public.receipts
        return made


@functools.cache
def _batches_class() -> type:
    """Returns the class of batches; here, so that importing this file does not load Keras."""
    import keras

    class TeacherBatches(keras.utils.PyDataset):
        """Batches of kept examples; see ``TeacherLabels.batches``."""

        def __init__(
            self,
            labels: TeacherLabels,
            inputs: np.ndarray,
            batch_size: int,
            augment: Callable[..., Any],
            views: int,
            rng: np.random.Generator,
        ) -> None:
            super().__init__()
            self._labels, self._inputs, self._size = labels, inputs, batch_size
            self._augment, self._views, self._rng = augment, views, rng
            self.on_epoch_end()

        def __len__(self) -> int:
            return -(-self._order.size // self._size)

        def __getitem__(self, index: int) -> tuple[Any, np.ndarray]:
            places = self._order[index * self._size : (index + 1) * self._size]
            places = np.repeat(places, self._views)
            x = self._augment(self._inputs[self._labels.indices[places]])
            return keras.ops.convert_to_numpy(x), self._labels.targets[places]

        def on_epoch_end(self) -> None:
            self._order = self._rng.permutation(self._labels.indices.size)

    return TeacherBatches


def teacher_labels(
    probabilities: Public[Any],
    *,
    confidence: float = 0.0,
    least_share: float = 0.1,
    hard: bool = False,
) -> TeacherLabels:
    """Returns targets for a model (the student) that a head teaches, of the examples it is sure of.

    A student is worthwhile where it can use the inputs better than the head (it knows, say, that a
    mirrored image shows the same thing), or where a small model is to be shipped; it has no more
    information on the labels than the head. A threshold drops examples near the borders of the
    classes, so it helps (as does ``hard``) only where the head is often wrong there.

    Guarantee:
        That of the probabilities: this is post-processing, and nothing is charged.

    Args:
        probabilities: of the head for the public inputs, (n, K); rows sum to one.
        confidence: in [0, 1), the least largest probability of an example that is kept.
        least_share: in [0, 1): of the examples of each predicted class at least this share is kept
            (rounded up), the surest ones, so that no class is lost.
        hard: whether targets are one-hot instead of the probabilities.

    Returns:
        What was kept, its targets, and the share of it.

    Raises:
        ValueError: not probabilities, or arguments out of range.

    Example:
        >>> made = teacher_labels([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]], confidence=0.8)
        >>> made.indices.tolist(), made.targets.argmax(axis=1).tolist(), round(made.share, 2)
        ([0, 2], [0, 1], 0.67)
    """
    confidence = _validate.number_in("confidence", confidence, "[0, 1)")
    least_share = _validate.number_in("least_share", least_share, "[0, 1)")
    hard = _validate.boolean("hard", hard)
    public = public_input(probabilities)
    probabilities = public.value
    if np.ndim(probabilities) != 2 or np.shape(probabilities)[1] < 2:
        raise ValueError(
            f"probabilities must have shape (n, K), got {np.shape(probabilities)}. Pass the "
            "predict_proba of a head."
        )
    rows = _validate.prior_rows("probabilities", probabilities, None, np.shape(probabilities)[1])
    classes, surest = rows.argmax(axis=1), rows.max(axis=1)
    kept = surest >= confidence
    for one in np.unique(classes):
        members = np.flatnonzero(classes == one)
        fewest = int(np.ceil(least_share * members.size))
        kept[members[np.argsort(-surest[members], kind="stable")[:fewest]]] = True
    indices = np.flatnonzero(kept)
    targets = np.eye(rows.shape[1])[classes[indices]] if hard else rows[indices]
    share = indices.size / max(1, rows.shape[0])
    return TeacherLabels(indices, targets.astype(np.float32), share, public.receipts)
