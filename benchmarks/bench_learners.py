"""Learning from structure and noisy labels: accuracy at equal epsilon and equal labelled steps.

All methods train one small CNN on as many batches of 128 noisy labels (``--steps``), whatever else
a step uses: 256 unlabelled images twice in FixMatch, twelve views per network in DivideMix. These
are thousandths of the papers' steps, so the order of methods that have not converged means little.
The table has the share of images with a pseudo-label at the end of FixMatch, and of labels that
DivideMix believes. Epsilon is for the replacement of one label, delta = 1/n (0 for RR, LP-2ST and
the learners on RR). Settings were chosen on Fashion-MNIST. Labels of these data sets are public;
draws are seeded, so that the table is reproducible, and protect nobody. Every training is a line of
a JSON file, and long ones are saved by epoch in ``--made``, so a stopped benchmark resumes.

    python benchmarks/bench_learners.py
    python benchmarks/bench_learners.py --encoders 10 30 60 --data fashion_mnist
    python benchmarks/bench_learners.py --histograms
    python benchmarks/bench_learners.py --methods RR "FixMatch, channel" --data cifar10_subset

With ``--device H100`` all times are those of the clock, and the table has the runs of that device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
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
from tf_labeldp.accounting import public_input
from tf_labeldp.features import NeighbourSmoothing, PatchDictionary, find_clusters
from tf_labeldp.features.clusters import Clusters
from tf_labeldp.heads import (
    BootstrappedHead,
    HeadPriorRandomizer,
    NoiseCluster,
    PrivateLogisticRegression,
    teacher_labels,
)
from tf_labeldp.mechanisms import HistogramMechanism, InformativeRR
from tf_labeldp.pate import PATE
from tf_labeldp.self_supervised import (
    SCAN,
    SimCLR,
    rand_augment_views,
    strong_views,
    weak_views,
)
from tf_labeldp.semi_supervised import DivideMix, FixMatch

EPSILONS = (0.2, 1.0, 2.0, 4.0)
OURS = ("smooth head", "bootstrapped head", "bootstrapped head, large")
OURS_AT = (0.1, 1.0, 2.0, 50.0)
"""Epsilons of the second table; at 50 the noisy labels are practically the true ones."""
BATCH, RATIO, RATE = 128, 2, 1e-3
STEPS = 938
"""Two passes over 60,000 labels. FixMatch's authors train 1,048,576 steps of 64 labels each."""
CLUSTERS, SIMCLR_MINUTES = 100, 10
SCAN_IMAGES, SCAN_EPOCHS = 10_000, 20
"""Of each stage. The papers: all images, 50 epochs and 200 of self-labelling."""
TEACHERS, QUERIES = 250, 1000
SHARES = (0.3, 0.7)
EPOCHS = 10
"""Parts of FixMatch's training; the share of pseudo-labels is that of the last."""
HISTOGRAM_EPSILONS = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)
HISTOGRAM_CLUSTERS = (10, 50, 100, 200, 500)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a method returns.

    Attributes:
        predicted: logits, probabilities or classes of the test images.
        steps: its steps with noisy labels; 0 for a head.
        pseudo: the last share of images with a pseudo-label, or of believed labels, or None.
    """

    predicted: np.ndarray
    steps: int = 0
    pseudo: float | None = None


class Data:
    """A data set, with label-free features of its images, computed on first use."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.encoders, self.minutes = name, args.made, args.minutes
        # By default the time of the processor, since other work may share it.
        self.clock = time.perf_counter if args.device else time.process_time
        data = _datasets.load(name)
        self.x, self.y = data.x_train.astype("float32"), data.y_train
        self.x_test, self.y_test = data.x_test.astype("float32"), data.y_test
        self.num_classes = data.num_classes
        self.flip = name != "mnist"
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
        model = self.patches if kind == "patches" else self.encoder(self.minutes)
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
            keep = _Keep(encoder, files, minutes, self.clock)
            model.fit(self.x, batch_size=256, epochs=10_000, verbose=0, callbacks=[keep])
        return keras.models.load_model(files[-1])

    @functools.cached_property
    def scan(self) -> SCAN:
        """SCAN with a cluster per class and its authors' views, on some of the images."""
        views = rand_augment_views(
            shift=0.0, flip=self.flip, operations=4, reach=0.1, cutout=(0.0, 0.5)
        )
        model = SCAN(self.encoder(self.minutes), self.num_classes, strong=views)
        for stage, batch in (("epochs", 128), ("self_label_epochs", 1000)):
            file = self.encoders / f"{self.name}_scan_{stage}.weights.h5"
            if not file.exists():
                model.compile(keras.optimizers.Adam(1e-4))
                epochs = {"epochs": 0, stage: SCAN_EPOCHS}
                saved = [self.saved(f"scan_{stage}")]
                x = self.x[:SCAN_IMAGES]
                model.fit(x, batch_size=batch, **epochs, callbacks=saved, verbose=2)
                model.save_weights(file)
            model.load_weights(file)
        return model

    def saved(self, name: str) -> keras.callbacks.Callback:
        """Returns a callback that saves a training by epoch, and goes on with a saved one."""
        return keras.callbacks.BackupAndRestore(self.encoders / f"{self.name}_{name}")

    def vault(self, epsilon: float, delta: float, seed: int) -> ldp.PrivateLabels:
        budget = ldp.PrivacyBudget(epsilon, delta)
        return ldp.PrivateLabels(self.y, self.num_classes, budget=budget, insecure_seed=seed)

    def noisy(self, epsilon: float, seed: int) -> ldp.NoisyLabels:
        """Returns labels of plain randomized response."""
        mechanism = ldp.RandomizedResponse(epsilon, self.num_classes)
        return self.vault(epsilon, 0.0, seed).randomize(mechanism)


