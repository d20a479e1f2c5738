"""Accuracy of LabelDP-Pro, DP-SGD and randomized response (``ghazi2024``, Tables 2, 3, 5(a), 14).

The CNN is that of Table 10(a). Batches are Poisson samples of 1,024 of 60,000 images on average;
delta is 1/n, as in the paper. `mnist:5` has the first five classes alone, for Table 12(a), and
``lp-normal-sgd`` is Algorithm 6 of ``ghazi2021``: one image per step. ``--relation add_or_remove``
sets the noise as the paper's accounting does, ``replace_label`` by the definition of label DP; each
line has the epsilon under both. Every finished run is a line in a JSON file, so a stopped benchmark
resumes.

    python benchmarks/bench_label_dp_pro.py --data mnist --methods dp-sgd gauss-newton
    python benchmarks/bench_label_dp_pro.py --data adult --set clipping=label_distance
    python benchmarks/bench_label_dp_pro.py --table
    python benchmarks/bench_label_dp_pro.py --crossings

For two classes (Adult, a perceptron of 32 units) the table has the AUC, otherwise the accuracy.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import time
import warnings
from typing import Any

import _datasets
import _models
import _results
import keras
import numpy as np
import tensorflow as tf
from _projection_solvers import SOLVERS, AltConvStoppingAtNoise
from sklearn.metrics import roc_auc_score

import tf_labeldp as ldp
from tf_labeldp.accounting import calibrate_noise_multiplier, dp_sgd_guarantee
from tf_labeldp.estimation import debiased
from tf_labeldp.keras_layers import LabelWeightedLoss
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.training import (
    AltConv,
    GaussNewton,
    LabelDPModel,
    LabelDPOptimizer,
    SelfConv,
    SelfSpan,
)

EPSILONS = (0.1, 0.2, 0.5, 1.0)
BATCH = 1024
ALT = {"num_examples": 256, "smoothing": 1.0}
INNER_OPTIMIZERS = {
    "sgd": keras.optimizers.SGD,
    "adam": functools.partial(keras.optimizers.Adam, beta_2=0.99),
}
# The learning rate falls linearly to zero. With more noise smaller steps are better, with little
# noise large steps diverge: under replacement
# "gauss-newton" has 8 times the root of epsilon (``--set learning_rate=2.5`` at 0.1).
SETTINGS: dict[str, dict[str, Any]] = {
    "rr": {"learning_rate": 0.1, "epochs": 5},
    "rr-debiased": {"learning_rate": 0.003, "epochs": 5, "standardize": 1},
    "dp-sgd": {"learning_rate": 4.0, "clip": 1.0, "epochs": 5, "standardize": 1},
    "gauss-newton": {"learning_rate": 8.0, "clip": 1.0, "epochs": 5, "standardize": 1},
    "labeldp-pro": {
        "learning_rate": 6.0,
        "clip": 1.0,
        "epochs": 5,
        "standardize": 1,
        "max_products": 20,
        "relative_gap": 1e-4,
        "residual": 0.7,
    },
    "stop-at-noise": {"learning_rate": 4.0, "clip": 1.0, "epochs": 5, "residual": 0.0},
    "self-conv": {"learning_rate": 4.0, "clip": 1.0, "epochs": 2},
    "self-span": {"learning_rate": 4.0, "clip": 1.0, "epochs": 2},
    "lp-normal-sgd": {
        "learning_rate": 0.003,
        "clip": 1.0,
        "epochs": 1,
        "standardize": 1,
        "batch": 1,
        "max_products": 40,
    },
}
OF_TRAINING = {"learning_rate", "epochs", "standardize", "flatten"}
OF_DP_SGD = OF_TRAINING | {"clip", "clipping", "optimizer", "batch"}
AMPLIFICATION = "unearned_amplification"
"""For denoisers that reveal the batch."""
PARTS = {
    "gauss-newton": GaussNewton,
    "labeldp-pro": functools.partial(AltConv, **ALT),
    "stop-at-noise": functools.partial(AltConvStoppingAtNoise, **ALT),
    "self-conv": SelfConv,
    "self-span": SelfSpan,
    "lp-normal-sgd": SelfSpan,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion_mnist"])
    parser.add_argument("--methods", nargs="+", default=["dp-sgd"], choices=sorted(SETTINGS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--relation", default="add_or_remove", choices=["add_or_remove", "replace_label"]
    )
    parser.add_argument("--set", nargs="*", default=[], help="settings to change: name=value")
    parser.add_argument("--results", type=pathlib.Path, default="label_dp_pro.jsonl")
    parser.add_argument("--table", action="store_true", help="only print the runs of the file")
    parser.add_argument("--crossings", action="store_true", help="print RR next to LabelDP-Pro")
    return parser.parse_args()


def settings_of(method: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a method with the changes; exits at an unknown setting."""
    known = OF_TRAINING if method.startswith("rr") else OF_DP_SGD
    if method in PARTS:
        part = PARTS[method]()
        known = known | set(part.get_config())
        known = known | ({AMPLIFICATION} if getattr(part, "reveals_batch", False) else set())
    unknown = sorted(set(changes) - known)
    if unknown:
        raise SystemExit(
            f"{method} has no setting {', '.join(unknown)}; --set takes {', '.join(sorted(known))}."
        )
    return {**SETTINGS[method], **changes}


