"""How fast projections find the gradient behind the noise: error and gap against products.

The model is the CNN of Ghazi et al. 2024, Table 10(a), on MNIST, at three states of plain training.
The target is the noisy gradient of a step of DP-SGD: the mean of 1,024 clipped gradients (norm 1)
and noise. "Direction error" is one minus the cosine between the projected and the clean clipped
gradient, "relative error" their distance over the length of the clean gradient. Columns are the
gradients of all labels, unscaled (``plain``) or scaled to norm 1 by norms estimated from four
products (``clipped``; the table counts these four, the curves do not). The curvature of the earlier
step comes from another draw of noise. Each curve is a line in a JSON file, so a stopped benchmark
resumes.

    python benchmarks/bench_projection.py --plot benchmarks/projection_convergence.png
    python benchmarks/bench_projection.py --quick
    python benchmarks/bench_projection.py --times
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import _projection_report as report
import _projection_times as times
import _results
import numpy as np
import tensorflow as tf
from _projection_solvers import SOLVERS, estimate_column_norms
from _projection_states import BATCH_SIZE, STATES, State, training_states

from tf_labeldp.gradients import GradientOperator, project_onto_hull
from tf_labeldp.gradients._operator import unflatten
from tf_labeldp.gradients.hull import CoefficientSet, HullProblem, Point

CLIP = 1.0
MAX_PRODUCTS = 40
PGD_STEP_SIZE = 0.01
"""The smallest of the paper's; 0.02 and 0.05 oscillate as well."""
PGD_STEPS = (5, 10, 20, 50, 100, 200)
SOLVERS_AND_STARTS = (
    ("conjugate", "predictions"),
    ("conjugate", "uniform"),
    ("accelerated", "predictions"),
    ("accelerated", "uniform"),
    ("frank_wolfe", "predictions"),
    ("frank_wolfe", "uniform"),
    ("pgd", "uniform"),
)
LARGE = (("conjugate", "predictions"), ("accelerated", "predictions"), ("pgd", "uniform"))


class CountingOperator(GradientOperator):
    """Counts its products, which run one by one outside of graphs."""

    count = 0

    def matvec(self, coefficients: Any) -> list[tf.Tensor]:
        """Counts and multiplies."""
        self.count += 1
        return super().matvec(coefficients)

    def rmatvec(self, vector: Any) -> tf.Tensor:
        """Counts and multiplies."""
        self.count += 1
        return super().rmatvec(vector)


