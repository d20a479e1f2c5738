"""The library works without an engine, and an error names the engine's extra."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


def test_a_missing_engine_names_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    for name in [name for name in sys.modules if name.startswith("tf_labeldp.scale.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tf-labeldp\[spark\]'"):
        importlib.import_module("tf_labeldp.scale.spark")


def test_no_engine_is_loaded_before_it_is_asked_for():
    code = "import sys, tf_labeldp.scale; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"apache_beam", "pyspark", "tfx", "tensorflow"} & set(done.stdout.split()) == set()
