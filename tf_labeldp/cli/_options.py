"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def epsilon(text: str) -> float:
    """Returns a privacy parameter: finite and above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0.0:
        raise argparse.ArgumentTypeError(
            f"epsilon must be a finite number above zero, got {text!r}"
        )
    return value


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
