"""Mixup: convex combinations of pairs of examples and of their targets."""

import math
from typing import Annotated, Any

import keras
from keras import ops

from ._in_files import NamesItsImport


@keras.saving.register_keras_serializable(package="tf_labeldp")
class Mixup(NamesItsImport, keras.layers.Layer):
    """Mixup of inputs and targets, with one ``lam ~ Beta(alpha, alpha)`` per batch.

    ``x' = lam * x + (1 - lam) * reversed(x)``, and the same for the targets: example i is paired
    with example ``batch - 1 - i``, as in the authors' code for LP-MST; in a shuffled batch that is
    a random partner. Targets keep their precision under mixed precision; half-precision tensors
    are mixed in float32.

    Guarantee:
        On labels that are already private (randomized labels, debiased weights) mixing is
        post-processing; ``LabelWeightedLoss`` stays unbiased. On true labels mixing protects
        nothing, and it must not precede the per-example clipping of DP-SGD: one label would affect
        the gradients of two examples and double the sensitivity.

    Args:
        alpha: finite and at least zero; 0 is the identity. Larger values mix more.
        seed: seed of the draws, or None. It is public and protects nothing.
        **kwargs: as in ``keras.layers.Layer``.

    Call arguments:
        inputs: a pair ``(x, y)``: a nested structure of float tensors (batch, ...), and float
            targets (batch, K), one-hot, soft, or signed weights.
        training: whether to mix. A ``tf.data`` map must pass it:
            ``dataset.map(lambda x, y: layer((x, y), training=True))``.

    Returns:
        The pair ``(x, y)``, mixed, with the structure, shapes and dtypes of the inputs.

    Raises:
        ValueError: ``alpha`` is negative or not finite; on call, a tensor has no float dtype, or
            ``y`` is not (batch, K).

    Example:
        >>> import numpy as np
        >>> layer = Mixup(alpha=8.0, seed=1)
        >>> x, y = layer((np.array([[0.0], [1.0]]), np.eye(2)), training=True)
        >>> bool(abs(float(x[0, 0]) + float(x[1, 0]) - 1.0) < 1e-6)
        True

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018); for label DP: Ghazi
    et al., "Deep Learning with Label Differential Privacy" (2021), appendix B.
    """

    def __init__(
        self, alpha: float, seed: int | None = None, **kwargs: Annotated[Any, "setting"]
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        if not 0.0 <= alpha < float("inf"):
            raise ValueError(f"alpha must be a finite number >= 0, got {alpha}.")
        self.alpha = float(alpha)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs: tuple[Any, Any], training: bool | None = None) -> tuple[Any, Any]:
        """Returns the pair ``(x, y)``, mixed in training."""
        x, y = _checked_pair(inputs)
        if not training or self.alpha == 0.0:
            return x, y
        lam = self.symmetric_beta(self.alpha, seed=self.seed_generator)

        def mix(tensor: Any) -> Any:
            dtype = keras.backend.standardize_dtype(tensor.dtype)
            compute_dtype = "float32" if dtype in ("float16", "bfloat16") else dtype
            tensor = ops.cast(tensor, compute_dtype)
            weight = ops.convert_to_tensor(lam, dtype=compute_dtype)
            mixed = weight * tensor + (1.0 - weight) * ops.flip(tensor, axis=0)
            return ops.cast(mixed, dtype)

        return keras.tree.map_structure(mix, x), mix(y)

    @staticmethod
    def symmetric_beta(
        alpha: float, shape: tuple[int, ...] = (), seed: Annotated[Any, "setting"] = None
    ) -> Any:
        """Returns exact float32 draws from Beta(alpha, alpha), without rejection.

        With ``u``, ``v`` uniform and ``t = sqrt(u^(-1 / alpha) - 1) * cos(2 pi v)``,
        ``(1 + t / sqrt(1 + t^2)) / 2`` is Beta(alpha, alpha): Bailey, "Polar Generation of Random
        Variates with the t-Distribution" (1994). XLA has no kernel for ``keras.random.beta``.
        """
        uniforms = keras.random.uniform((2, *shape), dtype="float32", seed=seed)
        exponential = -ops.log1p(-uniforms[0])
        # From exponent 69 (1e30) on the result is 0 or 1 in float32; the cap avoids an overflow.
        squared_radius = ops.expm1(ops.minimum(exponential / alpha, 69.0))
        cosine = ops.cos(2.0 * math.pi * uniforms[1])
        # With s = t / sqrt(1 + t^2), 1 - |s| = (1 - s^2) / (1 + |s|) stays precise near 0.
        one_minus_square = 1.0 / (1.0 + squared_radius * cosine**2)
        magnitude = ops.abs(cosine) * ops.sqrt(squared_radius * one_minus_square)
        lower = 0.5 * one_minus_square / (1.0 + ops.minimum(magnitude, 1.0))
        return ops.where(cosine < 0, lower, 1.0 - lower)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "alpha": self.alpha, "seed": self.seed}


def _checked_pair(inputs: Any) -> tuple[Any, Any]:
    if not isinstance(inputs, tuple | list) or len(inputs) != 2:
        raise ValueError(
            f"Mixup takes one pair (x, y) of inputs and targets, got a {type(inputs).__name__}. "
            "Call layer((x, y), training=True)."
        )
    x, y = inputs
    named = [("x", tensor) for tensor in keras.tree.flatten(x)] + [("y", y)]
    for name, tensor in named:
        if not keras.backend.is_float_dtype(tensor.dtype) or len(tensor.shape) == 0:
            dtype = keras.backend.standardize_dtype(tensor.dtype)
            raise ValueError(
                f"Mixup needs float tensors with a batch axis, got {name} of dtype {dtype} and "
                f"shape {tuple(tensor.shape)}. Cast inputs to float, and make class ids one-hot."
            )
    if len(y.shape) != 2:
        raise ValueError(
            f"Mixup needs targets of shape (batch, K), got y of shape {tuple(y.shape)}. Make class "
            "ids one-hot, and give a single regression target a last axis."
        )
    return x, y
