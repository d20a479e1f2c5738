"""Losses, heads, files, the ledger and multi-stage training agree on all Keras backends.

Each backend needs its own process. ``make test-torch`` installs PyTorch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("everything.py")


def run(backend: str, *folders: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the arrays and statements of a backend."""
    folders[0].mkdir()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, folders)],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-1] == backend
    statements = json.loads((folders[0] / "statements.json").read_text())
    return dict(np.load(folders[0] / "arrays.npz")), statements


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("backends") / "tensorflow"
    return folder, *run("tensorflow", folder)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_results_are_those_of_tensorflow(backend, reference, tmp_path):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed; `make test-torch` installs PyTorch")
    folder, expected, statements = reference
    arrays, found = run(backend, tmp_path / backend, folder)
    assert found == statements
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        if array.dtype.kind == "i":  # draws
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
        else:
            np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=1e-4, err_msg=name)
