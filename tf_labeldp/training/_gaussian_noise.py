"""The noise of a step: the contract of noise, and independent Gaussian noise."""

from __future__ import annotations

import abc
import functools
import operator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Assumption, Setting
from tf_labeldp.accounting.events import dp_sgd_event
from tf_labeldp.mechanisms.step_noise import DeviceNormal, standard_normal

_GRID = 2.0**-16
"""Noisy sums are rounded to this fraction of the noise's standard deviation."""
_CIPHERS = {"host": "AES-256", "device": "ChaCha20"}


def fixed(name: str, doc: str) -> Any:
    """Returns a property that can't be set: steps are charged for it."""
    return property(operator.attrgetter(name), doc=doc)


class NoiseMechanism(abc.ABC):
    """Adds noise to the sum of clipped gradients, once per step.

    ``LabelDPOptimizer`` makes a ``GaussianNoise`` by default; ``tf_privacy.QueryNoise`` adapts the
    queries of TF Privacy.

    Guarantee:
        This base class promises nothing. A statement about noise of another library rests on the
        event that its ``dp_event`` names, and calls that its author's claim.

    Attributes:
        noise_multiplier: standard deviation of one step's noise, divided by ``l2_norm_clip``; must
            not change while a model is trained.
        seeded: whether the noise can be repeated; then a statement says "not private: seeded".
        compiles: whether ``add_noise`` consists of TensorFlow's operations alone, without a call of
            Python, as ``jit_compile=True`` needs it.

    Example:
        >>> isinstance(GaussianNoise(noise_multiplier=1.0), NoiseMechanism)
        True
    """

    noise_multiplier: float
    seeded: bool = False
    compiles: bool = False

    def begin(self) -> None:
        """Prepares for the steps of another ``fit``."""
        return None

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns the state carried from step to step: a nest of tensors, ``()`` for none."""
        return ()

    @abc.abstractmethod
    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Setting[Any]
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the noisy sum and the next state; called once per step.

        Args:
            clipped_sum: tensors shaped like the variables: a sum of gradients, each with an L2 norm
                of at most ``l2_norm_clip`` over all tensors together.
            l2_norm_clip: the bound C.
            state: from ``initial_state`` or from the last step.
        """

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        """Returns the ``dp_accounting`` event of some steps; None if nothing can be promised.

        Args:
            sampling_probability: of Poisson sampling; 1 without amplification.
            steps: the number of uses of each example.
        """
        return None

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns the assumptions of a statement about this noise."""
        return ()

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        return {"noise_multiplier": self.noise_multiplier}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> NoiseMechanism:
        """Returns the mechanism that ``get_config`` described."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class GaussianNoise(NoiseMechanism):
    """Independent Gaussian noise in every coordinate and step (``ghazi2024``, Algorithm 1, line 5).

    Guarantee:
        The noise has standard deviation ``noise_multiplier * l2_norm_clip`` in each coordinate.
        Unless a seed is given, its bits come from a cipher under keys of 256 bits that the
        operating system draws: on the host from OpenSSL's AES-256 generator, on the device from
        ChaCha20 with a key for each ``fit`` and a nonce for each step. Statements name the cipher
        as an assumption. Noise is drawn and added in double precision, and the noisy sum is rounded
        to a grid of 2^-16 standard deviations, so that the last bits of a sum reveal nothing
        (Mironov 2012 shows that they may for other noise). The statement treats the draw as an
        exact Gaussian.

    Args:
        noise_multiplier: standard deviation over ``l2_norm_clip``, finite and above zero.
        source: ``"host"`` draws in Python, outside the program of a step; ``"device"`` inside the
            program, which ``jit_compile=True`` needs, and which is faster on a GPU.
        insecure_seed: makes the noise repeatable; the statement then says "not private: seeded".

    Example:
        >>> noise = GaussianNoise(noise_multiplier=2.0, insecure_seed=1)
        >>> noisy, _ = noise.add_noise([tf.zeros([3])], 1.0, ())
        >>> noisy[0].shape
        TensorShape([3])
    """

    def __init__(
        self,
        noise_multiplier: float,
        *,
        source: str = "host",
        insecure_seed: int | None = None,
    ) -> None:
        self._noise_multiplier = _validate.positive_finite("noise_multiplier", noise_multiplier)
        self._source = _validate.one_of("source", source, tuple(_CIPHERS))
        self._seeded, self.compiles = insecure_seed is not None, source == "device"
        self._insecure_seed, self._rng = insecure_seed, None
        if insecure_seed is not None:
            self._insecure_seed = _validate.integer_at_least("insecure_seed", insecure_seed, 0)
            self._rng = np.random.default_rng(self.insecure_seed)

    noise_multiplier: float = fixed(
        "_noise_multiplier", "Standard deviation over ``l2_norm_clip``."
    )
    source: str = fixed("_source", 'Where the noise is drawn: ``"host"`` or ``"device"``.')
    insecure_seed: int | None = fixed("_insecure_seed", "The seed of repeatable noise, or None.")
    seeded: bool = fixed("_seeded", "Whether the noise can be repeated.")

    def begin(self) -> None:
        """Takes a new key for the noise of the device."""
        if self.source == "device":
            self._device.new_key()

    def dp_event(self, sampling_probability: float, steps: int, clipping: str = "norm") -> Any:
        """Returns the event of DP-SGD with this noise, and this clipping."""
        return dp_sgd_event(self.noise_multiplier, sampling_probability, steps, clipping)

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns the assumption that the cipher is secure; none for seeded noise."""
        if self.seeded:
            return ()
        cipher = _CIPHERS[self.source]
        text = f"{cipher} is a secure pseudorandom generator: the noise of the steps is made of it."
        return (Assumption("secure-key-stream", "machines", text),)

    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Setting[Any]
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the sum with Gaussian noise, in ``float32``; there is no state."""
        shapes = [tf.shape(part) for part in clipped_sum]
        flat = tf.concat([tf.reshape(part, [-1]) for part in clipped_sum], 0)
        scale = self.noise_multiplier * l2_norm_clip
        noisy = tf.cast(flat, tf.float64) + scale * tf.reshape(self._unit(flat), [-1])
        grid = scale * _GRID
        noisy = tf.cast(tf.round(noisy / grid) * grid, tf.float32)
        parts = tf.split(noisy, [tf.reduce_prod(shape) for shape in shapes])
        return [
            tf.ensure_shape(tf.reshape(part, shape), like.shape)
            for part, shape, like in zip(parts, shapes, clipped_sum, strict=True)
        ], state

    def _unit(self, like: tf.Tensor) -> tf.Tensor:
        """Returns standard normal numbers, others in each run of the step."""
        if self.source == "device":
            return self._device.draw(like.shape[0])
        # Stateful, so that no pass folds or shares it.
        draw = lambda size: standard_normal(int(size), self._rng)  # noqa: E731
        return tf.numpy_function(draw, [tf.size(like)], tf.float64)

    @functools.cached_property
    def _device(self) -> DeviceNormal:
        return DeviceNormal(self.insecure_seed)

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        names = ("noise_multiplier", "source", "insecure_seed")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> GaussianNoise:
        """Returns the noise that ``get_config`` described.

        The integers of 0.2 (``source="integer"``) become the doubles of ``"device"``: what steps
        have spent stays in their receipts, and further steps have the event of their own noise.
        """
        source = config.get("source", "host")
        return cls(**{**config, "source": "device" if source == "integer" else source})
