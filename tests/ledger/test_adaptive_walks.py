"""Random walks over uses and plans that are chosen by earlier ones, against an account by example.

The account keeps the plans of every single example in their order, and reads no receipts. A use is
refused if, and only if, the filter of one of its examples refuses it; what remains is the least of
all examples; the statement is never below the exact composition of the worst one.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError, Charge, PrivacyBudget, dp_sgd_charge
from tf_labeldp.plugins import EventFields, PrivacyFilter, gaussian_sigma
from tf_labeldp.vault import Store

N, DELTA = 12, 1e-5
PARTS = [np.arange(N), np.arange(6), np.arange(4, 9), np.arange(10, N)]
STEPS = [dp_sgd_charge(noise, 0.05, 100, DELTA) for noise in (1.0, 2.0, 6.0)]


def gaussian(epsilon):
    return Charge(epsilon, DELTA, EventFields.gaussian(gaussian_sigma(epsilon, DELTA, 1.0)))


def counted(charges):
    return tuple(Counter(charges).items())


class Walk:
    """A vault, and the plans of each of its examples: all charges of a plan, and those drawn."""

    def __init__(self, seed, store):
        self.rng, self.store = np.random.default_rng(seed), store
        delta = float(self.rng.choice([0.0, DELTA], p=[0.2, 0.8]))
        self.budget = PrivacyBudget(float(self.rng.choice([0.5, 2.0, 6.0])), delta)
        self.plans = {example: {} for example in range(N)}
        self.unfinished = []
        self.labels = self.opened()
        self.number = 0

    def opened(self):
        return ldp.PrivateLabels(np.arange(N) % 2, 2, budget=self.budget, store=self.store)

    def part(self, rows):
        return self.labels if rows.size == N else self.labels.split(rows)[1]

    def charge(self):
        kind = self.rng.choice(["pure", "small", "gaussian", "steps", "claim"])
        epsilon = self.budget.epsilon * float(self.rng.choice([0.05, 0.2, 0.45, 0.7]))
        if kind == "pure" or self.budget.delta == 0.0:
            return Charge(epsilon, 0.0, EventFields.randomized_response(epsilon))
        if kind == "small":
            return Charge(0.1 * epsilon, 0.0, EventFields.randomized_response(0.1 * epsilon))
        if kind == "steps":
            return STEPS[self.rng.integers(len(STEPS))]
        claim = Charge(epsilon, 0.2 * DELTA, EventFields.NOT_PRIVATE)
        return gaussian(epsilon) if kind == "gaussian" else claim

    def filter(self, example, more=()):
        found = PrivacyFilter.of(self.budget)
        for charges, drawn in self.plans[example].values():
            found = found.after(counted(charges), counted(drawn))
        return found.after(counted(more)) if more else found

    def fits(self, rows, charges=()):
        """Whether each of these examples may bear one more plan, or its present ones."""
        for example in rows:
            together = [use for plan, drawn in self.plans[example].values() for use in drawn]
            fixed = Charge.composed(counted([*together, *charges]), self.budget.delta)
            if not (self.filter(example, charges).allows and self.budget.allows(fixed)):
                return False
        return True

    def keep(self, rows, plan, uses, drawn):
        for example in rows:
            self.plans[example][plan] = uses, drawn

    def one(self, rows):
        use = self.charge()
        fits = self.fits(rows, [use])
        with contextlib.nullcontext() if fits else pytest.raises(BudgetExceededError):
            self.labels.charge(use, what="a use", indices=rows)
        self.keep(rows if fits else (), self.next(), [use], [use])

    def several(self, rows):
        """A plan whose uses are drawn in part; the others are given back."""
        uses = [self.charge() for _ in range(self.rng.integers(1, 4))]
        plan = self.next()
        if not self.fits(rows, uses):
            with pytest.raises(BudgetExceededError):
                self.part(rows).reserve({plan: uses})
            return
        drawn = uses[: self.rng.integers(0, len(uses) + 1)]
        self.keep(rows, plan, uses, uses)
        self.draw(rows, plan, uses, drawn)
        if drawn:
            self.keep(rows, plan, uses, drawn)
            self.unfinished += [(rows, plan, uses, drawn)] if len(drawn) < len(uses) else []
        else:
            self.leave_out(rows, plan)

    def repeat(self):
        """Reserves the rest of a plan again: as its part, or as a new plan if that is refused."""
        if not self.unfinished:
            return
        rows, plan, uses, drawn = self.unfinished.pop()
        rest = uses[len(drawn) :]
        self.keep(rows, plan, uses, uses)
        if not self.fits(rows):
            self.keep(rows, plan, uses, drawn)
            if not self.fits(rows, rest):
                with pytest.raises(BudgetExceededError):
                    self.part(rows).reserve({plan: rest})
                return
            self.keep(rows, self.next(), rest, rest)
        self.draw(rows, plan, rest, rest)

    def draw(self, rows, name, uses, drawn):
        part = self.part(rows)
        with part.reserve({name: uses}):
            # All is counted, and none of it is charged, before the first use.
            self.check()
            for use in drawn:
                part.charge(use, what="a planned use")

    def leave_out(self, rows, plan):
        for example in rows:
            del self.plans[example][plan]

    def next(self):
        self.number += 1
        return f"plan {self.number}"

    def check(self):
        for rows in PARTS:
            part = self.part(rows)
            left = min(self.filter(example).remaining() for example in rows)
            assert part.remaining() == pytest.approx(left, rel=1e-3, abs=1e-6)

    def check_statement(self):
        stated = self.labels.guarantee()
        used = [
            counted([use for _, drawn in plans.values() for use in drawn])
            for plans in self.plans.values()
        ]
        exact = max(Charge.composed(each, self.budget.delta).epsilon for each in used)
        assert exact * (1.0 - 1e-9) <= stated.epsilon <= self.budget.epsilon * (1.0 + 1e-6)
        if exact:
            assert stated.adaptive == (self.budget.epsilon, self.budget.delta)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", with_slow(range(40), range(12, 40)))
def test_the_filter_of_every_example_keeps_the_budget(seed, tmp_path):
    walk = Walk(seed, tmp_path / "store" if seed % 4 == 0 else None)
    for _ in range(8):
        rows = PARTS[walk.rng.integers(len(PARTS))]
        (walk.one if walk.rng.random() < 0.6 else walk.several)(rows)
        if walk.rng.random() < 0.5:
            walk.repeat()
        if walk.store is not None and walk.rng.random() < 0.3:
            walk.labels = walk.opened()
        walk.check()
    walk.check_statement()


def test_uses_of_two_label_sets_of_the_same_people_count_in_their_order(tmp_path):
    """What is left differs in other orders."""
    draw = Charge(0.2, 0.0, EventFields.randomized_response(0.2))
    budget, uses = PrivacyBudget(2.0, DELTA), (draw, gaussian(1.4), draw)
    first, second = (
        ldp.PrivateLabels([0, 1], 2, budget=budget, store=Store(tmp_path / name, project=True))
        for name in ("first", "second")
    )
    for labels, use in zip((first, second, first), uses, strict=True):
        labels.charge(use, what="a use")
    left = [
        PrivacyFilter.after_all((counted([uses[place]]) for place in order), budget).remaining()
        for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1))
    ]
    assert first.remaining() == second.remaining() == pytest.approx(left[0], rel=1e-3)
    assert max(left) - 0.05 > left[0] > min(left) + 0.05
