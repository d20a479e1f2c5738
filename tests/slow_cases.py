"""Marks the slow cases of a parametrized test."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def with_slow(cases: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """Returns the cases, a tuple or one value each; those in ``slow`` are marked as slow."""
    rows = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [pytest.param(*row, marks=[pytest.mark.slow] * (case in slow)) for case, row in rows]
