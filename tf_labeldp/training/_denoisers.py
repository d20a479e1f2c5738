"""Denoisers of noisy gradients, which use public features and no label (``ghazi2024``)."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.gradients import GradientOperator, project_onto_hull, project_onto_span
from tf_labeldp.gradients.hull import HullChoice
from tf_labeldp.training._configured import Stateful
from tf_labeldp.training._vertex_losses import VertexLosses

Denoised = tuple[list[tf.Tensor], Any, dict[str, tf.Tensor]]


class Denoiser(Stateful, abc.ABC):
    """Improves a noisy gradient with public features and the model alone.

    Guarantee:
        A denoiser post-processes the noisy gradient, sees no label, and spends no budget. Its state
        depends on earlier noisy gradients alone. A denoiser that uses the features of the sampled
        batch reveals the batch, and revealed batches get no amplification by sampling
        (``ghazi2024``, section 3.4). It sets ``reveals_batch``; ``LabelDPModel`` then draws and
        accounts for batches accordingly.

    With several replicas, each denoises the same gradient with the public examples of all.

    Attributes:
        reveals_batch: whether it uses the features of the sampled batch.
        num_examples: other public examples per step; 0 for none.
        takes_single_examples: whether steps of one example are allowed.

    Example:
        >>> NoOp().reveals_batch, SelfConv().reveals_batch, AltConv(num_examples=256).num_examples
        (False, True, 256)
    """

    reveals_batch: bool = False
    num_examples: int = 0
    takes_single_examples: bool = False

    @abc.abstractmethod
    def denoise(
        self, gradients: list[tf.Tensor], vertices: VertexLosses, state: Setting[Any]
    ) -> Denoised:
        """Returns the denoised gradients, the next state, and scalars to report.

        Args:
            gradients: the noisy mean gradient, one tensor per variable.
            vertices: the public examples of this step, and their losses for each label; None for
                a denoiser that uses neither the batch nor other examples.
            state: from ``initial_state`` or the previous step.
        """


@keras.saving.register_keras_serializable(package="tf_labeldp")
class NoOp(Denoiser):
    """Leaves the noisy gradient as it is: plain DP-SGD (``ghazi2024``, Table 1).

    Example:
        >>> NoOp().get_config()
        {}
    """

    def denoise(
        self, gradients: list[tf.Tensor], vertices: VertexLosses, state: Setting[Any]
    ) -> Denoised:
        """Returns the gradients."""
        return gradients, state, {}


@keras.saving.register_keras_serializable(package="tf_labeldp")
@dataclasses.dataclass(eq=False)
class SelfSpan(Denoiser):
    """Projects onto the span of the batch's gradients for all labels (``ghazi2024``, Table 1).

    The clean gradient is in the span, so only noise is removed. In steps of a single example this
    is LP-Normal-SGD (``ghazi2021``, Algorithm 6): one epoch of ``poisson_batches(x, labels,
    sampling_probability=1 / n, steps=n)`` uses each label once. Reveals the batch: no amplification
    by sampling.

    Args:
        tolerance: stop at this relative residual of the normal equations; at least 1e-6, as single
            precision diverges below.
        max_products: the most products with the gradient matrix or its transpose, at least 4.
        products: as for ``AltConv``.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> SelfSpan().reveals_batch
        True
    """

    tolerance: float = 1e-3
    max_products: int = 100
    products: str = "double_backward"

    reveals_batch = True
    takes_single_examples = True

    def __post_init__(self) -> None:
        self.tolerance = _validate.number_in("tolerance", self.tolerance, "[1e-06, inf)")
        self.max_products = _validate.integer_at_least("max_products", self.max_products, 4)
        _validate.one_of("products", self.products, GradientOperator.PRODUCTS)

    def denoise(
        self, gradients: list[tf.Tensor], vertices: VertexLosses, state: Setting[Any]
    ) -> Denoised:
        """Returns the projection onto the span, and its residual."""
        projection = project_onto_span(
            GradientOperator(vertices.losses, vertices.variables, products=self.products),
            gradients,
            max_products=self.max_products,
            tolerance=self.tolerance,
            mask=vertices.mask,
        )
        return projection.point, state, _report(projection)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Hull(HullChoice, Denoiser):
    """The projection onto a hull, which Self-Conv and Alt-Conv share."""

    num_examples: int = dataclasses.field(default=0, init=False)
    smoothing: float = 1.0
    residual: float = 0.0
    products: str = "double_backward"

    def __post_init__(self) -> None:
        self.smoothing = _validate.number_in("smoothing", self.smoothing, "(0, 1]")
        self.residual = _validate.number_in("residual", self.residual, "[0, 1)")
        # A gap of zero has no end but the largest number of products, in every step.
        self.relative_gap = _validate.positive_finite("relative_gap", self.relative_gap)
        super().__post_init__()
        _validate.one_of("products", self.products, GradientOperator.PRODUCTS)

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns the curvature estimate that the solver carries from step to step."""
        return tf.zeros([])

    def denoise(
        self, gradients: list[tf.Tensor], vertices: VertexLosses, state: Setting[Any]
    ) -> Denoised:
        operator = GradientOperator(vertices.losses, vertices.variables, products=self.products)
        if vertices.cross_entropy:
            predictions = tf.exp(-operator.losses)
        else:
            predictions = vertices.predictions()
        projection = project_onto_hull(
            operator,
            gradients,
            hull=self.hull,
            start=self.start,
            predictions=predictions,
            zero_at_predictions=vertices.cross_entropy,
            solver=self.solver,
            relative_gap=self.relative_gap,
            max_products=self.max_products,
            curvature=state,
            mask=vertices.mask,
            step_size=self.step_size,
            steps=self.steps,
        )
        point = projection.point
        if self.smoothing < 1.0:
            point = operator.matvec(projection.smoothed(self.smoothing, vertices.mask))
        if self.residual > 0.0:
            point = [
                near + self.residual * (noisy - near)
                for near, noisy in zip(point, gradients, strict=True)
            ]
        report = {**_report(projection), "projection_gap": projection.relative_gap}
        return point, projection.curvature, report

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> Denoiser:
        # Files of 0.2 have this argument, which is always "uniform" now.
        config = dict(config)
        towards = config.pop("smooth_towards", "uniform")
        if towards != "uniform" and config.get("smoothing", 1.0) < 1.0:
            _validate.warn(
                f"smooth_towards={towards!r} of 0.2 is gone: this denoiser would smooth towards "
                "uniform labels. To train on, compile the model again, with smoothing=1.0."
            )
        if isinstance(config.get("solver"), dict):  # Keras serialized a callable
            config["solver"] = keras.saving.deserialize_keras_object(config["solver"])
        return cls(**config)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class SelfConv(_Hull):
    """Projects onto the hull of the batch's own gradients for all labels (``ghazi2024``, Table 1).

    The clean gradient is in the hull unless it was clipped. Reveals the batch: no amplification by
    sampling.

    Args:
        smoothing: as for ``AltConv``, as are all other arguments; ``residual`` is 0 by default and
            ``max_products`` 20.

    Example:
        >>> SelfConv(smoothing=0.75).get_config()["smoothing"]
        0.75
    """

    reveals_batch = True


