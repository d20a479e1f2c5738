"""Time of one step on seven nets: plain and private, here, in jax_privacy and in Opacus.

Each framework is a process that trains net after net on random data; between rounds it waits, so
that all frameworks take turns and share every slow moment of the machine. Tables have medians over
rounds, of times and of ratios within a round. Compilation and the fixed cost of a ``fit`` are a
table of their own. The threads of a process are pinned to its cores.

- Keras: ``fit`` of Keras 3 on TensorFlow with its defaults, on one batch.
- ours: ``LabelDPModel.fit`` on Poisson batches of the same mean size, with noise from a cipher.
- jax_privacy: ``keras_api.make_private`` of Keras on JAX, in the fastest of some microbatches.
- Opacus: ``PrivacyEngine``, the faster of its modes "ghost" (g) and "hooks" (h).

jax_privacy and Opacus train on one batch of fixed size: their Poisson sampling is left out, in
their favour. They have environments of their own, ``.venv-jax-privacy`` and ``.venv-opacus``, which
``make bench-nets`` creates; without them their cells are empty.

    make bench-nets                    # creates the environments, then runs the script: 12 minutes
    python benchmarks/bench_nets.py
    python benchmarks/bench_nets.py --nets resnet lstm --frameworks Keras ours --cores 1
    python benchmarks/bench_nets.py --clock processor --cores 1   # on a busy machine

On a GPU, absolute times and peak memory of the device. The first command needs Python, make, a
package index and a driver of NVIDIA, and installs the builds for CUDA:

    make bench-nets-gpu
    python benchmarks/bench_nets.py --gpu --nets cnn resnet --batches 256 8192
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _results
import _workers

ROOT = Path(__file__).parents[1]
CLIP, NOISE = 1.0, 4.7
STEPS = 10_000
ROUND_SECONDS = 0.3
# Seconds per step of cases that are measured in one round only.
SLOW = 2.0
MEMORY_LIMIT = 9 * 2**30
DRAW = 10_000_000


@dataclasses.dataclass(frozen=True)
class Row:
    """A net, its batch, and the optimizer: SGD, which updates an Embedding sparsely, or Adam."""

    net: str
    batch: int
    optimizer: str = "SGD"

    def __str__(self) -> str:
        adam = ", Adam" if self.optimizer == "Adam" else ""
        return f"{self.net.replace('_', ' ')}{adam}, {self.batch:,}"


ROWS = [
    Row("cnn", 256),
    Row("cnn", 1024),
    Row("perceptron", 256),
    Row("embedding", 256),
    Row("embedding", 256, "Adam"),
    Row("resnet", 256),
    Row("token_transformer", 128),
    Row("patch_transformer", 128),
    Row("lstm", 256),
]
# The draw and the noise of 10 million weights; no net.
NOISE_ROW = Row("add_noise", DRAW)
NETS = list(dict.fromkeys(row.net for row in ROWS))

# Name -> (environment, trainer, settings).
FRAMEWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Keras": ("", "keras", {}),
    "ours": ("", "ours", {}),
    "JAX": (".venv-jax-privacy", "jax", {}),
    "jax_privacy": (".venv-jax-privacy", "jax", {"private": True}),
    "PyTorch": (".venv-opacus", "torch", {"mode": "plain"}),
    "Opacus ghost": (".venv-opacus", "torch", {"mode": "ghost"}),
    "Opacus hooks": (".venv-opacus", "torch", {"mode": "hooks"}),
    "draw": ("", "draw", {}),
}
ON_A_GPU: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Keras, no XLA": ("", "keras", {"jit_compile": False}),
    "ours, device noise": ("", "ours", {"source": "device"}),
    "ours, XLA": ("", "ours", {"source": "device", "jit_compile": True}),
    "AltConv, double backward": ("", "ours", {"products": "double_backward"}),
    "AltConv, forward": ("", "ours", {"products": "forward"}),
}
OPACUS = [name for name in FRAMEWORKS if name.startswith("Opacus")]
ALL = {**FRAMEWORKS, **ON_A_GPU}
# Microbatches of jax_privacy that were faster on one core than its default, the whole batch.
MICROBATCH = {"perceptron": 1, "embedding": 1, "lstm": 1}


def train_keras(rounds: Any, row: Row, settings: dict[str, Any]) -> None:
    """Trains with ``fit`` of Keras 3 on TensorFlow."""
    import keras
    import tensorflow as tf

    model, data = _net(row)
    model.compile(_optimizer(row), _loss(), **settings)
    batches = tf.data.Dataset.from_tensors(data).repeat()
    callbacks = [rounds.callback(keras.callbacks.Callback)]
    model.fit(batches, steps_per_epoch=STEPS, callbacks=callbacks, verbose=0)


def train_ours(rounds: Any, row: Row, settings: dict[str, Any]) -> None:
    """Trains a ``LabelDPModel``, or adds noise to as many weights as the row says."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tf_labeldp.data import poisson_batches
    from tf_labeldp.training import AltConv, GaussianNoise, LabelDPModel, LabelDPOptimizer

    noise = GaussianNoise(NOISE, source=settings.pop("source", "host"))
    if row == NOISE_ROW:
        zeros = tf.zeros([DRAW])
        adding = tf.function(lambda: noise.add_noise([zeros], CLIP, ())[0])
        while True:
            rounds.before_step()
            adding()
            rounds.after_step()
    jit = settings.pop("jit_compile", False)
    examples = min(256, row.batch)
    denoiser = AltConv(num_examples=examples, **settings) if settings else None
    network, (x, y) = _net(dataclasses.replace(row, batch=16 * row.batch))
    model = LabelDPModel.from_model(network)
    optimizer = LabelDPOptimizer(_optimizer(row), CLIP, noise=noise, denoiser=denoiser)
    model.compile(optimizer, loss=_loss(), jit_compile=jit)
    batches = poisson_batches(x, y.astype(np.int64), sampling_probability=1 / 16, steps=STEPS)
    model.fit(batches, callbacks=[rounds.callback(keras.callbacks.Callback)], verbose=0)


