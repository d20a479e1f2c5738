"""Time of one training step: plain Keras, DP-SGD here and in TF Privacy, and LabelDP-Pro by solver.

The CNN of ``ghazi2024``, Table 10(a), on random images (the time does not depend on them), two
cores. Each case trains in a separate process, which stops after some steps and waits for the
others, so that all cases share every slow moment of the machine; the table has medians over rounds
of times, and of the ratios within a round. DP-SGD here is ``LabelDPModel.fit`` on Poisson batches,
with secret sampling, a buffer larger than the mean batch, and noise from a cipher, on the host
unless the case names another source.

TF Privacy is timed if tensorflow-privacy and tf-keras are installed (``make test-tf-privacy``
creates ``.venv-tf-privacy`` with both).

    python benchmarks/bench_step_time.py
    python benchmarks/bench_step_time.py --rounds 3 --cases plain dp-sgd "AltConv 256"
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
from importlib.util import find_spec
from typing import Any

import _results
import _workers

CORES = 2
WARM_UP = 2
# More than the rounds need: all steps are in one epoch.
STEPS = 10_000
CLASSES = 10
WORDS = 100_000
CLIP, NOISE = 1.0, 4.7
MEMORY_LIMIT = 12 * 2**30

# Name -> (worker, settings, steps per round).
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("plain", {}, 8),
    "plain, jit_compile=False": ("plain", {"jit_compile": False}, 8),
    "dp-sgd": ("ours", {}, 8),
    "dp-sgd, device noise": ("ours", {"source": "device"}, 8),
    "dp-sgd, jit_compile": ("ours", {"source": "device", "jit_compile": True}, 8),
    "dp-sgd, vectorized": ("ours", {"method": "vectorized"}, 2),
    "plain, 10,000,000 weights": ("plain", {"network": "dense"}, 2),
    "dp-sgd, 10,000,000 weights": ("ours", {"network": "dense"}, 2),
    "dp-sgd, 10,000,000 weights of an Embedding": ("ours", {"network": "embedding"}, 2),
    "dp-sgd, label_distance, 2 classes": ("ours", {"clipping": "label_distance"}, 4),
    "dp-sgd, gauss_newton": ("ours", {"preconditioner": "gauss_newton"}, 4),
    "TF Privacy DPSequential": ("tfp", {"use_xla": True}, 2),
    "TF Privacy DPSequential, use_xla=False": ("tfp", {"use_xla": False}, 2),
    "TF Privacy DPKerasSGDOptimizer": ("jacobian", {}, 1),
}
for _count in (256, 1024):
    CASES[f"AltConv {_count}"] = ("ours", {"num_examples": _count}, 4)
    CASES[f"AltConv {_count}, 20 products"] = (
        "ours",
        {"num_examples": _count, "max_products": 20},
        4,
    )
    CASES[f"AltConv {_count}, forward mode"] = (
        "ours",
        {"num_examples": _count, "products": "forward"},
        4,
    )
    CASES[f"AltConv {_count}, frank_wolfe"] = (
        "ours",
        {"num_examples": _count, "solver": "frank_wolfe"},
        2,
    )
    CASES[f"AltConv {_count}, pgd (the paper's)"] = (
        "ours",
        {"num_examples": _count, "solver": "pgd", "hull": "joint", "start": "uniform"},
        1,
    )
# (text, numerator, denominator, largest ratio).
TARGETS = [
    ("dp-sgd / plain", "dp-sgd", "plain", 4.0),
    ("dp-sgd / TF Privacy DPSequential", "dp-sgd", "TF Privacy DPSequential", 0.25),
    (
        "dp-sgd / TF Privacy DPSequential, use_xla=False",
        "dp-sgd",
        "TF Privacy DPSequential, use_xla=False",
        0.25,
    ),
    ("AltConv 256 / dp-sgd", "AltConv 256", "dp-sgd", 2.0),
    ("AltConv 1024 / dp-sgd", "AltConv 1024", "dp-sgd", 5.0),
]


def random_data(batch: int, batches: int = 1, network: str = "cnn") -> tuple[Any, Any]:
    """Returns images, or the words of texts, and labels."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.random((batches * batch, 28, 28, 1), dtype=np.float32)
    if network == "embedding":
        x = rng.integers(WORDS, size=(batches * batch, 64))
    return x, rng.integers(CLASSES, size=batches * batch)


