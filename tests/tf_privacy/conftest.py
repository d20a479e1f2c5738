"""Tests with the mark `tf_privacy` need packages that conflict with the others, and are skipped."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import pytest

PACKAGES = ("tensorflow_privacy", "tf_keras")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tf_privacy") is None:
        return
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}; `make test-tf-privacy` installs them")


@pytest.fixture
def tfp() -> ModuleType:
    """The package `tensorflow_privacy`."""
    from tf_labeldp.tf_privacy import load

    return load()
