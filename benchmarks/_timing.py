"""Time and memory of a call, for the benchmarks of single functions."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable


def best_seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Returns the wall time of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes(call: Callable[[], object]) -> int:
    """Returns the peak memory of a call, its result included."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