class _Keep(keras.callbacks.Callback):
    """Saves an encoder after each number of minutes, and ends the training after the last."""

    def __init__(self, encoder: Any, files: list[pathlib.Path], minutes: Any, clock: Any) -> None:
        super().__init__()
        self._encoder, self._left = encoder, list(zip(files, minutes, strict=True))
        self._clock, self._start = clock, clock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        while self._left and self._clock() - self._start > 60.0 * self._left[0][1]:
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()  # writes the weights of the step into the variables
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


def plain(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """Trains the CNN on labels of randomized response, weak views."""
    noisy = np.eye(data.num_classes)[np.asarray(data.noisy(epsilon, seed))]
    return trained_on(noisy, data, seed, steps)


def ssl_priors(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
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
    return trained_on(noisy.posterior(), data, seed, steps)


def passes_of(data: Data, steps: int) -> int:
    """Returns the passes over all labels that have about as many steps."""
    return max(1, round(steps * BATCH / len(data.x)))


def logits_of(model: keras.Model, data: Data) -> np.ndarray:
    return model.predict(data.x_test, batch_size=500, verbose=0)


def trained_on(targets: np.ndarray, data: Data, seed: int, steps: int) -> Trained:
    """Trains the CNN on targets (n, K)."""
    model = network(data.x.shape[1:], data.num_classes)
    batches = teacher_labels(targets).batches(data.x, BATCH, augment=data.views["weak"], seed=seed)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    passes = passes_of(data, steps)
    model.compile(optimizer(passes * len(batches)), loss)
    model.fit(batches, epochs=passes, verbose=0)
    return Trained(logits_of(model, data), passes * len(batches))


def two_stages(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """LP-2ST without its filter; the second stage uses all labels."""
    model = network(data.x.shape[1:], data.num_classes)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(RATE), loss)
    stages = ldp.MultiStageTraining(
        data.x,
        data.vault(epsilon, 0.0, seed),
        epsilon=epsilon,
        fractions=(0.6, 0.4),
        epochs_per_stage=max(1, round(passes_of(data, steps) / 1.6)),
        batch_size=BATCH,
        temperature=1.0,
        filter_labels=False,
        seed=seed,
        verbose=0,
    )
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], verbose=0, shuffle=False)
    # The optimizer starts again with the second stage.
    return Trained(logits_of(model, data), round(stages.epochs * 0.8 * len(data.x) / BATCH))