def train_jax(rounds: Any, row: Row, settings: dict[str, Any]) -> None:
    """Trains with ``fit`` of Keras 3 on JAX, plain or by ``jax_privacy.keras_api``."""
    import itertools

    import keras

    model, data = _net(row)
    if settings:
        from jax_privacy import keras_api

        config = keras_api.DPKerasConfig(
            epsilon=1e6,
            delta=1e-5,
            clipping_norm=CLIP,
            batch_size=row.batch,
            gradient_accumulation_steps=1,
            train_steps=STEPS,
            train_size=16 * row.batch,
            noise_multiplier=NOISE,
            microbatch_size=MICROBATCH.get(row.net),
        )
        model = keras_api.make_private(model, config)
    model.compile(_optimizer(row), _loss())
    callbacks = [rounds.callback(keras.callbacks.Callback)]
    batches = (data for _ in itertools.count())
    model.fit(batches, steps_per_epoch=STEPS, callbacks=callbacks, verbose=0)


def train_torch(rounds: Any, row: Row, settings: dict[str, Any]) -> None:
    """Trains a net of PyTorch, plain or with Opacus."""
    import _nets_torch

    model, data = _net(row)
    weights = model.count_params()
    _nets_torch.train(rounds, row.net, row.optimizer, data, weights, settings["mode"], NOISE)


def draw(rounds: Any, row: Row, settings: dict[str, Any]) -> None:
    """Draws 10 million normal numbers with NumPy's own generator, in each step."""
    import numpy as np

    rng = np.random.default_rng()
    while True:
        rounds.before_step()
        rng.standard_normal(DRAW)
        rounds.after_step()


TRAINERS = {
    "keras": train_keras,
    "ours": train_ours,
    "jax": train_jax,
    "torch": train_torch,
    "draw": draw,
}
BACKENDS = {"jax": "jax", "torch": "torch"}


