"""Time and memory of heads and of smoothing on many rows: 1,000,000 rows of 2,000 features.

Each head is fitted in a separate process, in this version and in another (``--against``); the table
has the ratios. A ``tf.data.Dataset`` generates the features when they are read, so the memory of
the process is that of the head. The features are a fixed block of random numbers with other signs
in each batch, at next to no cost; a linear model of them draws the labels. Epsilon is 1 for a
million rows and larger for fewer, so that as many directions are kept.

``--ratios`` fits both heads to arrays of these numbers of rows: processor time as a ratio to one
Gram product of the same rows (``ssyrk``), which is timed before and after each fit.

``--smoothing`` times ``NeighbourSmoothing`` on images of Fashion-MNIST, shifted by up to two pixels
for more rows: the search over all pairs (some queries, scaled up) against the search in lists, and
the share of neighbours that it finds. ``--accuracy`` fits heads on features smoothed by either
search.

    python benchmarks/bench_large_head.py --rows 100000 --against ce97f1e
    python benchmarks/bench_large_head.py --rows 100000 --head logistic
    OMP_NUM_THREADS=1 python benchmarks/bench_large_head.py --ratios 25000 50000 100000 \
        --features 1000 --against 31ad80d
    OMP_NUM_THREADS=1 python benchmarks/bench_large_head.py --ratios 50000 200000 --features 64 \
        --classes 1000
    python benchmarks/bench_large_head.py --smoothing 60000 200000 1000000
    python benchmarks/bench_large_head.py --accuracy
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from typing import Any

import _results
import numpy as np

BATCH = 5000
CLASSES = 10
QUERIES = 4096
ROOT = pathlib.Path(__file__).parents[1]


def dataset(rows: int, width: int) -> Any:
    """Returns batches (x, y), the same in each pass."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    scales = np.geomspace(1.0, 0.03, width)
    block = tf.constant((rng.normal(size=(BATCH, width)) * scales).astype(np.float32))
    weights = tf.constant(rng.normal(size=(width, CLASSES)).astype(np.float32))

    def batch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.stack([index, index])
        signs = tf.sign(tf.random.stateless_uniform((width,), seed, -1.0, 1.0))
        x = block * signs
        return x, tf.argmax(x @ weights, axis=1)

    return tf.data.Dataset.range(rows // BATCH).map(batch).prefetch(2)


def peak() -> float:
    """Returns the peak memory of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def fit_one(rows: int, width: int, head: str) -> dict[str, float]:
    """Fits a head in this process; returns times, memory and accuracy."""
    from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge

    data = dataset(rows, width)
    kind = PrivateRidge if head == "ridge" else PrivateLogisticRegression
    wall, processor = time.perf_counter(), time.process_time()
    fitted = kind(1e6 / rows, 1.0 / rows, num_classes=CLASSES, insecure_seed=0).fit(data)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    x, y = next(data.as_numpy_iterator())
    return {
        "wall": wall,
        "processor": processor,
        "peak": peak(),
        "directions": fitted.num_directions_,
        "accuracy": fitted.score(x, y),
    }


def ratio_one(rows: int, width: int, head: str, classes: int) -> dict[str, float]:
    """Fits a head to an array; returns its processor time, that of a Gram product, and accuracy."""
    from scipy.linalg import blas

    from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge

    rng = np.random.default_rng(0)
    scales = np.geomspace(1.0, 0.03, width).astype(np.float32)
    x = rng.normal(size=(rows, width)).astype(np.float32) * scales
    scores = x @ rng.normal(size=(width, classes)).astype(np.float32)
    y = np.argmax(scores + 0.1 * rng.normal(size=scores.shape), axis=1)
    kind = PrivateRidge if head == "ridge" else PrivateLogisticRegression
    # The first fit of a process imports libraries.
    PrivateLogisticRegression(1.0, 1e-5, num_classes=2).fit(x[:300, :5], y[:300] % 2)
    times = []
    for call in ("product", "fit", "product"):
        begun = time.process_time()
        if call == "product":
            blas.ssyrk(1.0, x.T)
        else:
            fitted = kind(1e5 / rows, 0.1 / rows, num_classes=classes, insecure_seed=0).fit(x, y)
        times.append(time.process_time() - begun)
    product = 0.5 * (times[0] + times[2])
    return {"product": product, "fit": times[1], "accuracy": fitted.score(x, y), "peak": peak()}


def compare_ratios(args: argparse.Namespace) -> None:
    """Prints a table of both heads over the numbers of rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        versions = {"this version": ROOT}
        if args.against:
            extract(args.against, folder)
            versions = {args.against: pathlib.Path(folder), **versions}
        for size in args.ratios:
            for args.head in ("ridge", "logistic"):
                for name, code in versions.items():
                    args.rows = size
                    found = fit_apart(code, args, "--ratio-one")
                    figures = [f"{found['product']:.2f}", f"{found['fit']:.1f}"]
                    figures += [f"{found['fit'] / found['product']:.1f}", f"{found['peak']:.1f}"]
                    figures.append(f"{100 * found['accuracy']:.2f}")
                    rows.append([f"{size:,} x {args.features:,}", args.head, name, *figures])
                    print(rows[-1], file=sys.stderr, flush=True)
    columns = ["shape", "head", "version", "product, s", "fit, s", "ratio", "peak GB"]
    print(_results.markdown([*columns, "accuracy, %"], rows))


def extract(commit: str, folder: str) -> None:
    """Writes the files of a commit to a folder."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=True
    ).stdout
    tarfile.open(fileobj=io.BytesIO(archive)).extractall(folder)
    keras_layers = pathlib.Path(folder) / "tf_labeldp" / "keras_layers"
    if not keras_layers.exists():
        keras_layers.symlink_to("../keras_layers")


def fit_apart(code: pathlib.Path, args: argparse.Namespace, how: str = "--one") -> dict[str, float]:
    """Fits a head in a separate process, with the library of a folder."""
    call = [sys.executable, __file__, how, "--rows", str(args.rows)]
    call += ["--features", str(args.features), "--head", args.head]
    call += ["--classes", str(args.classes)]
    env = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(call, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare_heads(args: argparse.Namespace) -> None:
    """Prints a table of both versions, with ratios."""
    found = {}
    if args.against:
        with tempfile.TemporaryDirectory() as folder:
            extract(args.against, folder)
            found[args.against] = fit_apart(pathlib.Path(folder), args)
    found["this version"] = fit_apart(ROOT, args)
    rows = [
        [
            name,
            f"{fit['wall']:.0f}",
            f"{fit['processor']:.0f}",
            f"{args.rows / fit['processor']:,.0f}",
            f"{fit['peak']:.2f}",
            f"{fit['directions']:.0f}",
            f"{100 * fit['accuracy']:.1f}",
        ]
        for name, fit in found.items()
    ]
    if args.against:
        old, new = found.values()
        ratios = [f"{old[what] / new[what]:.2f}" for what in ("wall", "processor")]
        rows.append(["ratio", *ratios, ratios[1], f"{old['peak'] / new['peak']:.2f}", "", ""])
    what = f"{args.head}, {args.rows:,} x {args.features:,}"
    columns = [what, "wall s", "processor s", "rows per processor s", "peak GB", "directions"]
    print(_results.markdown([*columns, "accuracy on a batch, %"], rows))


def moved_images(rows: int) -> np.ndarray:
    """Returns images of Fashion-MNIST as rows (n, 784), shifted in different ways."""
    import _datasets

    images = _datasets.load("fashion_mnist").x_train
    images = np.rint(images.reshape(-1, 28, 28) * (255.0 / images.max())).astype(np.uint8)
    moves = sorted(np.ndindex(5, 5), key=lambda move: (abs(move[0] - 2) + abs(move[1] - 2), move))
    parts = [np.roll(images, (down - 2, right - 2), axis=(1, 2)) for down, right in moves]
    return np.concatenate(parts[: -(-rows // len(images))])[:rows].reshape(rows, -1)


def time_smoothing(sizes: list[int]) -> None:
    """Prints a table of searches and of whole fits."""
    from tf_labeldp.features import NeighbourSmoothing, _neighbour_smoothing

    searches: list[tuple[float, np.ndarray]] = []

    def timed(*arguments: Any) -> np.ndarray:
        begun = time.process_time()
        found = _neighbour_smoothing.listed_neighbours(*arguments)
        searches.append((time.process_time() - begun, found))
        return found

    _neighbour_smoothing.find_neighbours = timed
    rows = []
    for size in sizes:
        x = moved_images(size)
        smoothing = NeighbourSmoothing()
        wall, processor = time.perf_counter(), time.process_time()
        smoothing.fit(x)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        lists, found = searches.pop()
        asked = np.random.default_rng(0).permutation(size)[:QUERIES]
        begun = time.process_time()
        expected = _neighbour_smoothing.nearest_neighbours(
            smoothing._keys[asked], smoothing._keys, smoothing.num_neighbours
        )
        all_pairs = (time.process_time() - begun) * size / len(asked)
        pairs = zip(expected, found[asked], strict=True)
        shared = [np.isin(exact, listed).mean() for exact, listed in pairs]
        figures = [f"{all_pairs:.0f}", f"{lists:.0f}", f"{all_pairs / lists:.1f}"]
        figures += [f"{100 * np.mean(shared):.1f}", f"{processor:.0f}", f"{wall:.0f}"]
        rows.append([f"{size:,}", *figures])
        print(rows[-1], file=sys.stderr, flush=True)
    columns = ["rows", "all pairs, processor s", "lists, processor s", "ratio", "found, %"]
    columns += ["whole fit with lists, processor s", "wall s"]
    print(_results.markdown(columns, rows))


def compare_accuracy(seeds: int) -> None:
    """Prints a table of heads on features smoothed by either search."""
    import _datasets

    from tf_labeldp.features import NeighbourSmoothing, PatchDictionary, _neighbour_smoothing
    from tf_labeldp.heads import PrivateRidge

    rows, epsilons = [], (0.1, 1.0)
    for name in ("mnist", "fashion_mnist"):
        data = _datasets.load(name)
        patches = PatchDictionary().fit(data.x_train)
        train, test = patches.transform(data.x_train), patches.transform(data.x_test)
        for search, pairs in (("all pairs", np.inf), ("lists", 0.0)):
            _neighbour_smoothing._EXACT_PAIRS = pairs
            smoothing = NeighbourSmoothing().fit(train)
            smooth, smooth_test = smoothing._smooth, smoothing.transform(test)
            cells = []
            for epsilon in epsilons:
                heads = [
                    PrivateRidge(
                        epsilon, 1.0 / len(train), num_classes=data.num_classes, insecure_seed=seed
                    ).fit(smooth, data.y_train)
                    for seed in range(seeds)
                ]
                scores = [100.0 * head.score(smooth_test, data.y_test) for head in heads]
                cells.append(f"{np.mean(scores):.2f} ± {np.std(scores):.2f} ({seeds})")
            rows.append([name, search, *cells])
    print(_results.markdown(["data", "search", *(f"ε {e:g}" for e in epsilons)], rows))


def main() -> None:
    """Prints and records one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=2_000)
    parser.add_argument("--head", choices=["ridge", "logistic"], default="ridge")
    parser.add_argument("--against", help="a commit to compare with")
    parser.add_argument("--one", action="store_true", help="fit here, and print figures as JSON")
    parser.add_argument("--ratios", type=int, nargs="+", help="numbers of rows of arrays")
    parser.add_argument("--classes", type=int, default=CLASSES, help="for --ratios")
    parser.add_argument("--ratio-one", action="store_true", help="as --one, for --ratios")
    parser.add_argument("--smoothing", type=int, nargs="+", help="numbers of rows")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    # Delta is 1/n, and fits repeat: nothing is published here.
    warnings.simplefilter("ignore")
    if args.one:
        print(json.dumps(fit_one(args.rows, args.features, args.head)))
    elif args.ratio_one:
        print(json.dumps(ratio_one(args.rows, args.features, args.head, args.classes)))
    elif args.ratios:
        with _results.recorded(__file__, "ratios"):
            compare_ratios(args)
    elif args.smoothing:
        with _results.recorded(__file__, "smoothing"):
            time_smoothing(args.smoothing)
    elif args.accuracy:
        with _results.recorded(__file__, "smoothing_accuracy"):
            compare_accuracy(args.seeds)
    else:
        with _results.recorded(__file__, f"{args.head}_{args.rows}"):
            compare_heads(args)


if __name__ == "__main__":
    main()
