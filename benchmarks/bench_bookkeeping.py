"""Processor time of a use of a vault after many earlier uses.

Times a draw, a release and the charge of an epoch after n receipts, each with the budget check and
the statement of the vault, with and without a store, at delta zero and above; medians of five. Also
times opening the store again. A second table has the growth of other calls with their size: the
processor time of each at three sizes, the last exponent (1 is linear), and the memory that the
process took for the largest size; each size has a process of its own, with one thread.

    python benchmarks/bench_bookkeeping.py
    python benchmarks/bench_bookkeeping.py --receipts 10 100 --calls weeks report
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import math
import multiprocessing
import os
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable

import _results

N, K = 1000, 3
LIMIT_S = 120
"""Processor time after which a call is stopped."""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receipts", type=int, nargs="+", default=[10, 1000, 10_000])
    parser.add_argument("--calls", nargs="*", choices=GROWTH, default=list(GROWTH))
    args = parser.parse_args()
    with _results.recorded(__file__, "one more use", "growth"):
        heads = ["receipts", "delta", "store", "draw", "release", "epoch", "opening"]
        print(_results.markdown(heads, []))
        for delta, stored in itertools.product((0.0, 1e-5), (False, True)):
            for size in args.receipts:
                with tempfile.TemporaryDirectory() as folder:
                    store = pathlib.Path(folder, "store") if stored else None
                    cells = [f"{size:,}", f"{delta:g}", "yes" if stored else "no"]
                    cells += measured(size, delta, store)
                    print(f"| {' | '.join(cells)} |", flush=True)
        print()
        print(_results.markdown(["call", "sizes", "seconds", "growth", "memory"], []))
        for name in args.calls:
            print(f"| {' | '.join(growth(name))} |", flush=True)


def growth(name: str) -> list[str]:
    """Returns the times of a call at its sizes, and how they grow."""
    _, sizes = GROWTH[name]
    runs = []
    for size in sizes:
        fresh = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
            try:
                runs.append(pool.submit(measured_alone, name, size).result())
            except concurrent.futures.process.BrokenProcessPool:
                runs.append((math.inf, math.nan))
    seconds = [run[0] for run in runs]
    exponent = math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2])
    return [
        name,
        " / ".join(f"{size:,}" for size in sizes),
        " / ".join(f"{each:.3g}" if each < LIMIT_S else f"> {LIMIT_S}" for each in seconds),
        f"{exponent:.2f}",
        f"{runs[-1][1]:,.0f} MB",
    ]


def measured_alone(name: str, size: int) -> tuple[float, float]:
    """Returns the processor time of a call, and the memory that it adds; for its own process."""
    import numpy as np

    # Loaded before the clock starts; the calls name them `ldp.features`, `ldp.pate`, `ldp.dossier`.
    import tf_labeldp.dossier
    import tf_labeldp.features
    import tf_labeldp.pate  # noqa: F401

    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
    prepare, _ = GROWTH[name]
    call = prepare(size, np.random.default_rng(0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    call()
    seconds = time.process_time() - begun
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def vault(labels: object, budget: float = 1e4, delta: float = 0.0, **more: object) -> object:
    """Returns a vault with a budget that allows every use here."""
    import warnings

    import tf_labeldp as ldp

    warnings.simplefilter("ignore")
    return ldp.PrivateLabels(labels, K, budget=ldp.PrivacyBudget(budget, delta), **more)


def statement(size: int, rng: object) -> Callable[[], object]:
    """The statement and the history of equal charges."""
    import tf_labeldp as ldp

    labels = vault(rng.integers(0, K, N), delta=1e-5)
    charge = ldp.accounting.Charge.of(ldp.RandomizedResponse(1e-3, K))
    for _ in range(size):
        labels.charge(charge, what="a use")
    return lambda: (labels.guarantee(), str(labels.history()))


def kinds(size: int, rng: object) -> Callable[[], object]:
    """Ten more charges after as many different ones."""
    import tf_labeldp as ldp

    def charge(number: int) -> object:
        epsilon = 1e-3 * (1 + number / 1e5)
        return ldp.accounting.Charge.of(ldp.RandomizedResponse(epsilon, K))

    labels = vault(rng.integers(0, K, N))
    for number in range(size):
        labels.charge(charge(number), what="a use")
    return lambda: [labels.charge(charge(size + more), what="a use") for more in range(10)]


def halves(size: int, rng: object) -> Callable[[], object]:
    """Different charges of random halves of the labels, whose histories all differ."""
    import tf_labeldp as ldp

    labels = vault(rng.integers(0, K, size))

    def charge(number: int) -> None:
        use = ldp.accounting.Charge.of(ldp.RandomizedResponse(0.01 * (1 + number), K))
        labels.charge(use, what="a half", indices=rng.choice(size, size // 2, replace=False))

    for number in range(16):
        charge(number)
    return lambda: [charge(number) for number in range(16, 20)]


def weeks(size: int, rng: object) -> Callable[[], object]:
    """One more week of a named draw."""
    import tf_labeldp as ldp

    folder = tempfile.mkdtemp()
    labels = vault(rng.integers(0, K, 100), store=pathlib.Path(folder, "store"))

    def week() -> None:
        labels.extend(rng.integers(0, K, 100))
        labels.randomize(ldp.RandomizedResponse(1.0, K), key="weekly")

    for _ in range(size):
        week()
    return week


def teachers(size: int, rng: object) -> Callable[[], object]:
    """PATE with teachers that cost nothing themselves."""
    import numpy as np

    import tf_labeldp as ldp

    features = np.zeros((60_000, 4))
    labels = vault(rng.integers(0, K, len(features)), delta=1e-6)
    settings = {"num_teachers": size, "num_queries": 3000, "teacher": _votes}
    return lambda: ldp.pate.PATE(2.0, 1e-6, **settings).answer(features, labels)


def _votes(features: object, labels: object, queries: object) -> object:
    import numpy as np

    return np.zeros(len(queries), np.int64)


def clusters(size: int, rng: object) -> Callable[[], object]:
    """100 clusters of 16 columns."""
    import tf_labeldp as ldp

    rows = rng.normal(size=(size, 16)).astype("float32")
    return lambda: ldp.features.find_clusters(rows, 100)


def report(size: int, rng: object) -> Callable[[], object]:
    """The audited report of a store, with the file of its noisy labels."""
    import tf_labeldp as ldp

    folder = pathlib.Path(tempfile.mkdtemp())
    noisy = vault(rng.integers(0, K, size), store=folder / "store").randomize(
        ldp.RandomizedResponse(1.0, K)
    )
    noisy.save(folder / "noisy.npz")
    return lambda: ldp.dossier.report(
        folder / "store", published=[folder / "noisy.npz"], audit=True
    ).save(folder / "report")


def load(size: int, rng: object) -> Callable[[], object]:
    """Loading noisy labels."""
    import tf_labeldp as ldp

    path = pathlib.Path(tempfile.mkdtemp(), "noisy.npz")
    vault(rng.integers(0, K, size)).randomize(ldp.RandomizedResponse(1.0, K)).save(path)
    return lambda: ldp.NoisyLabels.load(path).guarantee()


def calibrated(size: int, rng: object) -> Callable[[], object]:
    """The noise multiplier of as many sampled steps."""
    from tf_labeldp.accounting import _losses, calibrate_noise_multiplier  # noqa: F401

    return lambda: calibrate_noise_multiplier(1.0, 1e-5, 0.01, size)


def full_batches(size: int, rng: object) -> Callable[[], object]:
    """The noise multiplier of 100 full batches at this epsilon."""
    from tf_labeldp.accounting import _losses, calibrate_noise_multiplier  # noqa: F401

    return lambda: calibrate_noise_multiplier(float(size), 1e-5, 1.0, 100)


def evaluation(size: int, rng: object) -> Callable[[], object]:
    """The accuracy of as many predictions."""
    predicted, labels = rng.integers(0, K, size), vault(rng.integers(0, K, size))
    return lambda: labels.evaluate(predicted, "accuracy", epsilon=1.0)


def opened(size: int, rng: object) -> Callable[[], object]:
    """A vault of as many labels, and a draw."""
    import tf_labeldp as ldp

    labels = rng.integers(0, K, size)
    return lambda: vault(labels).randomize(ldp.RandomizedResponse(1.0, K))


GROWTH: dict[str, tuple[Callable[..., Callable[[], object]], tuple[int, ...]]] = {
    "statement": (statement, (100, 1000, 10_000)),
    "kinds": (kinds, (100, 300, 1000)),
    "halves": (halves, (1000, 3000, 10_000)),
    "weeks": (weeks, (20, 60, 180)),
    "teachers": (teachers, (60, 600, 6000)),
    "clusters": (clusters, (10_000, 100_000, 1_000_000)),
    "report": (report, (20_000, 200_000, 2_000_000)),
    "load": (load, (100_000, 1_000_000, 10_000_000)),
    "calibrated": (calibrated, (10**3, 10**6, 10**9)),
    "full_batches": (full_batches, (100, 1000, 10_000)),
    "evaluation": (evaluation, (100_000, 1_000_000, 10_000_000)),
    "opened": (opened, (200_000, 2_000_000, 20_000_000)),
}


def measured(size: int, delta: float, store: pathlib.Path | None) -> list[str]:
    """Returns the times of a draw, a release, an epoch, and opening the store again."""
    import numpy as np

    import tf_labeldp as ldp
    from tf_labeldp.accounting import Charge, dp_sgd_charge
    from tf_labeldp.mechanisms import HistogramMechanism

    y = np.random.default_rng(0).integers(0, K, N)
    small = ldp.RandomizedResponse(1e-3, K)
    steps = dp_sgd_charge(50.0, 0.01, 10, 1e-5) if delta else Charge.of(small)
    labels = ldp.PrivateLabels(y, K, budget=ldp.PrivacyBudget(19.0, delta), store=store)
    for number in range(size):
        labels.charge((Charge.of(small), steps)[number % 2], what="a use")

    def timed(use: Callable[[], object]) -> float:
        begun = time.process_time()
        use()
        labels.guarantee()
        return time.process_time() - begun

    uses: list[Callable[[], object]] = [
        lambda: labels.randomize(small),
        lambda: labels.release(HistogramMechanism(1e-3, K)),
        lambda: labels.charge(steps, what="an epoch"),
    ]
    cells = [f"{1e3 * statistics.median(timed(use) for _ in range(5)):.1f} ms" for use in uses]
    opening = "-"
    if store is not None:
        opening = f"{timed(lambda: ldp.PrivateLabels(y, K, store=store)):.2f} s"
    return [*cells, opening]


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    main()
