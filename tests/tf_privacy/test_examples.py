"""The docstring examples that need TF Privacy run where it is installed."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io

import pytest

PART = "tf_labeldp.tf_privacy"
pytestmark = pytest.mark.tf_privacy

MODULES = ["_denoised_query", "_query_noise"]


@pytest.mark.parametrize("name", MODULES)
def test_skipped_examples_run(name: str) -> None:
    module = importlib.import_module(f"{PART}.{name}")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report, count = io.StringIO(), 0
    for test in doctest.DocTestFinder().find(module):
        for example in test.examples:
            count += example.options.pop(doctest.SKIP, False)
        with contextlib.redirect_stdout(report):
            runner.run(test)
    assert count > 0
    assert runner.failures == 0, report.getvalue()
