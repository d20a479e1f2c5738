"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

_LARGEST_EPSILON = 1000.0
"""e to this power is more than a double holds, and a label is as good as published."""


def epsilon(text: str) -> float:
    """Returns a privacy parameter: above zero, and not absurdly large."""
    value = _float(text)
    if not math.isfinite(value) or value <= 0.0:
        raise argparse.ArgumentTypeError(
            f"epsilon must be a finite number above zero, got {text!r}"
        )
    if value > _LARGEST_EPSILON:
        raise argparse.ArgumentTypeError(
            f"epsilon must be at most {_LARGEST_EPSILON:g}, got {text!r}, which protects nothing; "
            "little is protected above about 10"
        )
    return value


def number(text: str) -> float:
    """Returns a finite number."""
    value = _float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return value


def _float(text: str) -> float:
    """Returns a number, or NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def at_least(minimum: int) -> Callable[[str], int]:
    """Returns the type of whole numbers from ``minimum`` on."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {minimum}, got {text!r}"
            )
        return value

    return whole
