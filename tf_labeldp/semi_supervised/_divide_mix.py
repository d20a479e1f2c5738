"""DivideMix with AugDescent: two networks that select clean labels for each other."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.keras_layers import Mixup
from tf_labeldp.mechanisms import ClassificationMechanism
from tf_labeldp.self_supervised.training import Batches, Learner
from tf_labeldp.semi_supervised._fix_match import checked_network, sharpened
from tf_labeldp.semi_supervised.targets import Targets, class_shares, read_targets
from tf_labeldp.vault import Classes

_SMALL = 1e-8
"""Keeps divisors and the arguments of logarithms above zero."""


@keras.saving.register_keras_serializable(package="tf_labeldp")
class DivideMix(Learner):
    """Trains two networks on noisy labels, each on the labels that the other finds clean.

    After a warm-up on all noisy labels, each epoch starts with the probability, by the other
    network, that a noisy label is the true one. Images above ``clean_threshold`` are labelled, with
    targets refined by the network's own prediction; the others are unlabelled, with targets
    predicted by both networks. Predictions use weak views, and training uses strong views after
    mixup (AugDescent). The model returns the mean probabilities of both networks.

    Guarantee:
        Post-processing of noisy labels: training spends no budget, and the model carries their
        receipts. Arrays of labels have no receipt, so a model trained on them promises nothing
        until it is declared.

    Source: DivideMix (Li et al., 2020) with the views of AugDescent (Nishi et al., 2021), which is
    LDP-AugDescent, Algorithm 6 of ``tang2022``. The papers fit a mixture of two Gaussians to the
    losses (``division="mixture"``). For a known mechanism, ``division="channel"`` uses Bayes' rule
    with the network's probabilities and the mechanism's channel; the channel then also corrects the
    loss of the warm-up. ``tang2022`` trains with ``keras.optimizers.SGD(0.02, momentum=0.9)``,
    an L2 penalty of 5e-4, batches of 128, and strong views of AutoAugment's policy for CIFAR-10,
    which ``rand_augment_views`` comes closest to. Their code trains the networks one after the
    other in each epoch, raises ``unlabelled_weight`` per step and adds logits for predictions; here
    both networks take each step together, the weight grows per epoch, and probabilities are
    averaged.

    Args:
        network: a built Keras model from images to K logits; both networks have its layers, and the
            second one starts from fresh weights.
        weak: layers for weak views; None for ``self_supervised.weak_views()``.
        strong: layers for strong views; None for ``self_supervised.strong_views()``.
        clean_threshold: probability above which a noisy label is clean, in (0, 1).
        temperature: temperature that sharpens predicted targets, above zero.
        mixup_alpha: parameter of the Beta distribution, above zero.
        unlabelled_weight: weight of the unlabelled loss after ``ramp_epochs``, at least 0.
        ramp_epochs: epochs in which this weight grows from 0; at least 0.
        division: ``"mixture"`` or ``"channel"``.
        priors: class shares (K,), which the mean prediction is pulled to; None for uniform.

    Raises:
        ValueError: arguments out of range, or a network without K logits.

    Example:
        >>> import tf_labeldp as ldp
        >>> images = np.random.default_rng(0).random((60, 8, 8, 1), dtype=np.float32)
        >>> labels = ldp.PrivateLabels(np.arange(60) % 3, 3, budget=ldp.PrivacyBudget(4.0))
        >>> noisy = labels.randomize(ldp.RandomizedResponse(4.0, 3))
        >>> network = keras.Sequential(
        ...     [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
        ... )
        >>> model = DivideMix(network)
        >>> model.compile("sgd")
        >>> history = model.fit(images, noisy, batch_size=8, epochs=2, verbose=0)
        >>> ldp.guarantee(model).epsilon
        4.0
    """

    def __init__(  # noqa: PLR0913 (the paper's parameters)
        self,
        network: Public[keras.Model],
        weak: Public[Any] = None,
        strong: Public[Any] = None,
        *,
        clean_threshold: float = 0.5,
        temperature: float = 0.5,
        mixup_alpha: float = 4.0,
        unlabelled_weight: float = 25.0,
        ramp_epochs: int = 16,
        division: str = "mixture",
        priors: Public[Any] = None,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(**kwargs)
        public = public_input(network, weak, strong, priors)
        network, weak, strong, priors = public.value
        self.clean_threshold = _validate.number_in("clean_threshold", clean_threshold, "(0, 1)")
        self.temperature = _validate.positive_finite("temperature", temperature)
        self.mixup_alpha = _validate.positive_finite("mixup_alpha", mixup_alpha)
        self.unlabelled_weight = _validate.number_in(
            "unlabelled_weight", unlabelled_weight, "[0, inf)"
        )
        self.ramp_epochs = _validate.integer_at_least("ramp_epochs", ramp_epochs, 0)
        self.division = _validate.one_of("division", division, ("mixture", "channel"))
        self.network = checked_network(network, from_logits=True)
        self.second = keras.models.clone_model(network)
        self.num_classes = network.output_shape[-1]
        self._set_views(weak, strong)
        self.priors = class_shares(priors, self.num_classes)
        self._channel = self.add_weight(
            shape=(self.num_classes, self.num_classes),
            initializer=keras.initializers.Identity(),
            trainable=False,
            name="channel",
        )
        self._ramp = self.add_weight(shape=(), initializer="zeros", trainable=False, name="ramp")
        self.seed_generator = keras.random.SeedGenerator(0)
        self._note_parts(public)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the mean probabilities of both networks; in training, what the loss needs."""
        if not isinstance(inputs, dict):
            return (
                self._predicted(self.network, inputs) + self._predicted(self.second, inputs)
            ) / 2.0
        is_warmup = "images" in inputs
        if is_warmup:
            views = self.weak(inputs["images"], training=True)
            return [
                ops.cast(net(views, training=training), "float32")
                for net in (self.network, self.second)
            ]
        return [
            self._mixed(self.network, self.second, inputs["first"]),
            self._mixed(self.second, self.network, inputs["second"]),
        ]

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the sum of both networks' losses."""
        if not isinstance(y_pred, list):
            return ops.mean(keras.losses.categorical_crossentropy(y, y_pred))
        if not isinstance(y_pred[0], tuple):
            noisy = [ops.softmax(logits) @ self._channel for logits in y_pred]
            losses = [keras.losses.categorical_crossentropy(y, shares) for shares in noisy]
            return ops.mean(losses[0]) + ops.mean(losses[1])
        return sum(self._mixed_loss(*mixed) for mixed in y_pred)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns the metrics; in training, the first network's on its own targets."""
        if isinstance(y_pred, list):
            y_pred = y_pred[0]
            if isinstance(y_pred, tuple):
                y_pred, y, _ = y_pred
            y_pred = ops.softmax(y_pred)
        return super().compute_metrics(x, y, y_pred)

    def fit(  # type: ignore[override]
        self,
        x: Public[Any] = None,
        y: Public[Any] = None,
        batch_size: int | None = None,
        epochs: int = 1,
        *,
        warmup_epochs: int = 1,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        callbacks: Setting[Any] = None,
        **kwargs: Setting[Any],
    ) -> Any:
        """Warms both networks up on all noisy labels, then divides the labels before every epoch.

        Args:
            x: images (n, height, width, channels), floats in [0, 1].
            y: ``NoisyLabels``, whose ``indices`` count these images; or an array of classes (n,),
                which has no receipt.
            batch_size: size of the labelled batch and of the unlabelled batch; None for 64.
            epochs: total epochs with the warm-up, at least ``warmup_epochs``.
            warmup_epochs: at least 0.
            steps_per_epoch: None for one pass over the images.
            seed: public seed of the batch order.
            callbacks: callbacks for ``keras.Model.fit``.
            **kwargs: further arguments of ``keras.Model.fit``.

        Returns:
            The ``History`` of all epochs.

        Raises:
            ValueError: images or labels of another shape or range; ``division="channel"`` without a
                known mechanism.
        """
        callbacks = _validate.callbacks_of(callbacks)
        public = public_input(x, None, None)
        images = self._read_images(public.value[0])
        labelled = read_targets(y, public, len(images), Classes(self.num_classes), "values")
        size = _validate.integer_at_least("batch_size", batch_size or 64, 1)
        warmup = min(_validate.integer_at_least("warmup_epochs", warmup_epochs, 0), epochs)
        channel = self._known_channel(labelled) if self.division == "channel" else None

        def warm(rows: np.ndarray) -> Any:
            return {"images": images[labelled.rows[rows]]}, labelled.targets[rows]

        warm_batches = Batches(warm, [len(labelled.rows)], [size], steps_per_epoch, seed)
        divided = _Divided(self, images, labelled, size, steps_per_epoch, seed, warmup)
        history: dict[str, list[Any]] = {}
        with labelled.training(self):
            # The channel is a weight: set before, it would be a change without receipts.
            if channel is not None:
                self._channel.assign(channel)
            for batches, first, last in ((warm_batches, 0, warmup), (divided, warmup, epochs)):
                if first < last:
                    dividing = []
                    if batches is divided:
                        # Keras takes a batch before it calls any callback.
                        divided.divide(first)
                        dividing = [keras.callbacks.LambdaCallback(on_epoch_end=divided.next)]
                    stage = super().fit(
                        batches,
                        epochs=last,
                        initial_epoch=first,
                        callbacks=[*dividing, *callbacks],
                        **kwargs,
                    )
                    for name, values in stage.history.items():
                        history.setdefault(name, []).extend(values)
        stage.history, stage.epoch = history, list(range(epochs))
        return stage

    def clean_probabilities(
        self, network: Public[Any], images: Public[Any], labelled: Public[Targets]
    ) -> np.ndarray:
        """Returns the probability (m,), by a network, that each noisy label is the true one."""
        blocks = np.split(labelled.rows, range(1024, len(labelled.rows), 1024))
        shares = np.concatenate(
            [ops.convert_to_numpy(self._predicted(network, images[rows])) for rows in blocks]
        ).astype(np.float64)
        noisy = np.arange(len(shares)), labelled.classes
        if self.division == "channel":
            channel = ops.convert_to_numpy(self._channel).astype(np.float64)
            kept = shares[noisy] * channel[labelled.classes, labelled.classes]
            return kept / np.maximum((shares @ channel)[noisy], _SMALL)
        from sklearn.mixture import GaussianMixture

        losses = -np.log(np.maximum(shares[noisy], _SMALL))[:, np.newaxis]
        losses = (losses - losses.min()) / max(float(np.ptp(losses)), _SMALL)
        mixture = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0)
        lower = mixture.fit(losses).means_.argmin()
        return mixture.predict_proba(losses)[:, lower]

    def _known_channel(self, labelled: Targets) -> np.ndarray:
        mechanism: Any = None if labelled.noisy is None else labelled.noisy.mechanism
        is_fixed = isinstance(mechanism, ClassificationMechanism) and not mechanism.uses_priors
        if not is_fixed or not mechanism.outputs_are_classes:
            raise ValueError(
                "division='channel' needs NoisyLabels of a mechanism with one channel, such as "
                f"RandomizedResponse, got {mechanism}. Use division='mixture'."
            )
        return mechanism.transition_matrix()

    @staticmethod
    def _predicted(network: Any, images: Any, training: bool = False) -> Any:
        return ops.softmax(ops.cast(network(images, training=training), "float32"))

    def _mixed(self, network: Any, other: Any, batch: dict[str, Any]) -> Any:
        """Returns logits, mixed targets, and the number of rows that begin as labelled images."""
        images, unlabelled = batch["labelled"], batch["unlabelled"]

        def mean_prediction(images: Any, *others: Any) -> Any:
            views = [self.weak(images, training=True) for _ in range(2)]
            # The network in training uses the statistics of its batch, as in the authors' code.
            shares = [self._predicted(network, view, training=True) for view in views]
            shares += [self._predicted(net, view) for net in others for view in views]
            return sum(shares) / float(len(shares))

        clean = batch["clean"][:, None]
        refined = clean * batch["targets"] + (1.0 - clean) * mean_prediction(images)
        predicted = mean_prediction(unlabelled, other)
        refined, predicted = (
            ops.stop_gradient(sharpened(shares, self.temperature))
            for shares in (refined, predicted)
        )
        sources = (images, images, unlabelled, unlabelled)
        views = [self.strong(source, training=True) for source in sources]
        inputs = ops.cast(ops.concatenate(views), "float32")
        mixed = ops.concatenate([refined, refined, predicted, predicted])
        size = ops.shape(inputs)[0]
        share = Mixup.symmetric_beta(self.mixup_alpha, seed=self.seed_generator)
        share = ops.maximum(share, 1.0 - share)
        partner = keras.random.shuffle(ops.arange(size), seed=self.seed_generator)
        inputs, mixed = (
            share * part + (1.0 - share) * ops.take(part, partner, axis=0)
            for part in (inputs, mixed)
        )
        logits = ops.cast(network(inputs, training=True), "float32")
        return logits, mixed, 2 * ops.shape(images)[0]

    def _mixed_loss(self, logits: Any, targets: Any, size: Any) -> Any:
        shares = ops.softmax(logits)
        labelled = ops.mean(keras.losses.categorical_crossentropy(targets[:size], shares[:size]))
        unlabelled = ops.mean(ops.square(targets[size:] - shares[size:]))
        mean = ops.mean(shares, axis=0)
        priors = self.priors or [1.0 / self.num_classes] * self.num_classes
        priors = ops.convert_to_tensor(priors, mean.dtype)
        divergence = ops.sum(priors * ops.log(priors / (mean + _SMALL) + _SMALL))
        return labelled + self.unlabelled_weight * self._ramp * unlabelled + divergence


