"""FixMatch on noisy labels: Algorithms 6 (LDP-SSL) and 7 (DenoiseSSL) of ``tang2022``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_labeldp import _checks, _validate
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.keras_layers import ForwardCorrectedLoss
from tf_labeldp.self_supervised.training import Batches, Learner
from tf_labeldp.semi_supervised.targets import Targets, class_shares, read_targets
from tf_labeldp.vault import Classes
from tf_labeldp.vault.model_history import TrainedModel

_MOMENTUM = 0.9
"""Of running means. With 0.99 the alignment lags, and one class may take all pseudo-labels."""


@keras.saving.register_keras_serializable(package="tf_labeldp")
class FixMatch(Learner):
    """Trains a classifier on noisy labels and, with pseudo-labels, on all images.

    Each step takes a batch of images with noisy labels and a larger batch of all images. The
    network predicts the true label: without a compiled loss, the labelled batch gets the negative
    log-likelihood of the noisy labels through the channel of their mechanism, on weak views. The
    other images get pseudo-labels from the prediction on their weak view: Bayes' rule adds the
    noisy label of the image, and the class shares, which the noisy labels estimate at no cost,
    align it. A pseudo-label at or above the threshold of its class trains the strong view. The
    model is used like its network: ``predict``, ``evaluate``, ``save``.

    Noisy labels whose true class has hardly more probability than another (randomized response of
    ten classes below epsilon 0.75) are learnt as they are, without Bayes' rule.

    Guarantee:
        Post-processing of noisy labels: training spends no budget, and the model carries their
        receipts. Arrays of labels have no receipt, so a model trained on them promises nothing
        until it is declared.

    Source: FixMatch (Sohn et al., 2020), as Algorithms 6 and 7 of ``tang2022`` use it: ``fit`` with
    all noisy labels is LDP-SSL, with ``clusters=`` DenoiseSSL; ``from_paper`` has their settings.
    The alignment is that of ReMixMatch (Berthelot et al., 2020). FreeMatch (Wang et al., 2023)
    scales the running mean of all classes by class; here each class has its own mean. The
    likelihoods of noisy labels, in loss and pseudo-labels, are ours.

    Args:
        network: a built Keras model from images (n, height, width, channels) to K outputs.
        weak: layers for weak views; None for ``self_supervised.weak_views()``.
        strong: layers for strong views; None for ``self_supervised.strong_views()``.
        threshold: least probability of a pseudo-label, in (0, 1); None for the running mean of
            each class.
        unlabelled_weight: weight of the pseudo-labels' loss, at least 0.
        unlabelled_ratio: unlabelled images per labelled image in a step, at least 1.
        temperature: temperature of soft pseudo-labels, above zero; None for hard ones, in which
            early errors reinforce themselves where the labels are very noisy.
        priors: class shares (K,), for example ``released.priors()`` of a histogram, to which
            pseudo-labels are aligned; ``"estimated"`` from the labels; None for no alignment.
        l2_penalty: weight of half the sum of squared kernels, at least 0.
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
        >>> model.compile("adam")
        >>> history = model.fit(images, noisy, batch_size=8, verbose=0)
        >>> ldp.guarantee(model).epsilon
        4.0
    """

    def __init__(  # noqa: PLR0913 (the paper's parameters)
        self,
        network: Public[keras.Model],
        weak: Public[Any] = None,
        strong: Public[Any] = None,
        *,
        threshold: float | None = None,
        unlabelled_weight: float = 1.0,
        unlabelled_ratio: int = 7,
        temperature: float | None = 1.0,
        priors: Public[Any] = "estimated",
        l2_penalty: float = 0.0,
        from_logits: bool = True,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(**kwargs)
        public = public_input(network, weak, strong, priors)
        network, weak, strong, priors = public.value
        self.threshold = (
            None if threshold is None else _validate.number_in("threshold", threshold, "(0, 1)")
        )
        self.unlabelled_weight = _validate.number_in(
            "unlabelled_weight", unlabelled_weight, "[0, inf)"
        )
        self.unlabelled_ratio = _validate.integer_at_least("unlabelled_ratio", unlabelled_ratio, 1)
        self.temperature = (
            None if temperature is None else _validate.positive_finite("temperature", temperature)
        )
        self.l2_penalty = _validate.number_in("l2_penalty", l2_penalty, "[0, inf)")
        self.from_logits = _validate.boolean("from_logits", from_logits)
        self.network = checked_network(network, self.from_logits)
        self.num_classes = network.output_shape[-1]
        self._set_views(weak, strong)
        is_estimated = isinstance(priors, str)
        if is_estimated:
            _validate.one_of("priors", priors, ("estimated",))
        self.priors = priors if is_estimated else class_shares(priors, self.num_classes)

        def running(name: str) -> Any:
            start = keras.initializers.Constant(1.0 / self.num_classes)
            return self.add_weight(
                (self.num_classes,), start, trainable=False, autocast=False, name=name
            )

        if self.threshold is None:
            self.mean_confidence = running("confidence")
        if priors is not None:
            self.mean_prediction = running("prediction")
        self.pseudo_labelled = keras.metrics.Mean(name="pseudo_labelled")
        self._note_parts(public)

    @classmethod
    def from_paper(
        cls,
        network: Public[keras.Model],
        weak: Public[Any] = None,
        strong: Public[Any] = None,
        *,
        steps: int = 1 << 20,
        learning_rate: float = 0.03,
        l2_penalty: float = 5e-4,
        **settings: Public[Any],
    ) -> FixMatch:
        """Returns FixMatch with the settings of its paper, which ``tang2022`` uses, compiled.

        Hard pseudo-labels above 0.95, 7 unlabelled images per label, no alignment, cross-entropy of
        the noisy labels as they are, SGD with Nesterov momentum 0.9 and an L2 penalty, the learning
        rate ``learning_rate * cos(7 pi k / (16 steps))`` in step k, and an average of the weights
        with momentum 0.999. Fit with ``batch_size=64``.

        Args:
            network: as for the constructor.
            weak: as for the constructor.
            strong: as for the constructor; the paper's are ``rand_augment_views()``.
            steps: all steps of the training; the paper has 2^20.
            learning_rate: the rate of the first step.
            l2_penalty: 5e-4; the paper has 1e-3 for 100 classes.
            **settings: further arguments of the constructor.

        Example:
            >>> network = keras.Sequential(
            ...     [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
            ... )
            >>> model = FixMatch.from_paper(network, steps=1000)
            >>> model.threshold, model.unlabelled_ratio, model.priors
            (0.95, 7, None)
        """
        settings = {"threshold": 0.95, "temperature": None, "priors": None, **settings}
        model = cls(network, weak, strong, l2_penalty=l2_penalty, **settings)
        steps = _validate.integer_at_least("steps", steps, 1)
        # A cosine to -1 over 16/7 of the steps reaches 7 pi / 16 at the last one.
        rate = keras.optimizers.schedules.CosineDecay(learning_rate, 16 * steps / 7, alpha=-1.0)
        optimizer = keras.optimizers.SGD(
            rate, momentum=0.9, nesterov=True, use_ema=True, ema_momentum=0.999
        )
        model.compile(optimizer, keras.losses.CategoricalCrossentropy(model.from_logits))
        return model

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
        outputs = ops.cast(self.network(ops.concatenate(views), training=training), "float32")
        first, second = ops.shape(labelled)[0], ops.shape(unlabelled)[0]
        weak, strong = outputs[first : first + second], outputs[first + second :]
        targets, mask = self._pseudo_labels(ops.stop_gradient(weak), inputs["evidence"])
        return {"labelled": outputs[:first], "strong": strong, "targets": targets, "mask": mask}

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of the noisy labels plus that of the pseudo-labels."""
        outputs = y_pred if isinstance(y_pred, dict) else {"labelled": ops.cast(y_pred, "float32")}
        if self.loss is None:
            predicted = outputs["labelled"]
            small = predicted + self.SMALL
            logs = ops.log_softmax(predicted) if self.from_logits else ops.log(small)
            losses = self.negative_log_likelihood(y, logs)
            loss = ops.mean(losses if sample_weight is None else sample_weight * losses)
            loss = loss + sum(self.losses)
        else:
            loss = super().compute_loss(x, y, outputs["labelled"], sample_weight, training)
        if "mask" not in outputs:
            return loss
        if self.l2_penalty:
            kernels = [w for w in self.network.trainable_variables if len(w.shape) > 1]
            loss = loss + 0.5 * self.l2_penalty * sum(ops.sum(ops.square(w)) for w in kernels)
        losses = keras.losses.categorical_crossentropy(
            outputs["targets"], outputs["strong"], from_logits=self.from_logits
        )
        self.pseudo_labelled.update_state(outputs["mask"])
        return loss + self.unlabelled_weight * ops.mean(outputs["mask"] * losses)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns the metrics, the compiled ones on the noisy labels."""
        outputs = y_pred["labelled"] if isinstance(y_pred, dict) else y_pred
        return super().compute_metrics(x, y, outputs, sample_weight)

    def fit(  # type: ignore[override]  # noqa: PLR0913 (Keras's arguments, and the targets)
        self,
        x: Public[Any] = None,
        y: Public[Any] = None,
        batch_size: int | None = None,
        epochs: int = 1,
        *,
        targets: str | None = None,
        clusters: Public[Any] = None,
        sample_weight: Public[Any] = None,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        **kwargs: Setting[Any],
    ) -> Any:
        """Trains on noisy labels and on all images.

        Args:
            x: all images (n, height, width, channels), floats in [0, 1].
            y: ``NoisyLabels``, whose ``indices`` count these images; or an array without a receipt,
                of classes (n,), -1 for none, or of probabilities (n, K).
            batch_size: size of the labelled batch; None for 64.
            epochs: passes over all images.
            targets: ``"values"`` or ``"posterior"`` of the noisy labels, for a compiled loss; None
                for their likelihoods without one, else their values.
            clusters: ``find_clusters`` of the images, or clusters (n,): training uses only noisy
                labels that agree with their cluster (DenoiseSSL).
            sample_weight: (n,), at least 0; an example with weight 0 is unlabelled.
            steps_per_epoch: None for one pass over the images.
            seed: public seed of the batch order.
            **kwargs: further arguments of ``keras.Model.fit``.

        Returns:
            The ``History`` of ``keras.Model.fit``.

        Raises:
            ValueError: images or labels of another shape or range, a class without labels, soft
                targets without a compiled loss, or a ``ForwardCorrectedLoss`` for another draw or
                for targets that are corrected already.

        Warns:
            UserWarning: no cluster has some class.
        """
        public = public_input(x, clusters, sample_weight)
        images = self._read_images(public.value[0])
        has_loss = self.loss is not None
        if targets is None and not has_loss:
            kind = "likelihoods"
        else:
            kind = _validate.one_of("targets", targets or "values", ("values", "posterior"))
        labelled = read_targets(y, public, len(images), Classes(self.num_classes), kind)
        if not has_loss and labelled.likelihoods is None and labelled.targets.max(axis=1).min() < 1:
            raise ValueError(
                "expected classes, or NoisyLabels of a mechanism for classes, got probabilities. "
                "Compile a loss for them: CategoricalCrossentropy(from_logits=True)."
            )
        if isinstance(self.loss, ForwardCorrectedLoss) and labelled.noisy is not None:
            matrix = self.loss.transition_matrix
            _checks.run("corrected", kind, self.loss.name, matrix, labelled.noisy.channel)
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
            TrainedModel(self).attach(public.receipts)

        shares = labelled.class_shares if self.priors == "estimated" else self.priors
        shares = None if shares is None else np.asarray(shares, np.float32)

        def batch(chosen: np.ndarray, unlabelled: np.ndarray) -> Any:
            inputs = {"labelled": images[labelled.rows[chosen]], "unlabelled": images[unlabelled]}
            evidence = np.ones((len(unlabelled), self.num_classes), np.float32)
            if labelled.likelihoods is not None:
                evidence *= labelled.likelihoods[unlabelled]
            inputs["evidence"] = evidence if shares is None else evidence * shares
            return inputs, labelled.targets[chosen], labelled.weights[chosen]

        batches = Batches(
            batch,
            [len(labelled.rows), len(images)],
            [size, size * self.unlabelled_ratio],
            steps,
            seed,
        )
        with labelled.training(self):
            if self.compiled and not self.optimizer.built:
                # Variables that the first step makes would trace it twice.
                self.optimizer.build(self.trainable_variables)
            return super().fit(batches, **kwargs)

    def _pseudo_labels(self, outputs: Any, evidence: Any) -> tuple[Any, Any]:
        """Returns targets for the strong views, and a mask of those above the threshold.

        The evidence (n, K) has the class shares, and the likelihoods of the noisy labels.
        """
        shares = ops.softmax(outputs) if self.from_logits else outputs
        if self.priors is not None:
            self.mean_prediction.assign(_averaged(self.mean_prediction, ops.mean(shares, axis=0)))
            # A class that is never predicted has a mean of 0.
            shares = shares / ops.maximum(self.mean_prediction.value, self.SMALL)
        shares = _normalized(shares * evidence + self.SMALL)
        confidence = ops.max(shares, axis=-1)
        classes = ops.one_hot(ops.argmax(shares, axis=-1), self.num_classes)
        threshold = self.threshold
        if threshold is None:
            counts = ops.sum(classes, axis=0)
            means = ops.matmul(confidence, classes) / ops.maximum(counts, 1.0)
            # JAX takes no variables here.
            means = ops.where(counts > 0.0, means, self.mean_confidence.value)
            self.mean_confidence.assign(_averaged(self.mean_confidence, means))
            threshold = ops.matmul(classes, self.mean_confidence.value)
        mask = ops.cast(confidence >= threshold, shares.dtype)
        if self.temperature is None:
            return classes, mask
        return sharpened(shares, self.temperature), mask


def _averaged(mean: Any, new: Any) -> Any:
    return _MOMENTUM * mean + (1.0 - _MOMENTUM) * new


def _normalized(shares: Any) -> Any:
    return shares / ops.sum(shares, axis=-1, keepdims=True)


def sharpened(shares: Any, temperature: float) -> Any:
    """Returns probabilities (n, K) to the power of 1/temperature, normalised."""
    return _normalized(shares ** (1.0 / temperature))


def checked_network(network: Any, from_logits: bool) -> keras.Model:
    """Returns a built classifier whose last activation agrees with ``from_logits``, or raises."""
    Learner.built_network(network, "network")
    last = getattr(getattr(network.layers[-1], "activation", None), "__name__", None)
    if (last == "softmax") == from_logits:
        raise ValueError(
            f"from_logits={from_logits} contradicts the network's last activation {last}. Set "
            f"from_logits={not from_logits}, or change the last layer."
        )
    return network
