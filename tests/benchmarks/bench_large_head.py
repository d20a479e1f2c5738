"""Time and memory of a head on many rows: by default 1,000,000 rows of 2,000 features.

The features come from a ``tf.data.Dataset`` that makes them when they are read, so the process
holds what the head holds. They are a fixed block of random numbers with other signs in each batch,
and cost next to nothing; labels are drawn from a linear model of them.

    python tests/benchmarks/bench_large_head.py
    python tests/benchmarks/bench_large_head.py --rows 100000 --head logistic
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings

import numpy as np
import tensorflow as tf

from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge

BATCH = 5000
CLASSES = 10


def dataset(rows: int, width: int) -> tf.data.Dataset:
    """Returns batches (x, y), the same whenever they are read."""
    rng = np.random.default_rng(0)
    scales = np.geomspace(1.0, 0.03, width)
    block = tf.constant((rng.normal(size=(BATCH, width)) * scales).astype(np.float32))
    weights = tf.constant(rng.normal(size=(width, CLASSES)).astype(np.float32))

    def batch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.stack([index, index])
        signs = tf.sign(tf.random.stateless_uniform((width,), seed, -1.0, 1.0))
        x = block * signs
        return x, tf.argmax(x @ weights, axis=1)

    return tf.data.Dataset.range(rows // BATCH).map(batch).prefetch(2)


def main() -> None:
    """Fits once, and prints seconds, rows a second and the peak of memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=2_000)
    parser.add_argument("--head", choices=["ridge", "logistic"], default="ridge")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "delta")  # 1/n: nothing is published here
    data = dataset(args.rows, args.features)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    start = time.perf_counter()
    kind = PrivateRidge if args.head == "ridge" else PrivateLogisticRegression
    head = kind(1.0, 1.0 / args.rows, num_classes=CLASSES, insecure_seed=0).fit(data)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    x, y = next(data.as_numpy_iterator())
    print(f"{args.rows:,} x {args.features:,}, {args.head}: {head.num_directions_} directions kept")
    print(f"{seconds:.0f} s, {args.rows / seconds:,.0f} rows a second")
    print(f"peak memory {peak:.1f} GB, of which {before:.1f} GB before the fit")
    print(f"accuracy on a batch: {head.score(x, y):.3f}")


if __name__ == "__main__":
    main()
