"""Making the next batch while the model takes a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np


class OneAhead:
    """Calls a function of the step on a thread of its own, one step ahead.

    This takes the place of ``tf.data``'s prefetch: if Python exits while a thread of that one is
    in a Python function, it waits for an interpreter that is gone, and the program never ends.
    The thread here ends after the batch it is at.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._waiting: dict[int, Future[Any]] = {}

    def __call__(self, step: np.ndarray) -> Any:
        """Returns the function's value for a step, and starts on that of the next."""
        now = int(step)
        found = self._waiting.pop(now, None) or self._pool.submit(self._make, now)
        self._waiting = {now + 1: self._pool.submit(self._make, now + 1)}
        return found.result()
