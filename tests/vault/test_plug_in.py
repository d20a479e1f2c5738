"""Mechanisms of another library: ordinary classes, compared with their claims, and charged."""

from __future__ import annotations

import json
import re

import dp_accounting
import numpy as np
import pytest

from tf_labeldp import PrivacyBudget, PrivateLabels
from tf_labeldp.accounting import BudgetExceededError, Charge
from tf_labeldp.accounting.budget import compose_charges
from tf_labeldp.accounting.events import pure_dp_event
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    ClassificationMechanism,
    LaplaceMechanism,
    Priors,
    RandomizedResponse,
    RegressionMechanism,
    RRTopK,
)
from tf_labeldp.mechanisms.base import _REGISTRY, deserialize, serialize
from tf_labeldp.vault import NoisyLabels, _draws

K, N = 5, 200
LABELS = np.random.default_rng(91).integers(0, K, N)
NUMBERS = np.random.default_rng(92).uniform(0.0, 10.0, N)
CLAIM = "{} has the epsilon of {} that it states{}: its author's claim, not this library's."


class NearbyResponse(ClassificationMechanism):
    """The exponential mechanism with the score -|z - y|, of which tests spoil a part."""

    def __init__(self, epsilon, num_classes):
        self.epsilon = epsilon
        self.num_classes = num_classes

    def transition_matrix(self, prior=None):
        every = np.arange(self.num_classes)
        distance = np.abs(np.subtract.outer(every, every))
        weights = np.exp(-self.epsilon * distance / (2 * (self.num_classes - 1)))
        return weights / weights.sum(axis=1, keepdims=True)

    def randomize(self, labels, public=None, *, rng=None):
        rng = np.random.default_rng() if rng is None else rng
        ends = self.transition_matrix().cumsum(axis=1)[labels]
        drawn = (rng.random(len(labels))[:, np.newaxis] > ends).sum(axis=1)
        return drawn.clip(max=self.num_classes - 1)


class NoisyNumbers(RegressionMechanism):
    """Laplace noise on [0, 10]."""

    def __init__(self, epsilon):
        self.epsilon = epsilon

    def label_range(self):
        return 0.0, 10.0

    def likelihood(self, outputs, labels):
        return np.exp(-self.epsilon * np.abs(np.subtract.outer(outputs, labels)) / 10.0)

    def randomize(self, labels, public=None, *, rng=None):
        rng = np.random.default_rng() if rng is None else rng
        return labels + rng.laplace(scale=10.0 / self.epsilon, size=len(labels))


class NoisyCounts(AggregateMechanism):
    """Laplace noise on the counts of the classes, perhaps by groups."""

    def __init__(self, epsilon, num_classes):
        self.epsilon, self.num_classes = epsilon, num_classes

    def release(self, labels, public_input=None, *, rng=None):
        rng = np.random.default_rng() if rng is None else rng
        noise = rng.laplace(scale=2.0 / self.epsilon, size=self.num_classes)
        return np.bincount(labels, minlength=self.num_classes) + noise


class ByPrior(ClassificationMechanism):
    """RRTop2, known by its prior."""

    public_input = "priors"

    def __init__(self, epsilon, num_classes):
        self.epsilon, self.num_classes = epsilon, num_classes

    def transition_matrix(self, prior=None):
        return RRTopK(self.epsilon, self.num_classes, 2).transition_matrix(prior)

    def randomize(self, labels, public=None, *, rng=None):
        return RRTopK(self.epsilon, self.num_classes, 2).randomize(labels, public, rng=rng)


@pytest.fixture(autouse=True)
def not_checked_as_yet(monkeypatch):
    """What other tests had checked in this process."""
    monkeypatch.setattr(_draws, "_CHECKED", {})


@pytest.fixture
def checks(monkeypatch):
    """The mechanisms that are checked, in order; the check itself is made."""
    made = []
    check = _draws.check_mechanism

    def record(mechanism, **arguments):
        made.append(mechanism)
        return check(mechanism, **arguments)

    monkeypatch.setattr(_draws, "check_mechanism", record)
    return made


def vault(epsilon=10.0, delta=0.0, **arguments):
    arguments = {"labels": LABELS, "num_classes": K, **arguments}
    return PrivateLabels(budget=PrivacyBudget(epsilon, delta), **arguments)


def numbers(epsilon=10.0, **arguments):
    budget = PrivacyBudget(epsilon)
    return PrivateLabels(NUMBERS, low=0.0, high=10.0, budget=budget, **arguments)


