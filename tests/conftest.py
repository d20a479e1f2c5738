"""Fixtures of all tests."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# TensorFlow reads this at its import; its start-up notes would fill the reports.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_collection_finish() -> None:
    """Keeps what was imported out of garbage collections, which Keras starts often."""
    gc.collect()
    gc.freeze()


_FAILED_LOADS: list[str] = []


def pytest_configure() -> None:
    """Notes attempts to load LightGBM where the system lacks OpenMP."""
    try:
        importlib.import_module("lightgbm")
    except OSError:
        module = importlib.import_module("tf_labeldp.boosting._lightgbm")
        load = module.load
        module.load = lambda: _FAILED_LOADS.append("lightgbm") or load()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skips a test that fails after such an attempt."""
    _FAILED_LOADS.clear()
    try:
        return (yield)
    except Exception:
        if not _FAILED_LOADS:
            raise
        pytest.skip("LightGBM can't be loaded: the system lacks OpenMP")


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_searched_again() -> Iterator[None]:
    """Collects a module's garbage, and keeps what is left of it out of later collections.

    Models that caches hold would be searched each time: after an hour, half a minute.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fits_of_this_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process adds up the fits on arrays of the same rows: tests must not see each other's."""
    source = sys.modules.get("tf_labeldp.heads.label_source")
    if source is not None:
        monkeypatch.setattr(source, "_FITS", type(source._FITS)())


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Returns the folder of real data sets; mark its tests with `pytest.mark.data`."""
    default = REPOSITORY.parent / "shared" / "data"
    folder = Path(os.environ.get("LABELDP_DATA_DIR") or default)
    if not folder.is_dir():
        pytest.skip(f"no data sets in {folder}; set LABELDP_DATA_DIR to their folder")
    return folder


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function that forgets the receipts of all weights, as in another process."""
    from tf_labeldp.accounting.provenance import Weights

    return lambda: monkeypatch.setattr(Weights, "by_digest", {})
