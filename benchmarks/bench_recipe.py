"""A network from scratch on images: one release as prior, noisy labels, refined posteriors.

The recipe is that of ``PrivateClassifier(method="network")``. Epsilon is for the replacement of one
label, delta = 1e-5. Labels of these data sets are public; draws are seeded, so that the table is
reproducible, and protect nobody. Releases, draws and networks are in the vault's store
(``--made``), and each run is a line of a JSON file, so a stopped benchmark resumes with the epoch
of training that was cut off. ``--policy mixed_bfloat16`` is faster on processors that have it.

    python benchmarks/bench_recipe.py                     # the table
    python benchmarks/bench_recipe.py --choose            # variants, on a part of the training set

``--choose`` trains on 12,000 examples of the training set, and tests on 10,000 others of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import time
import warnings
from typing import Any

import _datasets
import _results
import keras
import numpy as np

import tf_labeldp as ldp
from tf_labeldp.features import NeighbourSmoothing, PatchDictionary
from tf_labeldp.front_door.image_network import image_network, image_views
from tf_labeldp.heads import BootstrappedHead, PrivateLogisticRegression

EPSILONS, DELTA = (0.1, 0.5, 1.0, 2.0, 4.0), 1e-5
PASSES = {"mnist": 40, "fashion_mnist": 40, "cifar10_subset": 120}
"""Passes over the training set, in all rounds together."""
CHOOSE_EXAMPLES, CHOOSE_TEST = 12_000, 10_000
VARIANTS: dict[str, dict[str, Any]] = {
    "network": {},
    "two releases": {"draw_share": 0.0},
    "noisy labels": {"draw_share": 0.85},
    "noisy labels, 70 %": {"draw_share": 0.7},
    "two releases, noisy labels": {"draw_share": 0.6, "shares": (0.3, 0.7)},
}
HEAD = "smooth logistic"
PUBLISHED = {
    "mnist": {
        "LP-2ST (ghazi2021)": {1.0: 95.82, 2.0: 98.78, 4.0: 99.24},
        "no privacy (ghazi2021)": dict.fromkeys(EPSILONS, 99.33),
    },
    "fashion_mnist": {
        "LP-2ST (ghazi2021)": {1.0: 83.26, 2.0: 91.24, 4.0: 94.1},
        "no privacy (ghazi2021)": dict.fromkeys(EPSILONS, 94.28),
    },
}
"""Table 4 of ghazi2021, which trains a larger network for 40 passes in each stage."""


class Data:
    """Images of a data set, and label-free features, computed on first use."""

    def __init__(self, name: str, choose: bool) -> None:
        self.name, self.num_classes = name, 10
        self.mirrored = name != "mnist"
        if name == "cifar10_subset":
            files = [np.load(_datasets.FOLDER / name / f"{part}.npz") for part in ("train", "test")]
            (x, y), (x_test, y_test) = ((file["images"], file["labels"]) for file in files)
            x, x_test = (images.astype(np.float32) / 255.0 for images in (x, x_test))
        else:
            data = _datasets.load(name)
            x, y, x_test, y_test = data.x_train, data.y_train, data.x_test, data.y_test
        if choose:
            order = np.random.default_rng(0).permutation(len(y))
            size = min(CHOOSE_TEST, len(y) // 4)
            x_test, y_test = x[order[-size:]], y[order[-size:]]
            x, y = x[order[:-size][:CHOOSE_EXAMPLES]], y[order[:-size][:CHOOSE_EXAMPLES]]
        self.x, self.y = x.astype(np.float32), y
        self.x_test, self.y_test = x_test.astype(np.float32), y_test

    @functools.cached_property
    def encoder(self) -> NeighbourSmoothing:
        """The features of ``PrivateClassifier``."""
        return NeighbourSmoothing(PatchDictionary().fit(self.x)).fit(self.x)

    @functools.cached_property
    def features(self) -> tuple[np.ndarray, np.ndarray]:
        return self.encoder.transform(self.x), self.encoder.transform(self.x_test)

    def vault(self, epsilon: float, seed: int, store: pathlib.Path | None) -> ldp.PrivateLabels:
        budget = ldp.PrivacyBudget(epsilon, DELTA)
        options = {"budget": budget, "insecure_seed": seed, "store": store}
        return ldp.PrivateLabels(self.y, self.num_classes, **options)

    def accuracy(self, scores: np.ndarray) -> float:
        """Returns the test accuracy in percent."""
        return round(100.0 * float(np.mean(scores.argmax(axis=1) == self.y_test)), 2)


def head(data: Data, epsilon: float, seed: int) -> dict[str, Any]:
    """Returns the accuracy of the one release of ``PrivateClassifier``."""
    train, test = data.features
    model = PrivateLogisticRegression(epsilon, DELTA).fit(train, data.vault(epsilon, seed, None))
    return {"accuracy": data.accuracy(model.predict_proba(test))}


def recipe(data: Data, job: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Trains a variant of the recipe; returns accuracies of heads, of rounds, and at the end."""
    options = {**VARIANTS[job["variant"]]}
    epsilon, seed = job["epsilon"], job["seed"]
    keras.utils.set_random_seed(seed)
    network = image_network(data.x, data.num_classes)
    options |= {"encoder": data.encoder, "mirrored": data.mirrored, "seed": seed, "verbose": 2}
    options["views"] = image_views(data.x.shape[1:], data.mirrored)
    model = BootstrappedHead(epsilon, DELTA, network, **options)
    model = dataclasses.replace(model, epochs=max(1, round(job["passes"] / model.rounds())))
    store = folder / "-".join(str(value).replace(" ", "-") for value in job.values())
    model.fit(data.x, data.vault(epsilon, seed, store))
    found = {"accuracy": data.accuracy(model.predict_proba(data.x_test))}
    found["head"] = data.accuracy(model.heads_[0].predict_proba(data.features[1]))
    files = sorted((store / "networks").iterdir(), key=lambda file: file.stat().st_mtime)
    found["rounds"] = []
    for file in files:
        with np.load(file) as saved:
            network.set_weights([saved[name] for name in saved if name.startswith("arr")])
        found["rounds"].append(data.accuracy(model.predict_proba(data.x_test)))
    return {**found, "stated": round(model.guarantee().epsilon, 4)}