def test_it_is_charged_and_stated_as_its_authors_claim():
    held = vault()
    noisy = held.randomize(NearbyResponse(0.75, K))
    claim = CLAIM.format("NearbyResponse", "0.75", "")
    for statement in (noisy.guarantee(), held.guarantee()):
        assert statement.epsilon == 0.75 and statement.delta == 0.0
        assert claim in statement.assumptions
        assert f"[claimed-mechanism] {claim}" in str(statement)
    (receipt,) = noisy.receipts
    assert receipt.charge == Charge(0.75, 0.0, pure_dp_event(0.75), (claim,))
    assert (receipt.kind, receipt.seeded) == ("draw", False)
    ours = vault().randomize(RandomizedResponse(0.75, K)).guarantee()
    assert not any("author" in text for text in ours.assumptions)
    planned = vault().guarantee(after=NearbyResponse(0.75, K))
    assert planned == noisy.guarantee()


def test_numbers_and_statistics_of_ordinary_classes():
    held = numbers()
    noisy = held.randomize(NoisyNumbers(1.5))
    assert noisy.values.dtype == np.float64 and noisy.values.shape == (N,)
    assert held.guarantee().epsilon == 1.5
    assert CLAIM.format("NoisyNumbers", "1.5", "") in noisy.guarantee().assumptions
    values = np.linspace(0.0, 10.0, 11)
    means = noisy.posterior(Priors(np.full(11, 1 / 11), values=values))
    assert means.shape == (N,) and 0.0 < means.min() and means.max() < 10.0

    held = vault()
    counts = held.release(NoisyCounts(0.5, K))
    assert counts.values.shape == (K,) and held.guarantee().epsilon == 0.5
    assert CLAIM.format("NoisyCounts", "0.5", "") in counts.guarantee().assumptions
    assert held.receipts[0].kind == "release"


def test_priors_of_a_plug_in_reach_it():
    held = vault()
    priors = np.tile([0.6, 0.4, 0.0, 0.0, 0.0], (N, 1))
    priors[::2] = priors[::2, ::-1]
    noisy = held.randomize(ByPrior(1.0, K), priors=priors)
    assert set(noisy.values[::2].tolist()) == {3, 4} and set(noisy.values[1::2]) == {0, 1}
    assert CLAIM.format("ByPrior", "1", "") in noisy.guarantee().assumptions
    for name in ("clusters", "features"):
        with pytest.raises(ValueError, match=f"ByPrior takes no {name}"):
            held.randomize(ByPrior(1.0, K), **{name: np.zeros(N, int)})


def test_round_trip_of_its_configuration():
    mechanism = NearbyResponse(0.5, K)
    data = json.loads(json.dumps(serialize(mechanism)))
    assert data["config"] == {"epsilon": 0.5, "num_classes": K}
    assert data["class_name"] == f"{__name__}.NearbyResponse"  # no name of the library's
    again = deserialize(data)
    assert type(again) is NearbyResponse and serialize(again) == serialize(mechanism)


def test_no_plug_in_takes_the_name_of_a_mechanism_of_the_library():
    class RandomizedResponse(ClassificationMechanism):
        """Not that of the library."""

        def __init__(self, epsilon, num_classes):
            self.epsilon, self.num_classes = epsilon, num_classes

        transition_matrix = NearbyResponse.transition_matrix
        randomize = NearbyResponse.randomize

    from tf_labeldp.mechanisms import RandomizedResponse as Ours

    assert type(deserialize(serialize(Ours(1.0, K)))) is Ours
    assert type(deserialize(serialize(RandomizedResponse(1.0, K)))) is RandomizedResponse
    assert serialize(RandomizedResponse(1.0, K)) != serialize(Ours(1.0, K))


def test_a_subclass_of_a_mechanism_of_the_library_is_a_plug_in(checks):
    class Mine(RandomizedResponse):
        """Reviewed by nobody."""

    noisy = vault().randomize(Mine(1.0, K))
    assert [type(one) for one in checks] == [Mine]
    assert CLAIM.format("Mine", "1", "") in noisy.guarantee().assumptions


