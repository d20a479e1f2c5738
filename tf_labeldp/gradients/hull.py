"""Projections of a noisy gradient onto a convex hull of per-example, per-label gradients.

In this order: the set of coefficients that a hull stands for, the problem, its two solvers, and the
front door, ``project_onto_hull``. A projection stops where ``HullProblem.is_solved`` is true.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.gradients._operator import GradientOperator, dot, flat_target, flatten, unflatten

HULLS = ("joint", "per_example")
STARTS = ("predictions", "uniform")
SOLVERS = ("conjugate", "pgd")

_PGD_STEP_SIZE, _PGD_STEPS = 0.02, 200


def project_onto_simplex(values: Any, total: Any = 1.0) -> tf.Tensor:
    """Returns the nearest rows (..., m) with entries of at least 0 that sum to ``total`` (..., 1).

    By sorting: Wang and Carreira-Perpinan (2013), "Projection onto the probability simplex".
    """
    values = tf.convert_to_tensor(values)
    total = tf.cast(tf.convert_to_tensor(total, dtype_hint=values.dtype), values.dtype)
    # Neither the shift nor the floor moves the answer; sums run over numbers of its size.
    values -= tf.reduce_max(values, axis=-1, keepdims=True)
    values = tf.maximum(values, -2.0 * total)
    ordered = tf.sort(values, axis=-1, direction="DESCENDING")
    counts = tf.range(1, tf.shape(values)[-1] + 1)
    excess = tf.cumsum(ordered, axis=-1) - total
    support = tf.reduce_sum(
        tf.cast(ordered * tf.cast(counts, values.dtype) > excess, tf.int32), axis=-1, keepdims=True
    )
    support = tf.maximum(support, 1)  # of all-NaN rows, which stay NaN
    threshold = tf.gather(excess, support - 1, axis=-1, batch_dims=values.shape.rank - 1)
    return tf.maximum(values - threshold / tf.cast(support, values.dtype), 0.0)


def mask_column(mask: Any, num_rows: int, dtype: tf.DType) -> tf.Tensor:
    """Returns 1 (n, 1) for examples and 0 for padding."""
    if mask is None:
        return tf.ones([num_rows, 1], dtype)
    return tf.reshape(tf.cast(tf.cast(mask, bool), dtype), [num_rows, 1])


class CoefficientSet(NamedTuple):
    """Coefficients (n, K) of a hull: at least 0, with fixed sums, and 0 in rows that are padding.

    All together sum to one (``"joint"``), or those of each of m examples to 1 / m.
    """

    hull: str
    mask: tf.Tensor  # float (n, 1), 1 for examples and 0 for padding
    row_total: tf.Tensor  # 1 / m

    @classmethod
    def of(cls, hull: str, mask: Any, num_rows: int, dtype: tf.DType) -> CoefficientSet:
        """Returns the set for n rows, of which those with a ``mask`` of 0 do not count."""
        column = mask_column(mask, num_rows, dtype)
        return cls(hull, column, 1.0 / tf.maximum(tf.reduce_sum(column), 1.0))

    @property
    def total(self) -> Any:
        """Sum of the entries that are projected together."""
        return 1.0 if self.hull == "joint" else self.row_total

    def grouped(self, values: tf.Tensor) -> tf.Tensor:
        """Returns values (n, K) in one row for each fixed sum."""
        return tf.reshape(values, [1, -1]) if self.hull == "joint" else values

    def project(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the nearest coefficients (n, K) to ``values``."""
        # Padding goes where no entry of the answer can be: more than the total below the largest.
        largest = tf.reduce_max(tf.where(self.mask > 0, values, values.dtype.min))
        rows = self.grouped(tf.where(self.mask > 0, values, largest - 2.0))
        return self.mask * tf.reshape(project_onto_simplex(rows, self.total), tf.shape(values))

    def fill(self, probabilities: tf.Tensor) -> tf.Tensor:
        """Returns coefficients with each example's row proportional to its probabilities."""
        return self.mask * self.row_total * probabilities

    def lowest_vertex(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the vertex (n, K) of the set whose inner product with ``gradient`` is least."""
        rows = self.grouped(tf.where(self.mask > 0, gradient, gradient.dtype.max))
        best = tf.one_hot(tf.argmin(rows, axis=1), rows.shape[1], dtype=gradient.dtype)
        return self.mask * self.total * tf.reshape(best, gradient.shape)

    def centred(self, coefficients: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the gradient less its mean over the coefficients, for each fixed sum.

        Moves within the set do not see the mean, which would swamp small slopes by its rounding.
        """
        products = self.grouped(coefficients * gradient)
        return gradient - tf.reduce_sum(products, axis=1, keepdims=True) / self.total

    def gap(self, coefficients: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the Frank-Wolfe gap: the most that ``<gradient, .>`` can fall within the set."""
        return tf.reduce_sum((coefficients - self.lowest_vertex(gradient)) * gradient)


def smooth_coefficients(
    coefficients: tf.Tensor,
    smoothing: float,
    towards: str = "uniform",
    *,
    predictions: Any = None,
    mask: Any = None,
) -> tf.Tensor:
    """Returns ``smoothing * coefficients + (1 - smoothing) * b`` (``ghazi2024``, section 3.3).

    ``b`` is ``1 / (n K)`` (``"uniform"``) or ``predictions / n``, with 0 for padding.
    """
    shape, dtype = coefficients.shape, coefficients.dtype
    feasible = CoefficientSet.of("joint", mask, shape[0], dtype)
    other = feasible.fill(_probabilities(towards, predictions, shape, dtype))
    return smoothing * coefficients + (1.0 - smoothing) * other


def _starting_coefficients(
    start: Any, predictions: Any, operator: GradientOperator, feasible: CoefficientSet
) -> tf.Tensor:
    shape, dtype = operator.coefficients_shape, operator.dtype
    if isinstance(start, str):
        _validate.one_of("start", start, STARTS)
        start = feasible.fill(_probabilities(start, predictions, shape, dtype))
    # Probabilities of half precision miss their sum of one by more than the gap may.
    return feasible.project(tf.ensure_shape(tf.cast(start, dtype), shape))


def _probabilities(kind: str, predictions: Any, shape: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns uniform probabilities (n, K) of the labels, or the model's."""
    if kind == "uniform":
        return tf.fill(shape, tf.constant(1.0 / shape[1], dtype))
    if predictions is None:
        raise ValueError(
            "'predictions' needs predictions=, the model's probabilities (n, K) of the labels."
        )
    return tf.ensure_shape(tf.cast(predictions, dtype), shape)


# The problem.


class Point(NamedTuple):
    """Coefficients with two linear maps of them, so that combinations of points cost no product."""

    coefficients: tf.Tensor  # (n, K), ``a``
    image: tf.Tensor  # (d,), ``G a``
    slope: tf.Tensor  # (n, K), ``G^T (G a - target)`` up to constants (see ``centred``)

    def towards(self, other: Point, step: tf.Tensor) -> Point:
        """Returns ``self + step (other - self)``."""
        return Point(*(a + step * (b - a) for a, b in zip(self, other, strict=True)))

    def best_step(self, other: Point) -> tf.Tensor:
        """Returns the step towards ``other``, of any size from 0, at which f is least."""
        descent = -dot(self.slope, other.coefficients - self.coefficients)
        change = other.image - self.image
        return tf.maximum(tf.math.divide_no_nan(descent, dot(change, change)), 0.0)


class HullProblem(NamedTuple):
    """The problem of a solver: minimise ``f(a) = 1/2 |G a - target|^2`` over a set."""

    operator: GradientOperator  # G
    target: tf.Tensor  # (d,)
    feasible: CoefficientSet
    relative_gap: tf.Tensor
    max_products: int
    curvature: tf.Tensor  # that the solver returned at the last training step; 0: unknown
    starts_at_zero: bool = False  # whether ``G a`` is zero for the first coefficients

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
        """Returns the point to begin with, and the number of products that it took."""
        if not self.starts_at_zero:
            return self.point(start), 2
        image = tf.zeros_like(self.target)
        return self.centred(Point(start, image, self.slope(image))), 1

    def centred(self, point: Point) -> Point:
        """Returns the point with its slope centred."""
        return point._replace(slope=self.feasible.centred(point.coefficients, point.slope))

    def gap(self, point: Point) -> tf.Tensor:
        """Returns the Frank-Wolfe gap at a point, which bounds how far f can still fall."""
        return tf.maximum(self.feasible.gap(point.coefficients, point.slope), 0.0)

    def is_solved(self, point: Point) -> tf.Tensor:
        """Returns whether the gap is at most ``relative_gap |G a|^2 / 2``: solvers stop there."""
        return self.gap(point) <= self.relative_gap * 0.5 * dot(point.image, point.image)


# The solvers.

# The last point, the number of products taken, and a curvature to begin the next step with.
Solution = tuple[Point, Any, Any]
Solver = Callable[[HullProblem, tf.Tensor], Solution]


def solve_conjugate(problem: HullProblem, start: tf.Tensor) -> Solution:
    """Projects by conjugate directions, as far as they stay in the set (Polyak 1969).

    Each step goes towards ``Proj(a + d + b s)``, as far as f falls and the set allows: ``d`` is the
    projected gradient step of Barzilai and Borwein (1988), ``s`` the previous step, and ``b`` makes
    the two conjugate. f never rises, and while no coefficient reaches zero these are conjugate
    gradients. Without a known curvature, the first step goes towards a vertex.
    """
    feasible, dtype = problem.feasible, start.dtype
    first, taken = problem.first(start)

    def unfinished(products: Any, point: Point, _: Point, __: Any, length: Any) -> Any:
        # After a step of no length there is no way down at this precision.
        may_go_on = (products + 2 <= problem.max_products) & (length > 0)
        return may_go_on & ~problem.is_solved(point)

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
        # As far as the set allows: until the first entry would be negative, but at least to trial.
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

    one = tf.ones([], dtype)
    nothing = Point(*(tf.zeros_like(part) for part in first))
    scale = tf.math.divide_no_nan(one, problem.curvature)
    products, point, _, scale, _ = tf.while_loop(
        unfinished, step, (tf.constant(taken), first, nothing, scale, one)
    )
    return point, products, tf.math.divide_no_nan(one, scale)


def solve_pgd(problem: HullProblem, start: tf.Tensor, *, step_size: float, steps: int) -> Solution:
    """Projects by a fixed number of steps ``a <- Proj(a - 2 step_size G^T (G a - target))``.

    ``ghazi2024``, section 3.2. Two products per step, and two for the last point's certificate.
    """

    def step(done: Any, coefficients: tf.Tensor) -> tuple[Any, tf.Tensor]:
        slope = problem.slope(problem.image(coefficients))
        return done + 1, problem.feasible.project(coefficients - 2.0 * step_size * slope)

    _, coefficients = tf.while_loop(lambda done, _: done < steps, step, (tf.constant(0), start))
    point = problem.point(coefficients)
    return point, 2 * steps + 2, tf.zeros([], start.dtype)


def checked_solver(solver: Any, step_size: float | None, steps: int | None) -> Solver:
    """Returns the function of a solver's name, or raises if an argument is wrong."""
    if not callable(solver):
        _validate.one_of("solver", solver, SOLVERS)
    if solver != "pgd":
        if (step_size, steps) != (None, None):
            raise ValueError(
                f"step_size and steps are for solver='pgd', got solver={solver!r}. Leave them out."
            )
        return solver if callable(solver) else solve_conjugate
    step_size = _PGD_STEP_SIZE if step_size is None else step_size
    steps = _PGD_STEPS if steps is None else steps
    return functools.partial(
        solve_pgd,
        step_size=_validate.positive_finite("step_size", step_size),
        steps=_validate.integer_at_least("steps", steps, 1),
    )


# The front door.


class HullProjection(NamedTuple):
    """The result of ``project_onto_hull``, whose docstring describes it."""

    point: list[tf.Tensor]
    coefficients: tf.Tensor
    gap: tf.Tensor
    relative_gap: tf.Tensor
    num_products: tf.Tensor
    converged: tf.Tensor
    curvature: tf.Tensor


def project_onto_hull(
    operator: GradientOperator,
    target: Setting[Sequence[Any]],
    hull: str = "per_example",
    *,
    start: Setting[Any] = "predictions",
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
    """Returns the point of a convex hull of gradients that is nearest to ``target``, or near it.

    Minimises ``1/2 |G a - target|^2`` over coefficients ``a`` (n, K) of at least 0 (``ghazi2024``,
    sections 3.1 and 3.2), never forming G, in two products per step. Works in a ``tf.function``.

    Guarantee:
        Post-processing of ``target``: sees no labels.

    Args:
        operator: G.
        target: list of tensors, like the operator's variables; the noisy gradient.
        hull: ``"per_example"``: the coefficients of each of n examples sum to 1 / n, so the set
            contains the mean gradient of the examples for any labels, and little else.
            ``"joint"``: all of them sum to 1, the paper's set.
        start: ``"predictions"`` begins at the model's predictions, which is point 0 for
            cross-entropy and no ``scales``; ``"uniform"`` with equal coefficients for all labels,
            as the paper; or coefficients (n, K), which are first projected onto the set.
        predictions: float (n, K), the model's probabilities of the labels, for this start.
        zero_at_predictions: whether this start is known to be point 0, which saves a product.
        solver: ``"conjugate"``: projected conjugate gradients. ``"pgd"``: the paper's fixed number
            of plain steps. Or a callable ``(problem, start) -> (point, num_products, curvature)``:
            ``problem.point(a)`` evaluates coefficients (n, K) in two products,
            ``problem.first(start)`` in one if possible, and counts them, ``problem.feasible`` is
            their set, ``problem.is_solved(point)`` the criterion to stop, and
            ``problem.max_products`` the limit.
        relative_gap: stop once ``gap <= relative_gap |point|^2 / 2``; at least 0.
        max_products: largest number of products, at least 4.
        curvature: that of the last training step's result, for a better first step; None or 0 if
            unknown. Not used by ``"pgd"``.
        mask: (n,), zero for examples that are padding: they get no coefficients. None: all count.
        step_size: of ``"pgd"`` alone, above 0; None: 0.02.
        steps: of ``"pgd"``, which has no other criterion to stop; None: 200.

    Returns:
        A named tuple of
        point: list of tensors, like the variables: ``G coefficients``;
        coefficients: float (n, K);
        gap: scalar, the Frank-Wolfe gap of ``1/2 |G a - target|^2``: a certificate, as
        ``|point - exact projection|^2 <= 2 gap``;
        relative_gap: scalar ``gap / (1/2 |point|^2)``, whose root bounds
        ``|point - exact projection| / |point|``;
        num_products: int32 scalar, the number of products with G or its transpose;
        converged: boolean scalar, whether the gap is at most the ``relative_gap`` of the argument;
        curvature: scalar for the projection of the next training step.

    Raises:
        TypeError: a number of the wrong type.
        ValueError: an unknown word; no ``predictions`` to start from; a target that does not fit
            the variables or is not finite (in eager mode); numbers out of range; ``step_size`` or
            ``steps`` without ``solver="pgd"``.

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
    _validate.one_of("hull", hull, HULLS)
    solve = checked_solver(solver, step_size, steps)
    relative_gap = _validate.number_in("relative_gap", relative_gap, "[0, inf)")
    dtype = operator.dtype
    feasible = CoefficientSet.of(hull, mask, operator.coefficients_shape[0], dtype)
    problem = HullProblem(
        operator,
        flat_target(target, operator),
        feasible,
        relative_gap=tf.cast(relative_gap, dtype),
        max_products=_validate.integer_at_least("max_products", max_products, 4),
        curvature=tf.cast(0.0 if curvature is None else curvature, dtype),
        starts_at_zero=zero_at_predictions and isinstance(start, str) and start == "predictions",
    )
    first = _starting_coefficients(start, predictions, operator, feasible)
    point, num_products, curvature = solve(problem, first)
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