def part_of(method: str, settings: dict[str, Any]) -> Any:
    """Returns the denoiser or preconditioner of a method with its own settings, or None."""
    if method not in PARTS:
        return None
    own = {
        name: value for name, value in settings.items() if name not in OF_DP_SGD | {AMPLIFICATION}
    }
    if "solver" in own:
        own["solver"] = SOLVERS.get(own["solver"], own["solver"])
    return PARTS[method](**own)


def network(data: _datasets.ClassificationData) -> keras.Model:
    """Returns the CNN of the paper for images, a perceptron of 32 units for vectors."""
    if data.x_train.ndim == 2:
        return _models.small_mlp(data.x_train.shape[1], data.num_classes, units=32)
    return _models.small_cnn((28, 28, 1), data.num_classes)


def standardized(data: _datasets.ClassificationData) -> _datasets.ClassificationData:
    """Returns the data with pixels of mean zero and variance one; the features are public."""
    mean, stddev = data.x_train.mean(), data.x_train.std()
    train, test = ((x - mean) / stddev for x in (data.x_train, data.x_test))
    return dataclasses.replace(data, x_train=train, x_test=test)


def flattened(data: _datasets.ClassificationData) -> _datasets.ClassificationData:
    """Returns the data with images as vectors, for the perceptron."""
    train, test = (x.reshape(len(x), -1) for x in (data.x_train, data.x_test))
    return dataclasses.replace(data, x_train=train, x_test=test)


def load(name: str) -> _datasets.ClassificationData:
    """Returns a data set; `NAME:K` has its first K classes alone."""
    name, _, number = name.partition(":")
    data = _datasets.load(name)
    if not number:
        return data
    kept = {}
    for part in ("train", "test"):
        labels = getattr(data, f"y_{part}")
        rows = labels < int(number)
        kept |= {f"x_{part}": getattr(data, f"x_{part}")[rows], f"y_{part}": labels[rows]}
    return dataclasses.replace(data, **kept, class_names=data.class_names[: int(number)])


