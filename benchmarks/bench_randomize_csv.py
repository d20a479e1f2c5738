"""Time and memory of ``tf-labeldp randomize``: Markdown tables.

``python benchmarks/bench_randomize_csv.py [ROWS]`` writes a CSV file of ids, two features and
labels (ten million rows) into a temporary folder, once whole and once as eight files, and runs the
command in separate processes. The operating system measures their time and peak memory (resident
set of the process).

``python benchmarks/bench_randomize_csv.py --ratios [ROWS]`` compares the command on one core with
pyarrow's own read and write of the same file (five million rows, and a fifth and two fifths of
them), CSV and Parquet: processor seconds of whole processes, imports included, and peak memory.
Each round runs pyarrow and then the command; the ratios are medians over three rounds. A second
table has the processor seconds of short processes: a first draw, and the command on 100 rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _results

REGRESSION = ("--column", "amount", "--task", "regression", "--low", "0", "--high", "400")
CLASSES = ("--column", "bought", "--task", "classification", "--num-classes", "2")
RUNS = {
    "regression, RR-on-Bins": REGRESSION,
    "regression, RR-on-Bins, store": (*REGRESSION, "--store"),
    "regression, RR-on-Bins, store, keyed": (*REGRESSION, "--draws", "keyed", "--store"),
    "regression, RR-on-Bins, 8 files": REGRESSION,
    "regression, Laplace": (*REGRESSION, "--mechanism", "laplace"),
    "classification, RR": CLASSES,
}
PART = 1_000_000
FILES = 8


def make_table(path: Path, rows: int, first: int = 0) -> None:
    """Writes the input: ids of nine digits, two features, amounts with cents, a class."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv

    rng = np.random.default_rng(first)
    writer = None
    for start in range(first, first + rows, PART):
        n = min(PART, first + rows - start)
        table = pa.table(
            {
                "id": 100_000_000 + np.arange(start, start + n),
                "age": rng.integers(18, 90, n),
                "visits": rng.poisson(3.0, n),
                "amount": np.minimum(rng.exponential(50.0, n), 400.0).round(2),
                "bought": rng.integers(0, 2, n),
            }
        )
        writer = writer or csv.CSVWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def make_parquet(path: Path) -> None:
    """Writes the table of a CSV file as Parquet, next to it."""
    from pyarrow import csv, parquet

    parquet.write_table(csv.read_csv(path), path.with_suffix(".parquet"))


def measured(command: list[str]) -> tuple[float, float, float]:
    """Runs a command; returns its wall time, processor time, and peak memory in MB."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read().decode() if process.stderr is not None else ""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    if status:
        sys.exit(f"bench_randomize_csv: {errors}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return wall, usage.ru_utime + usage.ru_stime, peak


def alone(command: list[str]) -> tuple[float, float]:
    """Runs a command on one core; returns its processor seconds and its peak memory in MB."""
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS")}
    os.environ.update(threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    _, processor, peak = measured(command)
    return processor, peak


def copy(source: str, target: str) -> None:
    """Reads and writes a table with pyarrow, by one thread."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if source.endswith(".csv"):
        from pyarrow import csv

        table = csv.read_csv(source, read_options=csv.ReadOptions(use_threads=False))
        csv.write_csv(table, target)
    else:
        from pyarrow import parquet

        parquet.write_table(parquet.read_table(source, use_threads=False), target)


