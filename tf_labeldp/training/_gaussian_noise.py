"""The noise of a step: what may be plugged in, and independent Gaussian noise."""

from __future__ import annotations

import abc
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting._events import dp_sgd_event
from tf_labeldp.training._normal_draws import standard_normal

_GRID = 2.0**-16
"""Noisy sums are rounded to this fraction of the noise's standard deviation."""
_CIPHER = (
    "nobody tells the key stream of AES-256 from random bits, which the noise of steps is made of"
)


class NoiseMechanism(abc.ABC):
    """Adds noise to the sum of clipped gradients, once a step.

    ``LabelDPOptimizer`` makes a ``GaussianNoise`` where none is given; ``tf_privacy.QueryNoise``
    adapts the queries of TF Privacy.

    Guarantee:
        This base class promises nothing. A statement about noise of your own rests on the event
        that its ``dp_event`` names, and says that this is its author's claim.

    Attributes:
        noise_multiplier: standard deviation of one step's noise, divided by ``l2_norm_clip``; must
            not change while a model is trained.
        seeded: whether the noise can be repeated; then a statement says "not private: seeded".

    Example:
        >>> isinstance(GaussianNoise(noise_multiplier=1.0), NoiseMechanism)
        True
    """

    noise_multiplier: float
    seeded: bool = False

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns what is carried from step to step: a nest of tensors, ``()`` for nothing."""
        return ()

    @abc.abstractmethod
    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Any
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the noisy sum and the next state; called once a step.

        Args:
            clipped_sum: tensors like the variables: a sum of gradients, of which each has L2 norm
                ``l2_norm_clip`` at most over all tensors together.
            l2_norm_clip: the bound C.
            state: from ``initial_state`` or from the last step.
        """

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        """Returns the ``dp_accounting`` event of some steps; None where nothing can be promised.

        ``accounting.dp_sgd_event`` is that of independent Gaussian noise in each step.

        Args:
            sampling_probability: of Poisson sampling; 1 where nothing is amplified.
            steps: the number of uses of each example.
        """
        return None

    def assumptions(self) -> tuple[str, ...]:
        """Returns what a statement about this noise rests on."""
        return ()

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        return {"noise_multiplier": self.noise_multiplier}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NoiseMechanism:
        """Returns the mechanism that ``get_config`` described."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class GaussianNoise(NoiseMechanism):
    """Independent Gaussian noise in every coordinate and step (``ghazi2024``, Algorithm 1, line 5).

    Guarantee:
        The noise has standard deviation ``noise_multiplier * l2_norm_clip`` in each coordinate. Its
        bits are those of AES-256 in counter mode under a key that the operating system draws for
        each step, unless a seed is given: statements name the cipher as an assumption. It is drawn
        and added in double precision, and the noisy sum is rounded to a grid of 2^-16 standard
        deviations, so that the last bits of a sum tell nothing of what was added (Mironov 2012
        shows that they may for other noise). The statement treats the draw as an exact Gaussian.

    Args:
        noise_multiplier: standard deviation over ``l2_norm_clip``, finite and above zero.
        insecure_seed: makes the noise repeatable; the statement then says "not private: seeded".

    Example:
        >>> noise = GaussianNoise(noise_multiplier=2.0, insecure_seed=1)
        >>> noisy, _ = noise.add_noise([tf.zeros([3])], 1.0, ())
        >>> noisy[0].shape
        TensorShape([3])
    """

    def __init__(self, noise_multiplier: float, *, insecure_seed: int | None = None) -> None:
        self._noise_multiplier = _validate.positive_finite("noise_multiplier", noise_multiplier)
        self.insecure_seed, self._rng = insecure_seed, None
        self.seeded = insecure_seed is not None
        if insecure_seed is not None:
            self.insecure_seed = _validate.integer_at_least("insecure_seed", insecure_seed, 0)
            self._rng = np.random.default_rng(self.insecure_seed)

    @property
    def noise_multiplier(self) -> float:  # type: ignore[override]
        """Standard deviation over ``l2_norm_clip``; it can't be changed."""
        return self._noise_multiplier

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        """Returns the event of DP-SGD with this noise."""
        return dp_sgd_event(self.noise_multiplier, sampling_probability, steps)

    def assumptions(self) -> tuple[str, ...]:
        """Returns what a statement about this noise rests on."""
        return () if self.seeded else (_CIPHER,)

    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Any
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the sum with Gaussian noise, in ``float32``; there is no state."""
        scale = self.noise_multiplier * l2_norm_clip
        shapes = [tf.shape(part) for part in clipped_sum]
        flat = tf.concat([tf.reshape(part, [-1]) for part in clipped_sum], 0)
        # Once a run of this step: `numpy_function` is stateful, so no pass folds or shares it.
        unit = tf.numpy_function(
            lambda size: standard_normal(int(size), self._rng), [tf.size(flat)], tf.float64
        )
        noisy = tf.cast(flat, tf.float64) + scale * tf.reshape(unit, [-1])
        grid = scale * _GRID
        noisy = tf.cast(tf.round(noisy / grid) * grid, tf.float32)
        parts = tf.split(noisy, [tf.reduce_prod(shape) for shape in shapes])
        return [
            tf.ensure_shape(tf.reshape(part, shape), like.shape)
            for part, shape, like in zip(parts, shapes, clipped_sum, strict=True)
        ], state

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        return {"noise_multiplier": self.noise_multiplier, "insecure_seed": self.insecure_seed}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GaussianNoise:
        """Returns the noise that ``get_config`` described, also of version 0.1."""
        return cls(**renamed_seed(config))


def renamed_seed(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration with the new name of version 0.1's ``seed`` of private noise."""
    config = dict(config)
    if "seed" in config:
        config["insecure_seed"] = config.pop("seed")
    return config
