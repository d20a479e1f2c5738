"""The optimizer of a private model: clipping bound, noise, denoiser and inner optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, cast

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.gradients.clip import Coordinates, Speed
from tf_labeldp.training._configured import Stateful
from tf_labeldp.training._denoisers import Denoiser, NoOp
from tf_labeldp.training._gaussian_noise import GaussianNoise, NoiseMechanism, fixed
from tf_labeldp.training._preconditioner import GaussNewton

_CLIPS = "[1e-10, 1e10]"
"""Norms whose squares stay in the range of single precision."""
_WRAPPERS: tuple[type, ...] = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)  # Earlier versions of Keras lack the second.
)
"""Optimizers around others, whose settings are not theirs."""
_OBJECTS = ("inner_optimizer", "denoiser", "preconditioner", "noise")


class NoisyGradients(list):
    """Clipped and noised gradients; ``LabelDPOptimizer`` refuses all others."""


@keras.saving.register_keras_serializable(package="tf_labeldp")
class LabelDPOptimizer(keras.optimizers.Optimizer):
    """DP-SGD around any Keras optimizer, with a denoiser that uses the public features.

    A ``LabelDPModel`` with this optimizer clips per-example gradients to ``l2_norm_clip``, adds
    noise to their sum, divides by the expected batch size, denoises and passes the result to
    ``inner_optimizer`` (``ghazi2024``, Algorithm 1).

    Guarantee:
        One step is the Gaussian mechanism of noise multiplier ``noise_multiplier`` relative to
        ``l2_norm_clip``; under replacement of one label a clipped sum moves by at most twice
        ``l2_norm_clip``, with either ``clipping``. Denoiser and inner optimizer post-process noisy
        gradients; gradients without noise are refused. ``LabelDPModel.guarantee()`` states the cost
        of all steps. The clip, the noise, the denoiser and the preconditioner can't be changed:
        compile the model with another optimizer.

    Args:
        inner_optimizer: a Keras optimizer (or its name), which may have momentum, a learning-rate
            schedule, weight decay and ``use_ema``, but neither clipping nor gradient accumulation,
            which would act on noisy gradients.
        l2_norm_clip: C, the largest L2 norm of one example's gradient; above zero.
        noise_multiplier: standard deviation of the noise over C, above zero
            (``accounting.calibrate_noise_multiplier`` finds it for a target epsilon).
        denoiser: ``AltConv``, ``SelfConv``, ``SelfSpan``, or None for plain DP-SGD.
        preconditioner: ``"gauss_newton"`` or a ``GaussNewton``, to clip and to add noise in
            coordinates that whiten the curvature of the loss, computed without labels; excludes a
            denoiser. None for the coordinates of the weights.
        clipping: ``"norm"`` bounds each gradient by ``l2_norm_clip``. ``"label_distance"``, for two
            classes and plain cross-entropy of logits, bounds the distance between an example's
            gradients for the two labels by twice that, and so clips less at the same noise;
            calibrate the noise for it (``calibrate_noise_multiplier(..., clipping=...)``).
        noise: another source of noise than ``GaussianNoise(noise_multiplier)``; leave
            ``noise_multiplier`` out then, or give the same.
        insecure_seed: makes the noise repeatable; statements are then "not private: seeded".
        method: how per-example gradients are computed: ``"auto"``, ``"ghost"`` or
            ``"vectorized"``. Changes speed, not privacy.
        max_bytes: the most extra memory for per-example gradients.
        name: name of the optimizer.

    Raises:
        ValueError: an argument out of range, or an inner optimizer that clips.
        TypeError: an argument of another type.
        RuntimeError: Keras runs on another backend than TensorFlow.

    Example:
        >>> import keras
        >>> optimizer = LabelDPOptimizer(keras.optimizers.SGD(0.5), 1.0, noise_multiplier=2.0)
        >>> optimizer.apply([0.0], [keras.Variable(0.0)])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        RuntimeError: LabelDPOptimizer got gradients that are not clipped and noised...
    """

    inner_optimizer: Any = None
    # The model that counts its steps, as a weak reference.
    _owner: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(  # noqa: PLR0913 (TF Privacy's arguments, the denoiser, Keras's name)
        self,
        inner_optimizer: Setting[keras.optimizers.Optimizer | str],
        l2_norm_clip: float,
        noise_multiplier: float | None = None,
        denoiser: Denoiser | None = None,
        *,
        clipping: str = "norm",
        preconditioner: GaussNewton | str | None = None,
        noise: NoiseMechanism | None = None,
        insecure_seed: int | None = None,
        method: str = "auto",
        max_bytes: int = 2**30,
        name: str | None = None,
        **unused: Setting[Any],
    ) -> None:
        _validate.keras_on_tensorflow("LabelDPOptimizer")
        inner = _checked_inner(inner_optimizer)
        # Configurations of optimizers have Keras's arguments, with their defaults.
        changed = [key for key, value in unused.items() if value not in (None, False, 0.0, 0.99)]
        if "num_microbatches" in changed:
            raise TypeError(
                "LabelDPOptimizer clips each example, and does not take num_microbatches. Leave it "
                "out."
            )
        if changed:
            raise TypeError(
                f"LabelDPOptimizer does not take {', '.join(sorted(changed))}. Set arguments of "
                "Keras in inner_optimizer."
            )
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner
        l2_norm_clip = _validate.positive_finite("l2_norm_clip", l2_norm_clip)
        self._l2_norm_clip = _validate.number_in("l2_norm_clip", l2_norm_clip, _CLIPS)
        self._noise = _checked_noise(noise, noise_multiplier, insecure_seed)
        self.insecure_seed = insecure_seed
        self._denoiser = NoOp() if denoiser is None else denoiser
        if not isinstance(self._denoiser, Denoiser):
            raise TypeError(f"denoiser must be a Denoiser or None, got {type(denoiser).__name__}.")
        self._preconditioner = _checked_preconditioner(preconditioner, self._denoiser)
        self._clipping = _validate.one_of("clipping", clipping, EventFields.CLIPPINGS)
        if self._clipping == "label_distance" and type(self._noise) is not GaussianNoise:
            raise ValueError(
                f"expected GaussianNoise for clipping='label_distance', got "
                f"{type(noise).__name__}, which is accounted for gradients of norm l2_norm_clip. "
                "Use clipping='norm'."
            )
        speed = Speed(method, max_bytes)
        self.method, self.max_bytes = speed.method, speed.max_bytes
        # The variables of each part's state, by the prefix of their names.
        self._states: dict[str, Any] = {}

    l2_norm_clip: float = fixed("_l2_norm_clip", "The largest L2 norm of one example's gradient.")
    noise: NoiseMechanism = fixed("_noise", "The source of noise.")
    clipping: str = fixed("_clipping", "The kind of clipping.")
    denoiser: Denoiser = fixed("_denoiser", "The denoiser of noisy gradients.")
    preconditioner: GaussNewton | None = fixed(
        "_preconditioner", "The source of coordinates for clipping and noise, or None."
    )

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of one step's noise over ``l2_norm_clip``."""
        return self.noise.noise_multiplier

    def _draw_on_device(self) -> None:
        """Exchanges Gaussian noise of Python for that of a compiled program, between two fits.

        Both have the same events; statements name the generator of each step's noise.
        """
        if self.noise.compiles:
            return
        _validate.warn(
            "jit_compile=True draws the noise within the compiled step, from ChaCha20 instead of "
            "AES-256; the statement says so. noise=GaussianNoise(..., source='device') chooses it."
        )
        host = cast(GaussianNoise, self.noise)
        seed = host.insecure_seed
        self._noise = GaussianNoise(host.noise_multiplier, source="device", insecure_seed=seed)

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        """Returns the event of this many steps, as ``NoiseMechanism.dp_event``."""
        if self.clipping == "norm":
            return self.noise.dp_event(sampling_probability, steps)
        noise = cast(GaussianNoise, self.noise)
        return noise.dp_event(sampling_probability, steps, self.clipping)

    def build(self, variables: list[Any]) -> None:
        """Creates the variables of the inner optimizer, the noise and the denoiser."""
        if self.built:
            return
        self.inner_optimizer.build(variables)
        shapes = [tuple(variable.shape) for variable in variables]
        parts: dict[str, Stateful] = {"noise": self.noise, "denoiser": self.denoiser}
        if self.preconditioner is not None:
            parts["curvature"] = self.preconditioner
        # Files have the variables in this order.
        for prefix, part in parts.items():
            self._states[prefix] = self._in_variables(prefix, part.initial_state(shapes))
        super().build(variables)

    def _in_variables(self, prefix: str, state: Any) -> Any:
        variables = []
        for number, value in enumerate(tf.nest.flatten(state)):
            array, name = keras.ops.convert_to_numpy(value), f"{prefix}_{number}"
            variable = keras.Variable(array, trainable=False, dtype=str(array.dtype), name=name)
            self._track_variable(variable)
            variables.append(variable)
        return tf.nest.pack_sequence_as(state, variables)

    def _updated(self, prefix: str, update: Callable[[Any], tuple[Any, ...]]) -> list[Any]:
        """Returns the results of a part's ``update``, except for the next state: it is kept."""
        kept = self._states.get(prefix, ())
        result, state, *report = update(tf.nest.map_structure(tf.convert_to_tensor, kept))
        for variable, value in zip(tf.nest.flatten(kept), tf.nest.flatten(state), strict=True):
            variable.assign(value)
        return [result, *report]

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables and those of the inner optimizer."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer, which callbacks may set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        # Keras sets the rate of the outer optimizer before there is an inner one.
        if self.inner_optimizer is not None:
            self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """Number of steps taken."""
        return self.inner_optimizer.iterations

    def add_noise(self, clipped_sum: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sum with this step's noise; ``LabelDPModel`` calls it once per step."""
        clip = self.l2_norm_clip
        [noisy] = self._updated(
            "noise", lambda state: self.noise.add_noise(clipped_sum, clip, state)
        )
        return noisy

    def denoise(
        self, gradients: list[tf.Tensor], vertices: Setting[Any]
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        """Returns the denoised gradients, and scalars to report."""
        denoised, report = self._updated(
            "denoiser", lambda state: self.denoiser.denoise(gradients, vertices, state)
        )
        return denoised, report

    @property
    def num_examples(self) -> int:
        """Number of public examples per step in addition to the batch."""
        return (self.preconditioner or self.denoiser).num_examples

    def coordinates(self, vertices: Setting[Any]) -> list[Coordinates] | None:
        """Returns the coordinates of clipping and noise; None without a preconditioner."""
        whitening = self.preconditioner
        if whitening is None:
            return None
        [found] = self._updated("curvature", lambda state: whitening.coordinates(vertices, state))
        return found

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Applies noisy gradients; raises for any others."""
        if not isinstance(grads, NoisyGradients):
            self._refuse()
        if not self.built:
            self.build(trainable_variables)
        # Keras optimizers divide by the factor of their `loss_scale_factor`: the loss has it there.
        scaled = [self.inner_optimizer.scale_loss(gradient) for gradient in grads]
        self.inner_optimizer.apply(scaled, trainable_variables)

    def _refuse(self, *unused: Setting[Any], **also_unused: Setting[Any]) -> NoReturn:
        """Raises a ``RuntimeError``."""
        raise RuntimeError(
            "LabelDPOptimizer got gradients that are not clipped and noised; training with them "
            "would not be private. Use it in a tf_labeldp.LabelDPModel: "
            "LabelDPModel.from_model(model), or LabelDPModel(inputs, outputs), and call its fit."
        )

    # All of its steps have receipts, since it applies noisy gradients alone.
    label_dp_covered = math.inf

    # Models that train in the clear call these.
    apply_gradients = update_step = stateless_apply = scale_loss = _refuse

    def finalize_variable_values(self, var_list: Any) -> None:
        """Sets the variables to the moving averages of the inner optimizer, if it keeps any."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        serialize = keras.saving.serialize_keras_object
        return {
            "inner_optimizer": serialize(self.inner_optimizer),
            "denoiser": serialize(self.denoiser),
            "preconditioner": serialize(self.preconditioner),
            "noise": serialize(self.noise),
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "clipping": self.clipping,
            "insecure_seed": self.insecure_seed,
            "method": self.method,
            "max_bytes": self.max_bytes,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> LabelDPOptimizer:
        """Returns the optimizer of a configuration."""
        # Files of 0.2 have this argument.
        config = dict(config)
        if (microbatches := config.pop("num_microbatches", None)) is not None:
            _validate.warn(
                f"num_microbatches={microbatches} of 0.2 is gone: this optimizer would clip each "
                "example. To train on, compile the model again."
            )
        objects = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in _OBJECTS
        }
        return cls(**{**config, **objects})


def _checked_inner(inner: Any) -> keras.optimizers.Optimizer:
    inner = keras.optimizers.get(inner) if isinstance(inner, (str, dict)) else inner
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(f"inner_optimizer must be a Keras optimizer, got {type(inner).__name__}.")
    if isinstance(inner, (LabelDPOptimizer, *_WRAPPERS)):
        raise ValueError(
            f"inner_optimizer must be a plain optimizer, got {type(inner).__name__}. Unwrap it."
        )
    settings = {
        "clipnorm": inner.clipnorm,
        "clipvalue": inner.clipvalue,
        "global_clipnorm": inner.global_clipnorm,
        "gradient_accumulation_steps": inner.gradient_accumulation_steps,
    }
    clipping = [name for name, value in settings.items() if value]
    if clipping:
        raise ValueError(
            f"inner_optimizer sets {', '.join(clipping)}, which would act on noisy gradients. "
            "Leave it out, and set l2_norm_clip instead."
        )
    return inner


def _checked_noise(
    noise: Any, noise_multiplier: float | None, insecure_seed: int | None
) -> NoiseMechanism:
    if noise is None:
        if noise_multiplier is None:
            raise TypeError(
                "noise_multiplier is missing. accounting.calibrate_noise_multiplier finds one."
            )
        return GaussianNoise(noise_multiplier, insecure_seed=insecure_seed)
    if not isinstance(noise, NoiseMechanism):
        raise TypeError(
            f"noise must be a training.NoiseMechanism, got {type(noise).__name__}. Wrap a DPQuery: "
            "tf_labeldp.tf_privacy.QueryNoise(query)."
        )
    if noise_multiplier is not None and noise_multiplier != noise.noise_multiplier:
        raise ValueError(
            f"noise_multiplier={noise_multiplier:g} contradicts the {noise.noise_multiplier:g} of "
            "noise. Leave it out."
        )
    if insecure_seed is not None and noise.insecure_seed != insecure_seed:
        raise ValueError("got both insecure_seed and noise. Give the seed to the noise.")
    return noise


def _checked_preconditioner(value: Any, denoiser: Denoiser) -> GaussNewton | None:
    if value is None:
        return None
    if value == "gauss_newton":
        value = GaussNewton()
    if not isinstance(value, GaussNewton):
        raise TypeError(f"preconditioner must be a GaussNewton, its name or None, got {value!r}.")
    if not isinstance(denoiser, NoOp):
        raise ValueError(
            f"got both a preconditioner and {type(denoiser).__name__}, which use different "
            "coordinates. Leave one of them out."
        )
    return value
