"""The noise of a step: its contract, and independent Gaussian noise."""

from __future__ import annotations

import abc
import functools
import operator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp._progress import num_cores
from tf_labeldp.accounting import Assumption, Setting
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.mechanisms.step_noise import DeviceNormal, noisy_sums
from tf_labeldp.training._configured import Stateful

_GRID = 2.0**-16
"""Noisy sums are rounded to this fraction of the noise's standard deviation.

The grid depends on the noise alone, not on the sum, and the rounding moves a coordinate by at most
2^-17 standard deviations.
"""
_CIPHERS = {"host": "AES-256", "device": "ChaCha20"}
"""The pseudorandom generator of each source."""


def _num_threads() -> int:
    """Returns the number of threads of TensorFlow's operations."""
    return tf.config.threading.get_intra_op_parallelism_threads() or num_cores()


def fixed(name: str, doc: str) -> Any:
    """Returns a property that can't be set: steps are charged for it."""
    return property(operator.attrgetter(name), doc=doc)


class NoiseMechanism(Stateful, abc.ABC):
    """Adds noise to the sum of clipped gradients, once per step.

    ``LabelDPOptimizer`` makes a ``GaussianNoise`` by default; ``tf_privacy.QueryNoise`` adapts the
    queries of TF Privacy.

    Guarantee:
        This base class promises nothing. A statement about another library's noise rests on the
        noise's ``dp_event``, as its author's claim.

    Attributes:
        noise_multiplier: standard deviation of one step's noise over ``l2_norm_clip``; must not
            change during training.
        seeded: whether the noise is repeatable; statements are then "not private: seeded".
        insecure_seed: the seed of repeatable noise, if it has one of its own.
        compiles: whether ``add_noise`` consists of TensorFlow operations alone, without calls of
            Python, which ``jit_compile=True`` needs.

    Example:
        >>> isinstance(GaussianNoise(noise_multiplier=1.0), NoiseMechanism)
        True
    """

    noise_multiplier: float
    seeded: bool = False
    insecure_seed: int | None = None
    compiles: bool = False

    def begin(self) -> None:
        """Prepares for the steps of a ``fit``."""
        return None

    @abc.abstractmethod
    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Setting[Any]
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the noisy sum and the next state; called once per step.

        Args:
            clipped_sum: tensors shaped like the variables: a sum of gradients whose L2 norm, over
                all tensors, is at most ``l2_norm_clip``.
            l2_norm_clip: the bound C.
            state: from ``initial_state`` or from the previous step.
        """

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        """Returns the ``dp_accounting`` event of the steps; None if nothing can be promised.

        Args:
            sampling_probability: q of Poisson sampling; 1 without amplification.
            steps: the number of uses of each example.
        """
        return None

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns the assumptions of a statement about this noise."""
        return ()


@keras.saving.register_keras_serializable(package="tf_labeldp")
class GaussianNoise(NoiseMechanism):
    """Independent Gaussian noise in every coordinate and step (``ghazi2024``, Algorithm 1, line 5).

    Guarantee:
        The noise has standard deviation ``noise_multiplier * l2_norm_clip`` in each coordinate.
        Without a seed, its bits come from a cipher under keys of 256 bits that the operating system
        draws: on the host from OpenSSL's AES-256 with new keys in each step, on the device from
        ChaCha20 with a key per ``fit`` and a nonce per step. Statements name the cipher as an
        assumption. Noise is drawn and added in double precision, and the noisy sum is rounded to a
        grid of 2^-16 standard deviations, so that the last bits of a sum reveal nothing (Mironov
        2012 shows that they may for other noise). The statement treats the draw as an exact
        Gaussian.

    Args:
        noise_multiplier: standard deviation over ``l2_norm_clip``, finite and above zero.
        source: ``"host"`` draws in Python, outside a step's program; ``"device"`` draws inside,
            which is faster on a GPU, and which ``jit_compile=True`` chooses by itself.
        insecure_seed: makes the noise repeatable; statements are then "not private: seeded".

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
    seeded: bool = fixed("_seeded", "Whether the noise is repeatable.")

    def begin(self) -> None:
        """Draws a new key for noise on the device."""
        if self.source == "device":
            self._device.new_key()

    def dp_event(self, sampling_probability: float, steps: int, clipping: str = "norm") -> Any:
        """Returns the event of DP-SGD with this noise and clipping."""
        return EventFields.dp_sgd(
            self.noise_multiplier, sampling_probability, steps, clipping
        ).dp_event()

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns the assumption that the cipher is secure; none for seeded noise."""
        if self.seeded:
            return ()
        cipher = _CIPHERS[self.source]
        # The words of 0.2, so that a statement of steps of both versions has them once.
        text = f"{cipher} is a secure pseudorandom generator: the noise of the steps is made of it."
        return (Assumption("secure-key-stream", "machines", text),)

    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Setting[Any]
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the sum with Gaussian noise, in ``float32``; there is no state."""
        scale = self.noise_multiplier * l2_norm_clip
        grid = scale * _GRID
        if self.source == "host":
            # A stateful operation, since TensorFlow could fold or share others.
            add = lambda *sums: noisy_sums(sums, scale, grid, self._rng, _num_threads())  # noqa: E731
            dtypes = [tf.float32] * len(clipped_sum)
            parts = tf.nest.flatten(tf.numpy_function(add, clipped_sum, dtypes))
        else:
            flat = tf.concat([tf.reshape(part, [-1]) for part in clipped_sum], 0)
            noisy = tf.cast(flat, tf.float64) + scale * self._device.draw(flat.shape[0])
            noisy = tf.cast(tf.round(noisy / grid) * grid, tf.float32)
            parts = tf.split(noisy, [tf.size(part) for part in clipped_sum])
        return [
            tf.ensure_shape(tf.reshape(part, tf.shape(like)), like.shape)
            for part, like in zip(parts, clipped_sum, strict=True)
        ], state

    @functools.cached_property
    def _device(self) -> DeviceNormal:
        return DeviceNormal(self.insecure_seed)

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> GaussianNoise:
        """Returns the noise of a configuration.

        The integers of 0.2 (``source="integer"``) become the doubles of ``"device"``: receipts keep
        the cost of the steps taken, and further steps have the event of their noise.
        """
        source = config.get("source", "host")
        return cls(**{**config, "source": "device" if source == "integer" else source})
