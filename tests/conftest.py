"""Fixtures of all tests."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def forget_fits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function that forgets the fits on arrays, as in another process."""

    def forgotten() -> None:
        source = sys.modules.get("tf_labeldp.heads.label_source")
        if source is not None:
            monkeypatch.setattr(source, "_FITS", type(source._FITS)())

    return forgotten


@pytest.fixture(autouse=True)
def fits_of_this_test_alone(forget_fits: Callable[[], None]) -> None:
    """A process adds up the fits on arrays of the same rows: tests must not see each other's."""
    forget_fits()


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


class Injected(Exception):
    """An error that a test raises at a step of the library."""


@pytest.fixture
def failing_after_release() -> Callable[..., list[str]]:
    """Returns a function that repeats a call, which fails at another step after its charge.

    The steps are the calls of the functions that were running when the record was written, or when
    a vault returned it, and of those that these call: no list names them. Each repetition fails at
    the first step that has not been met, or at one of ``share`` such steps; the last one meets
    none. ``renew`` runs before each repetition. Returns the steps.
    """
    from tf_labeldp.vault import PrivateLabels

    met: list[str] = []
    failed: list[str] = []
    running: set[Any] = set()
    every = 1

    def begin() -> None:
        frame = sys._getframe(2)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith("tf_labeldp"):
                running.add(frame)
            frame = frame.f_back  # type: ignore[assignment]
        sys.setprofile(step)

    def step(frame: Any, event: str, unused: object) -> None:
        caller = frame.f_back
        is_near = caller in running or (caller is not None and caller.f_back in running)
        # An import that fails halfway is another matter.
        if event != "call" or not is_near or "importlib" in frame.f_code.co_filename:
            return
        name = f"{caller.f_globals['__name__']}:{caller.f_lineno} {frame.f_code.co_name}"
        if name in met:
            return
        met.append(name)
        if len(met) % every == 0:
            sys.setprofile(None)
            failed.append(name)
            raise Injected(name)

    def released(function: Any, is_due: Callable[..., bool]) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            if is_due(*arguments):
                begin()
            return result

        return call

    def run(
        call: Callable[[], object],
        renew: Callable[[], object] = lambda: None,
        share: int = 1,
    ) -> list[str]:
        nonlocal every
        every = share
        with pytest.MonkeyPatch.context() as patch:
            for name in ("link", "replace"):
                into = released(getattr(os, name), lambda *paths: "records" in Path(paths[1]).parts)
                patch.setattr(os, name, into)
            for name in ("randomize", "release"):
                release = released(getattr(PrivateLabels, name), lambda *unused: True)
                patch.setattr(PrivateLabels, name, release)
            before = -1
            while len(failed) > before:
                before = len(failed)
                renew()
                try:
                    call()
                except Injected:
                    pass
                finally:
                    sys.setprofile(None)
                    running.clear()
        return met

    return run
