"""Views of images: their time, and what views and settings of the papers do for each learner.

Accuracy is measured on a part of the training set that no training saw, with the true labels of
public data sets; draws are seeded and protect nobody. Every training is a line of a JSON file, so
a stopped benchmark resumes.

    python benchmarks/bench_views.py times
    python benchmarks/bench_views.py learners --data mnist fashion_mnist
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import _datasets
import _results
import keras
import numpy as np
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.self_supervised import (
    SCAN,
    SimCLR,
    rand_augment_views,
    sim_clr_views,
    strong_views,
    weak_views,
)
from tf_labeldp.semi_supervised import DivideMix, FixMatch

SIZE, HELD_OUT, BATCH = 6000, 4000, 128
MINUTES = 3.0
SHIFT = 0.07
EPSILON = 2.0


def keras_weak() -> list[Any]:
    """Returns Keras's layers that mirror and shift images."""
    shift = keras.layers.RandomTranslation(0.125, 0.125, fill_mode="constant")
    return [keras.layers.RandomFlip("horizontal"), shift]


def keras_strong() -> keras.Sequential:
    """Returns Keras's layers that shift, turn, zoom, shade and erase, as before our own warp."""
    layers = keras.layers
    return keras.Sequential(
        [
            *keras_weak(),
            layers.RandomRotation(0.05, fill_mode="constant"),
            layers.RandomZoom(0.3, 0.3, fill_mode="constant"),
            layers.RandomBrightness(0.3, value_range=(0.0, 1.0)),
            layers.RandomContrast(0.3, value_range=(0.0, 1.0)),
            layers.RandomErasing(value_range=(0.0, 1.0)),
        ]
    )


def keras_rand_augment() -> keras.Sequential:
    """Returns Keras's RandAugment, which draws once per batch, and an erased part."""
    last = [keras.layers.RandAugment((0, 1)), keras.layers.RandomErasing(value_range=(0, 1))]
    return keras.Sequential([*keras_weak(), *last])


def scan_views(flip: bool = True) -> keras.layers.Layer:
    """Returns the strong views of SCAN's authors."""
    return rand_augment_views(shift=0.0, flip=flip, operations=4, reach=0.1, cutout=(0.0, 0.5))


TIMED: dict[str, Callable[[], Any]] = {
    "Keras: flip, translation": lambda: keras.Sequential(keras_weak()),
    "`weak_views`": lambda: weak_views(flip=True),
    "Keras: the same, rotation, zoom, shades, erasing": keras_strong,
    "`strong_views`": lambda: strong_views(flip=True),
    "Keras: RandAugment, erasing": keras_rand_augment,
    "`rand_augment_views`": lambda: rand_augment_views(flip=True),
    "`rand_augment_views` of SCAN": scan_views,
    "`sim_clr_views`": lambda: sim_clr_views(flip=True),
    "`sim_clr_views`, blurred": lambda: sim_clr_views(flip=True, blur=True),
}


def times(repeats: int) -> str:
    """Returns milliseconds per 1,000 images of 32 by 32 as Markdown; a dash where XLA fails."""
    rows = []
    for name, make in TIMED.items():
        cells = []
        for channels in (3, 1):
            images = np.random.default_rng(0).random((1000, 32, 32, channels), dtype=np.float32)
            for jit in (False, True):
                views = make()
                call = tf.function(lambda x, views=views: views(x, training=True), jit_compile=jit)
                cells.append(_milliseconds(call, tf.constant(images), repeats))
        rows.append([name, *cells])
    columns = ["colour, graph", "colour, XLA", "grey, graph", "grey, XLA"]
    return _results.markdown(["views", *columns], rows)


def _milliseconds(call: Any, images: Any, repeats: int) -> str:
    try:
        call(images)
    except tf.errors.OpError:
        return "-"
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call(images).numpy()
        found.append(time.perf_counter() - start)
    return f"{1000 * np.median(found):.0f}"