class Curve:
    """Errors and gaps of the points of a solver."""

    def __init__(self, clean: np.ndarray) -> None:
        self.clean = clean
        self.points: list[dict] = []

    def add(self, products: int, image: tf.Tensor, gap: float | None) -> None:
        """Adds a point, once."""
        point = image.numpy().astype(np.float64)
        if self.points and self.points[-1]["products"] == products:
            return
        length, wanted = np.linalg.norm(point), np.linalg.norm(self.clean)
        self.points.append(
            {
                "products": products,
                "direction_error": 1.0 - float(point @ self.clean) / (length * wanted + 1e-30),
                "relative_error": float(np.linalg.norm(point - self.clean) / wanted),
                "gap": gap,
                "relative_gap": None if gap is None else gap / (0.5 * length**2 + 1e-30),
            }
        )

    @contextlib.contextmanager
    def recording(self, solver: str) -> Iterator[None]:
        """Adds each point at which a solver tests convergence; for pgd those of PGD_STEPS."""
        is_solved, slope = HullProblem.is_solved, HullProblem.slope

        def recorded_is_solved(problem: HullProblem, point: Point) -> tf.Tensor:
            self.add(problem.operator.count, point.image, float(problem.gap(point)))
            return is_solved(problem, point)

        def recorded_slope(problem: HullProblem, image: tf.Tensor) -> tf.Tensor:
            if problem.operator.count // 2 in PGD_STEPS:
                self.add(2 * (problem.operator.count // 2), image, None)
            return slope(problem, image)

        changes: dict[str, Any] = {"is_solved": recorded_is_solved}
        if solver == "pgd":
            changes["slope"] = recorded_slope
        with mock.patch.multiple(HullProblem, **changes):
            yield


def operator_of(
    state: State, num_examples: int, columns: str
) -> tuple[CountingOperator, tf.Tensor]:
    """Returns the operator at a state, and the model's probabilities."""
    rng = np.random.default_rng(1)
    x = state.images[rng.choice(len(state.images), num_examples, replace=False)]
    variables = state.model.trainable_variables

    def losses() -> tf.Tensor:
        return -tf.nn.log_softmax(state.model(x))

    operator = CountingOperator(losses, variables)
    if columns == "clipped":
        scales = tf.minimum(1.0, CLIP / estimate_column_norms(operator))
        operator = CountingOperator(losses, variables, scales=scales)
    return operator, tf.nn.softmax(state.model(x))


def noisy(state: State, noise_multiplier: float, seed: int) -> np.ndarray:
    """Returns the clean gradient (d,) with the noise of a step of DP-SGD."""
    rng = np.random.default_rng([seed, int(10 * noise_multiplier)])
    noise = rng.normal(size=state.clean.size).astype(np.float32)
    return state.clean + noise_multiplier * CLIP / BATCH_SIZE * noise


def earlier_curvature(
    state: State, hull: str, operator: CountingOperator, predictions: tf.Tensor
) -> float:
    """Returns the curvature that an earlier training step passes on."""
    target = unflatten(tf.constant(noisy(state, 5.0, seed=1)), operator.variable_shapes)
    result = project_onto_hull(
        operator, target, hull, predictions=predictions, relative_gap=0.0, max_products=12
    )
    return float(result.curvature)


def run(
    case: dict, state: State, operator: CountingOperator, predictions: tf.Tensor, curvature: float
) -> Iterator[dict]:
    """Yields the curve of one case; for pgd a curve per step size."""
    target = noisy(state, case["noise_multiplier"], case["seed"])
    stddev = case["noise_multiplier"] * CLIP / BATCH_SIZE
    wanted = unflatten(tf.constant(target), operator.variable_shapes)
    feasible = CoefficientSet.of(case["hull"], None, predictions.shape[0], tf.float32)
    noise = tf.random.stateless_normal(target.shape, [0, 0])
    noise_slope = operator.rmatvec(unflatten(noise, operator.variable_shapes))
    start = feasible.fill(predictions)
    noise_gap = stddev * float(feasible.gap(start, noise_slope))

    settings: list[dict] = [{"max_products": MAX_PRODUCTS, "curvature": curvature}]
    if case["solver"] == "pgd":
        u = tf.ones_like(predictions)
        # The paper's grid has no stable step size.
        for _ in range(10):
            u = operator.rmatvec(operator.matvec(u / tf.norm(u)))
        sizes = [0.5 / float(tf.norm(u))]
        if case["noise_multiplier"] == 2.0 and len(u) == 256:
            sizes.insert(0, PGD_STEP_SIZE)
        settings = [{"step_size": size, "steps": PGD_STEPS[-1]} for size in sizes]
    for setting in settings:
        operator.count = 0
        curve = Curve(state.clean.astype(np.float64))
        with curve.recording(case["solver"]):
            project_onto_hull(
                operator,
                wanted,
                case["hull"],
                start=case["start"],
                predictions=predictions,
                solver=SOLVERS.get(case["solver"], case["solver"]),
                relative_gap=0.0,
                **setting,
            )
        yield {
            **case,
            "step_size": setting.get("step_size"),
            "largest_step": case["solver"] == "pgd" and setting is settings[-1],
            "noise_gap": noise_gap,
            "noisy_direction_error": 1.0
            - float(target @ state.clean)
            / float(np.linalg.norm(target) * np.linalg.norm(state.clean)),
            "accuracy": state.accuracy,
            "curve": curve.points,
        }


def cases(quick: bool) -> Iterator[dict]:
    """Yields the cases in their order."""
    multipliers = (2.0, 10.0) if quick else (2.0, 5.0, 10.0, 40.0)
    sizes = (256,) if quick else (256, 1024)
    for state, size, columns in itertools.product(STATES, sizes, ("clipped", "plain")):
        for hull, multiplier in itertools.product(("per_example", "joint"), multipliers):
            for solver, start in SOLVERS_AND_STARTS:
                if solver == "pgd" and (hull != "joint" or multiplier not in (2.0, 10.0)):
                    # The paper's hull alone, to save time.
                    continue
                if size > 256 and (solver, start) not in LARGE:
                    continue
                yield {
                    "state": state,
                    "num_examples": size,
                    "columns": columns,
                    "hull": hull,
                    "solver": solver,
                    "start": start,
                    "noise_multiplier": multiplier,
                    "seed": 0,
                }


def main() -> None:
    """Runs what is missing, prints the table, and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default="projection_results.jsonl")
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="two noise levels, 256 examples")
    parser.add_argument(
        "--columns", nargs="+", default=["clipped", "plain"], choices=["clipped", "plain"]
    )
    parser.add_argument("--times", action="store_true", help="only the times of products")
    arguments = parser.parse_args()
    if arguments.times:
        with _results.recorded(__file__, "times"):
            times.main()
        return
    chosen = [case for case in cases(arguments.quick) if case["columns"] in arguments.columns]
    wanted = _results.missing(arguments.results, chosen)
    if wanted:
        states = {s.name: s for s in training_states(CLIP)}
        operator: tuple[Any, Any] = (None, None)
        curvatures: dict[str, float] = {}
        for case in wanted:
            which = case["state"], case["num_examples"], case["columns"]
            if operator[0] != which:
                operator = which, operator_of(states[which[0]], *which[1:])
                curvatures = {}
            state, hull = states[case["state"]], case["hull"]
            if hull not in curvatures:
                curvatures[hull] = earlier_curvature(state, hull, *operator[1])
            for result in run(case, state, *operator[1], curvatures[hull]):
                _results.add_run(arguments.results, result)
    results = _results.runs(arguments.results)
    with _results.recorded(__file__, "products_needed", "direction_error"):
        report.print_tables(results)
    if arguments.plot:
        report.plot(results, arguments.plot)


if __name__ == "__main__":
    main()
