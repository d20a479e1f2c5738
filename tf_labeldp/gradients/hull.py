"""Projections of a noisy gradient onto a convex hull of per-example, per-label gradients.

The file defines the coefficients of a hull, the problem, two solvers, and ``project_onto_hull``.
``solve_conjugate`` stops once ``HullProblem.is_solved`` is true, the products are used up or a step
has length zero; ``solve_pgd`` takes a fixed number of steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.gradients._operator import GradientOperator, dot, flat_target, flatten, unflatten

# The middle of the step sizes that ghazi2024 searches (appendix D.2), and the number of steps with
# which it measures running times.
_PGD_STEP_SIZE, _PGD_STEPS = 0.02, 200


def project_onto_simplex(values: Any, total: Any = 1.0) -> tf.Tensor:
    """Returns the nearest nonnegative rows (..., m) that sum to ``total`` (..., 1), by sorting.

    Source: Wang and Carreira-Perpinan (2013), "Projection onto the probability simplex".
    """
    values = tf.convert_to_tensor(values)
    total = tf.cast(tf.convert_to_tensor(total, dtype_hint=values.dtype), values.dtype)
    # The shift and the floor do not change the projection, and keep the sums precise.
    values -= tf.reduce_max(values, axis=-1, keepdims=True)
    values = tf.maximum(values, -2.0 * total)
    ordered = tf.sort(values, axis=-1, direction="DESCENDING")
    counts = tf.range(1, tf.shape(values)[-1] + 1)
    excess = tf.cumsum(ordered, axis=-1) - total
    support = tf.reduce_sum(
        tf.cast(ordered * tf.cast(counts, values.dtype) > excess, tf.int32), axis=-1, keepdims=True
    )
    # Rows of NaN have no support, and stay NaN.
    support = tf.maximum(support, 1)
    threshold = tf.gather(excess, support - 1, axis=-1, batch_dims=values.shape.rank - 1)
    return tf.maximum(values - threshold / tf.cast(support, values.dtype), 0.0)


def mask_column(mask: Any, num_rows: int, dtype: tf.DType) -> tf.Tensor:
    """Returns 1 (n, 1) for examples and 0 for padding."""
    if mask is None:
        return tf.ones([num_rows, 1], dtype)
    return tf.reshape(tf.cast(tf.cast(mask, bool), dtype), [num_rows, 1])


class CoefficientSet(NamedTuple):
    """The coefficients (n, K) of a hull: nonnegative, with fixed sums, and 0 in rows of padding.

    For ``"joint"`` all coefficients sum to one; otherwise each of m rows sums to 1 / m.
    """

    hull: str
    # float (n, 1), 1 for examples and 0 for padding
    mask: tf.Tensor
    # 1 / m
    row_total: tf.Tensor

    @classmethod
    def of(cls, hull: str, mask: Any, num_rows: int, dtype: tf.DType) -> CoefficientSet:
        """Returns the set for n rows; rows with a ``mask`` of 0 are padding."""
        column = mask_column(mask, num_rows, dtype)
        return cls(hull, column, 1.0 / tf.maximum(tf.reduce_sum(column), 1.0))

    @property
    def total(self) -> Any:
        """The fixed sum."""
        return 1.0 if self.hull == "joint" else self.row_total

    def grouped(self, values: tf.Tensor) -> tf.Tensor:
        """Returns values (n, K) with one row per fixed sum."""
        return tf.reshape(values, [1, -1]) if self.hull == "joint" else values

    def project(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the coefficients (n, K) nearest to ``values``."""
        # Entries more than the total below the largest are projected to zero, as padding must be.
        largest = tf.reduce_max(tf.where(self.mask > 0, values, values.dtype.min))
        rows = self.grouped(tf.where(self.mask > 0, values, largest - 2.0))
        return self.mask * tf.reshape(project_onto_simplex(rows, self.total), tf.shape(values))

    def fill(self, probabilities: tf.Tensor) -> tf.Tensor:
        """Returns coefficients in proportion to the probabilities in each row."""
        return self.mask * self.row_total * probabilities

    def lowest_vertex(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the vertex (n, K) with the smallest inner product with ``gradient``."""
        rows = self.grouped(tf.where(self.mask > 0, gradient, gradient.dtype.max))
        best = tf.one_hot(tf.argmin(rows, axis=1), rows.shape[1], dtype=gradient.dtype)
        return self.mask * self.total * tf.reshape(best, gradient.shape)

    def centred(self, coefficients: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the gradient minus its mean under the coefficients, for each fixed sum.

        The mean has no effect on moves within the set, and its rounding would hide small slopes.
        """
        products = self.grouped(coefficients * gradient)
        return gradient - tf.reduce_sum(products, axis=1, keepdims=True) / self.total

    def gap(self, coefficients: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the Frank-Wolfe gap, the largest decrease of ``<gradient, .>`` in the set."""
        return tf.reduce_sum((coefficients - self.lowest_vertex(gradient)) * gradient)


def _probabilities(kind: str, predictions: Any, shape: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns uniform probabilities (n, K) of the labels, or the model's."""
    if kind == "uniform":
        return tf.fill(shape, tf.constant(1.0 / shape[1], dtype))
    if predictions is None:
        raise ValueError(
            "expected predictions=, the model's probabilities (n, K) of the labels, got None."
        )
    return tf.ensure_shape(tf.cast(predictions, dtype), shape)


# The problem.


class Point(NamedTuple):
    """Coefficients with their image and slope, so that combinations of points need no product."""

    # (n, K), a
    coefficients: tf.Tensor
    # (d,), G a
    image: tf.Tensor
    # (n, K), G^T (G a - target), up to the constants that ``centred`` removes
    slope: tf.Tensor

    def towards(self, other: Point, step: tf.Tensor) -> Point:
        """Returns ``self + step (other - self)``."""
        return Point(*(a + step * (b - a) for a, b in zip(self, other, strict=True)))

    def best_step(self, other: Point) -> tf.Tensor:
        """Returns the nonnegative step towards ``other`` that minimises f."""
        descent = -dot(self.slope, other.coefficients - self.coefficients)
        change = other.image - self.image
        return tf.maximum(tf.math.divide_no_nan(descent, dot(change, change)), 0.0)


class HullProblem(NamedTuple):
    """The problem of a solver: minimise ``f(a) = 1/2 |G a - target|^2`` over a set."""

    # G
    operator: GradientOperator
    # (d,)
    target: tf.Tensor
    feasible: CoefficientSet
    relative_gap: tf.Tensor
    max_products: int
    # The solver's result in the last training step; 0 if there is none.
    curvature: tf.Tensor
    # Whether G a is zero at the first coefficients.
    starts_at_zero: bool = False

    def image(self, coefficients: tf.Tensor) -> tf.Tensor:
        """Returns ``G a`` (d,): one product."""
        return flatten(self.operator.matvec(coefficients), self.operator.dtype)

    def slope(self, image: tf.Tensor) -> tf.Tensor:
        """Returns the gradient (n, K) of f where ``G a`` is ``image`` (d,): one product."""
        residual = image - self.target
        return self.operator.rmatvec(unflatten(residual, self.operator.variable_shapes))

    def point(self, coefficients: tf.Tensor) -> Point:
        """Returns coefficients with their image and slope: two products."""
        image = self.image(coefficients)
        return self.centred(Point(coefficients, image, self.slope(image)))

    def first(self, start: tf.Tensor) -> tuple[Point, int]:
        """Returns the first point, and the number of products it took."""
        if not self.starts_at_zero:
            return self.point(start), 2
        image = tf.zeros_like(self.target)
        return self.centred(Point(start, image, self.slope(image))), 1

    def centred(self, point: Point) -> Point:
        """Returns the point with its slope centred."""
        return point._replace(slope=self.feasible.centred(point.coefficients, point.slope))

    def gap(self, point: Point) -> tf.Tensor:
        """Returns the Frank-Wolfe gap, which bounds how far f is above its minimum."""
        return tf.maximum(self.feasible.gap(point.coefficients, point.slope), 0.0)

    def is_solved(self, point: Point) -> tf.Tensor:
        """Returns whether the gap is at most ``relative_gap |G a|^2 / 2``."""
        return self.gap(point) <= self.relative_gap * 0.5 * dot(point.image, point.image)


# The solvers.

# The last point, the number of products, and the curvature for the next training step.
Solution = tuple[Point, Any, Any]
Solver = Callable[[HullProblem, tf.Tensor], Solution]


def solve_conjugate(problem: HullProblem, start: tf.Tensor) -> Solution:
    """Projects by conjugate directions within the set (Polyak 1969).

    Each step minimises f towards ``Proj(a + d + b s)``, as far as the set allows: ``d`` is the
    projected gradient step of Barzilai and Borwein (1988), ``s`` the previous step, and ``b`` makes
    them conjugate. f never rises, and the method is conjugate gradients while no coefficient
    reaches zero. Without a curvature, the first step goes towards a vertex.
    """
    feasible, dtype = problem.feasible, start.dtype
    first, first_products = problem.first(start)

    def unfinished(products: Any, point: Point, _: Point, __: Any, length: Any) -> Any:
        # After a step of length zero, f cannot fall at this precision.
        can_fall = (products + 2 <= problem.max_products) & (length > 0)
        return can_fall & ~problem.is_solved(point)

    def goal(point: Point, last: Point, scale: tf.Tensor) -> tf.Tensor:
        here = point.coefficients
        downhill = feasible.project(here - scale * point.slope)
        share = -tf.math.divide_no_nan(
            dot(downhill - here, last.slope), dot(last.image, last.image)
        )
        conjugate = feasible.project(downhill + share * last.coefficients)
        return tf.where(dot(point.slope, conjugate - here) < 0, conjugate, downhill)

    def step(products: Any, point: Point, last: Point, scale: Any, _: Any) -> tuple[Any, ...]:
        target = tf.cond(
            scale > 0,
            lambda: goal(point, last, scale),
            lambda: feasible.lowest_vertex(point.slope),
        )
        trial = problem.point(target)
        # The set allows a step until the first entry would be negative, and always up to trial.
        fall = point.coefficients - trial.coefficients
        room = tf.math.divide_no_nan(point.coefficients, fall)
        longest = tf.reduce_min(tf.where(fall > 0, room, fall.dtype.max))
        length = tf.minimum(point.best_step(trial), tf.maximum(longest, 1.0))
        ahead = point.towards(trial, length)
        ahead = problem.centred(ahead._replace(coefficients=tf.maximum(ahead.coefficients, 0.0)))
        last = Point(*(new - old for new, old in zip(ahead, point, strict=True)))
        measured = tf.math.divide_no_nan(
            dot(last.coefficients, last.coefficients), dot(last.image, last.image)
        )
        return products + 2, ahead, last, tf.where(measured > 0, measured, scale), length

    unit = tf.ones([], dtype)
    no_step = Point(*(tf.zeros_like(part) for part in first))
    scale = tf.math.divide_no_nan(unit, problem.curvature)
    products, point, _, scale, _ = tf.while_loop(
        unfinished, step, (tf.constant(first_products), first, no_step, scale, unit)
    )
    return point, products, tf.math.divide_no_nan(unit, scale)


def solve_pgd(problem: HullProblem, start: tf.Tensor, *, step_size: float, steps: int) -> Solution:
    """Projects by a fixed number of steps ``a <- Proj(a - 2 step_size G^T (G a - target))``.

    ``ghazi2024``, section 3.2. Takes two products per step, and two for the gap at the last point.
    """

    def step(done: Any, coefficients: tf.Tensor) -> tuple[Any, tf.Tensor]:
        slope = problem.slope(problem.image(coefficients))
        return done + 1, problem.feasible.project(coefficients - 2.0 * step_size * slope)

    _, coefficients = tf.while_loop(lambda done, _: done < steps, step, (tf.constant(0), start))
    point = problem.point(coefficients)
    return point, 2 * steps + 2, tf.zeros([], start.dtype)


@dataclasses.dataclass(eq=False, kw_only=True)
class HullChoice:
    """A hull, the start of its projection and the solver; ``project_onto_hull`` documents them."""

    hull: str = "per_example"
    start: str = "predictions"
    solver: Setting[str | Callable[..., Any]] = "conjugate"
    relative_gap: float = 1e-2
    max_products: int = 20
    step_size: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        _validate.one_of("hull", self.hull, ("joint", "per_example"))
        _validate.one_of("start", self.start, ("predictions", "uniform"))
        if not callable(self.solver):
            _validate.one_of("solver", self.solver, ("conjugate", "pgd"))
        self.relative_gap = _validate.number_in("relative_gap", self.relative_gap, "[0, inf)")
        self.max_products = _validate.integer_at_least("max_products", self.max_products, 4)
        if self.solver != "pgd" and (self.step_size, self.steps) != (None, None):
            raise ValueError(
                f"step_size and steps need solver='pgd', got solver={self.solver!r}. Leave them "
                "out."
            )
        if self.step_size is not None:
            _validate.positive_finite("step_size", self.step_size)
        if self.steps is not None:
            _validate.integer_at_least("steps", self.steps, 1)

    @property
    def solve(self) -> Solver:
        """The function of the solver."""
        if callable(self.solver):
            return self.solver
        if self.solver == "conjugate":
            return solve_conjugate
        step_size = _PGD_STEP_SIZE if self.step_size is None else self.step_size
        steps = _PGD_STEPS if self.steps is None else self.steps
        return functools.partial(solve_pgd, step_size=float(step_size), steps=int(steps))


class HullProjection(NamedTuple):
    """The result of ``project_onto_hull``, which documents the fields."""

    point: list[tf.Tensor]
    coefficients: tf.Tensor
    gap: tf.Tensor
    relative_gap: tf.Tensor
    num_products: tf.Tensor
    converged: tf.Tensor
    curvature: tf.Tensor

    def smoothed(self, smoothing: float, mask: Setting[Any] = None) -> tf.Tensor:
        """Returns ``smoothing * coefficients + (1 - smoothing) * b`` (``ghazi2024``, section 3.3).

        ``b`` is ``1 / (n K)``, with 0 for padding.
        """
        shape, dtype = self.coefficients.shape, self.coefficients.dtype
        feasible = CoefficientSet.of("joint", mask, shape[0], dtype)
        other = feasible.fill(_probabilities("uniform", None, shape, dtype))
        return smoothing * self.coefficients + (1.0 - smoothing) * other


def project_onto_hull(  # noqa: PLR0913 (a hull, its start, its solver's settings)
    operator: GradientOperator,
    target: Setting[Sequence[Any]],
    hull: str = "per_example",
    *,
    start: str = "predictions",
    predictions: Setting[Any] = None,
    zero_at_predictions: bool = False,
    solver: str | Solver = "conjugate",
    relative_gap: float = 1e-2,
    max_products: int = 30,
    curvature: Setting[Any] = None,
    mask: Setting[Any] = None,
    step_size: float | None = None,
    steps: int | None = None,
) -> HullProjection:
    """Projects a noisy gradient onto a convex hull of per-example, per-label gradients.

    Minimises ``1/2 |G a - target|^2`` over nonnegative coefficients ``a`` (n, K) (``ghazi2024``,
    sections 3.1 and 3.2), in two products per step, without forming G. Works in a ``tf.function``.

    Guarantee:
        Post-processing of ``target``: sees no labels.

    Args:
        operator: G.
        target: the noisy gradient, a list of tensors like the operator's variables.
        hull: ``"per_example"``: the coefficients of each of n examples sum to 1 / n, so the set
            contains the mean gradient of the examples for any labels, and little else.
            ``"joint"``: all coefficients together sum to 1, as in the paper.
        start: ``"predictions"`` starts at the model's predictions, which is point 0 for
            cross-entropy without ``scales``; ``"uniform"`` with equal coefficients for all labels,
            as in the paper.
        predictions: the model's probabilities of the labels, float (n, K); ``"predictions"`` needs
            them.
        zero_at_predictions: whether ``"predictions"`` starts at point 0, which saves a product.
        solver: ``"conjugate"`` for projected conjugate gradients, ``"pgd"`` for the paper's fixed
            number of plain steps, or a callable ``(problem, start) -> (point, num_products,
            curvature)``. ``problem.point(a)`` evaluates coefficients (n, K) in two products;
            ``problem.first(start)`` does so in one if possible, and returns their number;
            ``problem.feasible`` is the set, ``problem.is_solved(point)`` the criterion to stop, and
            ``problem.max_products`` the limit.
        relative_gap: stops once ``gap <= relative_gap |point|^2 / 2``; at least 0.
        max_products: the largest number of products, at least 4.
        curvature: ``curvature`` of the last training step's result, for a better first step; None
            or 0 if there is none. ``"pgd"`` ignores it.
        mask: (n,), zero for padding, which gets no coefficients; None if there is no padding.
        step_size: step size of ``"pgd"``, above 0; None: 0.02.
        steps: number of steps of ``"pgd"``, its only criterion to stop; None: 200.

    Returns:
        A named tuple of
        point: ``G coefficients``, a list of tensors like the variables;
        coefficients: float (n, K);
        gap: scalar, the Frank-Wolfe gap of ``1/2 |G a - target|^2``, a certificate:
        ``|point - exact projection|^2 <= 2 gap``;
        relative_gap: scalar ``gap / (1/2 |point|^2)``, whose root bounds
        ``|point - exact projection| / |point|``;
        num_products: int32 scalar, the number of products with G or its transpose;
        converged: boolean scalar, whether the gap reached the argument ``relative_gap``;
        curvature: scalar for the projection of the next training step.
        Its method ``smoothed`` mixes the coefficients with uniform ones.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a name is unknown; ``predictions`` are missing; ``target`` does not fit the
            variables or is not finite (in eager mode); a number is out of range; ``step_size`` or
            ``steps`` is set without ``solver="pgd"``.

    Example:
        >>> import tensorflow as tf
        >>> x, w = tf.constant([[1.0], [2.0]]), tf.Variable(tf.zeros([1, 2]))
        >>> operator = GradientOperator(lambda: -tf.nn.log_softmax(x @ w), [w])
        >>> result = project_onto_hull(
        ...     operator, [tf.constant([[2.0, 0.0]])], predictions=tf.fill([2, 2], 0.5)
        ... )
        >>> result.point[0].numpy().round(2).tolist(), bool(result.converged)
        ([[0.75, -0.75]], True)
        >>> result.coefficients.numpy().round(2).tolist()
        [[0.0, 0.5], [0.0, 0.5]]
    """
    choice = HullChoice(
        hull=hull,
        start=start,
        solver=solver,
        relative_gap=relative_gap,
        max_products=max_products,
        step_size=step_size,
        steps=steps,
    )
    shape, dtype = operator.coefficients_shape, operator.dtype
    feasible = CoefficientSet.of(hull, mask, shape[0], dtype)
    problem = HullProblem(
        operator,
        flat_target(target, operator),
        feasible,
        relative_gap=tf.cast(choice.relative_gap, dtype),
        max_products=choice.max_products,
        curvature=tf.cast(0.0 if curvature is None else curvature, dtype),
        starts_at_zero=zero_at_predictions and start == "predictions",
    )
    # Half-precision probabilities miss their sum of one by more than the gap allows.
    first = feasible.project(feasible.fill(_probabilities(start, predictions, shape, dtype)))
    point, num_products, curvature = choice.solve(problem, first)
    gap = problem.gap(point)
    scale = 0.5 * dot(point.image, point.image)
    return HullProjection(
        point=unflatten(point.image, operator.variable_shapes),
        coefficients=point.coefficients,
        gap=gap,
        relative_gap=gap / tf.maximum(scale, scale.dtype.as_numpy_dtype(1e-30)),
        num_products=tf.cast(num_products, tf.int32),
        converged=problem.is_solved(point),
        curvature=curvature,
    )
