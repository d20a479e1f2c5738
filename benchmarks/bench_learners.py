"""Learning from structure and noisy labels: accuracy at equal epsilon, each training in minutes.

All methods train one small CNN on about as many images, ten passes over 60,000 (``--passes``): a
few thousandths of the papers' steps, so the order of methods that have not converged means little.
Epsilon is for the replacement of one label, delta = 1/n (0 for RR, LP-2ST and the learners on RR).
Settings were chosen on Fashion-MNIST. Labels of these data sets are public; draws are seeded, so
that the table is reproducible, and protect nobody. Every training is a line of a JSON file, so a
stopped benchmark resumes.

    python benchmarks/bench_learners.py
    python benchmarks/bench_learners.py --encoders 10 30 60 --data fashion_mnist
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import _datasets
import _results
import keras
import numpy as np

import tf_labeldp as ldp
from tf_labeldp.features import NeighbourSmoothing, PatchDictionary, find_clusters
from tf_labeldp.heads import (
    BootstrappedHead,
    NoiseCluster,
    PrivateLogisticRegression,
    teacher_labels,
)
from tf_labeldp.mechanisms import HistogramMechanism
from tf_labeldp.pate import PATE
from tf_labeldp.self_supervised import SCAN, SimCLR, strong_views, weak_views
from tf_labeldp.semi_supervised import DivideMix, FixMatch

EPSILONS = (0.2, 1.0, 4.0)
OURS = ("smooth head", "bootstrapped head", "bootstrapped head, large")
OURS_AT = (0.1, 1.0, 2.0, 50.0)
"""Epsilons of the second table; at 50 the noisy labels are practically the true ones."""
BATCH, RATIO, RATE = 128, 2, 1e-3
CLUSTERS, SIMCLR_MINUTES, SCAN_EPOCHS = 100, 10, 2
TEACHERS, QUERIES = 250, 1000
SHARES, WARM_PASSES = (0.3, 0.7), 0.5


class Data:
    """A data set, with label-free features of its images, computed on first use."""

    def __init__(self, name: str, encoders: pathlib.Path) -> None:
        self.name, self.encoders = name, encoders
        data = _datasets.load(name)
        self.x, self.y = data.x_train.astype("float32"), data.y_train
        self.x_test, self.y_test = data.x_test.astype("float32"), data.y_test
        self.num_classes = data.num_classes
        self.flip = name == "fashion_mnist"
        self.views = {
            "weak": weak_views(shift=0.07, flip=self.flip),
            "strong": strong_views(shift=0.07, flip=self.flip),
        }

    @functools.cached_property
    def patches(self) -> PatchDictionary:
        return PatchDictionary().fit(self.x)

    @functools.cached_property
    def smooth(self) -> NeighbourSmoothing:
        return NeighbourSmoothing(self.patches).fit(self.x)

    @functools.cached_property
    def clusters(self) -> Any:
        """Clusters of patch features, which fit the classes better than SCAN after 10 minutes."""
        return find_clusters(self.x, CLUSTERS, encoder=self.patches)

    @functools.cache  # noqa: B019 - one object per data set, as long as the process
    def features(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns features of training and test images."""
        if kind == "smooth":
            return self.smooth.transform(self.x), self.smooth.transform(self.x_test)
        model = self.patches if kind == "patches" else self.encoder(SIMCLR_MINUTES)
        if kind == "patches":
            return model.transform(self.x), model.transform(self.x_test)
        return tuple(model.predict(x, batch_size=512, verbose=0) for x in (self.x, self.x_test))

    def encoder(self, *minutes: float) -> keras.Model:
        """Returns SimCLR's encoder after the last of these minutes; a file keeps each."""
        files = [self.encoders / f"{self.name}_simclr_{each:g}.keras" for each in minutes]
        if not all(file.exists() for file in files):
            self.encoders.mkdir(parents=True, exist_ok=True)
            keras.utils.set_random_seed(0)
            encoder = network(self.x.shape[1:], None)
            model = SimCLR(encoder, strong_views(flip=self.flip), temperature=0.2)
            model.compile(keras.optimizers.Adam(1e-3))
            keep = _Keep(encoder, files, minutes)
            model.fit(self.x, batch_size=256, epochs=10_000, verbose=0, callbacks=[keep])
        return keras.models.load_model(files[-1])

    @functools.cached_property
    def scan(self) -> SCAN:
        model = SCAN(self.encoder(SIMCLR_MINUTES), CLUSTERS, **self.views)
        model.compile(keras.optimizers.Adam(1e-4))
        model.fit(self.x, epochs=SCAN_EPOCHS, verbose=0)
        return model

    def vault(self, epsilon: float, delta: float, seed: int) -> ldp.PrivateLabels:
        budget = ldp.PrivacyBudget(epsilon, delta)
        return ldp.PrivateLabels(self.y, self.num_classes, budget=budget, insecure_seed=seed)

    def noisy(self, epsilon: float, seed: int) -> ldp.NoisyLabels:
        """Returns labels of plain randomized response."""
        mechanism = ldp.RandomizedResponse(epsilon, self.num_classes)
        return self.vault(epsilon, 0.0, seed).randomize(mechanism)


