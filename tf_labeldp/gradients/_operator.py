"""Products with the matrix of per-example, per-label gradients, which is never formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting


class GradientOperator:
    """The matrix ``G`` (d, n K) of gradients of n examples for each of K labels.

    Column ``(i, k)`` is the gradient of example i's loss for label k with respect to all d weights
    (``ghazi2024``, section 3.2). It needs no true label. ``G`` is never formed: ``G u`` is one
    backward pass, ``G^T v`` one forward pass (appendix C).

    The losses are evaluated once, at the current values of the variables: make a new operator in
    every step, inside the ``tf.function`` that uses it. Products work inside ``tf.while_loop``.

    Args:
        losses: a callable without arguments that returns the loss of each example for each label,
            float (n, K), from the current variables, such as
            ``lambda: -tf.nn.log_softmax(model(x))``. For numbers in [low, high] and squared error,
            whose gradient is linear in the label, the two ends are enough:
            ``lambda: tf.square(tf.constant([[low, high]]) - model(x))``.
        variables: the weights, in the order of the gradients: Keras or TensorFlow variables, or
            tensors that the losses depend on.
        scales: factors of the columns, float (n, K) or a shape that broadcasts to it, such as
            ``min(1, C / norm)`` to clip each column. None: 1.
        products: the way to compute ``G^T v``; both give the same numbers. ``"double_backward"``
            differentiates ``<v, G u>`` by u, from one evaluation of the model. ``"forward"`` is the
            paper's forward mode, ``tf.autodiff.ForwardAccumulator``, which evaluates the model for
            each product: it takes 1.7 times as long on a CPU for the CNN of Table 10(a), as long
            under XLA, and fails for models with loops, such as a recurrent layer without
            ``unroll=True``.

    Raises:
        TypeError: the losses are not floating-point.
        ValueError: there are no variables, the losses are not (n, K), ``products`` is unknown, or
            forward mode fails for these losses (in the first product).

    Example:
        >>> import tensorflow as tf
        >>> x, w = tf.constant([[1.0, 2.0]]), tf.Variable(tf.zeros([2, 3]))
        >>> operator = GradientOperator(lambda: -tf.nn.log_softmax(x @ w), [w])
        >>> operator.shape
        (6, 3)
        >>> [gradient] = operator.matvec(tf.constant([[1.0, 0.0, 0.0]]))
        >>> print(gradient.numpy().round(2))
        [[-0.67  0.33  0.33]
         [-1.33  0.67  0.67]]
        >>> print(operator.rmatvec([gradient]).numpy().round(2))
        [[ 3.33 -1.67 -1.67]]
    """

    PRODUCTS = ("double_backward", "forward")

    def __init__(
        self,
        losses: Setting[Callable[[], tf.Tensor]],
        variables: Setting[Sequence[Any]],
        *,
        scales: Setting[Any] = None,
        products: str = "double_backward",
    ) -> None:
        self._forward = _validate.one_of("products", products, self.PRODUCTS) == "forward"
        self._losses = losses
        self._variables = [_plain_variable(variable) for variable in variables]
        if not self._variables:
            raise ValueError("variables must not be empty. Give model.trainable_variables.")
        self._record()
        self._scales = None
        if scales is not None:
            self._scales = tf.broadcast_to(tf.cast(scales, self.dtype), self._values.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (d, n K) of the matrix."""
        rows, labels = self.coefficients_shape
        return sum(shape.num_elements() for shape in self.variable_shapes), rows * labels

    @property
    def coefficients_shape(self) -> tuple[int, int]:
        """The shape (n, K) of the argument of ``matvec`` and the result of ``rmatvec``."""
        rows, labels = self._values.shape.as_list()
        return rows, labels

    @property
    def losses(self) -> tf.Tensor:
        """The losses (n, K), in ``dtype``."""
        return tf.cast(self._values, self.dtype)

    @property
    def variable_shapes(self) -> list[tf.TensorShape]:
        """The shapes in the argument of ``rmatvec`` and the result of ``matvec``."""
        return [variable.shape for variable in self._variables]

    @property
    def dtype(self) -> tf.DType:
        """The dtype of coefficients: ``float64`` if the losses are, else ``float32``."""
        return tf.float64 if self._values.dtype == tf.float64 else tf.float32

    def matvec(self, coefficients: Setting[Any]) -> list[tf.Tensor]:
        """Returns ``G u``, the sum of columns weighted by u (n, K): one tensor per variable."""
        seed = tf.cast(coefficients, self.dtype)
        if self._scales is not None:
            seed *= self._scales
        return self._pulled_back(tf.cast(seed, self._values.dtype))

    def rmatvec(self, vector: Setting[Sequence[Any]]) -> tf.Tensor:
        """Returns ``G^T v`` (n, K), the inner products of the columns with v (like variables)."""
        tangents = [
            tf.cast(part, variable.dtype)
            for part, variable in zip(vector, self._variables, strict=True)
        ]
        if self._forward:
            try:
                with tf.autodiff.ForwardAccumulator(self._variables, tangents) as accumulator:
                    values = self._losses()
                products = accumulator.jvp(values, unconnected_gradients="zero")
            except (ValueError, LookupError) as error:
                raise ValueError(
                    "TensorFlow's forward mode fails for these losses, as it does for recurrent "
                    f"layers. Use products={self.PRODUCTS[0]!r}."
                ) from error
        else:
            products = self._transposed_tape.gradient(
                self._transposed, self._seed, tangents, unconnected_gradients="zero"
            )
        products = tf.cast(products, self.dtype)
        return products if self._scales is None else products * self._scales

    def _record(self) -> None:
        """Evaluates the losses once, for all later products."""
        with tf.GradientTape(persistent=True) as self._transposed_tape:
            with tf.GradientTape(persistent=True) as self._tape:
                self._tape.watch([v for v in self._variables if not isinstance(v, tf.Variable)])
                self._values = _checked_losses(self._losses())
            if self._forward:
                return
            # The backward pass from a seed u is G u, so its derivative by u, times v, is G^T v: a
            # forward product by two backward passes. It is linear, so any seed gives the same
            # derivative, and zeros need no labels.
            self._seed = tf.zeros_like(self._values)
            self._transposed_tape.watch(self._seed)
            self._transposed = self._pulled_back(self._seed)

    def _pulled_back(self, seed: tf.Tensor) -> list[tf.Tensor]:
        """Returns the backward pass from a seed; sparse gradients of embeddings become dense."""
        parts = self._tape.gradient(
            self._values, self._variables, seed, unconnected_gradients="zero"
        )
        # Loops around products need static shapes, which some gradients lack.
        return [
            tf.ensure_shape(part, variable.shape)
            for part, variable in zip(parts, self._variables, strict=True)
        ]