def make_network(network: str, classes: int = CLASSES) -> Any:
    """Returns the CNN, or a network of 10,000,000 weights."""
    import _models
    import keras

    layers = keras.layers
    if network == "cnn":
        return _models.small_cnn((28, 28, 1), classes)
    if network == "dense":
        stack = [keras.Input((28, 28, 1)), layers.Flatten()]
        stack += [layers.Dense(2048, "relu") for _ in range(3)]
    else:
        stack = [keras.Input((64,), dtype="int32"), layers.Embedding(WORDS, 100)]
        stack += [layers.GlobalAveragePooling1D()]
    return keras.Sequential([*stack, layers.Dense(classes)])


def train_plain(batch: int, settings: dict[str, Any]) -> None:
    """Trains with ``model.fit`` of Keras 3."""
    rounds = _workers.Rounds()
    import keras
    import tensorflow as tf

    network = settings.pop("network", "cnn")
    model = make_network(network)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, **settings)
    data = tf.data.Dataset.from_tensors(random_data(batch, network=network)).repeat()
    callbacks = [rounds.callback(keras.callbacks.Callback)]
    model.fit(data, steps_per_epoch=STEPS, callbacks=callbacks, verbose=0)


def train_ours(batch: int, settings: dict[str, Any]) -> None:
    """Trains a ``LabelDPModel``; settings that are not popped here are those of ``AltConv``."""
    rounds = _workers.Rounds()
    import keras
    from _projection_solvers import SOLVERS

    from tf_labeldp.data import poisson_batches
    from tf_labeldp.training import AltConv, GaussianNoise, LabelDPModel, LabelDPOptimizer

    method, jit = settings.pop("method", "auto"), settings.pop("jit_compile", False)
    network = settings.pop("network", "cnn")
    clipping = settings.pop("clipping", "norm")
    preconditioner = settings.pop("preconditioner", None)
    noise = GaussianNoise(NOISE, source=settings.pop("source", "host"))
    if "solver" in settings:
        settings["solver"] = SOLVERS.get(settings["solver"], settings["solver"])
    denoiser = AltConv(**settings) if settings else None
    inner = keras.optimizers.SGD(0.1)
    classes = CLASSES if clipping == "norm" else 2
    model = LabelDPModel.from_model(make_network(network, classes))
    model.compile(
        LabelDPOptimizer(
            inner,
            CLIP,
            denoiser=denoiser,
            preconditioner=preconditioner,
            noise=noise,
            method=method,
            clipping=clipping,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
    )
    x, y = random_data(batch, batches=16, network=network)
    data = poisson_batches(x, y % classes, sampling_probability=1 / 16, steps=STEPS)
    callbacks = [rounds.callback(keras.callbacks.Callback)]
    model.fit(data, callbacks=callbacks, verbose=0)


def train_tf_privacy(batch: int, settings: dict[str, Any]) -> None:
    """Trains the same network of Keras 2 with TF Privacy: by its model, or by its optimizer."""
    rounds = _workers.Rounds()
    import importlib

    import tensorflow as tf

    from tf_labeldp.tf_privacy import load

    load()
    layers = tf.keras.layers
    network = [
        layers.InputLayer((28, 28, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.AveragePooling2D(2),
        layers.Conv2D(16, 3, activation="relu"),
        layers.AveragePooling2D(2),
        layers.Flatten(),
        layers.Dense(16, activation="relu"),
        layers.Dense(CLASSES),
    ]
    loss = tf.keras.losses.SparseCategoricalCrossentropy
    home = "tensorflow_privacy.privacy"
    if settings:
        kind = importlib.import_module(f"{home}.keras_models.dp_keras_model").DPSequential
        model = kind(l2_norm_clip=CLIP, noise_multiplier=NOISE, layers=network, **settings)
        model.compile(tf.keras.optimizers.SGD(0.1), loss(from_logits=True))
    else:
        optimizers = importlib.import_module(f"{home}.optimizers.dp_optimizer_keras")
        model = tf.keras.Sequential(network)
        optimizer = optimizers.DPKerasSGDOptimizer(CLIP, NOISE, learning_rate=0.1)
        model.compile(optimizer, loss(from_logits=True, reduction="none"))
    data = tf.data.Dataset.from_tensors(random_data(batch)).repeat()
    callbacks = [rounds.callback(tf.keras.callbacks.Callback)]
    model.fit(data, steps_per_epoch=STEPS, callbacks=callbacks, verbose=0)


TRAINERS = {
    "plain": train_plain,
    "ours": train_ours,
    "tfp": train_tf_privacy,
    "jacobian": train_tf_privacy,
}


def started(name: str, batch: int) -> _workers.Worker:
    """Returns the process of a case."""
    kind, environment = CASES[name][0], {}
    command: list[str] | str = [sys.executable, __file__, "--worker", name, str(batch)]
    if kind in ("tfp", "jacobian"):
        environment["TF_USE_LEGACY_KERAS"] = "1"
        missing = [name for name in ("tensorflow_privacy", "tf_keras") if not find_spec(name)]
        if missing:
            command = f"no {' and no '.join(missing)}"
    return _workers.Worker(command, environment, MEMORY_LIMIT)


def measure(names: list[str], batch: int, rounds: int) -> dict[str, _workers.Worker]:
    """Runs all cases in turn, round by round."""
    workers = {name: started(name, batch) for name in names}
    for number in range(WARM_UP + rounds):
        for name, worker in workers.items():
            worker.round(CASES[name][2], counts=number >= WARM_UP)
        print(f"round {number + 1} of {WARM_UP + rounds}", file=sys.stderr)
    for worker in workers.values():
        worker.stop()
    return workers


def report(workers: dict[str, _workers.Worker], batch: int) -> None:
    """Prints one JSON line per case, the table, and the targets."""
    medians = {n: statistics.median(w.seconds) for n, w in workers.items() if w.seconds}
    for name, worker in workers.items():
        line = {
            "case": name,
            "batch": batch,
            "milliseconds": [round(1000 * s, 2) for s in worker.seconds],
            "products": worker.figures.get("products"),
            "peak": round(worker.figures.get("peak", 0.0), 2),
            "problem": worker.problem,
        }
        print(json.dumps(line))
    print(f"\n| one step, batch {batch} | ms | x plain | x dp-sgd | products | peak GiB |")
    print("|---|---|---|---|---|---|")
    for name, worker in workers.items():
        if name not in medians:
            print(f"| {name} | {worker.problem} |  |  |  |  |")
            continue
        ratios = [
            f"{_workers.ratio(worker.seconds, workers[base].seconds):.2f}"
            if base in medians
            else ""
            for base in ("plain", "dp-sgd")
        ]
        products = worker.figures["products"]
        milliseconds = f"{1000 * medians[name]:.1f}"
        cells = [name, milliseconds, *ratios, "" if products is None else str(products)]
        print(f"| {' | '.join(cells)} | {worker.figures['peak']:.2f} |")
    print()
    for what, above, below, most in TARGETS:
        if above in medians and below in medians:
            value = _workers.ratio(workers[above].seconds, workers[below].seconds)
            print(f"{what}: {value:.2f}, to be at most {most:g}: {value <= most}")


def main() -> None:
    """Measures and prints, or runs one worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, batch = args.worker
        kind, settings, _ = CASES[name]
        if kind == "jacobian":
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        TRAINERS[kind](int(batch), dict(settings))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    workers = measure(args.cases, args.batch, args.rounds)
    with _results.recorded(__file__, "steps"):
        report(workers, args.batch)


if __name__ == "__main__":
    main()