@keras.saving.register_keras_serializable(package="tf_labeldp")
@dataclasses.dataclass(eq=False)
class AltConv(_Hull):
    """Projects onto the hull of other public examples' gradients (``ghazi2024``, Table 1).

    The examples are drawn independently of the batch, so sampling amplifies the guarantee.
    ``data.poisson_batches`` supplies them.

    A projection shortens the gradient where the loss is flat, in the same directions in every step;
    the default ``residual`` restores part of it. The paper's denoiser has none:
    ``AltConv(256, residual=0.0)``, with the paper's set and solver
    ``AltConv(256, residual=0.0, hull="joint", start="uniform", solver="pgd")``.

    Args:
        num_examples: n2, the number of public examples per step, at least 1.
        smoothing: lambda in (0, 1]: the coefficients are mixed as ``lambda alpha + (1 - lambda)
            beta``, with beta uniform over all labels (section 3.3); 1 leaves them.
        residual: share, in [0, 1), of the removed part of the gradient to add back: signal is
            removed along with noise, and noise averages out. 0.7 suits SGD (0.5 with much noise,
            0.85 on harder data). For an inner optimizer that rescales coordinates, such as
            ``Adam(0.02)``, 0 is best, and 0.2 with noise multipliers below 2.
        hull: as for ``gradients.project_onto_hull``, as are ``start``, ``solver``, ``step_size``
            and ``steps``. Register a callable ``solver`` with Keras to save it with a model.
        relative_gap: stop once the Frank-Wolfe gap is this small, relative to the result; above 0.
        max_products: the most products with the gradient matrix per step, at least 4: half of them
            are backward passes through all public examples. On harder data 20, and without a
            ``residual`` 20 to 40, gain accuracy.
        products: how products with the transpose are computed; see ``gradients.GradientOperator``.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> AltConv(num_examples=256, smoothing=0.75).get_config()["residual"]
        0.7
    """

    num_examples: int = dataclasses.field()
    smoothing: float = 1.0
    residual: float = dataclasses.field(default=0.7, kw_only=True)
    max_products: int = dataclasses.field(default=8, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_examples = _validate.integer_at_least("num_examples", self.num_examples, 1)


def _report(projection: Any) -> dict[str, tf.Tensor]:
    return {
        "projection_products": tf.cast(projection.num_products, tf.float32),
        "projection_converged": tf.cast(projection.converged, tf.float32),
    }