def _plain_variable(variable: Any) -> Any:
    """Returns the ``tf.Variable`` in a Keras variable, and any other object unchanged."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def _checked_losses(values: Any) -> tf.Tensor:
    values = tf.convert_to_tensor(values)
    if not values.dtype.is_floating:
        raise TypeError(f"losses() must return floats, got {values.dtype.name}.")
    if values.shape.rank != 2 or not values.shape.is_fully_defined():
        raise ValueError(
            f"losses() must return a fixed shape (n, K), got {values.shape}. Pad batches to one "
            "size, and give a mask."
        )
    return values


def flatten(parts: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Returns gradients concatenated to a vector (d,)."""
    return tf.concat([tf.reshape(tf.cast(part, dtype), [-1]) for part in parts], axis=0)


def unflatten(vector: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Splits a vector (d,) into gradients of these shapes."""
    parts = tf.split(vector, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def dot(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(a * b)


def flat_target(target: Sequence[Any], operator: GradientOperator) -> tf.Tensor:
    """Returns a target as a vector (d,); raises if it does not fit the operator's variables."""
    shapes, parts = operator.variable_shapes, []
    if isinstance(target, (list, tuple)):
        parts = [tf.convert_to_tensor(part) for part in target]
    found = [part.shape for part in parts]
    if len(found) != len(shapes) or not all(map(tf.TensorShape.is_compatible_with, found, shapes)):
        raise ValueError(
            "target must be a list of tensors like the operator's variables, of shapes "
            f"{[tuple(shape) for shape in shapes]}, got {found or type(target).__name__}. Keep "
            "gradients in the order of the variables."
        )
    vector = flatten(parts, operator.dtype)
    if tf.executing_eagerly() and not bool(tf.reduce_all(tf.math.is_finite(vector))):
        raise ValueError("target must be finite. Look for the layer whose gradients overflowed.")
    return vector
