"""Importing the package is cheap: what is heavy is loaded by those parts that need it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"tensorflow", "keras", "apache_beam"}
LIMIT_SECONDS = 0.3
REPORT = """
import json, sys, time
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def import_in_new_process(module: str) -> tuple[float, set[str]]:
    """Gives the seconds that an import takes, and the top-level packages loaded after it."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(module=module)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seconds, loaded = json.loads(done.stdout.splitlines()[-1])
    return seconds, set(loaded)


@pytest.mark.parametrize(
    "module",
    [
        "tf_labeldp",
        "tf_labeldp.accounting",
        "tf_labeldp.mechanisms",
        "tf_labeldp.estimation",
        "tf_labeldp.vault",
        "tf_labeldp.heads",
    ],
)
def test_import_loads_no_tensorflow(module: str) -> None:
    _, loaded = import_in_new_process(module)
    assert "tf_labeldp" in loaded
    assert loaded & HEAVY == set()


@pytest.mark.parametrize("module", ["tf_labeldp.mechanisms", "tf_labeldp.vault"])
def test_the_vault_and_its_mechanisms_load_scipy_only_where_they_need_it(module: str) -> None:
    _, loaded = import_in_new_process(module)
    assert "numpy" in loaded and "scipy" not in loaded


def test_heavy_imports_are_seen() -> None:
    _, loaded = import_in_new_process("keras")
    assert loaded & HEAVY


def test_import_of_the_front_is_fast() -> None:
    # The best of several: the first run may compile, and other processes may be busy.
    seconds = min(import_in_new_process("tf_labeldp")[0] for _ in range(5))
    assert seconds < LIMIT_SECONDS
