"""A public encoder fine-tuned on private labels: which weights to train, and by which release.

EfficientNet-Lite0 of ImageNet (`examples/efficientnet_lite.py`) on the colour subset, 12,000 images
of CIFAR-10 resized to ``--size`` pixels. "frozen" trains a linear layer on the pooled features,
"LoRA" adapters of rank 4 in the last block and its head as well, "last block" all of their kernels.
Normalisations stay frozen. What comes before the last block is computed once, into ``--made``.
Epsilon is for the replacement of one label, delta = 1/n (0 for RR). Settings are chosen by
``choose`` on a fifth of the training images. Labels of these data are public; draws are seeded, so
that the table is reproducible, and protect nobody. A stopped benchmark resumes.

    pip install 'tf-labeldp[encoders]'
    python benchmarks/bench_encoder.py choose   # settings, on the training images
    python benchmarks/bench_encoder.py          # the table, on the test images
    python benchmarks/bench_encoder.py smoothing --seeds 0 1 2   # on the training images
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import _datasets
import _results
import keras
import numpy as np
from efficientnet_lite import efficientnet_lite0

import tf_labeldp as ldp
from tf_labeldp.features import NeighbourSmoothing
from tf_labeldp.front_door._estimators import SideBySide
from tf_labeldp.heads import HeadPriorRandomizer
from tf_labeldp.mechanisms import InformativeRR

EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
TRAINED = ("frozen", "LoRA", "last block")
LAST = "block14_add"
"""The layer whose outputs the last block takes."""
RANK, COMPONENTS = 4, 400
CLASSES = 10
# By `choose`: a rate for DP-SGD is times the root of epsilon, at most itself.
SETTINGS: dict[str, dict[str, dict[str, float]]] = {
    "DP-SGD": {
        "frozen": {"rate": 1.0, "epochs": 12},
        "LoRA": {"rate": 2.0, "epochs": 4},
        "last block": {"rate": 2.0, "epochs": 4},
    },
    "RR": {trained: {"rate": 1e-3, "epochs": 3} for trained in TRAINED},
    "prior": {trained: {"rate": 3e-4, "epochs": 3} for trained in TRAINED},
}
RATES = {"DP-SGD": (0.3, 1.0, 4.0), "RR": (1e-4, 1e-3), "prior": (1e-4, 1e-3)}
EPOCHS = {"DP-SGD": (4, 12), "RR": (3, 10), "prior": (3, 10)}
CHOSEN_AT = (1.0, 4.0)
ROWS = (500, 1000, 2000, 4000, 9600)
WAYS = ("plain", "smoothed", "both")
DP_BATCH, BATCH = 500, 100


class Data:
    """Outputs of the layers before the last block, and pooled features, of both parts."""

    def __init__(self, size: int, made: pathlib.Path, part: str) -> None:
        folder = _datasets.FOLDER / "cifar10_subset"
        files = [np.load(folder / f"{name}.npz") for name in ("train", "test")]
        path = made / f"efficientnet_lite0_{size}.npz"
        if not path.exists():
            made.mkdir(parents=True, exist_ok=True)
            maps = [before_last_block(file["images"], size) for file in files]
            np.savez(path, train=maps[0], test=maps[1])
        with np.load(path) as stored:
            maps = [stored["train"], stored["test"]]
        images, labels = ([file[name] for file in files] for name in ("images", "labels"))
        if part == "validation":
            order = np.random.default_rng(0).permutation(len(labels[0]))
            rows = np.split(order, [len(order) * 4 // 5])
            images, labels, maps = ([all_[0][r] for r in rows] for all_ in (images, labels, maps))
        self.images, self.labels, self.maps = images, labels, maps
        last = last_block(size)
        self.features = [last.predict(part, batch_size=500, verbose=0) for part in maps]
        self.size = size

    @functools.cached_property
    def smooth(self) -> list[np.ndarray]:
        graph = NeighbourSmoothing().fit(self.features[0])
        return [graph.transform(part) for part in self.features]

    def vault(self, epsilon: float, seed: int) -> ldp.PrivateLabels:
        budget = ldp.PrivacyBudget(epsilon, self.delta)
        return ldp.PrivateLabels(self.labels[0], CLASSES, budget=budget, insecure_seed=seed)

    @property
    def delta(self) -> float:
        return 1.0 / len(self.labels[0])


def before_last_block(images: np.ndarray, size: int) -> np.ndarray:
    encoder = efficientnet_lite0(images.shape[1:], size)
    model = keras.Model(encoder.input, encoder.get_layer(LAST).output)
    return model.predict(images, batch_size=250, verbose=1).astype(np.float16)


def last_block(size: int) -> keras.Model:
    """Returns the frozen last block and head, from maps to 1,280 pooled features."""
    encoder = efficientnet_lite0(size=size)
    return keras.Model(encoder.get_layer(LAST).output, encoder.output)


def network(
    trained: str, data: Data, project: bool = False
) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Returns a fresh model to logits, with its inputs for training and test.

    The last layer takes features of unit variance, or, for the curvature of DP-SGD, which has full
    matrices up to 1,024 inputs, their principal components.
    """
    if trained == "frozen":
        inputs = keras.Input(data.features[0].shape[1:])
        x, rows = inputs, data.features
    else:
        last = last_block(data.size)
        inputs, x, rows = last.input, last.output, data.maps
        for layer in last.layers:
            if type(layer) is keras.layers.Conv2D or trained == "last block":
                layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
            if type(layer) is keras.layers.Conv2D and trained == "LoRA":
                layer.enable_lora(RANK)
    mean, variance = (getattr(data.features[0], name)(axis=0) for name in ("mean", "var"))
    if project:
        centred = data.features[0] - mean
        basis = np.linalg.eigh(centred.T @ centred)[1][:, -COMPONENTS:]
        projection = keras.layers.Dense(COMPONENTS, trainable=False)
        x = projection(x)
        projection.set_weights([basis, -mean @ basis])
    else:
        x = keras.layers.Normalization(mean=mean, variance=variance + 1e-6)(x)
    x = keras.layers.Dense(CLASSES, kernel_initializer="zeros")(x)
    return keras.Model(inputs, x), *(part.astype(np.float32) for part in rows)


