"""Importing the package is cheap: only the parts that need heavy packages load them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = {"tensorflow", "keras", "apache_beam"}
LIMIT_SECONDS = 0.3
"""Of the bare import, without NumPy."""
REPORT = """
import json, sys, time
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def import_in_new_process(module):
    """Returns the seconds that an import takes, and the top-level packages loaded after it."""
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


def test_imports_load_no_tensorflow():
    parts = ("accounting", "mechanisms", "estimation", "vault", "features", "heads")
    _, loaded = import_in_new_process(", ".join(f"tf_labeldp.{part}" for part in parts))
    assert "tf_labeldp" in loaded
    assert loaded & HEAVY == set()


def test_the_vault_and_its_mechanisms_load_scipy_only_where_they_need_it():
    _, loaded = import_in_new_process("tf_labeldp.mechanisms, tf_labeldp.vault")
    assert "numpy" in loaded and "scipy" not in loaded


DRAW = """
import json, sys
import numpy as np
import tf_labeldp as ldp
from tf_labeldp.cli import main
store, table = sys.argv[1:]
for _ in range(2):
    budget = ldp.PrivacyBudget(2.0)
    labels = ldp.PrivateLabels(np.arange(9) % 3, 3, budget=budget, store=store)
    noisy = labels.randomize(ldp.RandomizedResponse(0.5, 3), key="a")
    labels.randomize(ldp.RRWithPrior(0.5, 3), priors=np.full(3, 1 / 3), key="b")
    assert noisy.guarantee().epsilon == 0.5
options = ["--epsilon", "1", "--store", table + "-store", "--output", table + ".csv"]
options += ["--column", "y", "--task", "classification", "--num-classes", "2"]
assert main(["randomize", table + "-in.csv", *options]) == 0
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_a_first_draw_and_the_command_load_neither_scipy_nor_an_accountant(tmp_path):
    # dp_accounting imports scipy.stats, which takes a second; pyarrow.array imports pandas.
    (tmp_path / "t-in.csv").write_text("id,y\n" + "".join(f"{i},{i % 2}\n" for i in range(9)))
    done = subprocess.run(
        [sys.executable, "-c", DRAW, str(tmp_path / "store"), str(tmp_path / "t")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    if int(version("pyarrow").partition(".")[0]) == 16:
        loaded -= {"pandas"}  # This version imports it for more calls.
    assert "pyarrow" in loaded and not loaded & {*HEAVY, "scipy", "dp_accounting", "pandas"}


def test_heavy_imports_are_detected(tmp_path, monkeypatch):
    # An empty module in place of Keras.
    (tmp_path / "keras.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, loaded = import_in_new_process("keras")
    assert loaded & HEAVY == {"keras"}


def test_import_of_the_front_is_fast():
    # One fast run is enough: the first may compile, and other processes may be busy.
    assert any(import_in_new_process("tf_labeldp")[0] < LIMIT_SECONDS for _ in range(5))