@pytest.mark.parametrize("keep", ["store", "folder"])
def test_its_draws_are_kept(keep, tmp_path, checks):
    """In a store, and with the noisy labels, which read back where the class is imported."""
    mechanism = NearbyResponse(1.0, K)
    if keep == "store":
        first = vault(store=tmp_path / "store").randomize(mechanism, key="a")
        held = vault(store=tmp_path / "store")
        again = held.randomize(NearbyResponse(1.0, K), key="a")
        assert serialize(held.mechanism("a")) == serialize(mechanism)
        assert held.guarantee().epsilon == 1.0
    else:
        first = vault().randomize(mechanism)
        first.save(tmp_path / "noisy")
        again = NoisyLabels.load(tmp_path / "noisy")
        assert type(again.mechanism) is NearbyResponse
    np.testing.assert_array_equal(again.values, first.values)
    assert again.guarantee() == first.guarantee()
    assert again.debiased().tolist() == first.debiased().tolist()
    assert len(checks) == 1  # for what was drawn, nothing is to be checked again


def test_noisy_labels_of_a_class_that_is_not_imported_say_so(tmp_path, monkeypatch):
    name = f"{__name__}.NearbyResponse"
    message = f"unknown mechanism '{re.escape(name)}'.*Import the module that defines it first"
    vault().randomize(NearbyResponse(1.0, K)).save(tmp_path / "noisy")
    monkeypatch.delitem(_REGISTRY, name)  # as in a process that has not imported it
    with pytest.raises(ValueError, match=message):
        NoisyLabels.load(tmp_path / "noisy")


def test_it_is_checked_at_its_first_use_alone(checks):
    """Once in a process for each configuration; those of the library never."""
    held = vault()
    for _ in range(2):
        held.randomize(NearbyResponse(0.5, K))
        vault().randomize(NearbyResponse(0.5, K))
    assert [one.epsilon for one in checks] == [0.5]
    held.randomize(NearbyResponse(0.25, K))
    held.randomize(RandomizedResponse(0.25, K))
    numbers().randomize(LaplaceMechanism(1.0, 0.0, 10.0))
    assert [one.epsilon for one in checks] == [0.5, 0.25]
    held.release(NoisyCounts(0.25, K))
    assert [type(one).__name__ for one in checks[2:]] == ["NoisyCounts"]


def test_a_class_that_was_written_anew_is_checked_anew():
    """In a notebook, a cell that is run again makes another class of the same name."""

    def written(honest):
        class OfACell(NoisyNumbers):
            """Of the same name each time."""

            def randomize(self, labels, public=None, *, rng=None):
                return super().randomize(labels, rng=rng) if honest else labels + 0.0

        return OfACell

    held = numbers()
    held.randomize(written(honest=True)(1.0))
    with pytest.raises(ValueError, match="violates its epsilon"):
        held.randomize(written(honest=False)(1.0))


DEFECTS = {
    "true labels": ("randomize", lambda self, labels, *_, **__: labels, "do not follow its"),
    "identity channel": (
        "transition_matrix",
        lambda self, prior=None: np.eye(K),
        "worst log-ratio of inf",
    ),
    "too short": ("randomize", lambda self, labels, *_, **__: labels[1:], r"shape \(\d+,\)"),
    "floats": ("randomize", lambda self, labels, *_, **__: labels + 0.5, "dtype float64"),
    "range": ("randomize", lambda self, labels, *_, **__: labels + 1, "classes that do not"),
}


@pytest.mark.parametrize("case", DEFECTS)
def test_a_defect_is_found_before_a_label_is_looked_at(case, monkeypatch):
    place, spoilt, message = DEFECTS[case]
    monkeypatch.setattr(NearbyResponse, place, spoilt)
    held = vault()
    looked = []
    opened = type(held._sealed).open
    monkeypatch.setattr(
        type(held._sealed), "open", lambda self, rows=None: looked.append(1) or opened(self, rows)
    )
    for _ in range(2):  # it is not let through the second time
        with pytest.raises(ValueError, match=message):
            held.randomize(NearbyResponse(1.0, K))
    assert not looked and held.receipts == () and held.guarantee().epsilon == 0.0


@pytest.mark.parametrize("epsilon", [0.0, float("nan"), None])
def test_an_epsilon_that_is_none_is_refused(epsilon):
    held = vault()
    with pytest.raises((ValueError, TypeError), match=r"NearbyResponse\.epsilon must be"):
        held.randomize(NearbyResponse(epsilon, K))
    assert held.receipts == ()