class Data:
    """A part of a training set, and another one for accuracy."""

    def __init__(self, name: str, seed: int) -> None:
        if name == "cifar10_subset":
            with np.load(_datasets.FOLDER / name / "train.npz") as file:
                x, y = file["images"] / np.float32(255), file["labels"].astype(np.int64)
        else:
            data = _datasets.load(name)
            x, y = data.x_train.astype("float32"), data.y_train
        rows = np.random.default_rng(seed).permutation(len(x))[: SIZE + HELD_OUT]
        self.x, self.y = x[rows[:SIZE]], y[rows[:SIZE]]
        self.x_held_out, self.y_held_out = x[rows[SIZE:]], y[rows[SIZE:]]
        self.flip, self.seed, self.name = name != "mnist", seed, name

    def noisy(self) -> ldp.NoisyLabels:
        """Returns labels of randomized response."""
        budget = ldp.PrivacyBudget(EPSILON)
        labels = ldp.PrivateLabels(self.y, 10, budget=budget, insecure_seed=self.seed)
        return labels.randomize(ldp.RandomizedResponse(EPSILON, 10))

    def accuracy(self, predicted: np.ndarray) -> float:
        """Returns the accuracy in percent of predicted scores."""
        return 100.0 * float(np.mean(predicted.argmax(axis=1) == self.y_held_out))

    def views(self, name: str) -> Any:
        """Returns views by name."""
        return {
            "weak": lambda: weak_views(shift=SHIFT, flip=self.flip),
            "strong": lambda: strong_views(shift=SHIFT, flip=self.flip),
            "rand_augment": lambda: rand_augment_views(shift=SHIFT, flip=self.flip),
            "scan": lambda: scan_views(self.flip),
            "sim_clr": lambda: sim_clr_views(flip=self.flip),
        }[name]()


def network(shape: tuple[int, ...], num_classes: int | None) -> keras.Model:
    """Returns four convolutions with batch normalisation, to logits or to 128 features."""
    layers = keras.layers
    x = inputs = keras.Input(shape)
    for width, strides in ((16, 2), (32, 1), (32, 2), (128, 1)):
        x = layers.Conv2D(width, 3, strides=strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, x if num_classes is None else layers.Dense(num_classes)(x))


class _Minutes(keras.callbacks.Callback):
    def __init__(self, minutes: float) -> None:
        super().__init__()
        self._minutes, self._start = minutes, time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.perf_counter() - self._start > 60 * self._minutes:
            self.model.stop_training = True


class FrozenGuesses(DivideMix):
    """DivideMix whose guesses take the moving averages of batch normalisation in both networks."""

    @staticmethod
    def _predicted(network: Any, images: Any, training: bool = False) -> Any:
        return DivideMix._predicted(network, images)


def encoder(data: Data, views: str, minutes: float) -> keras.Model:
    """Returns SimCLR's encoder after some minutes."""
    model = SimCLR(network(data.x.shape[1:], None), data.views(views), temperature=0.2)
    model.compile(keras.optimizers.Adam(1e-3))
    stop = [_Minutes(minutes)]
    model.fit(data.x, batch_size=256, epochs=10_000, verbose=0, callbacks=stop, seed=data.seed)
    return model.encoder()


def sim_clr(data: Data, views: str) -> float:
    """Returns the accuracy of a logistic regression on the features and all true labels."""
    from sklearn.linear_model import LogisticRegression

    model = encoder(data, views, MINUTES)
    train, test = (model.predict(x, batch_size=500, verbose=0) for x in (data.x, data.x_held_out))
    spread = train.std(axis=0) + 1e-6
    head = LogisticRegression(C=0.1, max_iter=300).fit(train / spread, data.y)
    return 100.0 * head.score(test / spread, data.y_held_out)