def table(runs: list[dict[str, Any]], choose: bool) -> str:
    """Returns accuracies as Markdown, mean and standard deviation over seeds, and minutes."""
    rows = []
    for name in PASSES:
        for variant in (HEAD, *VARIANTS):
            wanted = {"data": name, "variant": variant, "choose": choose}
            of_variant = [run for run in runs if wanted.items() <= run.items()]
            for passes in sorted({run["passes"] for run in of_variant}):
                found = [run for run in of_variant if run["passes"] == passes]
                cells = []
                for epsilon in EPSILONS:
                    values = [run["accuracy"] for run in found if run["epsilon"] == epsilon]
                    cells.append(_results.cell(values, 2))
                rows.append([name, variant, f"{passes or '-'}", *cells, _minutes(found)])
        if not choose:
            for method, figures in PUBLISHED.get(name, {}).items():
                cells = [f"{figures[each]:.2f}" if each in figures else "" for each in EPSILONS]
                rows.append([name, f"*{method}*", "", *cells, ""])
    columns = ["data", "method", "passes", *(f"ε {epsilon:g}" for epsilon in EPSILONS), "minutes"]
    return _results.markdown(columns, rows)


def _minutes(runs: list[dict[str, Any]]) -> str:
    """Returns the median minutes of runs by device; those on a processor come first."""
    found = []
    for device in sorted({run.get("device", "") for run in runs}):
        seconds = [run["seconds"] for run in runs if run.get("device", "") == device]
        found.append(f"{np.median(seconds) / 60:.0f} {device}".strip())
    return ", ".join(found)


def main() -> None:
    """Runs what is missing, prints and records the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--variants", nargs="+", choices=(HEAD, *VARIANTS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--passes", type=int, help="over the examples, in all rounds together")
    parser.add_argument("--policy", default="float32", help="of keras.mixed_precision")
    parser.add_argument("--device", help="that these runs are on, such as H100")
    parser.add_argument("--choose", action="store_true", help="on parts of the training set")
    parser.add_argument("--made", type=pathlib.Path, default=pathlib.Path("bench_recipe_made"))
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("recipe.jsonl"))
    args = parser.parse_args()
    keras.mixed_precision.set_global_policy(args.policy)
    # All data sets have the same delta, to compare them.
    warnings.filterwarnings("ignore", "delta")
    variants = args.variants or [HEAD, "network"]
    for name in args.data:
        data: Data | None = None
        jobs = [
            {"data": name, "variant": variant, "epsilon": epsilon, "seed": seed}
            for seed in args.seeds
            for variant in variants
            for epsilon in args.epsilons
        ]
        passes = args.passes or PASSES[name]
        for job in jobs:
            job |= {"passes": 0 if job["variant"] == HEAD else passes, "choose": args.choose}
            job |= {"device": args.device} if args.device else {}
        for job in _results.missing(args.results, jobs):
            data = data or Data(name, args.choose)
            start = time.perf_counter()
            if job["variant"] == HEAD:
                found = head(data, job["epsilon"], job["seed"])
            else:
                found = recipe(data, job, args.made)
            seconds = round(time.perf_counter() - start, 1)
            _results.add_run(args.results, {**job, **found, "seconds": seconds})
            keras.backend.clear_session()
    name = "choices" if args.choose else "accuracy"
    with _results.recorded(__file__, name):
        print(table(_results.runs(args.results), args.choose))


if __name__ == "__main__":
    main()