class _Keep(keras.callbacks.Callback):
    """Saves an encoder after each number of minutes, and ends the training after the last."""

    def __init__(self, encoder: Any, files: list[pathlib.Path], minutes: Any) -> None:
        super().__init__()
        self._encoder, self._left = encoder, list(zip(files, minutes, strict=True))
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        while self._left and time.perf_counter() - self._start > 60.0 * self._left[0][1]:
            self._encoder.save(self._left.pop(0)[0])
        self.model.stop_training = self.model.stop_training or not self._left

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print(f"SimCLR, epoch {epoch + 1}: loss {logs['loss']:.3f}", flush=True)


def network(shape: tuple[int, ...], num_classes: int | None, large: bool = False) -> keras.Model:
    """Returns a CNN of four convolutions to logits, or without classes to 128 features.

    The large network has its first layer at full resolution: 16 million multiplications per image
    against 9 million.
    """
    layers = keras.layers

    def block(x: Any, width: int, size: int = 3, strides: int = 1) -> Any:
        convolution = layers.Conv2D(width, size, strides=strides, padding="same")
        # Very noisy labels change the statistics of a normalisation more than its weights.
        normalised = large or num_classes is None
        x = layers.BatchNormalization()(convolution(x)) if normalised else convolution(x)
        return layers.ReLU()(x)

    inputs = keras.Input(shape)
    if large or num_classes is None:
        x = block(block(inputs, 32), 64, strides=2)
        x = block(block(x, 64), 128, strides=2)
    else:
        x = block(block(inputs, 32, 5, 2), 64)
        x = block(block(x, 64, strides=2), 128)
    if num_classes is None:
        return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))
    x = layers.Dense(256, activation="relu")(layers.Dropout(0.3)(layers.Flatten()(x)))
    return keras.Model(inputs, layers.Dense(num_classes)(x))


