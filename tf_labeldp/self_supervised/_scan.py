"""SCAN: clusters of images that follow their classes, found without labels."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_labeldp import _validate
from tf_labeldp._progress import silent, without_retracing_warnings
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.features._neighbour_smoothing import nearest_neighbours
from tf_labeldp.features.clusters import Clusters
from tf_labeldp.self_supervised._views import rand_augment_views
from tf_labeldp.self_supervised.training import Batches, Learner
from tf_labeldp.vault.counted_steps import CountedSteps


@keras.saving.register_keras_serializable(package="tf_labeldp")
class SCAN(Learner):
    """Clusters images with a network that gives an image and its neighbours the same cluster.

    The first stage puts a strong view of each image into the cluster of a strong view of one of its
    nearest neighbours, by the features of an encoder, and keeps all clusters in use. The second
    stage (self-labelling) trains strong views on the clusters of confident images.
    ``clusters(images)`` goes into ``NoiseCluster``, ``denoise_labels``, ``FixMatch.fit(clusters=)``
    and ``ClusterRandomizedResponse``.

    Guarantee:
        Training uses no labels, so nothing is charged. The images are public; receipts of the
        encoder are passed on.

    Source: Van Gansbeke et al. (2020), which ``tang2022`` uses for Algorithms 1, 2 and 7: 20
    neighbours and the image itself, entropy weight 5, 50 epochs of batches of 128; self-labelling
    at 0.99, 200 epochs of batches of 1,000 (``fit(epochs=0, self_label_epochs=200,
    batch_size=1000)``, after the first stage); ``keras.optimizers.Adam(1e-4)`` with an L2 penalty
    of 1e-4. Neighbours are those of the encoder's centred features; the authors take SimCLR's
    projections, which are not part of an encoder.

    Args:
        encoder: a built Keras model from images to features (n, d), for example
            ``SimCLR.encoder()``. Training changes it, so pass a copy
            (``keras.models.clone_model`` and ``set_weights``) to keep the original.
        num_clusters: C, at least 2; usually the number of classes.
        num_neighbours: neighbours per image, at least 1.
        entropy_weight: weight of the mean assignment's entropy, at least 0.
        threshold: probability from which self-labelling uses an image, in (0, 1).
        weak: layers for the views whose clusters are targets of self-labelling; None for the images
            themselves, as the authors take them.
        strong: layers for strong views; None for those of the authors without mirrored images,
            ``self_supervised.rand_augment_views(shift=0.0, operations=4, reach=0.1,
            cutout=(0.0, 0.5))``. Set ``flip=True`` for photographs and clothes.

    Raises:
        ValueError: arguments out of range, or an encoder without outputs (n, d).

    Example:
        >>> images = np.random.default_rng(0).random((64, 8, 8, 1), dtype=np.float32)
        >>> encoder = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
        >>> strong = keras.layers.GaussianNoise(0.1)
        >>> model = SCAN(encoder, num_clusters=2, num_neighbours=5, strong=strong)
        >>> model.compile(keras.optimizers.Adam(1e-3))
        >>> history = model.fit(images, batch_size=32, self_label_epochs=1, verbose=0)
        >>> len(model.clusters(images))
        64
    """

    def __init__(
        self,
        encoder: Public[keras.Model],
        num_clusters: int,
        *,
        num_neighbours: int = 20,
        entropy_weight: float = 5.0,
        threshold: float = 0.99,
        weak: Public[Any] = None,
        strong: Public[Any] = None,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(**kwargs)
        public = public_input(encoder, weak, strong)
        encoder, weak, strong = public.value
        self.encoder = self.built_network(encoder, "encoder")
        self.num_clusters = _validate.integer_at_least("num_clusters", num_clusters, 2)
        self.num_neighbours = _validate.integer_at_least("num_neighbours", num_neighbours, 1)
        self.entropy_weight = _validate.number_in("entropy_weight", entropy_weight, "[0, inf)")
        self.threshold = _validate.number_in("threshold", threshold, "(0, 1)")
        self._checks_images = strong is None
        self.weak = keras.layers.Identity() if weak is None else weak
        self.strong = (
            rand_augment_views(shift=0.0, operations=4, reach=0.1, cutout=(0.0, 0.5))
            if strong is None
            else strong
        )
        width = self.encoder.output_shape[-1]
        self.head = keras.Sequential(
            [keras.Input((width,)), keras.layers.Dense(self.num_clusters, activation="softmax")]
        )
        self.sure = keras.metrics.Mean(name="sure")
        self._note_parts(public)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns cluster probabilities (n, C), for two views in training (2n, C)."""
        if not isinstance(inputs, dict):
            return self.head(self.encoder(inputs, training=training))
        sources = [(self.weak, inputs["images"]), (self.strong, inputs["images"])]
        if "neighbours" in inputs:
            sources = [(self.strong, inputs[key]) for key in ("images", "neighbours")]
        # Each kind of view has its own batch statistics, as in the authors' code.
        views = [
            self.encoder(views(images, training=True), training=training)
            for views, images in sources
        ]
        return ops.cast(self.head(ops.concatenate(views)), "float32")

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns SCAN's loss; for batches without neighbours, the loss of self-labelling."""
        first, second = ops.split(y_pred, 2)
        small = 1e-8
        if "neighbours" in x:
            agreement = ops.sum(first * second, axis=-1)
            mean = ops.mean(first, axis=0)
            entropy = -ops.sum(mean * ops.log(mean + small))
            return -ops.mean(ops.log(agreement + small)) - self.entropy_weight * entropy
        targets = ops.one_hot(ops.argmax(first, axis=-1), self.num_clusters)
        sure = ops.cast(ops.max(first, axis=-1) > self.threshold, first.dtype)
        # Clusters have equal weight, so an image has the inverse of its cluster's confident share.
        counts = ops.sum(targets * sure[:, None], axis=0)
        weights = ops.stop_gradient(sure * ops.sum(targets / (counts + small), axis=-1))
        wrong = keras.losses.categorical_crossentropy(ops.stop_gradient(targets), second)
        self.sure.update_state(sure)
        return ops.sum(weights * wrong) / ops.maximum(ops.sum(weights), 1.0)

    def fit(  # type: ignore[override]
        self,
        x: Public[Any],
        *,
        batch_size: int = 128,
        epochs: int = 1,
        self_label_epochs: int = 0,
        seed: int = 0,
        **kwargs: Setting[Any],
    ) -> Any:
        """Finds the neighbours of all images, then trains both stages.

        Args:
            x: images (n, height, width, channels), floats in [0, 1], more than ``num_neighbours``.
                There is no ``y``.
            batch_size: at least 2.
            epochs: epochs of the first stage.
            self_label_epochs: epochs of self-labelling, which follows; 0 for none.
            seed: public seed of batch order and of the choice among neighbours.
            **kwargs: further arguments of ``keras.Model.fit``.

        Returns:
            The ``History`` of the last stage.

        Raises:
            ValueError: images of another shape or range, or too few of them.
        """
        public = public_input(x)
        images = self._read_images(public.value)
        if len(images) <= self.num_neighbours:
            raise ValueError(
                f"expected more than num_neighbours={self.num_neighbours} images, got "
                f"{len(images)}. Give more images, or a smaller num_neighbours."
            )
        size = min(_validate.integer_at_least("batch_size", batch_size, 2), len(images))
        with silent(kwargs.get("verbose", "auto")), without_retracing_warnings():
            rows = self.encoder.predict(images, batch_size=512, verbose=0)
            rows = rows - rows.mean(axis=0)
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
            near = nearest_neighbours(rows, rows, self.num_neighbours)
        near = np.column_stack([np.arange(len(images)), near])
        rng = np.random.default_rng(seed)

        def pairs(batch: np.ndarray) -> Any:
            column = rng.integers(near.shape[1], size=len(batch))
            return ({"images": images[batch], "neighbours": images[near[batch, column]]},)

        def singles(batch: np.ndarray) -> Any:
            return ({"images": images[batch]},)

        history = None
        with CountedSteps.throughout(self, public.receipts):
            for make, count in ((pairs, epochs), (singles, self_label_epochs)):
                if count:
                    batches = Batches(make, [len(images)], [size], seed=seed)
                    history = super().fit(batches, epochs=count, **kwargs)
        return history

    @without_retracing_warnings()
    def clusters(self, images: Public[Any]) -> Clusters:
        """Returns the most likely cluster of each image, as ``find_clusters`` does.

        ``assign`` of the result does the same for new images: the nearest unit vector to an output
        is its most likely cluster.
        """
        public = public_input(images, self)
        images = np.asarray(public.value[0])
        corners = np.eye(self.num_clusters)
        chosen = self.predict(images, batch_size=512, verbose=0).argmax(axis=1).astype(np.int64)
        return Clusters(chosen, self.num_clusters, corners, self, receipts=public.receipts)
