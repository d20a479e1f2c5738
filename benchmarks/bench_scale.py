"""Rows per second of keyed draws by engine and number of workers, and the memory of a soak test.

Run it in the environment of each engine, which `make test-beam` and `make test-spark` create:
``.venv-beam/bin/python benchmarks/bench_scale.py beam``; also ``core``, ``spark`` and ``soak``.
Each figure comes from a separate process; memory is the peak over its subprocesses.

``python benchmarks/bench_scale.py keyed`` needs no engine: processor nanoseconds of a keyed draw
per row for three numbers of rows, next to a draw by the operating system's bits (medians over five
rounds), by whole numbers, short and long texts, and with a prior for each row.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import _results
import numpy as np

PART = 100_000
KINDS = ("arrow", "pairs", "dicts")


def part_of(part: int, kind: str = "arrow") -> Any:
    """Returns rows with integer ids: one Arrow batch, pairs or dicts."""
    import pyarrow as pa

    ids = np.arange(part * PART, (part + 1) * PART)
    labels = (ids * 7919) % 10
    if kind == "arrow":
        return [pa.record_batch({"id": ids, "label": labels})]
    pairs = zip(ids.tolist(), labels.tolist(), strict=True)
    return pairs if kind == "pairs" else ({"id": i, "label": y} for i, y in pairs)


def core(rows: int, ids: str) -> None:
    """Draws with the stateless core, batch by batch."""
    from tf_labeldp.scale import randomize_batch

    for part in range(rows // PART):
        batch = part_of(part)[0]
        names = batch.column(0).cast("string") if ids == "texts" else batch.column(0)
        randomize_batch(names, batch.column(1), mechanism(), bytes(32), "bench")


def plain(rows: int) -> None:
    """Draws all rows at once by the operating system's bits."""
    mechanism().randomize(np.arange(rows) % 10)


def mechanism() -> Any:
    from tf_labeldp.mechanisms import RandomizedResponse

    return RandomizedResponse(epsilon=1.0, num_classes=10)


def key() -> Any:
    from tf_labeldp.scale import ReleaseKey

    return ReleaseKey.create(pathlib.Path(tempfile.mkdtemp()) / "labels.key")


