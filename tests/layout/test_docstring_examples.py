"""The examples in docstrings run as they stand, and every public class and function has one."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import typing

import pytest

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
    for part in tf_labeldp.__all__
    if inspect.ismodule(getattr(tf_labeldp, part)) and part != "cli"
    for name in importlib.import_module(f"tf_labeldp.{part}").__all__
]


def imported(name):
    """Gives a module, or skips the test where the engine that it is for is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith("tf_labeldp.scale.") or "pip install" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = imported(name)
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        failures, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0, report.getvalue()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name):
    part, attribute = name.split(".")
    value = getattr(importlib.import_module(f"tf_labeldp.{part}"), attribute)
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    is_contract = inspect.isabstract(value)
    is_annotation = typing.get_origin(value) is typing.Annotated
    if not (is_error or is_contract or is_annotation):
        assert ">>>" in (inspect.getdoc(value) or "")