def _net(row: Row) -> tuple[Any, Any]:
    import _nets

    model = _nets.NETS[row.net]()
    return model, _nets.random_batch(model, row.batch)


def _optimizer(row: Row) -> Any:
    import keras

    return getattr(keras.optimizers, row.optimizer)(0.1)


def _loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _device(kind: str, cores: int) -> tuple[str, Any, Any]:
    """Returns the device, and functions: to wait for it, and its peak memory in GiB (or None)."""
    if kind == "torch":
        import torch

        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated
            return torch.cuda.get_device_name(), torch.cuda.synchronize, lambda: peak() / 2**30
        if cores:
            torch.set_num_threads(cores)
    elif kind == "jax":
        import jax

        first = jax.devices()[0]
        if first.platform == "gpu":
            # ``fit`` reads the loss of each step, and a step is one program.
            return (
                first.device_kind,
                None,
                lambda: first.memory_stats()["peak_bytes_in_use"] / 2**30,
            )
    elif kind in ("keras", "ours"):
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
            memory, wait = tf.config.experimental.get_memory_info, tf.test.experimental.sync_devices
            return name, wait, lambda: memory("GPU:0")["peak"] / 2**30
    return "CPU", None, None


def work(name: str, cores: int) -> None:
    """Trains the rows that the parent names, in turn."""
    # Before any library starts threads.
    if cores:
        # Single cores in turn, so that all of them compile.
        able = sorted(os.sched_getaffinity(0))
        first = list(ALL).index(name) % (len(able) - cores + 1)
        os.sched_setaffinity(0, able[first : first + cores])
    _, kind, settings = ALL[name]
    rounds = _workers.Rounds()
    device, rounds.wait, rounds.peak = _device(kind, cores)
    if device == "CPU":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    if kind != "draw":
        import _nets  # noqa: F401
    rounds.device = device
    rounds.answer()
    while line := sys.stdin.readline().split():
        row = Row(line[0], int(line[1]), line[2])
        rounds.begun = time.process_time()
        try:
            TRAINERS[kind](rounds, row, dict(settings))
        except _workers.Stopped:
            pass
        if kind == "jax":
            import jax

            jax.clear_caches()
        if kind != "draw":
            import keras

            keras.backend.clear_session()
        gc.collect()


