"""Mixup: convex combinations of pairs of examples and of their targets."""

from typing import Annotated, Any

import keras
from keras import ops

from ._in_files import NamesItsImport
from .beta import symmetric_beta


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
        return mixup(x, y, symmetric_beta(self.alpha, seed=self.seed_generator))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "alpha": self.alpha, "seed": self.seed}


def mixup(x: Any, y: Any, lam: Any) -> tuple[Any, Any]:
    """Returns ``lam * batch + (1 - lam) * reversed batch`` of float inputs and targets."""

    def mix(tensor: Any) -> Any:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        compute_dtype = "float32" if dtype in ("float16", "bfloat16") else dtype
        tensor = ops.cast(tensor, compute_dtype)
        weight = ops.convert_to_tensor(lam, dtype=compute_dtype)
        mixed = weight * tensor + (1.0 - weight) * ops.flip(tensor, axis=0)
        return ops.cast(mixed, dtype)

    return keras.tree.map_structure(mix, x), mix(y)


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
