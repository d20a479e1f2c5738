"""Times of products with the matrix of gradients, by method, weights, classes and examples."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from _timing import best_seconds

from tf_labeldp.gradients import GradientOperator, project_onto_hull

IN_A_ROW = 10


def cnn(width: int, num_classes: int) -> keras.Model:
    """Returns the CNN of Table 10(a), with ``width`` times its channels and units."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16 * width, 3, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16 * width, 3, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(16 * width, activation="relu"),
            layers.Dense(num_classes),
        ]
    )


def milliseconds(width: int, num_classes: int, num_examples: int) -> list[float]:
    """Returns the times of a forward pass, of each kind of product, and of a projection with 20."""
    model = cnn(width, num_classes)
    shape = (num_examples, 28, 28, 1)
    x = tf.constant(np.random.default_rng(0).random(shape, dtype=np.float32))
    variables = model.trainable_variables

    def operator(products: str) -> GradientOperator:
        return GradientOperator(lambda: -tf.nn.log_softmax(model(x)), variables, products=products)

    def repeated(products: str, transposed: bool) -> tf.Tensor:
        matrix = operator(products)
        vector = [tf.ones(s) for s in matrix.variable_shapes]

        def step(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            factor = tf.cast(i + 1, tf.float32)
            if transposed:
                product = matrix.rmatvec([factor * part for part in vector])
            else:
                parts = matrix.matvec(tf.fill(matrix.coefficients_shape, factor))
                product = tf.add_n([tf.reduce_sum(part) for part in parts])
            return i + 1, total + tf.reduce_sum(product)

        return tf.while_loop(lambda i, _: i < IN_A_ROW, step, (0, 0.0))[1]

    def projection() -> tf.Tensor:
        target = [0.01 * tf.random.normal(v.shape) for v in variables]
        return project_onto_hull(
            operator("double_backward"),
            target,
            predictions=tf.nn.softmax(model(x)),
            relative_gap=0.0,
            max_products=20,
        ).gap

    results = [1e3 * _seconds(tf.function(lambda: tf.reduce_sum(model(x))))]
    kinds = (("double_backward", False), ("double_backward", True), ("forward", True))
    for products, transposed in kinds:
        seconds = _seconds(tf.function(lambda p=products, t=transposed: repeated(p, t)))
        results.append(1e3 * seconds / IN_A_ROW)
    return [*results, 1e3 * _seconds(tf.function(projection))]


def _seconds(function: tf.types.experimental.PolymorphicFunction) -> float:
    function()  # traces
    return best_seconds(lambda: function().numpy(), repeats=3)


def main() -> None:
    """Prints the table."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    print("Milliseconds on one core; products taken ten in a row in a graph.\n")
    print("| d | K | n2 | forward | G u | G^T v | G^T v, forward mode |", end="")
    print(" projection of 20 products |")
    print("|---|---|---|---|---|---|---|---|")
    for width, num_classes, num_examples in (
        (1, 10, 64),
        (1, 10, 256),
        (1, 10, 1024),
        (1, 2, 256),
        (1, 100, 256),
        (1, 1000, 256),
        (2, 10, 256),
        (4, 10, 256),
    ):
        weights = cnn(width, num_classes).count_params()
        cells = [f"{t:.1f}" for t in milliseconds(width, num_classes, num_examples)]
        print(f"| {weights} | {num_classes} | {num_examples} | {' | '.join(cells)} |", flush=True)
