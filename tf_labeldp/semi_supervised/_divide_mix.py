"""DivideMix with AugDescent: two networks tell each other which noisy labels to believe."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.mechanisms import ClassificationMechanism, Priors
from tf_labeldp.self_supervised.training import Batches, Learner
from tf_labeldp.semi_supervised._fix_match import checked_network, sharpened
from tf_labeldp.semi_supervised.targets import Targets, read_targets

_SMALL = 1e-8


@keras.saving.register_keras_serializable(package="tf_labeldp")
class DivideMix(Learner):
    """Trains two networks on noisy labels, each on those that the other believes.

    After a warm-up on all noisy labels, every epoch begins with the probability, by the other
    network, that each noisy label is the true one. Those above ``clean_threshold`` are labelled
    examples, whose targets are refined by the network's own guess; the rest are unlabelled, with
    targets guessed by both networks. Guesses are made on weak views, and mixed-up strong views are
    trained on (AugDescent). The model's outputs are the mean probabilities of both networks.

    Guarantee:
        Post-processing of noisy labels: training spends no budget, and the model carries their
        receipts. Arrays of labels have no receipt, so a model trained on them promises nothing
        until it is declared.

    Source: DivideMix (Li et al., 2020) with the views of AugDescent (Nishi et al., 2021), which is
    LDP-AugDescent, Algorithm 6 of ``tang2022``. The papers find the probabilities with a mixture of
    two Gaussians on the losses (``division="mixture"``); with ``division="channel"``, which needs a
    known mechanism, they come from Bayes' rule: the share of the noisy label that its own class
    explains, under the network's probabilities and the mechanism's channel. The channel also
    corrects the loss of the warm-up then.

    Args:
        network: a built Keras model from images to K logits; both networks have its layers, the
            second one with fresh weights.
        weak: layers that make weak views; None for ``self_supervised.weak_views()``.
        strong: layers that make strong views; None for ``self_supervised.strong_views()``.
        clean_threshold: in (0, 1).
        temperature: that sharpens guesses, above zero.
        mixup_alpha: of the Beta distribution, above zero.
        unlabelled_weight: of the unlabelled loss, reached after ``ramp_epochs``; at least 0.
        ramp_epochs: at least 0.
        division: ``"mixture"`` or ``"channel"``.
        priors: shares of the classes (K,), which the mean prediction is held to; None for uniform.

    Raises:
        ValueError: arguments out of range, or a network of other outputs.

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

    _PARTS = ("network", "weak", "strong")
    _SETTINGS = (
        "clean_threshold",
        "temperature",
        "mixup_alpha",
        "unlabelled_weight",
        "ramp_epochs",
        "division",
        "priors",
    )

    def __init__(
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
        rows = np.full((1, self.num_classes), 1.0 / self.num_classes)
        if priors is not None:
            shares = Priors.of(priors).probabilities
            rows = _validate.prior_rows("priors", shares, 1, self.num_classes)
        self.priors = None if priors is None else rows[0].tolist()
        self._shares = rows[0].astype(np.float32)
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
            return (self._guess(self.network, inputs) + self._guess(self.second, inputs)) / 2.0
        if "images" in inputs:  # of the warm-up
            views = self.weak(inputs["images"], training=True)
            return [net(views, training=training) for net in (self.network, self.second)]
        return [
            self._mixed(net, *(inputs[f"{name}_{key}"] for key in ("x", "y", "w", "u")))
            for name, net in (("first", self.network), ("second", self.second))
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
            corrected = [ops.softmax(made) @ self._channel for made in y_pred]
            losses = [keras.losses.categorical_crossentropy(y, made) for made in corrected]
            return ops.mean(losses[0]) + ops.mean(losses[1])
        return sum(self._mixed_loss(*made) for made in y_pred)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns the metrics; in training those of the first network, on the targets it has."""
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
        """Warms both networks up on all noisy labels, then divides and trains.

        Args:
            x: images, floating-point numbers (n, height, width, channels) in [0, 1].
            y: ``NoisyLabels`` of these images, or an array of classes (n,), which has no receipt.
            batch_size: of the labelled stream, and of the unlabelled one; None for 64.
            epochs: with the warm-up, at least ``warmup_epochs``.
            warmup_epochs: at least 0.
            steps_per_epoch: None for one pass over the images.
            seed: of the orders, public.
            callbacks: as of ``keras.Model.fit``.
            **kwargs: further arguments of ``keras.Model.fit``.

        Returns:
            The ``History`` of all epochs.

        Raises:
            ValueError: images or labels that can't be used; ``division="channel"`` without a known
                mechanism.
        """
        public = public_input(x, None, None)
        images = self._read_images(public.value[0])
        labelled = read_targets(y, public, len(images), self.num_classes, "values")
        size = _validate.integer_at_least("batch_size", batch_size or 64, 1)
        warmup = min(_validate.integer_at_least("warmup_epochs", warmup_epochs, 0), epochs)
        if self.division == "channel":
            self._channel.assign(self._known_channel(labelled))

        def warm(rows: np.ndarray) -> Any:
            return {"images": images[labelled.rows[rows]]}, labelled.targets[rows]

        warm_batches = Batches(warm, [len(labelled.rows)], [size], steps_per_epoch, seed)
        divided = _Divided(self, images, labelled, size, steps_per_epoch, seed, warmup)
        history: dict[str, list[Any]] = {}
        with labelled.training(self):
            for batches, first, last in ((warm_batches, 0, warmup), (divided, warmup, epochs)):
                if first < last:
                    own = []
                    if batches is divided:  # Keras takes a batch before it calls any callback
                        divided.divide(first)
                        own = [keras.callbacks.LambdaCallback(on_epoch_end=divided.next)]
                    made = super().fit(
                        batches,
                        epochs=last,
                        initial_epoch=first,
                        callbacks=[*own, *(callbacks or ())],
                        **kwargs,
                    )
                    for name, values in made.history.items():
                        history.setdefault(name, []).extend(values)
        made.history, made.epoch = history, list(range(epochs))
        return made

    def clean_probabilities(
        self, network: Public[Any], images: Public[Any], labelled: Public[Targets]
    ) -> np.ndarray:
        """Returns how likely each noisy label is the true one, by a network, (m,)."""
        outputs = np.concatenate(
            [
                ops.convert_to_numpy(self._guess(network, images[labelled.rows[at : at + 1024]]))
                for at in range(0, len(labelled.rows), 1024)
            ]
        ).astype(np.float64)
        own = np.arange(len(outputs)), labelled.classes
        if self.division == "channel":
            channel = keras.ops.convert_to_numpy(self._channel).astype(np.float64)
            kept = outputs[own] * channel[labelled.classes, labelled.classes]
            return kept / np.maximum((outputs @ channel)[own], _SMALL)
        from sklearn.mixture import GaussianMixture

        losses = -np.log(np.maximum(outputs[own], _SMALL))[:, np.newaxis]
        losses = (losses - losses.min()) / max(float(np.ptp(losses)), _SMALL)
        mixture = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0)
        lower = mixture.fit(losses).means_.argmin()
        return mixture.predict_proba(losses)[:, lower]

    def _known_channel(self, labelled: Targets) -> np.ndarray:
        mechanism = getattr(labelled.noisy, "mechanism", None)
        if not isinstance(mechanism, ClassificationMechanism) or mechanism.uses_priors:
            raise ValueError(
                "division='channel' needs noisy labels of a mechanism with one known channel, such "
                "as RandomizedResponse. Use division='mixture' for others."
            )
        return mechanism.transition_matrix()

    @staticmethod
    def _guess(network: Any, images: Any) -> Any:
        return ops.softmax(network(images, training=False))

    def _mixed(self, network: Any, images: Any, targets: Any, believed: Any, free: Any) -> Any:
        """Returns outputs, mixed targets, and how many rows are of labelled images."""

        def guesses(nets: Any, some: Any) -> Any:
            views = [self.weak(some, training=True) for _ in range(2)]
            made = [self._guess(net, view) for net in nets for view in views]
            return sum(made) / float(len(made))

        believed = believed[:, None]
        refined = believed * targets + (1.0 - believed) * guesses([network], images)
        refined = ops.stop_gradient(sharpened(refined, self.temperature))
        guessed = sharpened(guesses([self.network, self.second], free), self.temperature)
        guessed = ops.stop_gradient(guessed)
        inputs = [self.strong(part, training=True) for part in (images, images, free, free)]
        inputs, wanted = (
            ops.concatenate(parts) for parts in (inputs, [refined, refined, guessed, guessed])
        )
        size = ops.shape(inputs)[0]
        share = keras.random.beta((), self.mixup_alpha, self.mixup_alpha, seed=self.seed_generator)
        share = ops.maximum(share, 1.0 - share)
        partner = keras.random.shuffle(ops.arange(size), seed=self.seed_generator)
        inputs, wanted = (
            share * part + (1.0 - share) * ops.take(part, partner, axis=0)
            for part in (inputs, wanted)
        )
        return network(inputs, training=True), wanted, 2 * ops.shape(images)[0]

    def _mixed_loss(self, outputs: Any, wanted: Any, size: Any) -> Any:
        shares = ops.softmax(outputs)
        loss = ops.mean(keras.losses.categorical_crossentropy(wanted[:size], shares[:size]))
        apart = ops.mean(ops.square(wanted[size:] - shares[size:]))
        mean = ops.mean(shares, axis=0)
        expected = ops.convert_to_tensor(self._shares, mean.dtype)
        away = ops.sum(expected * ops.log(expected / (mean + _SMALL) + _SMALL))
        return loss + self.unlabelled_weight * self._ramp * apart + away


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
        self._sides: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        super().__init__(self._batch, [count] * 4, [size] * 4, steps, seed)

    def next(self, epoch: int, logs: Any = None) -> None:
        """Logs the share of the labels that was believed, and divides for the next epoch."""
        if logs is not None:
            shares = [len(clean) / len(believed) for clean, _, believed in self._sides.values()]
            logs["believed"] = float(np.mean(shares))
        self.divide(epoch + 1)

    def divide(self, epoch: int) -> None:
        """Lets each network say which labels the other one is to believe."""
        model = self._model
        ramp = (epoch - self._warmup) / max(1, model.ramp_epochs)
        model._ramp.assign(min(1.0, max(0.0, ramp)))
        for name, other in (("first", model.second), ("second", model.network)):
            believed = model.clean_probabilities(other, self._images, self._labelled)
            clean = np.flatnonzero(believed > model.clean_threshold)
            rest = np.flatnonzero(believed <= model.clean_threshold)
            everything = np.arange(len(believed))
            clean = clean if clean.size else everything
            rest = rest if rest.size else everything
            self._sides[name] = (clean, rest, believed.astype(np.float32))

    def _batch(self, *orders: np.ndarray) -> Any:
        batch = {}
        for number, name in enumerate(("first", "second")):
            clean, rest, believed = self._sides[name]
            chosen = clean[orders[2 * number] % len(clean)]
            free = rest[orders[2 * number + 1] % len(rest)]
            rows = self._labelled.rows
            batch[f"{name}_x"] = self._images[rows[chosen]]
            batch[f"{name}_y"] = self._labelled.targets[chosen]
            batch[f"{name}_w"] = believed[chosen]
            batch[f"{name}_u"] = self._images[rows[free]]
        return (batch,)