def test_it_is_run_on_made_up_labels_before_every_use(monkeypatch):
    """So that what is wrong with the public input shows before a true label is looked at."""
    held = vault()
    held.randomize(NearbyResponse(1.0, K))
    seen = []
    sound = NearbyResponse.randomize

    def record(self, labels, public=None, *, rng=None):
        seen.append((labels.copy(), rng))
        return sound(self, labels, public, rng=rng)

    monkeypatch.setattr(NearbyResponse, "randomize", record)
    rows = np.array([3, 1, 4, 15])
    held.randomize(NearbyResponse(1.0, K), rows)
    (made_up, rng), (true, _) = seen
    assert made_up.tolist() == [0] * 4 and rng is None
    np.testing.assert_array_equal(true, LABELS[rows])


def test_bad_public_input_is_refused_as_the_plug_in_says_and_costs_nothing():
    held = vault()
    held.randomize(ByPrior(1.0, K), priors=np.full(K, 1 / K))
    with pytest.raises(ValueError, match="priors must sum to one"):
        held.randomize(ByPrior(1.0, K), priors=np.full(K, 0.3))
    assert len(held.receipts) == 1


def test_a_failure_on_any_labels_is_raised_as_it_is_and_costs_nothing(monkeypatch):
    held = vault()
    held.randomize(NearbyResponse(1.0, K))

    def broken(self, labels, public=None, *, rng=None):
        raise ZeroDivisionError("a plain mistake")

    monkeypatch.setattr(NearbyResponse, "randomize", broken)
    with pytest.raises(ZeroDivisionError, match="a plain mistake"):
        held.randomize(NearbyResponse(1.0, K))
    assert len(held.receipts) == 1


class Gaussian(NearbyResponse):
    """Names an event of its own."""

    def __init__(self, epsilon, num_classes, delta):
        super().__init__(epsilon, num_classes)
        self.delta = delta

    def dp_event(self):
        return dp_accounting.GaussianDpEvent(2.0 / self.epsilon)


def test_an_event_of_its_own_composes():
    held = vault(2.0, 1e-4)
    held.randomize(Gaussian(0.1, K, 1e-5))
    claim = CLAIM.format("Gaussian", "0.1", ", and its uses compose as its dp_event states")
    charge = Charge(0.1, 1e-5, dp_accounting.GaussianDpEvent(20.0), (claim,))
    assert [one.charge for one in held.receipts] == [charge]
    assert held.guarantee().epsilon == 0.1 and held.guarantee().delta == 1e-5
    hundred = compose_charges([charge] * 100, 1e-4)
    together = Charge.of_event(dp_accounting.GaussianDpEvent(20.0 / 100**0.5), 1e-4)
    assert hundred.epsilon == pytest.approx(together.epsilon, rel=1e-3) and hundred.epsilon < 10


class Approximate(NearbyResponse):
    """Says a delta, and leaves the event to the base class."""

    def __init__(self, epsilon, num_classes, delta):
        super().__init__(epsilon, num_classes)
        self.delta = delta


def test_a_delta_without_an_event_of_its_own_is_counted():
    """Sixty uses that fail with probability 0.01 each do not fail with 0.001 together."""
    assert Approximate(0.1, K, 0.01).dp_event() != pure_dp_event(0.1)
    held = vault(10.0, 1e-3)
    with pytest.raises(BudgetExceededError):
        held.randomize(Approximate(0.1, K, 0.01))


class Strange(dp_accounting.DpEvent):
    """An event that no other program reads."""


def test_an_event_that_no_program_reads_is_refused_by_a_store(monkeypatch, tmp_path):
    """Before any output, and nothing is half written."""
    monkeypatch.setattr(NearbyResponse, "dp_event", lambda self: Strange())
    held = vault(store=tmp_path / "store")
    with pytest.raises(ValueError, match="JSON can represent, got Strange"):
        held.randomize(NearbyResponse(1.0, K))
    assert vault(store=tmp_path / "store").receipts == ()


@pytest.mark.parametrize("result", [{"a": 1.0}, [[1.0], [1.0, 2.0]], None], ids=type)
def test_a_statistic_that_is_no_array_of_numbers_is_refused(result, monkeypatch, tmp_path):
    """Before a label is looked at, since it comes for made-up labels too."""

    def release(self, labels, public_input=None, *, rng=None):
        if public_input is None:
            raise ValueError("it needs a public input, so it is not checked")
        return result

    monkeypatch.setattr(NoisyCounts, "release", release)
    held = vault(store=tmp_path / "store")
    with pytest.raises((TypeError, ValueError), match="NoisyCounts"):
        held.release(NoisyCounts(1.0, K), public_input=np.zeros(N))
    assert vault(store=tmp_path / "store").receipts == ()