def ratios(rows: int, rounds: int = 3) -> None:
    """Prints the table of the command next to pyarrow, for three numbers of rows."""
    runs = {
        "classification": CLASSES,
        "classification, store": (*CLASSES, "--store"),
        "classification, store, keyed": (*CLASSES, "--draws", "keyed", "--store"),
        "regression": REGRESSION,
    }
    print("| file | rows | run | pyarrow, s | command, s | ratio | pyarrow, MB | MB | ratio |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for size in (rows // 5, 2 * rows // 5, rows):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make = [sys.executable, __file__, str(size), "--make", str(folder / "labels.csv")]
            subprocess.run(make, check=True)
            for kind in ("csv", "parquet"):
                found: dict[str, list[tuple[float, ...]]] = {run: [] for run in runs}
                for _ in range(rounds):
                    for run, options in runs.items():
                        found[run].append(_pair(folder, kind, options))
                for run, pairs in found.items():
                    ours, theirs = (
                        [statistics.median(pair[at] for pair in pairs) for at in columns]
                        for columns in ((2, 3), (0, 1))
                    )
                    time_ratio = statistics.median(pair[2] / pair[0] for pair in pairs)
                    print(
                        f"| {kind} | {size:,} | {run} | {theirs[0]:.2f} | {ours[0]:.2f} | "
                        f"{time_ratio:.2f} | {theirs[1]:,.0f} | {ours[1]:,.0f} | "
                        f"{ours[1] / theirs[1]:.2f} |",
                        flush=True,
                    )


def _pair(folder: Path, kind: str, options: tuple[str, ...]) -> tuple[float, ...]:
    source, output = folder / f"labels.{kind}", folder / "public" / f"noisy.{kind}"
    for name in ("public", "store"):
        shutil.rmtree(folder / name, ignore_errors=True)
    output.parent.mkdir()
    theirs = alone([sys.executable, __file__, "--copy", str(source), str(output)])
    output.unlink()
    command = [sys.executable, "-m", "tf_labeldp.cli", "randomize", str(source), *options]
    command += [str(folder / "store")] if options[-1] == "--store" else []
    ours = alone([*command, "--epsilon", "1", "--jobs", "1", "--quiet", "--output", str(output)])
    return *theirs, *ours


def starts(rounds: int = 5) -> None:
    """Prints the processor seconds of short processes."""
    draw = (
        "import numpy as np; import tf_labeldp as ldp; "
        "labels = ldp.PrivateLabels(np.arange(100) % 2, 2, budget=ldp.PrivacyBudget(1.0)); "
        "labels.randomize(ldp.RandomizedResponse(1.0, 2)).guarantee()"
    )
    with tempfile.TemporaryDirectory() as name:
        table, output = str(Path(name) / "labels.csv"), str(Path(name) / "noisy.csv")
        make_table(Path(table), 100)
        command = [sys.executable, "-m", "tf_labeldp.cli"]
        few = [*command, "randomize", table, *CLASSES, "--epsilon", "1", "--output", output]
        runs = {
            "import numpy": [sys.executable, "-c", "import numpy"],
            "import numpy, pyarrow, pyarrow.csv": [
                sys.executable,
                "-c",
                "import numpy, pyarrow.csv, pyarrow.parquet, pyarrow.compute",
            ],
            "a first draw and its guarantee": [sys.executable, "-c", draw],
            "tf-labeldp --help": [*command, "--help"],
            "tf-labeldp randomize, 100 rows": [*few, "--overwrite"],
        }
        print("| process | processor seconds |\n|---|---:|")
        for run, words in runs.items():
            taken = statistics.median(alone(words)[0] for _ in range(rounds))
            print(f"| {run} | {taken:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=int, nargs="?")
    parser.add_argument("--ratios", action="store_true", help="the tables next to pyarrow")
    parser.add_argument("--copy", nargs=2, metavar="FILE", help="only read and write with pyarrow")
    parser.add_argument("--only", choices=tuple(RUNS), help="one of the runs")
    parser.add_argument(
        "--make",
        type=Path,
        metavar="FILE",
        help="only write FILE, and a folder next to it",
    )
    arguments = parser.parse_args()
    if arguments.copy:
        return copy(*arguments.copy)
    if arguments.ratios:
        with _results.recorded(__file__, "ratios"):
            ratios(arguments.rows or 5_000_000)
        with _results.recorded(__file__, "starts"):
            starts()
        return None
    arguments.rows = arguments.rows or 10_000_000
    if arguments.make:
        make_table(arguments.make, arguments.rows)
        make_parquet(arguments.make)
        parts = arguments.make.with_suffix("")
        parts.mkdir()
        for number in range(FILES):
            rows = arguments.rows // FILES
            make_table(parts / f"part-{number}.csv", rows, number * rows)
        return None
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "labels.csv"
        # In a separate process, since a new process inherits the peak of its parent.
        rows = str(arguments.rows)
        subprocess.run([sys.executable, __file__, rows, "--make", str(table)], check=True)
        print(f"{arguments.rows:,} rows, {table.stat().st_size / 1e6:,.0f} MB, epsilon 1\n")
        with _results.recorded(__file__, "times"):
            print("| run | seconds | rows a second | processor seconds | peak memory, MB |")
            print("|---|---:|---:|---:|---:|")
            for number, (name, options) in enumerate(RUNS.items()):
                if arguments.only not in (None, name):
                    continue
                # The output is public and the store is not, so they have different folders.
                public = Path(folder) / "public"
                public.mkdir(exist_ok=True)
                output = public / f"noisy-{number}.csv"
                source = table
                if name.endswith("files"):
                    source, output = table.with_suffix(""), output.with_suffix("")
                command = [sys.executable, "-m", "tf_labeldp.cli", "randomize", str(source)]
                command += options
                command += (
                    [str(Path(folder) / f"store-{number}")] if options[-1] == "--store" else []
                )
                command += ["--epsilon", "1", "--output", str(output)]
                wall, processor, peak = measured(command)
                print(
                    f"| {name} | {wall:.1f} | {arguments.rows / wall:,.0f} | {processor:.1f} | "
                    f"{peak:,.0f} |",
                    flush=True,
                )
                shutil.rmtree(output) if output.is_dir() else output.unlink()
    return None


if __name__ == "__main__":
    main()