def scan(data: Data, views: str) -> float:
    """Returns the purity of 10 clusters after 20 epochs of the first stage."""
    model = SCAN(encoder(data, "strong", MINUTES / 2), 10, strong=data.views(views))
    model.compile(keras.optimizers.Adam(1e-4))
    model.fit(data.x, batch_size=BATCH, epochs=20, verbose=0, seed=data.seed)
    counts = np.zeros((10, 10))
    np.add.at(counts, (model.clusters(data.x).assignments, data.y), 1)
    return 100.0 * counts.max(axis=1).sum() / len(data.y)


def fix_match(data: Data, views: str, steps: int = 500) -> float:
    """Returns the accuracy of FixMatch after some steps."""
    net = network(data.x.shape[1:], 10)
    model = FixMatch(net, data.views("weak"), data.views(views), unlabelled_ratio=2)
    rate = keras.optimizers.schedules.CosineDecay(1e-3, steps)
    model.compile(
        keras.optimizers.Adam(rate), keras.losses.CategoricalCrossentropy(from_logits=True)
    )
    model.fit(data.x, data.noisy(), BATCH, steps_per_epoch=steps, verbose=0, seed=data.seed)
    return data.accuracy(model.predict(data.x_held_out, batch_size=500, verbose=0))


def divide_mix(data: Data, views: str, learner: type[DivideMix] = DivideMix) -> float:
    """Returns the accuracy of DivideMix after a warm-up of 90 steps and 150 others."""
    net = network(data.x.shape[1:], 10)
    model = learner(net, data.views("weak"), data.views(views), ramp_epochs=4)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9, weight_decay=5e-4))
    options = {"epochs": 8, "warmup_epochs": 3, "steps_per_epoch": 30}
    model.fit(data.x, data.noisy(), BATCH // 2, **options, verbose=0, seed=data.seed)
    return data.accuracy(model.predict(data.x_held_out, batch_size=500, verbose=0))


METHODS: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {
    "DivideMix": (divide_mix, ("strong", "rand_augment")),
    "DivideMix, frozen guesses": (
        functools.partial(divide_mix, learner=FrozenGuesses),
        ("strong",),
    ),
    "SimCLR": (sim_clr, ("strong", "sim_clr", "rand_augment")),
    "SCAN": (scan, ("weak", "scan")),
    "FixMatch": (fix_match, ("strong", "rand_augment")),
}


def table(runs: list[dict[str, Any]], names: list[str]) -> str:
    """Returns accuracies as Markdown, the mean over seeds with their number."""
    rows = []
    for method, (_, choices) in METHODS.items():
        for views in choices:
            cells = []
            for name in names:
                wanted = (name, method, views)
                found = [
                    run["accuracy"]
                    for run in runs
                    if (run["data"], run["method"], run["views"]) == wanted
                ]
                cells.append(f"{np.mean(found):.1f} ({len(found)})" if found else "")
            if any(cells):
                rows.append([method, views, *cells])
    return _results.markdown(["learner", "views", *names], rows)


def main() -> None:
    """Runs what is missing, prints and records the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["times", "learners"])
    names = ["mnist", "fashion_mnist", "cifar10_subset"]
    parser.add_argument("--data", nargs="+", default=names, choices=names)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("views.jsonl"))
    args = parser.parse_args()
    if args.part == "times":
        with _results.recorded(__file__, "times"):
            print(times(args.repeats))
        return
    jobs = [
        {"data": name, "method": method, "views": views, "seed": seed}
        for seed in args.seeds
        for method in args.methods
        for views in METHODS[method][1]
        for name in args.data
    ]
    for job in _results.missing(args.results, jobs):
        keras.utils.set_random_seed(job["seed"])
        start = time.perf_counter()
        found = METHODS[job["method"]][0](Data(job["data"], job["seed"]), job["views"])
        seconds = round(time.perf_counter() - start)
        _results.add_run(args.results, {**job, "accuracy": round(found, 2), "seconds": seconds})
        keras.backend.clear_session()
    with _results.recorded(__file__, "learners"):
        print(table(_results.runs(args.results), names))


if __name__ == "__main__":
    main()