def optimizer(steps: int) -> keras.optimizers.Optimizer:
    """Returns AdamW, warmed up for 100 steps, then on a cosine to a twentieth."""
    warm = min(100, steps // 2)
    rate = keras.optimizers.schedules.CosineDecay(
        0.1 * RATE, steps - warm, 0.05, warmup_target=RATE, warmup_steps=warm
    )
    return keras.optimizers.AdamW(rate, weight_decay=1e-3)


def plain(data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """Returns test logits of the CNN on labels of randomized response, weak views."""
    noisy = np.eye(data.num_classes)[np.asarray(data.noisy(epsilon, seed))]
    return trained_on(noisy, data, seed, passes)


def ssl_priors(data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """Algorithm 4 of ``ghazi2021`` on SimCLR's features; the CNN learns from posteriors."""
    clusters = find_clusters(data.features("simclr")[0], CLUSTERS)
    # Table 9 of ghazi2024, interpolated.
    table = ((0.01, 0.02, 0.05, 0.18, 0.29, 0.5), (0.005, 0.01, 0.02, 0.05, 0.05, 0.1))
    for_priors = float(np.interp(epsilon, *table))
    labels = data.vault(epsilon, 0.0, seed)
    counts = HistogramMechanism(for_priors, data.num_classes)
    priors = labels.release(counts, public_input=clusters.assignments).priors()
    mechanism = ldp.RRWithPrior(epsilon - for_priors, data.num_classes)
    noisy = labels.randomize(mechanism, priors=priors)
    return trained_on(noisy.posterior(), data, seed, passes)


def trained_on(targets: np.ndarray, data: Data, seed: int, passes: int) -> Any:
    """Returns test logits of the CNN after passes over targets (n, K)."""
    model = network(data.x.shape[1:], data.num_classes)
    batches = teacher_labels(targets).batches(data.x, BATCH, augment=data.views["weak"], seed=seed)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(passes * len(batches)), loss)
    model.fit(batches, epochs=passes, verbose=0)
    return model.predict(data.x_test, batch_size=500, verbose=0)


def two_stages(data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """Returns test logits of LP-2ST without its filter."""
    model = network(data.x.shape[1:], data.num_classes)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(RATE), loss)
    stages = ldp.MultiStageTraining(
        data.x,
        data.vault(epsilon, 0.0, seed),
        epsilon=epsilon,
        fractions=(0.6, 0.4),
        epochs_per_stage=max(1, round(passes / 1.6)),
        batch_size=BATCH,
        temperature=1.0,
        filter_labels=False,
        seed=seed,
        verbose=0,
    )
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], verbose=0, shuffle=False)
    return model.predict(data.x_test, batch_size=500, verbose=0)


def fix_match(
    data: Data, labels: Any, seed: int, passes: int, loss: Any = None, **options: Any
) -> Any:
    """Returns test logits of FixMatch."""
    steps = passes * len(data.x) // (BATCH * (1 + 2 * RATIO))
    model = FixMatch(
        network(data.x.shape[1:], data.num_classes), unlabelled_ratio=RATIO, **data.views
    )
    model.compile(optimizer(steps), loss or keras.losses.CategoricalCrossentropy(from_logits=True))
    options |= {"batch_size": BATCH, "steps_per_epoch": steps, "seed": seed, "verbose": 0}
    model.fit(data.x, labels, **options)
    return model.predict(data.x_test, batch_size=500, verbose=0)


