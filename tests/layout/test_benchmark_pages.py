"""The tables of the benchmark pages come from the files of results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    """Returns a function that imports a helper of the benchmarks."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("report", "_results"):
        sys.modules.pop(name, None)


def test_tables_have_the_results_and_the_overview_is_short(benchmarks):
    for page in ("README.md", "REFERENCE.md"):
        text = (FOLDER / page).read_text(encoding="utf-8")
        assert "<!-- table" in text
        assert benchmarks("report").filled(text) == text, "run python benchmarks/report.py"
    assert len((FOLDER / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_printed_tables_are_recorded_with_the_command(benchmarks, monkeypatch, tmp_path, capsys):
    results = benchmarks("_results")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_x.py", "--seeds", "2"])
    with results.recorded("bench_x.py", "a", "b"):
        print("| n | s |\n|---|---|\n| 1 | 2 ± 1 |\n\nwords\n| m |\n|---|\n| 3 |")
    assert "| 1 | 2 ± 1 |" in capsys.readouterr().out
    tables = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["tables"]
    assert tables["a"]["columns"] == ["n", "s"] and tables["a"]["rows"] == [["1", "2 ± 1"]]
    assert tables["b"]["rows"] == [["3"]] and tables["b"]["command"] == "--seeds 2"
    with pytest.raises(ValueError, match="0 tables were printed"), results.recorded("x", "a"):
        print("no table")


@pytest.mark.slow
def test_scripts_find_the_loaders_of_the_examples():
    """In a new process, which has only the folder of the script on its path."""
    command = [sys.executable, "-c", "import _datasets; print(_datasets.load('digits').name)"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.stdout == "digits\n", done.stderr


def test_a_stopped_benchmark_resumes(benchmarks, tmp_path):
    results, path = benchmarks("_results"), tmp_path / "runs.jsonl"
    jobs = [{"seed": seed, "settings": {"clip": 1.0}} for seed in range(2)]
    assert results.missing(path, jobs) == jobs
    results.add_run(path, {**jobs[0], "accuracy": 90.0})
    path.write_text(path.read_text(encoding="utf-8") + '{"seed": 1, "sett', encoding="utf-8")
    assert results.missing(path, jobs) == jobs[1:]
