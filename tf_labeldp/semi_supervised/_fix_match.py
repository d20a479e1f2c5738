"""FixMatch on noisy labels: Algorithms 6 (LDP-SSL) and 7 (DenoiseSSL) of ``tang2022``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.self_supervised.training import Batches, Learner, built_network
from tf_labeldp.semi_supervised.targets import Targets, class_shares, read_targets
from tf_labeldp.vault.model_history import attach


@keras.saving.register_keras_serializable(package="tf_labeldp")
class FixMatch(Learner):
    """Trains a classifier on noisy labels and, with pseudo-labels, on all images.

    Each step takes a batch of images with noisy labels and a larger batch without labels. The
    labelled batch gets the compiled loss on weak views. An unlabelled image whose weak view gets a
    class with probability ``threshold`` or more trains its strong view on that class. The model is
    used like its network: ``predict``, ``evaluate``, ``save``.

    Guarantee:
        Post-processing of noisy labels: training spends no budget, and the model carries their
        receipts. Arrays of labels have no receipt, so a model trained on them promises nothing
        until it is declared.

    Source: FixMatch (Sohn et al., 2020) as Algorithms 6 and 7 of ``tang2022`` use it: ``fit`` with
    all noisy labels is LDP-SSL, with ``clusters=`` DenoiseSSL. Their settings: batch 64, ratio 7,
    threshold 0.95, ``keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.03, steps),
    momentum=0.9, nesterov=True, weight_decay=5e-4, use_ema=True, ema_momentum=0.999)``.

    Args:
        network: a built Keras model from images (n, height, width, channels) to K outputs.
        weak: layers for weak views; None for ``self_supervised.weak_views()``.
        strong: layers for strong views; None for ``self_supervised.strong_views()``.
        threshold: least probability of a pseudo-label, in (0, 1).
        unlabelled_weight: weight of the pseudo-labels' loss, at least 0.
        unlabelled_ratio: unlabelled images per labelled image in a step, at least 1.
        temperature: temperature of soft pseudo-labels, above zero; None for hard ones.
        priors: class shares (K,), for example ``released.priors()`` of a histogram, to which
            pseudo-labels are aligned (ReMixMatch). None for no alignment.
        from_logits: whether the network returns logits, not probabilities.

    Raises:
        ValueError: arguments out of range, or a network whose last activation contradicts
            ``from_logits``.

    Example:
        >>> import tf_labeldp as ldp
        >>> rng = np.random.default_rng(0)
        >>> images = rng.random((60, 8, 8, 1), dtype=np.float32)
        >>> labels = ldp.PrivateLabels(np.arange(60) % 3, 3, budget=ldp.PrivacyBudget(4.0))
        >>> noisy = labels.randomize(ldp.RandomizedResponse(4.0, 3))
        >>> network = keras.Sequential(
        ...     [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
        ... )
        >>> model = FixMatch(network)
        >>> model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
        >>> history = model.fit(images, noisy, batch_size=8, verbose=0)
        >>> ldp.guarantee(model).epsilon
        4.0
    """

    def __init__(
        self,
        network: Public[keras.Model],
        weak: Public[Any] = None,
        strong: Public[Any] = None,
        *,
        threshold: float = 0.95,
        unlabelled_weight: float = 1.0,
        unlabelled_ratio: int = 7,
        temperature: float | None = None,
        priors: Public[Any] = None,
        from_logits: bool = True,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(**kwargs)
        public = public_input(network, weak, strong, priors)
        network, weak, strong, priors = public.value
        self.threshold = _validate.number_in("threshold", threshold, "(0, 1)")
        self.unlabelled_weight = _validate.number_in(
            "unlabelled_weight", unlabelled_weight, "[0, inf)"
        )
        self.unlabelled_ratio = _validate.integer_at_least("unlabelled_ratio", unlabelled_ratio, 1)
        self.temperature = (
            None if temperature is None else _validate.positive_finite("temperature", temperature)
        )
        self.from_logits = _validate.boolean("from_logits", from_logits)
        self.network = checked_network(network, self.from_logits)
        self.num_classes = network.output_shape[-1]
        self._set_views(weak, strong)
        self.priors = class_shares(priors, self.num_classes)
        if priors is not None:
            self.mean_prediction = self.add_weight(
                shape=(self.num_classes,), initializer="ones", trainable=False, name="seen"
            )
        self.pseudo_labelled = keras.metrics.Mean(name="pseudo_labelled")
        self._note_parts(public)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the network's outputs; for a training batch, what the loss needs."""
        if not isinstance(inputs, dict):
            return self.network(inputs, training=training)
        labelled, unlabelled = inputs["labelled"], inputs["unlabelled"]
        views = [
            self.weak(labelled, training=True),
            self.weak(unlabelled, training=True),
            self.strong(unlabelled, training=True),
        ]
        outputs = self.network(ops.concatenate(views), training=training)
        first, second = ops.shape(labelled)[0], ops.shape(unlabelled)[0]
        weak, strong = outputs[first : first + second], outputs[first + second :]
        targets, mask = self._pseudo_labels(ops.stop_gradient(weak))
        return {"labelled": outputs[:first], "strong": strong, "targets": targets, "mask": mask}

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the compiled loss of the noisy labels plus that of the pseudo-labels."""
        outputs = y_pred if isinstance(y_pred, dict) else {"labelled": y_pred}
        loss = super().compute_loss(x, y, outputs["labelled"], sample_weight, training)
        if "mask" not in outputs:
            return loss
        losses = keras.losses.categorical_crossentropy(
            outputs["targets"], outputs["strong"], from_logits=self.from_logits
        )
        self.pseudo_labelled.update_state(outputs["mask"])
        return loss + self.unlabelled_weight * ops.mean(outputs["mask"] * losses)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns the metrics, the compiled ones on the noisy labels."""
        outputs = y_pred["labelled"] if isinstance(y_pred, dict) else y_pred
        return super().compute_metrics(x, y, outputs, sample_weight)

    def fit(  # type: ignore[override]
        self,
        x: Public[Any] = None,
        y: Public[Any] = None,
        batch_size: int | None = None,
        epochs: int = 1,
        *,
        targets: str = "values",
        clusters: Public[Any] = None,
        sample_weight: Public[Any] = None,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        **kwargs: Setting[Any],
    ) -> Any:
        """Trains on noisy labels and on all images.

        Args:
            x: all images (n, height, width, channels), floats in [0, 1].
            y: ``NoisyLabels`` of these images; or an array without a receipt, of classes (n,), -1
                for none, or of probabilities (n, K).
            batch_size: size of the labelled batch; None for 64.
            epochs: passes over all images.
            targets: ``"values"`` or ``"posterior"`` of the noisy labels.
            clusters: ``find_clusters`` of the images, or clusters (n,): training uses only noisy
                labels that agree with their cluster (DenoiseSSL).
            sample_weight: (n,), at least 0; an example with weight 0 is unlabelled.
            steps_per_epoch: None for one pass over the images.
            seed: public seed of the batch order.
            **kwargs: further arguments of ``keras.Model.fit``.

        Returns:
            The ``History`` of ``keras.Model.fit``.

        Raises:
            ValueError: images or labels of another shape or range, or a class without labels.
        """
        public = public_input(x, clusters, sample_weight)
        images = self._read_images(public.value[0])
        labelled = read_targets(y, public, len(images), self.num_classes, targets)
        size = _validate.integer_at_least("batch_size", batch_size or 64, 1)
        return self.fit_targets(
            images, labelled, size, steps_per_epoch, seed, epochs=epochs, **kwargs
        )

    def fit_targets(
        self,
        images: Public[np.ndarray],
        labelled: Public[Targets],
        size: int,
        steps: int | None,
        seed: int,
        **kwargs: Setting[Any],
    ) -> Any:
        """Trains as ``fit`` does, on targets that are not checked."""
        public = public_input(images, labelled)
        images, labelled = public.value
        if public.receipts:
            attach(self, public.receipts)

        def batch(chosen: np.ndarray, unlabelled: np.ndarray) -> Any:
            inputs = {"labelled": images[labelled.rows[chosen]], "unlabelled": images[unlabelled]}
            return inputs, labelled.targets[chosen], labelled.weights[chosen]

        batches = Batches(
            batch,
            [len(labelled.rows), len(images)],
            [size, size * self.unlabelled_ratio],
            steps,
            seed,
        )
        with labelled.training(self):
            return super().fit(batches, **kwargs)

    def _pseudo_labels(self, outputs: Any) -> tuple[Any, Any]:
        """Returns targets for the strong views, and a mask of those above the threshold."""
        shares = ops.softmax(outputs) if self.from_logits else outputs
        if self.priors is not None:
            self.mean_prediction.assign(
                0.99 * self.mean_prediction + 0.01 * ops.mean(shares, axis=0) * self.num_classes
            )
            shares = (
                shares * ops.convert_to_tensor(self.priors, shares.dtype) / self.mean_prediction
            )
            shares = shares / ops.sum(shares, axis=-1, keepdims=True)
        mask = ops.cast(ops.max(shares, axis=-1) >= self.threshold, shares.dtype)
        if self.temperature is None:
            return ops.one_hot(ops.argmax(shares, axis=-1), self.num_classes), mask
        return sharpened(shares, self.temperature), mask


def sharpened(shares: Any, temperature: float) -> Any:
    """Returns probabilities (n, K) to the power of 1/temperature, normalised."""
    powers = shares ** (1.0 / temperature)
    return powers / ops.sum(powers, axis=-1, keepdims=True)


def checked_network(network: Any, from_logits: bool) -> keras.Model:
    """Returns a built classifier whose last activation agrees with ``from_logits``, or raises."""
    built_network(network, "network")
    last = getattr(getattr(network.layers[-1], "activation", None), "__name__", None)
    if (last == "softmax") == from_logits:
        raise ValueError(
            f"from_logits={from_logits} contradicts the network's last activation {last}. Set "
            f"from_logits={not from_logits}, or change the last layer."
        )
    return network