def train_privately(
    data: _datasets.ClassificationData, run: dict[str, Any], settings: dict[str, Any]
) -> tuple[keras.Model, dict[str, float]]:
    """Trains by DP-SGD with or without denoiser; returns the model and its cost."""
    n, method, batch = len(data.x_train), run["method"], settings.get("batch", BATCH)
    q, delta = batch / n, 1.0 / n
    steps = max(1, round(settings["epochs"] / q))
    uses, probability = steps, q
    part = part_of(method, settings)
    denoiser, preconditioner = (None, part) if method == "gauss-newton" else (part, None)
    if denoiser is not None and denoiser.reveals_batch:
        uses, probability = settings["epochs"], 1.0
        a_pass = n // batch
        steps = a_pass * settings["epochs"]
    # Gray columns of Table 3: noise as if sampling amplified, stated at its true, higher cost.
    amplified = (q, steps) if settings.get(AMPLIFICATION) else (probability, uses)
    clipping = settings.get("clipping", "norm")
    noise = calibrate_noise_multiplier(
        run["epsilon"], delta, *amplified, relation=run["relation"], clipping=clipping
    )
    schedule = keras.optimizers.schedules.PolynomialDecay(settings["learning_rate"], steps, 0.0)
    inner = INNER_OPTIMIZERS[settings.get("optimizer", "sgd")](schedule)
    model = LabelDPModel.from_model(network(data))
    model.compile(
        LabelDPOptimizer(
            inner,
            settings["clip"],
            noise,
            denoiser=denoiser,
            preconditioner=preconditioner,
            clipping=clipping,
            insecure_seed=run["seed"],
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    a_pass = steps if probability < 1.0 else n // batch
    batches = ldp.data.poisson_batches(
        data.x_train, data.y_train, sampling_probability=q, steps=a_pass, insecure_seed=run["seed"]
    )
    model.fit(batches, epochs=steps // a_pass, verbose=0)
    cost = functools.partial(dp_sgd_guarantee, noise, probability, uses, delta)
    spent = {"replace_label": cost(clipping=clipping).epsilon}
    # The other clipping is for replaced labels alone.
    if clipping == "norm":
        spent["add_or_remove"] = cost(relation="add_or_remove").epsilon
    return model, {"noise_multiplier": noise, **spent}


def train_on_noisy_labels(
    data: _datasets.ClassificationData, run: dict[str, Any], settings: dict[str, Any]
) -> tuple[keras.Model, dict[str, float]]:
    """Trains on labels of randomized response, with the plain or the unbiased loss."""
    classes = data.num_classes
    mechanism = RandomizedResponse(run["epsilon"], classes)
    noisy = mechanism.randomize(data.y_train, rng=np.random.default_rng(run["seed"]))
    loss: Any = keras.losses.CategoricalCrossentropy(from_logits=True)
    targets = np.eye(classes, dtype=np.float32)[noisy]
    if run["method"] == "rr-debiased":
        targets = debiased(mechanism, noisy).astype(np.float32)
        loss = LabelWeightedLoss(keras.losses.CategoricalCrossentropy(from_logits=True))
    model = network(data)
    steps = settings["epochs"] * -(-len(noisy) // BATCH)
    schedule = keras.optimizers.schedules.PolynomialDecay(settings["learning_rate"], steps, 0.0)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), loss, jit_compile=False)
    model.fit(data.x_train, targets, BATCH, settings["epochs"], verbose=0)
    return model, {relation: run["epsilon"] for relation in ("add_or_remove", "replace_label")}


def number_or_word(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def print_table(lines: list[dict[str, Any]]) -> None:
    """Prints mean and standard deviation over the seeds of the file."""
    cells = collections.defaultdict(list)
    for line in lines:
        settings = ",".join(f"{k}={v}" for k, v in line["settings"].items())
        key = (line["data"], line["relation"], line["method"], settings, line["epsilon"])
        cells[key].append((line.get("auc", line["accuracy"]), line["replace_label"]))
    print("| data | relation | method | epsilon | under replacement | accuracy (AUC) | seeds |")
    print("|---|---|---|---|---|---|---|")
    for (data, relation, method, settings, epsilon), found in sorted(cells.items()):
        accuracy = np.array([run[0] for run in found])
        print(
            f"| {data} | {relation} | {method} ({settings}) | {epsilon:g} | {found[0][1]:.3g} | "
            f"{accuracy.mean():.1f} +- {accuracy.std():.1f} | {len(found)} |"
        )


def print_crossings(lines: list[dict[str, Any]]) -> None:
    """Prints RR next to LabelDP-Pro, whose order changes at an epsilon (Table 12(a))."""
    means = collections.defaultdict(list)
    for line in lines:
        key = (line["data"], line["relation"], line["epsilon"], line["method"])
        means[key].append(line["accuracy"])
    print("| data | relation | epsilon | RR | LabelDP-Pro | seeds |")
    print("|---|---|---|---|---|---|")
    for data, relation, epsilon, method in sorted(means):
        rr = means.get((data, relation, epsilon, "rr"))
        pro = means[(data, relation, epsilon, method)]
        if method == "labeldp-pro" and rr:
            print(
                f"| {data} | {relation} | {epsilon:g} | {np.mean(rr):.1f} | {np.mean(pro):.1f} | "
                f"{min(len(rr), len(pro))} |"
            )


def main() -> None:
    """Runs what is missing, or prints the table."""
    options = arguments()
    if options.crossings:
        with _results.recorded(__file__, "crossings"):
            print_crossings(_results.runs(options.results))
        return
    if options.table:
        with _results.recorded(__file__, "runs"):
            print_table(_results.runs(options.results))
        return
    # Delta is 1/n, as in the paper.
    warnings.filterwarnings("ignore", "delta")
    pairs = (change.partition("=") for change in options.set)
    changes = {name: number_or_word(value) for name, _, value in pairs}
    every_setting = {method: settings_of(method, changes) for method in options.methods}
    for data_name in options.data:
        raw = load(data_name)
        runs = itertools.product(options.seeds, options.epsilons, options.methods)
        jobs = [
            {
                "data": data_name,
                "method": method,
                "epsilon": epsilon,
                "seed": seed,
                "relation": options.relation,
                "settings": every_setting[method],
            }
            for seed, epsilon, method in runs
        ]
        for run in _results.missing(options.results, jobs):
            method, settings = run["method"], run["settings"]
            keras.utils.set_random_seed(run["seed"])
            begun = time.perf_counter()
            train = train_on_noisy_labels if method.startswith("rr") else train_privately
            used = standardized(raw) if settings.get("standardize") else raw
            used = flattened(used) if settings.get("flatten") else used
            model, cost = train(used, run, settings)
            scores = model.predict(used.x_test, batch_size=1000, verbose=0)
            accuracy = 100.0 * float(np.mean(scores.argmax(axis=1) == raw.y_test))
            took = time.perf_counter() - begun
            line = {**run, **cost, "accuracy": accuracy, "seconds": round(took, 1)}
            if raw.num_classes == 2:
                line["auc"] = 100.0 * roc_auc_score(raw.y_test, scores[:, 1] - scores[:, 0])
            _results.add_run(options.results, line)
            tf.keras.backend.clear_session()


if __name__ == "__main__":
    main()
