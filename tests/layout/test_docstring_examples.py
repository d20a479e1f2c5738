"""The examples in docstrings run unchanged, and every public class and function has an example."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import typing

import pytest
from _entry_points import PARTS, TRAINING
from slow_cases import with_slow

import tf_labeldp
import tf_labeldp.keras_layers

PACKAGES = (tf_labeldp, tf_labeldp.keras_layers)
MODULES = sorted(
    {
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not module.name.endswith("__main__")
    }
)
PUBLIC = [
    f"{part}.{name}"
    for part in PARTS
    for name in importlib.import_module(f"tf_labeldp.{part}").__all__
]


@pytest.mark.parametrize(
    "part", with_slow(sorted({name.split(".")[1] for name in MODULES}), TRAINING)
)
def test_examples_run(part, forget_fits):
    """Runs the examples of an engine only if the engine is installed."""
    failed = {}
    for name in (name for name in MODULES if name.split(".")[1] == part):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith("tf_labeldp.scale.") or "pip install" not in str(error):
                raise
            continue
        forget_fits()
        report = io.StringIO()
        with contextlib.redirect_stdout(report):
            failures, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        if failures:
            failed[name] = report.getvalue()
    assert not failed, "\n".join(failed.values())


def test_public_names_have_an_example():
    without = []
    for name in PUBLIC:
        part, attribute = name.split(".")
        value = getattr(importlib.import_module(f"tf_labeldp.{part}"), attribute)
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        is_contract = inspect.isabstract(value)
        is_annotation = typing.get_origin(value) is typing.Annotated
        if not (is_error or is_contract or is_annotation or ">>>" in (inspect.getdoc(value) or "")):
            without.append(name)
    assert PUBLIC and without == []