class _Divided(Batches):
    def __init__(
        self,
        model: DivideMix,
        images: np.ndarray,
        labelled: Targets,
        size: int,
        steps: int | None,
        seed: int,
        warmup: int,
    ) -> None:
        self._model, self._images, self._labelled = model, images, labelled
        self._warmup = warmup
        count = len(labelled.rows)
        # By network: rows of clean labels, the other rows, the probability of each label.
        self._sides: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        super().__init__(self._batch, [count] * 4, [size] * 4, steps, seed)

    def next(self, epoch: int, logs: Any = None) -> None:
        """Logs the share of clean labels as ``believed``, and divides for the next epoch."""
        if logs is not None:
            shares = [
                len(clean) / len(probability) for clean, _, probability in self._sides.values()
            ]
            logs["believed"] = float(np.mean(shares))
        self.divide(epoch + 1)

    def divide(self, epoch: int) -> None:
        """Divides the labels for each network by the probabilities of the other one."""
        model = self._model
        ramp = (epoch - self._warmup) / max(1, model.ramp_epochs)
        model._ramp.assign(min(1.0, max(0.0, ramp)))
        for name, other in (("first", model.second), ("second", model.network)):
            probability = model.clean_probabilities(other, self._images, self._labelled)
            clean = np.flatnonzero(probability > model.clean_threshold)
            rest = np.flatnonzero(probability <= model.clean_threshold)
            everything = np.arange(len(probability))
            clean = clean if clean.size else everything
            rest = rest if rest.size else everything
            self._sides[name] = (clean, rest, probability.astype(np.float32))

    def _batch(self, *orders: np.ndarray) -> Any:
        batch = {}
        for number, name in enumerate(("first", "second")):
            clean, rest, probability = self._sides[name]
            labelled = clean[orders[2 * number] % len(clean)]
            unlabelled = rest[orders[2 * number + 1] % len(rest)]
            rows = self._labelled.rows
            batch[name] = {
                "labelled": self._images[rows[labelled]],
                "targets": self._labelled.targets[labelled],
                "clean": probability[labelled],
                "unlabelled": self._images[rows[unlabelled]],
            }
        return (batch,)
