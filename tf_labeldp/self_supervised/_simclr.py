"""SimCLR: an encoder trained on images alone."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.self_supervised._views import strong_views
from tf_labeldp.self_supervised.training import Batches, Learner
from tf_labeldp.vault.counted_steps import CountedSteps


@keras.saving.register_keras_serializable(package="tf_labeldp")
class SimCLR(Learner):
    """Trains an encoder to match two views of one image among views of other images.

    ``encoder()`` then makes features for ``find_clusters``, heads and ``SCAN``, or is a warm start
    for any model.

    Guarantee:
        Training uses no labels, so nothing is charged and nothing is assumed. The images are
        public.

    Source: Chen et al. (2020), with the NT-Xent loss of both views; the encoder of ``ghazi2024``
    (section 5.3: a ResNet for 1,000 epochs with batches of 1,024) and, below SCAN, of ``tang2022``.
    ``ghazi2021`` (section 5.2) has BYOL and DINO in its place. On CIFAR-10 the paper has
    ``views=self_supervised.sim_clr_views(flip=True)``, a temperature of 0.5 and the optimizer LARS,
    which Keras lacks; SCAN's authors have ``sim_clr_views(flip=True, smallest=0.2)``, a temperature
    of 0.1 and ``keras.optimizers.SGD`` with a momentum of 0.9, an L2 penalty of 1e-4 and a rate of
    0.4 on a cosine, and score the first views alone.

    Args:
        network: a built Keras model from images to features (n, d).
        views: layers for random views; None for ``self_supervised.strong_views()``.
        projection_dim: width of the projection that the loss compares.
        temperature: temperature of the loss, above zero.

    Raises:
        ValueError: arguments out of range, or a network without outputs (n, d).

    Example:
        >>> import numpy as np
        >>> images = np.random.default_rng(0).random((64, 8, 8, 1), dtype=np.float32)
        >>> network = keras.Sequential(
        ...     [keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
        ... )
        >>> model = SimCLR(network)
        >>> model.compile("adam")
        >>> history = model.fit(images, batch_size=32, verbose=0)
        >>> model.encoder().predict(images, verbose=0).shape
        (64, 144)
    """

    def __init__(
        self,
        network: Public[keras.Model],
        views: Public[Any] = None,
        *,
        projection_dim: int = 128,
        temperature: float = 0.1,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(**kwargs)
        public = public_input(network, views)
        network, views = public.value
        self.network = self.built_network(network, "network")
        self._checks_images = views is None
        self.views = strong_views() if views is None else views
        self.projection_dim = _validate.integer_at_least("projection_dim", projection_dim, 2)
        self.temperature = _validate.positive_finite("temperature", temperature)
        width = self.network.output_shape[-1]
        self.projector = keras.Sequential(
            [
                keras.Input((width,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(self.projection_dim),
            ]
        )
        self._note_parts(public)

    def encoder(self) -> keras.Model:
        """Returns the encoder from images to features (n, d), which shares its weights."""
        return self.network

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns features (n, d); in training, projections (2n, p) of two views per image."""
        if not training:
            return self.network(inputs, training=False)
        views = [self.views(inputs, training=True) for _ in range(2)]
        return self.projector(self.network(ops.concatenate(views), training=True))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the NT-Xent loss of the projections."""
        projections = ops.cast(y_pred if training else self(x, training=True), "float32")
        # XLA's gradient of ops.normalize is NaN where a projection is zero.
        squares = ops.sum(ops.square(projections), axis=-1, keepdims=True)
        rows = projections * ops.rsqrt(ops.maximum(squares, 1e-12))
        size = ops.shape(rows)[0]
        scores = rows @ ops.transpose(rows) / self.temperature - 1e9 * ops.eye(size)
        partner = ops.roll(ops.arange(size), size // 2)
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(partner, scores, from_logits=True)
        )

    def fit(  # type: ignore[override]
        self,
        x: Public[Any],
        *,
        batch_size: int = 256,
        epochs: int = 1,
        seed: int = 0,
        **kwargs: Setting[Any],
    ) -> Any:
        """Trains the encoder on images.

        Args:
            x: images (n, height, width, channels), floats in [0, 1]. There is no ``y``.
            batch_size: at least 2; larger batches give the loss more images to compare.
            epochs: passes over the images.
            seed: public seed of the batch order.
            **kwargs: further arguments of ``keras.Model.fit``.

        Returns:
            The ``History`` of ``keras.Model.fit``.

        Raises:
            ValueError: images of another shape or range.
        """
        public = public_input(x)
        images = self._read_images(public.value)
        size = min(_validate.integer_at_least("batch_size", batch_size, 2), len(images))
        batches = Batches(lambda rows: (images[rows],), [len(images)], [size], seed=seed)
        with CountedSteps.throughout(self, public.receipts):
            return super().fit(batches, epochs=epochs, **kwargs)