def ldp_ssl(data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """Algorithm 6 of ``tang2022`` with FixMatch."""
    return fix_match(data, data.noisy(epsilon, seed), seed, passes)


def ldp_ssl_corrected(data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """The same with a loss that corrects for the channel, and pseudo-labels of equal shares."""
    noisy = data.noisy(epsilon, seed)
    channel = noisy.mechanism.transition_matrix()
    loss = ldp.keras_layers.ForwardCorrectedLoss(channel, from_logits=True)
    return fix_match(data, noisy, seed, passes, loss)


def denoise_ssl(data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """Algorithm 7 of ``tang2022``."""
    return fix_match(data, data.noisy(epsilon, seed), seed, passes, clusters=data.clusters)


def aug_descent(
    data: Data, epsilon: float, seed: int, passes: int, division: str = "mixture"
) -> Any:
    """Algorithm 6 of ``tang2022`` with DivideMix; passes count the views of both networks."""
    steps = round((passes - 2 * WARM_PASSES) * len(data.x) / (BATCH * 8))
    warm = round(WARM_PASSES * len(data.x) / BATCH)
    each = max(1, steps // 4)
    model = DivideMix(
        network(data.x.shape[1:], data.num_classes), division=division, ramp_epochs=2, **data.views
    )
    model.compile(keras.optimizers.Adam(0.5 * RATE))
    warm_epochs = max(1, round(warm / each))
    model.fit(
        data.x,
        data.noisy(epsilon, seed),
        batch_size=BATCH,
        epochs=warm_epochs + 4,
        warmup_epochs=warm_epochs,
        steps_per_epoch=each,
        seed=seed,
        verbose=0,
    )
    return model.predict(data.x_test, batch_size=500, verbose=0)


def pate(data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """Teachers on frozen patch features, with the student of PATE-FM."""
    delta = 1.0 / len(data.y)
    teachers = PATE(
        epsilon, delta, num_teachers=TEACHERS, num_queries=QUERIES, threshold=None, seed=seed
    )
    answers = teachers.answer(data.features("smooth")[0], data.vault(epsilon, delta, seed))
    return fix_match(data, answers, seed, passes)


def scan_cluster(data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """Algorithms 1 and 2 of ``tang2022``: noisy histograms of SCAN's clusters, no training."""
    clusters = data.scan.clusters(data.x)
    delta = 1.0 / len(data.y)
    head = NoiseCluster(None, epsilon, delta, clusters=clusters)
    return head.fit(data.x, data.vault(epsilon, delta, seed)).predict(data.x_test)


def head_on(kind: str, data: Data, epsilon: float, seed: int, passes: int) -> Any:
    """A logistic regression of one release on features."""
    train, test = data.features(kind)
    delta = 1.0 / len(data.y)
    head = PrivateLogisticRegression(epsilon, delta)
    return head.fit(train, data.vault(epsilon, delta, seed)).predict_proba(test)


def bootstrapped(
    data: Data, epsilon: float, seed: int, passes: int, large: bool = False
) -> np.ndarray:
    """Release, learn, release again; the large network trains on twice the images."""
    delta = 1.0 / len(data.y)
    epochs = (2 if large else 1) * max(1, passes // len(SHARES))
    head = BootstrappedHead(
        epsilon,
        delta,
        network(data.x.shape[1:], data.num_classes, large),
        encoder=data.smooth,
        shares=SHARES,
        epochs=epochs,
        views=data.views["weak"],
        seed=seed,
        verbose=0,
    )
    return head.fit(data.x, data.vault(epsilon, delta, seed)).predict_proba(data.x_test)


METHODS: dict[str, Callable[..., Any]] = {
    "RR": plain,
    "LP-2ST": two_stages,
    "priors of SimCLR": ssl_priors,
    "LDP-SSL": ldp_ssl,
    "LDP-SSL, corrected loss": ldp_ssl_corrected,
    "DenoiseSSL": denoise_ssl,
    "LDP-AugDescent": aug_descent,
    "LDP-AugDescent, channel": functools.partial(aug_descent, division="channel"),
    "PATE-FM": pate,
    "NoiseCluster, SCAN": scan_cluster,
    "SimCLR + head": functools.partial(head_on, "simclr"),
    "smooth head": functools.partial(head_on, "smooth"),
    "bootstrapped head": bootstrapped,
    "bootstrapped head, large": functools.partial(bootstrapped, large=True),
}


def accuracy(data: Data, predicted: np.ndarray) -> float:
    """Returns the test accuracy in percent of scores or classes."""
    classes = predicted.argmax(axis=1) if predicted.ndim == 2 else predicted
    return round(100.0 * float(np.mean(classes == data.y_test)), 2)


def table(
    runs: list[dict[str, Any]], names: list[str], methods: Iterable[str], epsilons: Sequence[float]
) -> str:
    """Returns accuracies as Markdown, mean and standard deviation over seeds, and median minutes.

    A cell has the runs with the most passes.
    """
    rows = []
    for name in names:
        for method in methods:
            cells, passes, seconds = [], [], []
            for epsilon in epsilons:
                wanted = (name, method, epsilon)
                found = [r for r in runs if (r["data"], r["method"], r["epsilon"]) == wanted]
                most = max((r["passes"] for r in found), default=0)
                found = [r for r in found if r["passes"] == most]
                values = [r["accuracy"] for r in found]
                spread = f" ± {np.std(values, ddof=1):.1f} ({len(values)})" if values[1:] else ""
                cells.append(f"{np.mean(values):.1f}{spread}" if found else "")
                passes.append(f"{most}" if found else "-")
                seconds += [r["seconds"] for r in found if r["seconds"] is not None]
            if any(cells):
                took = f"{np.median(seconds) / 60:.0f}" if seconds else "-"
                rows.append([name, method, *cells, " / ".join(passes), took])
    columns = ["data", "method", *(f"ε {epsilon:g}" for epsilon in epsilons), "passes", "minutes"]
    return _results.markdown(columns, rows)


def encoders(data: Data, minutes: list[float]) -> str:
    """Returns the quality of features as Markdown: purity of clusters, accuracy of heads."""
    start = time.perf_counter()
    features = {"PatchDictionary": data.features("patches")}
    took = {"PatchDictionary": (time.perf_counter() - start) / 60.0}
    data.encoder(*minutes)
    for number in minutes:
        model = data.encoder(number)
        name = f"SimCLR, {number:g} min"
        features[name] = tuple(
            model.predict(x, batch_size=512, verbose=0) for x in (data.x, data.x_test)
        )
        took[name] = number
    rows = []
    for name, (train, test) in features.items():
        assigned = find_clusters(train, CLUSTERS).assignments
        counts = np.zeros((CLUSTERS, data.num_classes))
        np.add.at(counts, (assigned, data.y), 1)
        cells = [f"{100 * counts.max(axis=1).sum() / len(data.y):.1f}"]
        delta = 1.0 / len(data.y)
        graph = NeighbourSmoothing().fit(train)
        both = ((train, test), (graph.transform(train), graph.transform(test)))
        for x, x_test in both:
            for epsilon in EPSILONS:
                head = PrivateLogisticRegression(epsilon, delta)
                fitted = head.fit(x, data.vault(epsilon, delta, 0))
                cells.append(f"{accuracy(data, fitted.predict(x_test)):.1f}")
        rows.append([data.name, name, f"{took[name]:.1f}", *cells])
    heads = [f"{kind}, ε {epsilon:g}" for kind in ("head", "smooth head") for epsilon in EPSILONS]
    return _results.markdown(["data", "features", "minutes", "purity", *heads], rows)


def main() -> None:
    """Runs what is missing, prints and records the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["fashion_mnist", "mnist"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--passes", type=int, default=10, help="over the images, of each training")
    parser.add_argument("--encoders", nargs="+", type=float, help="minutes of SimCLR")
    parser.add_argument("--made", type=pathlib.Path, default=pathlib.Path("bench_learners_made"))
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("learners.jsonl"))
    args = parser.parse_args()
    # All methods have delta 1/n, to compare them.
    warnings.filterwarnings("ignore", "delta")
    if args.encoders:
        with _results.recorded(__file__, f"encoders_{args.data[0]}"):
            print(encoders(Data(args.data[0], args.made), args.encoders))
        return
    for name in args.data:
        data: Data | None = None
        jobs = [
            {"data": name, "method": method, "epsilon": epsilon, "seed": seed}
            for seed in args.seeds
            for method in args.methods
            for epsilon in args.epsilons
        ]
        for job in _results.missing(args.results, jobs):
            data = data or Data(name, args.made)
            keras.utils.set_random_seed(job["seed"])
            start = time.perf_counter()
            predicted = METHODS[job["method"]](data, job["epsilon"], job["seed"], args.passes)
            found = {
                "accuracy": accuracy(data, predicted),
                "seconds": round(time.perf_counter() - start, 1),
                "passes": args.passes,
            }
            _results.add_run(args.results, {**job, **found})
            keras.backend.clear_session()
    with _results.recorded(__file__, "accuracy", "ours"):
        runs = _results.runs(args.results)
        print(table(runs, args.data, METHODS, EPSILONS))
        print()
        print(table(runs, args.data, OURS, OURS_AT))


if __name__ == "__main__":
    main()
