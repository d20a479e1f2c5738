"""What histories cost if they were fixed in advance and if they were not, and what each leaves.

    python benchmarks/bench_adaptive.py

Each line is a history of one example in a budget: its epsilon at the budget's delta as if it had
been fixed in advance, and the largest epsilon of one more draw (pure) and of one more head
(Gaussian, at the budget's delta), as if it had been fixed in advance too (fixed) and whatever it is
chosen by (adaptive, as vaults count it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tf_labeldp.accounting import Charge, PrivacyBudget, calibrate_noise_multiplier, dp_sgd_charge
from tf_labeldp.accounting.privacy_filter import PrivacyFilter
from tf_labeldp.plugins import EventFields, gaussian_sigma

DELTA = 1e-5
Plan = tuple[tuple[Charge, int], ...]


def draw(epsilon: float, times: int = 1) -> Plan:
    return ((Charge(epsilon, 0.0, EventFields.randomized_response(epsilon)), times),)


def head(epsilon: float, times: int = 1) -> Plan:
    event = EventFields.gaussian(gaussian_sigma(epsilon, DELTA, 1.0)).dp_event()
    return ((Charge(epsilon, DELTA, event), times),)


def training(epsilon: float) -> Plan:
    sampling, steps = 0.02, 500
    noise = calibrate_noise_multiplier(epsilon, DELTA, sampling, steps)
    return ((dp_sgd_charge(noise, sampling, steps, DELTA), 1),)


def claim(epsilon: float) -> Plan:
    return ((Charge(epsilon, DELTA / 2.0, EventFields.NOT_PRIVATE), 1),)


HISTORIES: dict[str, tuple[float, list[Plan]]] = {
    "a head of 1": (2.0, [head(1.0)]),
    "a draw of 1": (2.0, [draw(1.0)]),
    "ten heads of .5": (2.0, [head(0.5)] * 10),
    "a head of 1, a draw of .5": (2.0, [head(1.0), draw(0.5)]),
    "a draw of .5, a head of 1": (2.0, [draw(0.5), head(1.0)]),
    "a training of 1": (3.0, [training(1.0)]),
    "three trainings of 1": (3.0, [training(1.0)] * 3),
    "a head of 1, a training of 1": (3.0, [head(1.0), training(1.0)]),
    "forty draws of .05, reserved": (2.0, [draw(0.05, 40)]),
    "a claim of 1, a head of 1": (3.0, [claim(1.0), head(1.0)]),
}


def largest(fits: Callable[[float], bool], most: float) -> float:
    low, high = 0.0, most
    while high - low > 1e-4:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> None:
    names = ("budget", "epsilon", "draw, fixed", "adaptive", "head, fixed", "adaptive")
    print(f"{'history':<32}" + "".join(f"{name:>13}" for name in names))
    for name, (epsilon, plans) in HISTORIES.items():
        budget = PrivacyBudget(epsilon, DELTA)
        counts = Counter[Charge]()
        for plan in plans:
            counts.update(dict(plan))
        kept = PrivacyFilter.after_all(plans, budget)
        cells = [epsilon, Charge.composed(tuple(counts.items()), DELTA).epsilon]
        for use in (draw, head):

            def fixed(more: float, use=use, counts=counts, budget=budget) -> bool:  # type: ignore[no-untyped-def]
                together = counts + Counter(dict(use(more)))
                return budget.allows(Charge.composed(tuple(together.items()), DELTA))

            def adaptive(more: float, use=use, kept=kept) -> bool:  # type: ignore[no-untyped-def]
                return kept.after(use(more)).allows

            cells += [largest(fixed, epsilon), largest(adaptive, epsilon)]
        print(f"{name:<32}" + "".join(f"{cell:>13.3f}" for cell in cells))


if __name__ == "__main__":
    main()
