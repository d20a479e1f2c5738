"""Results of the benchmarks: one JSON file per script in `results/`, with command and commit.

`report.py` writes the tables and plots of the pages from these files.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "results"


def commit() -> str:
    """Returns the current commit, with a plus sign if files differ from it."""
    run = ["git", "-C", str(FOLDER.parent), "describe", "--always", "--dirty=+", "--abbrev=7"]
    return subprocess.run(run, capture_output=True, text=True, check=False).stdout.strip()


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(values: Sequence[float], digits: int = 1) -> str:
    """Returns the mean of figures, with deviation and number of several; empty for none."""
    if not values:
        return ""
    several = f" ± {statistics.stdev(values):.{digits}f} ({len(values)})" if values[1:] else ""
    return f"{statistics.fmean(values):.{digits}f}{several}"


@contextlib.contextmanager
def recorded(script: str, *names: str) -> Iterator[None]:
    """Copies the Markdown tables that a block prints into the results of a script.

    Args:
        script: `__file__` of the benchmark.
        names: names of the tables, in the order of printing.
    """
    printed = _Tee(sys.stdout)
    with contextlib.redirect_stdout(printed):
        yield
    tables: list[list[list[str]]] = []
    inside = False
    for line in printed.getvalue().splitlines():
        if line.startswith("|"):
            if not inside:
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.strip()[1:-1].split("|")])
        inside = line.startswith("|")
    if len(tables) != len(names):
        raise ValueError(f"{len(tables)} tables were printed, but {len(names)} names were passed.")
    path = FOLDER / f"{pathlib.Path(script).stem.removeprefix('bench_')}.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tables": {}}
    for name, (columns, _, *rows) in zip(names, tables, strict=True):
        results["tables"][name] = {
            "command": " ".join(sys.argv[1:]),
            "commit": commit(),
            "columns": columns,
            "rows": rows,
        }
    FOLDER.mkdir(exist_ok=True)
    path.write_text(_with_a_row_a_line(results), encoding="utf-8")


def add_run(path: pathlib.Path, figures: dict[str, Any]) -> None:
    """Appends a run to a file of JSON lines, and prints it; processes may share the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**figures, "commit": commit()}) + "\n")
    print(figures, flush=True)


def runs(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the runs of a file, if it exists, without a line that a kill cut off."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def missing(path: pathlib.Path, jobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the jobs without a run in a file; a run has all items of its job."""
    done = runs(path)
    return [job for job in jobs if not any(job.items() <= run.items() for run in done)]


class _Tee(io.StringIO):
    """Keeps the text, and writes it to another stream at once."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = other

    def write(self, text: str) -> int:
        self._other.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._other.flush()


def _with_a_row_a_line(results: dict[str, Any]) -> str:
    """Returns results as JSON in which a changed row is a changed line."""
    tables = []
    for name, table in results["tables"].items():
        rows = ",\n".join(f"        {json.dumps(row, ensure_ascii=False)}" for row in table["rows"])
        rest = {key: value for key, value in table.items() if key != "rows"}
        head = json.dumps(rest, ensure_ascii=False)[1:-1]
        tables.append(f'    {json.dumps(name)}: {{{head},\n      "rows": [\n{rows}\n      ]}}')
    return '{\n  "tables": {\n' + ",\n".join(tables) + "\n  }\n}\n"
