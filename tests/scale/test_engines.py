"""Without an engine the library works, and says which extra installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tf_labeldp.scale import _engines


def test_a_missing_engine_names_its_extra(monkeypatch):
    monkeypatch.setattr(_engines, "find_spec", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tf-labeldp\[beam\]'"):
        _engines.needs("apache_beam", "beam")


def test_no_engine_is_loaded_before_it_is_asked_for():
    code = "import sys, tf_labeldp.scale; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"apache_beam", "pyspark", "tfx", "tensorflow"} & set(done.stdout.split()) == set()
