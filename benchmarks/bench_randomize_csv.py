"""Time and memory of ``tf-labeldp randomize`` on CSV files of ten million rows: a Markdown table.

Run ``python benchmarks/bench_randomize_csv.py [ROWS]``. It writes a table of ids, two features and
labels into a temporary folder, once whole and once as eight files, and runs the command in separate
processes. The operating system measures their time and peak memory (resident set of the process).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _results

REGRESSION = ("--column", "amount", "--task", "regression", "--low", "0", "--high", "400")
RUNS = {
    "regression, RR-on-Bins": REGRESSION,
    "regression, RR-on-Bins, store": (*REGRESSION, "--store"),
    "regression, RR-on-Bins, store, keyed": (*REGRESSION, "--draws", "keyed", "--store"),
    "regression, RR-on-Bins, 8 files": REGRESSION,
    "regression, Laplace": (*REGRESSION, "--mechanism", "laplace"),
    "classification, RR": ("--column", "bought", "--task", "classification", "--num-classes", "2"),
}
PHASES = ("reading labels", "drawing noisy labels", "writing")
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


def measured(command: list[str]) -> tuple[float, float, float, str]:
    """Runs a command; returns its wall time, processor time, peak memory in MB, and stderr."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read().decode() if process.stderr is not None else ""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    if status:
        sys.exit(f"bench_randomize_csv: {errors}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return wall, usage.ru_utime + usage.ru_stime, peak, errors


def shares(errors: str, wall: float) -> list[str]:
    """Returns the share of each phase, from the last line that a run of some seconds prints."""
    taken = {name: re.search(rf"{name}: .* rows in ([\d.]+) s", errors) for name in PHASES}
    return [f"{float(found[1]) / wall:.0%}" if found else "-" for found in taken.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=int, nargs="?", default=10_000_000)
    parser.add_argument("--only", choices=tuple(RUNS), help="one of the runs")
    parser.add_argument(
        "--make",
        type=Path,
        metavar="FILE",
        help="only write FILE, and a folder next to it",
    )
    arguments = parser.parse_args()
    if arguments.make:
        make_table(arguments.make, arguments.rows)
        parts = arguments.make.with_suffix("")
        parts.mkdir()
        for number in range(FILES):
            rows = arguments.rows // FILES
            make_table(parts / f"part-{number}.csv", rows, number * rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "labels.csv"
        # In a separate process, since a new process inherits the peak of its parent.
        rows = str(arguments.rows)
        subprocess.run([sys.executable, __file__, rows, "--make", str(table)], check=True)
        print(f"{arguments.rows:,} rows, {table.stat().st_size / 1e6:,.0f} MB, epsilon 1\n")
        with _results.recorded(__file__, "times"):
            print(
                "| run | seconds | rows a second | processor seconds | peak memory, MB | reading | "
                "drawing | writing |"
            )
            print("|---|---:|---:|---:|---:|---:|---:|---:|")
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
                wall, processor, peak, errors = measured(command)
                print(
                    f"| {name} | {wall:.1f} | {arguments.rows / wall:,.0f} | {processor:.1f} | "
                    f"{peak:,.0f} | {' | '.join(shares(errors, wall))} |",
                    flush=True,
                )
                shutil.rmtree(output) if output.is_dir() else output.unlink()


if __name__ == "__main__":
    main()
