"""Time of ``randomize_labels`` per epoch of Fashion-MNIST: a Markdown table of ratios.

Run ``python benchmarks/bench_tf_data.py``; the data are in ``LABELDP_DATA_DIR``, else in
``../shared/data``. Each pipeline runs with and without the transform in turns, in one process. A
median ratio is the median over rounds of (time with / time without) in a round, so that other load
affects both. The table also has the best times, because epochs of one pipeline take one of two
times, depending on how tf.data's threads share two cores, and a median then compares luck.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _results
import numpy as np
import tensorflow as tf
from _datasets import load

from tf_labeldp.data import randomize_labels
from tf_labeldp.mechanisms import RandomizedResponse

BATCH = 256
SHUFFLE = 10_000


def load_images(limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images (n, 28, 28) uint8 and labels (n,) int64."""
    data = load("fashion_mnist")
    images = np.round(data.x_train[:limit, :, :, 0] * 255).astype(np.uint8)
    return images, data.y_train[:limit]


def prepared(features, label):
    """Scales the images and adds the channel, as a user's map would."""
    if isinstance(features, dict):
        image = tf.cast(features["image"], tf.float32)[..., None] / 255.0
        return {"id": features["id"], "image": image}, label
    return tf.cast(features, tf.float32)[..., None] / 255.0, label


def id_of(features):
    return features["id"]


def pipelines(images: np.ndarray, labels: np.ndarray) -> dict[tuple[str, str, str], list]:
    """Returns {(ids, place, shuffled): [without, with]}."""
    mechanism = RandomizedResponse(epsilon=1.0, num_classes=10)
    found = {}
    for ids in ("by place", "id_fn"):
        features = images if ids == "by place" else {"id": np.arange(len(images)), "image": images}
        source = tf.data.Dataset.from_tensor_slices((features, labels))
        for place in ("on the source", "after map"):
            transform = randomize_labels(mechanism, id_fn=id_of if ids == "id_fn" else None)
            if place == "on the source":
                private = source.apply(transform).map(prepared)
            else:
                private = source.map(prepared).apply(transform)
            for shuffled in ("yes", "no"):
                ends = [source.map(prepared), private]
                if shuffled == "yes":
                    ends = [end.shuffle(SHUFFLE) for end in ends]
                ends = [end.batch(BATCH).prefetch(tf.data.AUTOTUNE) for end in ends]
                found[ids, place, shuffled] = ends
    return found


def seconds(dataset: tf.data.Dataset) -> tuple[float, float]:
    """Returns wall and processor time of one epoch."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in dataset:
        pass
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--examples", type=int, default=60_000)
    arguments = parser.parse_args()
    images, labels = load_images(arguments.examples)
    print(f"Fashion-MNIST, {len(images):,} examples, batch {BATCH}, {arguments.rounds} rounds\n")
    print(
        "| ids | applied | shuffle | best without, s | best with, s | ratio of bests | "
        "median wall ratio | median processor ratio |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for name, (without, with_it) in pipelines(images, labels).items():
        # The first epochs warm up.
        seconds(without), seconds(with_it)
        rounds = []
        # The order alternates, since caches may favour the second.
        for i in range(arguments.rounds):
            if i % 2:
                after, before = seconds(with_it), seconds(without)
            else:
                before, after = seconds(without), seconds(with_it)
            rounds.append((before, after))
        best = [min(values[k][0] for values in rounds) for k in (0, 1)]
        ratios = [statistics.median(b[k] / a[k] for a, b in rounds) for k in (0, 1)]
        print(
            f"| {' | '.join(name)} | {best[0]:.2f} | {best[1]:.2f} | {best[1] / best[0]:.2f} | "
            f"{ratios[0]:.2f} | {ratios[1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    with _results.recorded(__file__, "times"):
        main()