def dp_sgd(
    trained: str, data: Data, epsilon: float, seed: int, rate: float, epochs: int
) -> np.ndarray:
    model, x, x_test = network(trained, data, project=True)
    steps = math.ceil(len(x) / DP_BATCH)
    share = DP_BATCH / len(x)
    noise = ldp.accounting.calibrate_noise_multiplier(
        epsilon, data.delta, sampling_probability=share, steps=epochs * steps
    )
    batches = ldp.data.poisson_batches(
        x,
        data.vault(epsilon, seed),
        sampling_probability=share,
        steps=steps,
        insecure_seed=seed,
    )
    private = ldp.LabelDPModel.from_model(model)
    decay = keras.optimizers.schedules.PolynomialDecay
    schedule = decay(rate * min(1.0, math.sqrt(epsilon)), epochs * steps, 0.0)
    optimizer = ldp.LabelDPOptimizer(
        keras.optimizers.SGD(schedule),
        1.0,
        noise,
        preconditioner="gauss_newton",
        insecure_seed=seed,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    private.compile(optimizer, loss=loss)
    private.fit(batches, epochs=epochs, verbose=0)
    return private.predict(x_test, batch_size=500, verbose=0)


def on_noisy_labels(
    trained: str,
    data: Data,
    epsilon: float,
    seed: int,
    rate: float,
    epochs: int,
    prior: bool = False,
) -> np.ndarray:
    """Labels of randomized response, or drawn with a head as their prior, for AdamW."""
    model, x, x_test = network(trained, data)
    labels = data.vault(epsilon, seed)
    if prior:
        draw = HeadPriorRandomizer(epsilon, data.delta, draw=InformativeRR)
        noisy = labels.randomize(draw, features=data.smooth[0])
        loss: Any = keras.losses.CategoricalCrossentropy(from_logits=True)
    else:
        noisy = labels.randomize(ldp.RandomizedResponse(epsilon, CLASSES))
        channel = noisy.mechanism.transition_matrix()
        loss = ldp.keras_layers.ForwardCorrectedLoss(channel, from_logits=True)
    steps = epochs * math.ceil(len(x) / BATCH)
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(keras.optimizers.AdamW(schedule, weight_decay=1e-3), loss)
    targets = "posterior" if prior else "values"
    ldp.fit(model, x, noisy, targets=targets, epochs=epochs, batch_size=BATCH, verbose=0)
    return model.predict(x_test, batch_size=500, verbose=0)


def head(smooth: bool, data: Data, epsilon: float, seed: int) -> np.ndarray:
    """Logistic regression of one release on the features."""
    x, x_test = data.smooth if smooth else data.features
    fitted = ldp.PrivateLogisticRegression(epsilon, data.delta).fit(x, data.vault(epsilon, seed))
    return fitted.predict_proba(x_test)


def pixels(data: Data, epsilon: float, seed: int) -> np.ndarray:
    """The one call, without the encoder."""
    model = ldp.PrivateClassifier(epsilon, data.delta)
    return model.fit(data.images[0], data.vault(epsilon, seed)).predict_proba(data.images[1])


def smoothing(args: argparse.Namespace) -> None:
    """Heads on plain, smoothed and both features, of some rows: prints a table."""
    data = Data(args.size, args.made, "validation")
    common = {"part": "validation", "trained": "-", "size": args.size}
    for rows in ROWS:
        chosen = np.random.default_rng(0).permutation(len(data.labels[0]))[:rows]
        jobs = [
            {**common, "how": way, "rows": rows, "epsilon": epsilon, "seed": seed}
            for way, epsilon, seed in itertools.product(WAYS, args.epsilons, args.seeds)
        ]
        jobs = _results.missing(args.results, jobs)
        if not jobs:
            continue
        x, y = data.features[0][chosen], data.labels[0][chosen]
        maps = [NeighbourSmoothing(strength=strength).fit(x) for strength in (0.0, 0.8)]
        encoders = dict(zip(WAYS, (*maps, SideBySide(tuple(maps)).fit(x)), strict=True))
        parts = {
            way: [map_.transform(part) for part in (x, data.features[1])]
            for way, map_ in encoders.items()
        }
        for job in jobs:
            features, test = parts[job["how"]]
            model = ldp.PrivateLogisticRegression(
                job["epsilon"], 1.0 / rows, num_classes=CLASSES, insecure_seed=job["seed"]
            )
            score = model.fit(features, y).score(test, data.labels[1])
            _results.add_run(args.results, {**job, "accuracy": round(100.0 * score, 2)})
    runs = [run for run in _results.runs(args.results) if "rows" in run]
    lines = []
    for rows, way in itertools.product(ROWS, WAYS):
        line = [f"{rows:,}", way]
        for epsilon in args.epsilons:
            wanted = {"rows": rows, "how": way, "epsilon": epsilon, "size": args.size}
            values = [run["accuracy"] for run in runs if wanted.items() <= run.items()]
            line.append(_results.cell(values))
        lines.append(line)
    columns = [f"ε {epsilon:g}" for epsilon in args.epsilons]
    with _results.recorded(__file__, "smoothing"):
        print(_results.markdown(["images", "features", *columns], lines))


HOW: dict[str, Callable[..., np.ndarray]] = {
    "DP-SGD": dp_sgd,
    "RR": on_noisy_labels,
    "prior": functools.partial(on_noisy_labels, prior=True),
}
WITHOUT_TRAINING: dict[str, Callable[..., np.ndarray]] = {
    "pixels, one call": pixels,
    "head": functools.partial(head, False),
    "smoothed head": functools.partial(head, True),
}


def jobs_of(what: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    both = itertools.product(TRAINED, HOW)
    common = {"size": args.size, "seed": 0}
    if what == "choose":
        return [
            {"part": "validation", "trained": trained, "how": how, "epsilon": epsilon}
            | {"settings": {"rate": rate, "epochs": epochs}, **common}
            for trained, how in both
            for rate, epochs in itertools.product(RATES[how], EPOCHS[how])
            for epsilon in CHOSEN_AT
        ]
    pairs = [("-", how, {}) for how in WITHOUT_TRAINING]
    pairs += [(trained, how, SETTINGS[how][trained]) for trained, how in both]
    return [
        {"part": "test", "trained": trained, "how": how, "epsilon": epsilon}
        | {"settings": settings, "size": args.size, "seed": seed}
        for seed in args.seeds
        for trained, how, settings in pairs
        for epsilon in EPSILONS
    ]


def accuracy(job: dict[str, Any], data: Data) -> float:
    """Returns the accuracy in percent of a job's model on its second part."""
    arguments = (data, job["epsilon"], job["seed"])
    if job["how"] in WITHOUT_TRAINING:
        scores = WITHOUT_TRAINING[job["how"]](*arguments)
    else:
        scores = HOW[job["how"]](job["trained"], *arguments, **job["settings"])
    return round(100.0 * float(np.mean(scores.argmax(axis=1) == data.labels[1])), 2)


def table(what: str, runs: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> str:
    """Returns the runs of the jobs as Markdown: mean over seeds, median seconds of a core."""
    epsilons = CHOSEN_AT if what == "choose" else EPSILONS
    cells: dict[tuple[str, ...], dict[float, list[dict[str, Any]]]] = {}
    for job in jobs:
        named = [f"{name} {value:g}" for name, value in job["settings"].items()]
        row = cells.setdefault((job["trained"], job["how"], ", ".join(named) or "-"), {})
        found = [run for run in runs if job.items() <= run.items()]
        row.setdefault(job["epsilon"], []).extend(found[-1:])
    rows = []
    for names, by_epsilon in cells.items():
        line = []
        for epsilon in epsilons:
            values = [run["accuracy"] for run in by_epsilon.get(epsilon, [])]
            line.append(_results.cell(values))
        seconds = [run["seconds"] for found in by_epsilon.values() for run in found]
        if seconds:
            rows.append([*names, *line, f"{np.median(seconds):.0f}"])
    columns = [f"ε {epsilon:g}" for epsilon in epsilons]
    return _results.markdown(["trained", "by", "settings", *columns, "seconds"], rows)


def main() -> None:
    """Runs what is missing, prints and records a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["test", "choose", "smoothing"], default="test")
    parser.add_argument("--size", type=int, default=96, help="pixels of the resized images")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--trained", nargs="+", default=["-", *TRAINED])
    parser.add_argument("--how", nargs="+", default=[*WITHOUT_TRAINING, *HOW])
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after these")
    parser.add_argument("--made", type=pathlib.Path, default=pathlib.Path("bench_encoder_made"))
    runs = _results.FOLDER / "encoder.jsonl"
    parser.add_argument("--results", type=pathlib.Path, default=runs)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "delta")
    if args.what == "smoothing":
        return smoothing(args)
    start, data, jobs = time.perf_counter(), None, jobs_of(args.what, args)
    chosen = [job for job in jobs if job["trained"] in args.trained and job["how"] in args.how]
    chosen = [job for job in chosen if job["epsilon"] in args.epsilons]
    for job in _results.missing(args.results, chosen):
        if time.perf_counter() - start > 60.0 * args.minutes:
            break
        data = data or Data(args.size, args.made, job["part"])
        keras.utils.set_random_seed(job["seed"])
        begin = time.process_time()
        found = {"accuracy": accuracy(job, data)}
        found["seconds"] = round(time.process_time() - begin, 1)
        _results.add_run(args.results, {**job, **found})
        keras.backend.clear_session()
    with _results.recorded(__file__, "choice" if args.what == "choose" else "accuracy"):
        print(table(args.what, _results.runs(args.results), jobs))
    return None


if __name__ == "__main__":
    main()