def beam(rows: int, workers: int, kind: str, what: str = "labels") -> None:
    """Runs a pipeline over generated rows on Beam's local runner."""
    import apache_beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    from tf_labeldp.mechanisms import HistogramMechanism
    from tf_labeldp.scale.beam import PrivateHistogram, RandomizeLabels

    mode = "multi_processing" if workers > 1 else "in_memory"
    options = PipelineOptions(direct_num_workers=workers, direct_running_mode=mode)
    with apache_beam.Pipeline(FnApiRunner(), options=options) as pipeline:
        parts = pipeline | apache_beam.Create(range(rows // PART)) | apache_beam.Reshuffle()
        if what == "counts":
            counts = PrivateHistogram(HistogramMechanism(1.0, num_classes=10), key(), "bench")
            _ = parts | apache_beam.FlatMap(_labels) | counts
        else:
            rows_of_parts = parts | apache_beam.FlatMap(part_of, kind)
            noisy = rows_of_parts | RandomizeLabels(mechanism(), key(), "bench")
            _ = noisy | apache_beam.Map(len) | apache_beam.CombineGlobally(sum)
    if what == "counts" and abs(counts.result().values.sum() - rows) > 0.01 * rows:
        raise ValueError("the counts are not those of all rows.")


def _labels(part: int) -> list[np.ndarray]:
    return [part_of(part)[0].column(1).to_numpy()]


def spark(rows: int, workers: int) -> None:
    """Randomizes a generated table on local Spark."""
    from pyspark.sql import SparkSession

    from tf_labeldp.scale.spark import randomize

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{workers}]")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    table = session.range(rows).selectExpr("id", "pmod(id * 7919, 10) as label")
    noisy = randomize(table, mechanism(), key(), "bench")
    if noisy.agg({"label": "count"}).first()[0] != rows:
        raise ValueError("rows are missing.")
    session.stop()


def keyed(rows: int, rounds: int = 5) -> None:
    """Prints the table of keyed draws; batches have 2^17 rows, as those of a vault."""
    import pyarrow as pa

    from tf_labeldp.mechanisms import RRWithPrior
    from tf_labeldp.scale import randomize_batch

    batch = 1 << 17
    columns = ("ids", "rows", "keyed, ns a row", "system's bits, ns", "ratio", "rows a second")
    print(_results.markdown(columns, ()), flush=True)
    for size in (rows // 4, rows // 2, rows):
        numbers, rng = np.arange(size), np.random.default_rng(0)
        labels = rng.integers(0, 10, size)
        short = pa.array(numbers + 10**8).cast(pa.string())
        long = pa.array(np.char.add(numbers.astype("U8"), " of a table with long names"))
        priors = rng.dirichlet(np.ones(10), size)
        with_prior = RRWithPrior(epsilon=1.0, num_classes=10)
        for name, ids, method, prior in (
            ("whole numbers", pa.array(numbers), mechanism(), None),
            ("texts of 9 bytes", short, mechanism(), None),
            ("texts above 15 bytes", long, mechanism(), None),
            ("whole numbers, a prior for each", pa.array(numbers), with_prior, priors),
        ):
            pairs = []
            for _ in range(rounds):
                start = time.process_time()
                for first in range(0, size, batch):
                    part = slice(first, first + batch)
                    of_rows = None if prior is None else prior[part]
                    some = ids.slice(first, batch)
                    randomize_batch(some, labels[part], method, bytes(32), "bench", of_rows)
                middle = time.process_time()
                method.randomize(labels, prior)
                pairs.append((middle - start, time.process_time() - middle))
            ours, plain = (
                1e9 * statistics.median(each) / size for each in zip(*pairs, strict=True)
            )
            ratio = statistics.median(own / system for own, system in pairs)
            cells = (name, f"{size:,}", f"{ours:.0f}", f"{plain:.0f}", f"{ratio:.1f}")
            print(f"| {' | '.join(cells)} | {1e9 / ours:,.0f} |", flush=True)


def measured(engine: str, **arguments: Any) -> tuple[float, float]:
    """Runs one engine in a separate process; returns seconds and peak megabytes."""
    run = [sys.executable, __file__, engine, "--one", json.dumps(arguments)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"bench_scale: {done.stderr[-2000:]}")
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def one(engine: str, arguments: dict[str, Any]) -> None:
    """Prints the figures for `measured`, after a short run for imports and start-up."""
    run = {"core": core, "plain": plain, "beam": beam, "spark": spark}[engine]
    if engine != "spark":
        run(**{**arguments, "rows": PART})
    start = time.perf_counter()
    run(**arguments)
    seconds = time.perf_counter() - start
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    print(json.dumps([seconds, max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1e3]))


def lines(engine: str, rows: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields a name, a number of workers and the arguments of each run."""
    if engine == "core":
        yield "operating system's bits, once", 1, {"engine": "plain", "rows": rows}
        for ids in ("whole numbers", "texts"):
            yield f"keyed, ids {ids}", 1, {"rows": rows, "ids": ids}
    elif engine == "spark":
        for workers in (1, 2):
            yield "Spark, mapInArrow", workers, {"rows": rows, "workers": workers}
    elif engine == "beam":
        for workers in (1, 2):
            yield (
                "Beam, Arrow batches",
                workers,
                {"rows": rows, "workers": workers, "kind": "arrow"},
            )
        for kind in KINDS[1:]:
            yield f"Beam, {kind}", 1, {"rows": max(PART, rows // 20), "workers": 1, "kind": kind}
    else:
        for share in (100, 10, 1):
            options = {"engine": "beam", "workers": 1, "kind": "arrow"}
            yield "PrivateHistogram", 1, {**options, "rows": rows // share, "what": "counts"}
        for share in (100, 20, 10):
            yield "RandomizeLabels", 1, {**options, "rows": rows // share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("core", "keyed", "beam", "spark", "soak", "plain"))
    parser.add_argument("--rows", type=int, help="default: 2 million, for soak 100 million")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        one(args.engine, args.one)
        return
    rows = args.rows or (100_000_000 if args.engine == "soak" else 2_000_000)
    if args.engine == "keyed":
        with _results.recorded(__file__, "keyed"):
            keyed(rows // 4)
        return
    table = []
    for name, workers, arguments in lines(args.engine, rows):
        seconds, peak = measured(**{"engine": args.engine, **arguments})
        size = arguments["rows"]
        figures = [f"{size:,}", f"{seconds:.1f}", f"{size / seconds:,.0f}", f"{peak:,.0f}"]
        table.append([name, str(workers), *figures])
        print(table[-1], file=sys.stderr, flush=True)
    with _results.recorded(__file__, args.engine):
        columns = ["what", "workers", "rows", "seconds", "rows a second", "peak MB"]
        print(_results.markdown(columns, table))


if __name__ == "__main__":
    main()
