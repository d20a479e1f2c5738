"""The noise of a step: what may be plugged in, and independent Gaussian noise."""

from __future__ import annotations

import abc
import math
import operator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Assumption, Setting
from tf_labeldp.accounting._events import dp_sgd_event
from tf_labeldp.training._chacha import DeviceNormal
from tf_labeldp.training._integer_normal import IntegerNormal, added_delta, lattice
from tf_labeldp.training._normal_draws import standard_normal

_GRID = 2.0**-16
"""Noisy sums are rounded to this fraction of the noise's standard deviation."""
_CIPHERS = {"host": "AES-256", "device": "ChaCha20", "integer": "ChaCha20"}
_DRAWN_BY = {"device": DeviceNormal, "integer": IntegerNormal}
_KEY_STREAM = "{} is a secure pseudorandom generator: the noise of the steps is made of it."


def fixed(name: str, doc: str) -> Any:
    """Returns a property that can't be set: steps are charged for it."""
    return property(operator.attrgetter(name), doc=doc)


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
        compiles: whether ``add_noise`` is made of TensorFlow's operations alone, without a call of
            Python, as ``jit_compile=True`` needs it.

    Example:
        >>> isinstance(GaussianNoise(noise_multiplier=1.0), NoiseMechanism)
        True
    """

    noise_multiplier: float
    seeded: bool = False
    compiles: bool = False

    def begin(self) -> None:
        """Makes ready for the steps of another ``fit``."""
        return None

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns what is carried from step to step: a nest of tensors, ``()`` for nothing."""
        return ()

    @abc.abstractmethod
    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Setting[Any]
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

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns what a statement about this noise rests on."""
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
        The noise has standard deviation ``noise_multiplier * l2_norm_clip`` in each coordinate. Its
        bits come from a cipher under keys of 256 bits that the operating system draws, unless a
        seed is given: AES-256 in counter mode with a key for each step on the host, ChaCha20 with a
        key for each ``fit`` and a nonce for each step on the device. Statements name the cipher as
        an assumption. On host and device the noise is drawn and added in double precision, and the
        noisy sum is rounded to a grid of 2^-16 standard deviations, so that the last bits of a sum
        tell nothing of what was added (Mironov 2012 shows that they may for other noise). The
        statement treats the draw as an exact Gaussian. With ``source="integer"`` the sum is rounded
        to a lattice first and integers are added; rounding and the distance from the Gaussian are
        in the statement (docs/accounting.md has the proof).

    Args:
        noise_multiplier: standard deviation over ``l2_norm_clip``, finite and above zero.
        source: ``"host"`` draws in Python, beside the program of a step; ``"device"`` within the
            program, which ``jit_compile=True`` needs, and which is faster on a GPU. ``"integer"``
            does so too, in integers and single precision: for TPUs, which have no double precision
            and are refused otherwise (untested on a TPU until one is at hand). It is slower, and
            for 2^30 weights and noise multipliers from 0.35 on.
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
        self._insecure_seed, self._rng = insecure_seed, None
        self._seeded, self.compiles = insecure_seed is not None, source != "host"
        self._device: Any = None
        if insecure_seed is not None:
            self._insecure_seed = _validate.integer_at_least("insecure_seed", insecure_seed, 0)
            self._rng = np.random.default_rng(self.insecure_seed)

    noise_multiplier: float = fixed(
        "_noise_multiplier", "Standard deviation over ``l2_norm_clip``."
    )
    source: str = fixed(
        "_source", 'Where the noise is drawn: ``"host"``, ``"device"`` or ``"integer"``.'
    )
    insecure_seed: int | None = fixed("_insecure_seed", "What makes the noise repeatable, or None.")
    seeded: bool = fixed("_seeded", "Whether the noise can be repeated.")

    def begin(self) -> None:
        """Takes a new key for the noise of the device."""
        if self._device is not None:
            self._device.new_key()
        elif self.source != "host":
            self._drawer()

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns no state; raises for more weights than ``source="integer"`` is for."""
        if self.source == "integer":
            lattice(self.noise_multiplier, 1.0, sum(map(math.prod, shapes)))
        return ()

    def dp_event(self, sampling_probability: float, steps: int, clipping: str = "norm") -> Any:
        """Returns the event of DP-SGD with this noise, and this clipping."""
        added = added_delta(self.noise_multiplier) if self.source == "integer" else 0.0
        return dp_sgd_event(self.noise_multiplier, sampling_probability, steps, clipping, added)

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns what a statement about this noise rests on."""
        if self.seeded:
            return ()
        text = _KEY_STREAM.format(_CIPHERS[self.source])
        return (Assumption("secure-key-stream", "machines", text),)

    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Setting[Any]
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the sum with Gaussian noise, in ``float32``; there is no state."""
        shapes = [tf.shape(part) for part in clipped_sum]
        flat = tf.concat([tf.reshape(part, [-1]) for part in clipped_sum], 0)
        if self.source == "integer":
            noisy = self._drawer().add(flat, self.noise_multiplier, l2_norm_clip)
        else:
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
        if self.source == "host":
            # Stateful, so that no pass folds or shares it.
            draw = lambda size: standard_normal(int(size), self._rng)  # noqa: E731
            return tf.numpy_function(draw, [tf.size(like)], tf.float64)
        return self._drawer().draw(like.shape[0])

    def _drawer(self) -> Any:
        self._device = self._device or _DRAWN_BY[self.source](self.insecure_seed)
        return self._device

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        names = ("noise_multiplier", "source", "insecure_seed")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> GaussianNoise:
        """Returns the noise that ``get_config`` described, also of version 0.1."""
        return cls(**renamed_seed(config))


def renamed_seed(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration with the new name of version 0.1's ``seed`` of private noise."""
    config = dict(config)
    if "seed" in config:
        config["insecure_seed"] = config.pop("seed")
    return config
