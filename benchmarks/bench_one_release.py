"""One private release against training on randomized labels: accuracy at equal epsilon.

Methods: the heads on the patch dictionary or on Fourier features (``ridge``, ``logistic``), the
same on features smoothed over their neighbours (``smooth ...``), a CNN taught by the head
(``teacher``), the head as prior of RRWithPrior and a CNN on its labels (``head + draw``), and a CNN
on labels of randomized response (``RR``) and of two-stage training (``LP-2ST``).

Epsilon is for the replacement of one label, delta = 1/n (0 for RR and LP-2ST). Labels of these data
sets are public; draws are seeded, so that the table is reproducible, and protect nobody. The seeds
change the noise alone; all have the same features. Every figure is a line in a JSON file, so a
stopped benchmark resumes.

    python benchmarks/bench_one_release.py
    python benchmarks/bench_one_release.py --data adult --methods ridge logistic
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import _datasets
import _one_release_report as report
import _results
import numpy as np
from bench_feature_maps import read_adult

from tf_labeldp.features import NeighbourSmoothing, PatchDictionary, RandomFourierFeatures
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge
from tf_labeldp.heads.design import HeadTerms
from tf_labeldp.heads.public_rows import PublicRows
from tf_labeldp.vault import Classes

HEADS = {"ridge": PrivateRidge, "logistic": PrivateLogisticRegression}
HEAD_METHODS = ("ridge", "logistic", "smooth ridge", "smooth logistic")
DEEP_METHODS = ("teacher", "head + draw", "RR", "LP-2ST")


class Features:
    """The features of a data set's training and test examples, computed on first use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.data = _datasets.load(name)
        self._inputs: tuple[Any, Any] = (self.data.x_train, self.data.x_test)
        # The raw columns, in place of the encoded ones for networks.
        if name == "adult":
            path = _datasets.FOLDER / name
            self._inputs = tuple(read_adult(path, part)[0] for part in ("data", "test"))
        self._made: dict[bool, tuple[np.ndarray, np.ndarray]] = {}
        self._read: dict[bool, tuple[float, Any]] = {}

    def get(self, smooth: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns features of training and of test examples."""
        if smooth not in self._made:
            start = time.perf_counter()
            if smooth:
                train, test = self.get(False)
                graph = NeighbourSmoothing()
                self._made[True] = graph.fit_transform(train), graph.transform(test)
            else:
                images = self.data.x_train.ndim > 2
                mapping: Any = PatchDictionary() if images else RandomFourierFeatures()
                train, test = self._inputs
                mapping.fit(train)
                self._made[False] = mapping.transform(train), mapping.transform(test)
            seconds = time.perf_counter() - start
            print(f"{self.name}: {'smoothed ' * smooth}features in {seconds:.0f} s", flush=True)
        return self._made[smooth]

    def read(self, smooth: bool, epsilon: float) -> Any:
        """Returns public rows for a release, and their design: the same for all heads and seeds."""
        if self._read.get(smooth, (None, None))[0] != epsilon:
            y = self.data.y_train
            head = PrivateLogisticRegression(
                epsilon, 1.0 / len(y), num_classes=self.data.num_classes, insecure_seed=0
            )
            inputs = FeatureRows(self.get(smooth)[0], None, max_bytes=2e9)
            rows, sample = PublicRows.survey(inputs, head.max_bytes)
            terms = HeadTerms.of(head, Classes(self.data.num_classes)).for_rows(rows)
            scanned = rows.scaled(terms.scaling(rows, sample)).scan()
            self._read[smooth] = epsilon, (scanned, terms.design(scanned))
        return self._read[smooth][1]


def head_results(
    features: Features, method: str, epsilon: float, seeds: list[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (seed, log-probabilities on the test set); all seeds share the public passes."""
    data, n = features.data, len(features.data.y_train)
    smooth = method.startswith("smooth")
    rows, design = features.read(smooth, epsilon)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        moments = design.terms.mechanism.release(data.y_train, rows, rng=rng)
        head = HEADS[method.split()[-1]](epsilon, 1.0 / n, num_classes=data.num_classes)
        solver = HeadTerms.of(head, design.terms.kind).solver
        terms = dataclasses.replace(design.terms, solver=solver)
        # The noise is seeded, so no statement is needed.
        dataclasses.replace(design, terms=terms).fit(moments).keep_in(head, ())
        yield seed, np.log(np.maximum(head.predict_proba(features.get(smooth)[1]), 1e-12))


def deep_result(features: Features, method: str, epsilon: float, seed: int) -> np.ndarray:
    """Returns logits on the test set."""
    import _one_release_deep as deep

    data = features.data
    if method in ("RR", "LP-2ST"):
        return deep.stages_logits(data, epsilon, seed, two_stages=method == "LP-2ST")
    train, _ = features.get(data.x_train.ndim > 2)
    targets = deep.targets(data, train, epsilon, seed, draw=method == "head + draw")
    return deep.student_logits(data, targets, seed)


def main() -> None:
    """Runs what is missing, prints and records the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion_mnist", "adult"])
    parser.add_argument("--methods", nargs="+", default=[*HEAD_METHODS, *DEEP_METHODS])
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(report.EPSILONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--results", type=pathlib.Path, default=pathlib.Path("bench_one_release.jsonl")
    )
    args = parser.parse_args()
    # All methods have delta 1/n, to compare them.
    warnings.filterwarnings("ignore", "delta")

    for name in args.data:
        features: Features | None = None
        for epsilon in args.epsilons:
            for method in args.methods:
                job = {"data": name, "method": method, "epsilon": epsilon}
                jobs = [{**job, "seed": seed} for seed in range(args.seeds)]
                seeds = [each["seed"] for each in _results.missing(args.results, jobs)]
                if not seeds:
                    continue
                if features is None:
                    features = Features(name)
                start = time.perf_counter()
                if method in HEAD_METHODS:
                    found = head_results(features, method, epsilon, seeds)
                else:
                    found = ((seed, deep_result(features, method, epsilon, seed)) for seed in seeds)
                for seed, logits in found:
                    seconds = round(time.perf_counter() - start, 1)
                    scores = report.scores(logits, features.data.y_test)
                    run = {**job, "seed": seed, "seconds": seconds, **scores}
                    _results.add_run(args.results, run)
                    start = time.perf_counter()
    with _results.recorded(__file__, "accuracy"):
        print(report.table(_results.runs(args.results), args.data))


if __name__ == "__main__":
    main()