def started(name: str, cores: int) -> _workers.Worker:
    """Returns the process of a framework, which has answered that it is ready."""
    home, kind, _ = ALL[name]
    python = ROOT / home / "bin" / "python" if home else Path(sys.executable)
    command: list[str] | str = [str(python), __file__, "--worker", name, str(cores)]
    if not python.exists():
        command = f"no {home}"
    environment = {
        "KERAS_BACKEND": BACKENDS.get(kind, "tensorflow"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Only what a case needs is taken from a GPU, so that the peak is its own.
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if cores:
        threads = ("OMP", "OPENBLAS", "MKL", "TF_INTRAOP", "TF_INTEROP")
        environment |= {f"{name}_NUM_THREADS": str(cores) for name in threads[:3]}
        environment |= {f"TF_NUM_{name}_THREADS": str(cores) for name in ("INTRAOP", "INTEROP")}
    worker = _workers.Worker(command, environment, MEMORY_LIMIT)
    worker.listen()
    return worker


class Found:
    """What a framework took for a row.

    Attributes:
        seconds: time per step of each round.
        start: processor seconds until the end of the first step, compilation included.
        peak: peak memory, GiB.
        device: the device's name.
        problem: why there are no figures.
    """

    def __init__(self, worker: _workers.Worker, start: float) -> None:
        self.seconds, worker.seconds = worker.seconds, []
        self.start, self.problem = start, worker.problem
        self.peak = worker.figures.get("peak", 0.0)
        self.device = worker.figures.get("device", "")

    @property
    def milliseconds(self) -> str:
        """The median time per step, or the problem."""
        if not self.seconds:
            return self.problem
        median = 1000 * statistics.median(self.seconds)
        return f"{median:,.{0 if median >= 100 else 1}f}"


def measure(
    workers: dict[str, _workers.Worker], row: Row, rounds: int, clock: str
) -> dict[str, Found]:
    """Takes steps of one row with all frameworks in turn, round by round."""
    for worker in workers.values():
        worker.tell(f"{row.net} {row.batch} {row.optimizer}")
        worker.tell("1")
    # All compile at the same time, which processor time does not count.
    starts = {name: worker.listen().get("since", 0.0) for name, worker in workers.items()}
    steps = {}
    for name, worker in workers.items():
        worker.round(1, counts=False)
        steps[name] = max(1, min(50, round(ROUND_SECONDS / worker.figures.get("seconds", 1.0))))
    for number in range(rounds):
        for name, worker in workers.items():
            if not number or worker.figures.get("seconds", 0.0) < SLOW:
                worker.round(steps[name], counts=True, clock=clock)
    for worker in workers.values():
        worker.tell("0")
    return {name: Found(worker, starts[name]) for name, worker in workers.items()}


def uses(name: str, row: Row) -> bool:
    """Returns whether a framework has figures for a row."""
    if row == NOISE_ROW:
        return name in ("draw", "ours")
    if "AltConv" in name:
        return row.net == "cnn"
    return name != "draw" or row.net == "embedding"


def measure_all(
    frameworks: list[str], rows: list[Row], cores: int, rounds: int, clock: str
) -> dict[Row, dict[str, Found]]:
    """Measures rows, all frameworks in turn; a process that failed starts again for the next."""
    workers: dict[str, _workers.Worker] = {}
    found = {}
    for row in rows:
        names = [name for name in frameworks if uses(name, row)]
        for name in names:
            if name not in workers or workers[name].problem:
                workers[name] = started(name, cores)
        found[row] = measure({name: workers[name] for name in names}, row, rounds, clock)
        for name, of in found[row].items():
            print(f"{cores} cores, {row}, {name}: {of.milliseconds} ms", file=sys.stderr)
    for worker in workers.values():
        worker.stop()
    return found


def measure_alone(
    frameworks: list[str], rows: list[Row], rounds: int
) -> dict[Row, dict[str, Found]]:
    """Measures each framework by itself, by a process per net, so that peaks are its own."""
    found: dict[Row, dict[str, Found]] = {row: {} for row in rows}
    for net in dict.fromkeys((row.net, row.optimizer) for row in rows):
        for name in frameworks:
            worker = started(name, 0)
            for row in rows:
                if (row.net, row.optimizer) == net and uses(name, row):
                    found[row] |= measure({name: worker}, row, rounds, "seconds")
                    print(f"{row}, {name}: {found[row][name].milliseconds} ms", file=sys.stderr)
            worker.stop()
    return found


def over(of: dict[str, Found], above: str, below: str) -> str:
    """Returns the ratio of two frameworks, or the problem of the first."""
    if above not in of or below not in of:
        return ""
    if not of[above].seconds or not of[below].seconds:
        return of[above].problem
    return f"{_workers.ratio(of[above].seconds, of[below].seconds):.2f}"


def fastest(of: dict[str, Found], names: Sequence[str]) -> str:
    """Returns the name of the fastest framework with figures, or the first name."""
    able = [name for name in names if name in of and of[name].seconds]
    return min(able, key=lambda name: statistics.median(of[name].seconds), default=names[0])


def tables(found: dict[int, dict[Row, dict[str, Found]]]) -> dict[str, str]:
    """Returns the tables by name."""
    ratios, times, starts, noise = [], [], [], []
    names = [name for name in FRAMEWORKS if name != "draw"]
    for cores, rows in found.items():
        for row, of in rows.items():
            if "draw" in of and "Keras" in of and "ours" in of:
                parts = zip(
                    of["ours"].seconds, of["Keras"].seconds, of["draw"].seconds, strict=False
                )
                excess = statistics.median((a - b) / c for a, b, c in parts)
                noise.append([str(cores), f"{row}: ours - Keras", f"{excess:.2f}"])
            if row == NOISE_ROW:
                noise.append(
                    [str(cores), f"`add_noise`, {DRAW:,} weights", over(of, "ours", "draw")]
                )
                continue
            opacus = fastest(of, OPACUS)
            peer = fastest(of, [*OPACUS, "jax_privacy"])
            mode = f" {opacus[7]}" if opacus in of and of[opacus].seconds else ""
            ratios.append(
                [
                    *(str(row), str(cores), of["Keras"].milliseconds if "Keras" in of else ""),
                    over(of, "ours", "Keras"),
                    over(of, "jax_privacy", "JAX"),
                    over(of, opacus, "PyTorch") + mode,
                    over(of, "jax_privacy", "Keras"),
                    over(of, opacus, "Keras") + mode,
                    over(of, "ours", peer),
                ]
            )
            head = [str(row), str(cores)]
            times.append(head + [of[n].milliseconds if n in of else "" for n in names])
            starts.append(
                head + [f"{of[n].start:.1f}" if n in of and of[n].seconds else "" for n in names]
            )
    columns = ["net, batch", "cores"]
    peers = ["jax_privacy / JAX", "Opacus / PyTorch", "jax_privacy / Keras", "Opacus / Keras"]
    ratio_columns = [*columns, "Keras, ms", "ours / Keras", *peers, "ours / best peer"]
    return {
        "ratios": _results.markdown(ratio_columns, ratios),
        "milliseconds": _results.markdown([*columns, *(f"{n}, ms" for n in names)], times),
        "start": _results.markdown([*columns, *(f"{n}, s" for n in names)], starts),
        "noise": _results.markdown(["cores", "what", "draws"], noise),
    }


def gpu_tables(found: dict[Row, dict[str, Found]], names: list[str]) -> dict[str, str]:
    """Returns the tables of times and of peak memory."""
    times, peaks = [], []
    for row, of in found.items():
        times.append([str(row), *(of[n].milliseconds if n in of else "" for n in names)])
        peaks.append([str(row), *(f"{of[n].peak:.2f}" if n in of else "" for n in names)])
    device = next((of.device for row in found.values() for of in row.values() if of.device), "")
    return {
        "gpu": _results.markdown([f"ms on {device}", *names], times),
        "gpu_memory": _results.markdown(["peak GiB", *names], peaks),
    }


def main() -> None:
    """Measures and prints, or runs one worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=[*NETS, "add_noise"])
    parser.add_argument("--frameworks", nargs="+", choices=list(ALL))
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=["seconds", "processor"], default="seconds")
    parser.add_argument("--gpu", action="store_true", help="absolute times and memory, each alone")
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 1024, 8192])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker[0], int(args.worker[1]))
        return
    nets = args.nets or [*NETS, "add_noise"]
    if args.gpu:
        names = args.frameworks or [name for name in ALL if name != "draw"]
        kinds = dict.fromkeys((row.net, row.optimizer) for row in ROWS if row.net in nets)
        rows = [Row(net, batch, optimizer) for net, optimizer in kinds for batch in args.batches]
        alone = measure_alone(names, rows, args.rounds)
        printed = gpu_tables(alone, names)
    else:
        names = args.frameworks or list(FRAMEWORKS)
        rows = [row for row in [*ROWS, NOISE_ROW] if row.net in nets]
        found = {n: measure_all(names, rows, n, args.rounds, args.clock) for n in args.cores}
        printed = tables(found)
    # A part of the table is printed alone.
    if args.nets or args.frameworks:
        print("\n\n".join(printed.values()))
        return
    with _results.recorded(__file__, *printed):
        print("\n\n".join(printed.values()))


if __name__ == "__main__":
    main()
