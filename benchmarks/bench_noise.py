"""Time of one step's noise: on the host, and inside the program, next to NumPy's own draw.

``GaussianNoise.add_noise`` on one tensor, on one core, and NumPy's draw of as many normal numbers
from a generator that is not secure. The variants take turns; ratios are medians over rounds of the
ratio within a round, and seconds are processor time.

    python benchmarks/bench_noise.py
    python benchmarks/bench_noise.py --weights 1000000 --rounds 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import _results


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    # Before any library starts threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])

    import numpy as np
    import tensorflow as tf

    from tf_labeldp.mechanisms.step_noise import standard_normal
    from tf_labeldp.training import GaussianNoise

    def adding(noise: GaussianNoise, jit: bool = False) -> tf.types.experimental.GenericFunction:
        return tf.function(lambda part: noise.add_noise([part], 1.0, ())[0], jit_compile=jit)

    device = GaussianNoise(1.0, source="device")
    zeros = tf.zeros([args.weights])
    adding_host, adding_device = adding(GaussianNoise(1.0)), adding(device)
    adding_jit = adding(device, jit=True)
    rng = np.random.default_rng(0)
    calls = {
        "NumPy's own draw, not secure": lambda: rng.standard_normal(args.weights),
        '`source="host"` (AES-256, ziggurat)': lambda: adding_host(zeros),
        "of which the sampler": lambda: standard_normal(args.weights, None),
        '`source="device"` (ChaCha20, Box and Muller)': lambda: adding_device(zeros),
        "the same in one program of XLA": lambda: adding_jit(zeros),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(args.rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            # The first round traces.
            if number:
                seconds[name].append(time.process_time() - start)
    first = next(iter(seconds.values()))
    rows = []
    for name, found in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(found, first, strict=True))
        rows.append([name, f"{statistics.median(found):.2f}", f"{ratio:.2f}"])
    with _results.recorded(__file__, "draws"):
        columns = [f"noise of {args.weights:,} weights", "s", "x NumPy's draw"]
        print(_results.markdown(columns, rows))


if __name__ == "__main__":
    main()