def fix_match(
    data: Data,
    labels: Any,
    seed: int,
    steps: int,
    *,
    loss: Any = None,
    published: bool = True,
    settings: dict[str, Any] | None = None,
    **fit: Any,
) -> tuple[FixMatch, Trained]:
    """Trains FixMatch, with further settings of the model and of its ``fit``."""
    of_paper = {"threshold": 0.95, "temperature": None, "priors": None} if published else {}
    settings = {**of_paper, "unlabelled_ratio": RATIO, **(settings or {})}
    logits = network(data.x.shape[1:], data.num_classes)
    model = FixMatch(logits, **data.views, **settings)
    if published:
        loss = loss or keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(steps), loss)
    fit |= {"batch_size": BATCH, "steps_per_epoch": steps // EPOCHS, "epochs": EPOCHS}
    history = model.fit(data.x, labels, seed=seed, verbose=0, **fit).history
    steps = EPOCHS * (steps // EPOCHS)
    return model, Trained(logits_of(model, data), steps, history["pseudo_labelled"][-1])


def ldp_ssl(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """Algorithm 6 of ``tang2022`` with FixMatch."""
    return fix_match(data, data.noisy(epsilon, seed), seed, steps)[1]


def ldp_ssl_corrected(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """The same with a loss that corrects for the channel, and pseudo-labels of equal shares."""
    noisy = data.noisy(epsilon, seed)
    channel = noisy.mechanism.transition_matrix()
    loss = ldp.keras_layers.ForwardCorrectedLoss(channel, from_logits=True)
    equal = np.full(data.num_classes, 1.0 / data.num_classes)
    return fix_match(data, noisy, seed, steps, loss=loss, settings={"priors": equal})[1]


def fix_match_by_default(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """FixMatch without a compiled loss: through the channel, with the estimated class shares."""
    return fix_match(data, data.noisy(epsilon, seed), seed, steps, published=False)[1]


def fix_match_on_prior(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """The same on labels that are drawn with the probabilities of the smooth head as priors."""
    delta = 1.0 / len(data.y)
    randomizer = HeadPriorRandomizer(epsilon, delta=delta, draw=InformativeRR)
    labels, features = data.vault(epsilon, delta, seed), data.features("smooth")[0]
    drawn = labels.randomize(randomizer, features=features)
    return fix_match(data, drawn, seed, steps, published=False)[1]


def denoise_ssl(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """Algorithm 7 of ``tang2022``."""
    noisy = data.noisy(epsilon, seed)
    return fix_match(data, noisy, seed, steps, clusters=data.clusters)[1]


def aug_descent(data: Data, epsilon: float, seed: int, steps: int, **settings: Any) -> Trained:
    """Algorithm 6 of ``tang2022`` with DivideMix."""
    return divide_mix(data, data.noisy(epsilon, seed), seed, steps, **settings)


def divide_mix(
    data: Data, labels: Any, seed: int, steps: int, *, published: bool = False, **settings: Any
) -> Trained:
    """Trains DivideMix: a fifth of the steps are the warm-up, each other fifth divides first.

    With the ``published`` preset of AugDescent for up to 20 % of wrong labels: no unlabelled loss,
    and SGD whose learning rate falls to a tenth half-way. (Theirs has 300 passes.)
    """
    if published:
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([steps // 2], [0.02, 0.002])
        # A loss with the penalty 5e-4 moves weights by ten times as much, through the momentum.
        method = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=5e-3)
        settings["unlabelled_weight"] = 0.0
    else:
        method = keras.optimizers.Adam(0.5 * RATE)
    logits = network(data.x.shape[1:], data.num_classes)
    model = DivideMix(logits, ramp_epochs=2, **data.views, **settings)
    model.compile(method)
    history = model.fit(
        data.x,
        labels,
        batch_size=BATCH,
        epochs=5,
        warmup_epochs=1,
        steps_per_epoch=steps // 5,
        seed=seed,
        verbose=2,
    ).history
    return Trained(logits_of(model, data), 5 * (steps // 5), history["believed"][-1])


def pate(data: Data, epsilon: float, seed: int, steps: int, label_all: bool = False) -> Trained:
    """Teachers on frozen patch features, with the student of PATE-FM.

    With ``label_all`` the student labels all images for DivideMix: pipeline 2 of ``tang2022``.
    """
    delta = 1.0 / len(data.y)
    teachers = PATE(
        epsilon, delta, num_teachers=TEACHERS, num_queries=QUERIES, threshold=None, seed=seed
    )
    answers = teachers.answer(data.features("smooth")[0], data.vault(epsilon, delta, seed))
    student, trained = fix_match(data, answers, seed, steps)
    if not label_all:
        return trained
    classes = student.predict(data.x, batch_size=500, verbose=0).argmax(axis=1)
    return divide_mix(data, public_input(student).with_value(classes), seed, steps)


def scan_cluster(data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """Algorithms 1 and 2 of ``tang2022``: noisy histograms of SCAN's clusters, no training."""
    clusters = data.scan.clusters(data.x)
    delta = 1.0 / len(data.y)
    head = NoiseCluster(None, epsilon, delta, clusters=clusters)
    return Trained(head.fit(data.x, data.vault(epsilon, delta, seed)).predict(data.x_test))


def head_on(kind: str, data: Data, epsilon: float, seed: int, steps: int) -> Trained:
    """A logistic regression of one release on features."""
    train, test = data.features(kind)
    delta = 1.0 / len(data.y)
    head = PrivateLogisticRegression(epsilon, delta)
    return Trained(head.fit(train, data.vault(epsilon, delta, seed)).predict_proba(test))


def bootstrapped(data: Data, epsilon: float, seed: int, steps: int, large: bool = False) -> Trained:
    """Release, learn, release again; the large network trains on twice the images."""
    delta = 1.0 / len(data.y)
    epochs = (2 if large else 1) * max(1, passes_of(data, steps) // len(SHARES))
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
    scores = head.fit(data.x, data.vault(epsilon, delta, seed)).predict_proba(data.x_test)
    return Trained(scores, epochs * len(SHARES) * -(-len(data.x) // BATCH))


METHODS: dict[str, Callable[..., Trained]] = {
    "RR": plain,
    "LP-2ST": two_stages,
    "priors of SimCLR": ssl_priors,
    "LDP-SSL": ldp_ssl,
    "LDP-SSL, corrected loss": ldp_ssl_corrected,
    "FixMatch, channel": fix_match_by_default,
    "FixMatch, head prior": fix_match_on_prior,
    "DenoiseSSL": denoise_ssl,
    "LDP-AugDescent": aug_descent,
    "LDP-AugDescent, channel": functools.partial(aug_descent, division="channel"),
    "LDP-AugDescent, published": functools.partial(aug_descent, published=True),
    "PATE-FM": pate,
    "PATE-FM + AugDescent": functools.partial(pate, label_all=True),
    "NoiseCluster, SCAN": scan_cluster,
    "SimCLR + head": functools.partial(head_on, "simclr"),
    "smooth head": functools.partial(head_on, "smooth"),
    "bootstrapped head": bootstrapped,
    "bootstrapped head, large": functools.partial(bootstrapped, large=True),
}

WITHOUT_STEPS = ("NoiseCluster, SCAN", "SimCLR + head", "smooth head")
WITH_STEPS = [method for method in METHODS if method not in WITHOUT_STEPS]


def accuracy(data: Data, predicted: np.ndarray) -> float:
    """Returns the test accuracy in percent of scores or classes."""
    classes = predicted.argmax(axis=1) if predicted.ndim == 2 else predicted
    return round(100.0 * float(np.mean(classes == data.y_test)), 2)


def table(
    runs: list[dict[str, Any]],
    names: list[str],
    methods: Iterable[str],
    epsilons: Sequence[float],
    steps: int | None = None,
) -> str:
    """Returns accuracies as Markdown, mean and standard deviation over seeds, and median minutes.

    A cell has the runs of a number of ``steps``, and those of heads; None for the most steps.
    """
    rows = []
    for name in names:
        for method in methods:
            cells, shares, done, seconds = [], [], [], []
            for epsilon in epsilons:
                wanted = (name, method, epsilon)
                found = [r for r in runs if (r["data"], r["method"], r["epsilon"]) == wanted]
                most = max((r["steps"] for r in found), default=0)
                kept = {0, steps or most}
                found = [r for r in found if r["steps"] in kept]
                values = [r["accuracy"] for r in found]
                cells.append(_results.cell(values))
                pseudo = [r["pseudo"] for r in found if r.get("pseudo") is not None]
                shares.append(f"{100 * np.mean(pseudo):.0f}" if pseudo else "-")
                labelled = sorted({r["labelled_steps"] for r in found})
                done.append(" to ".join(f"{each:,}" for each in labelled) or "-")
                seconds += [r["seconds"] for r in found if r["seconds"] is not None]
            if any(cells):
                took = f"{np.median(seconds) / 60:.0f}" if seconds else "-"
                same = set(done) - {"-"}
                steps_done = same.pop() if len(same) == 1 else " / ".join(done)
                pseudo_labels = "-" if set(shares) == {"-"} else " / ".join(shares)
                rows.append([name, method, *cells, steps_done, pseudo_labels, took])
    columns = ["data", "method", *(f"ε {epsilon:g}" for epsilon in epsilons)]
    columns += ["labelled steps", "pseudo-labels, %", "minutes"]
    return _results.markdown(columns, rows)


def histograms(data: Data, seed: int = 0) -> str:
    """Returns the accuracy of noisy histograms of clusters (``ghazi2021``, Figure 2) as Markdown.

    As there, k-means has the training and the test images, and a test image gets the class with the
    largest noisy count among the training images of its cluster.
    """
    rows = []
    for kind, name in (("patches", "PatchDictionary"), ("simclr", f"SimCLR, {data.minutes:g} min")):
        train, test = data.features(kind)
        for number in HISTOGRAM_CLUSTERS:
            assigned = find_clusters(np.concatenate([train, test]), number).assignments
            clusters = Clusters.from_assignments(assigned[: len(train)], number)
            cells = []
            for epsilon in HISTOGRAM_EPSILONS:
                head = NoiseCluster(None, epsilon, clusters=clusters)
                head.fit(None, data.vault(epsilon, 0.0, seed))
                predicted = head.cluster_classes_[assigned[len(train) :]]
                cells.append(f"{accuracy(data, predicted):.1f}")
            rows.append([data.name, name, f"{number}", *cells])
    columns = [f"ε {epsilon:g}" for epsilon in HISTOGRAM_EPSILONS]
    return _results.markdown(["data", "features", "clusters", *columns], rows)


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
    parser.add_argument("--steps", type=int, default=STEPS, help="with noisy labels, per training")
    parser.add_argument("--minutes", type=float, default=SIMCLR_MINUTES, help="of SimCLR")
    parser.add_argument("--encoders", nargs="+", type=float, help="minutes of SimCLR")
    parser.add_argument("--device", help="that these runs are on, such as H100")
    parser.add_argument("--histograms", action="store_true", help="Figure 2 of ghazi2021")
    parser.add_argument("--made", type=pathlib.Path, default=pathlib.Path("bench_learners_made"))
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("learners.jsonl"))
    args = parser.parse_args()
    # All methods have delta 1/n, to compare them.
    warnings.filterwarnings("ignore", "delta")
    if args.encoders:
        with _results.recorded(__file__, f"encoders_{args.data[0]}"):
            print(encoders(Data(args.data[0], args), args.encoders))
        return
    if args.histograms:
        for name in args.data:
            with _results.recorded(__file__, f"histograms_{name}"):
                print(histograms(Data(name, args)))
        return
    on_device = {"device": args.device} if args.device else {}
    for name in args.data:
        data: Data | None = None
        cells = itertools.product(args.seeds, args.methods, args.epsilons)
        jobs = [
            {
                "data": name,
                "method": method,
                "epsilon": epsilon,
                "seed": seed,
                "steps": 0 if method in WITHOUT_STEPS else args.steps,
                **on_device,
            }
            for seed, method, epsilon in cells
        ]
        for job in _results.missing(args.results, jobs):
            data = data or Data(name, args)
            keras.utils.set_random_seed(job["seed"])
            start = data.clock()
            trained = METHODS[job["method"]](data, job["epsilon"], job["seed"], args.steps)
            found = {
                "labelled_steps": trained.steps,
                "pseudo": trained.pseudo,
                "accuracy": accuracy(data, trained.predicted),
                "seconds": round(data.clock() - start, 1),
            }
            _results.add_run(args.results, {**job, **found})
            keras.backend.clear_session()
    runs = [run for run in _results.runs(args.results) if run.get("device") == args.device]
    names = sorted({run["data"] for run in runs})
    if args.device:
        with _results.recorded(__file__, f"accuracy_{args.device}"):
            print(table(runs, names, METHODS, EPSILONS, args.steps))
        return
    with _results.recorded(__file__, "accuracy", "longest", "ours"):
        print(table(runs, names, METHODS, EPSILONS, args.steps))
        print()
        print(table(runs, names, WITH_STEPS, EPSILONS))
        print()
        print(table(runs, names, OURS, OURS_AT))


if __name__ == "__main__":
    main()
