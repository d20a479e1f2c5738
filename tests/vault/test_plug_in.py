"""Mechanisms of other libraries are ordinary classes, checked against their claims and charged."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections import Counter

import dp_accounting
import numpy as np
import pytest

from tf_labeldp import PrivacyBudget, PrivateLabels
from tf_labeldp.accounting import BudgetExceededError, Charge
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    ClassificationMechanism,
    LaplaceMechanism,
    Mechanism,
    Priors,
    RandomizedResponse,
    RegressionMechanism,
    RRTopK,
)
from tf_labeldp.mechanisms.base import _REGISTRY
from tf_labeldp.plugins import EventFields
from tf_labeldp.vault import NoisyLabels, Numbers, Rows, _draws

K, N = 5, 200
LABELS = np.random.default_rng(91).integers(0, K, N)
NUMBERS = np.random.default_rng(92).uniform(0.0, 10.0, N)
CLAIM = "{} has the epsilon of {} that it states{}: its author's claim, not this library's."


class NearbyResponse(ClassificationMechanism):
    """The exponential mechanism with the score -|z - y|, which tests break."""

    def __init__(self, epsilon, num_classes):
        self.epsilon = epsilon
        self.num_classes = num_classes

    def transition_matrix(self, prior=None):
        classes = np.arange(self.num_classes)
        distance = np.abs(np.subtract.outer(classes, classes))
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
    """Laplace noise on class counts."""

    def __init__(self, epsilon, num_classes):
        self.epsilon, self.num_classes = epsilon, num_classes

    def release(self, labels, public_input=None, *, rng=None):
        rng = np.random.default_rng() if rng is None else rng
        noise = rng.laplace(scale=2.0 / self.epsilon, size=self.num_classes)
        return np.bincount(labels, minlength=self.num_classes) + noise


class ByPrior(ClassificationMechanism):
    """RRTopK with k = 2, as a plug-in that uses priors."""

    public_input = "priors"

    def __init__(self, epsilon, num_classes):
        self.epsilon, self.num_classes = epsilon, num_classes

    def transition_matrix(self, prior=None):
        return RRTopK(self.epsilon, self.num_classes, 2).transition_matrix(prior)

    def randomize(self, labels, public=None, *, rng=None):
        return RRTopK(self.epsilon, self.num_classes, 2).randomize(labels, public, rng=rng)


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch):
    """Other tests have checked mechanisms in this process."""
    monkeypatch.setattr(_draws, "_CHECKED", {})


@pytest.fixture
def checks(monkeypatch):
    """The checked mechanisms, in order."""
    checked = []
    check = _draws.check_mechanism

    def record(mechanism, **arguments):
        checked.append(mechanism)
        return check(mechanism, **arguments)

    monkeypatch.setattr(_draws, "check_mechanism", record)
    return checked


def vault(epsilon=10.0, delta=0.0, **arguments):
    arguments = {"labels": LABELS, "num_classes": K, **arguments}
    return PrivateLabels(budget=PrivacyBudget(epsilon, delta), **arguments)


def numbers(epsilon=10.0, **arguments):
    budget = PrivacyBudget(epsilon)
    return PrivateLabels(NUMBERS, Numbers(0.0, 10.0), budget=budget, **arguments)


def test_its_statement_names_the_claim_of_its_author():
    labels = vault()
    noisy = labels.randomize(NearbyResponse(0.75, K))
    claim = CLAIM.format("NearbyResponse", "0.75", "")
    for statement in (noisy.guarantee(), labels.guarantee()):
        assert statement.epsilon == 0.75 and statement.delta == 0.0
        assert claim in statement.assumptions
        assert f"[claimed-mechanism] {claim}" in str(statement)
    (receipt,) = noisy.receipts
    assert receipt.charge == Charge(0.75, 0.0, EventFields.randomized_response(0.75), (claim,))
    assert (receipt.kind, receipt.seeded) == ("draw", False)
    ours = vault().randomize(RandomizedResponse(0.75, K)).guarantee()
    assert not any("author" in text for text in ours.assumptions)
    planned = vault().guarantee(after=NearbyResponse(0.75, K))
    assert planned == noisy.guarantee()


def test_numbers_and_statistics_of_ordinary_classes():
    labels = numbers()
    noisy = labels.randomize(NoisyNumbers(1.5))
    assert noisy.values.dtype == np.float64 and noisy.values.shape == (N,)
    assert labels.guarantee().epsilon == 1.5
    assert CLAIM.format("NoisyNumbers", "1.5", "") in noisy.guarantee().assumptions
    values = np.linspace(0.0, 10.0, 11)
    means = noisy.posterior(Priors(np.full(11, 1 / 11), values=values))
    assert means.shape == (N,) and 0.0 < means.min() and means.max() < 10.0

    labels = vault()
    counts = labels.release(NoisyCounts(0.5, K))
    assert counts.values.shape == (K,) and labels.guarantee().epsilon == 0.5
    assert CLAIM.format("NoisyCounts", "0.5", "") in counts.guarantee().assumptions
    assert labels.receipts[0].kind == "release"


def test_priors_of_a_plug_in_reach_it():
    labels = vault()
    priors = np.tile([0.6, 0.4, 0.0, 0.0, 0.0], (N, 1))
    priors[::2] = priors[::2, ::-1]
    noisy = labels.randomize(ByPrior(1.0, K), priors=priors)
    assert set(noisy.values[::2].tolist()) == {3, 4} and set(noisy.values[1::2]) == {0, 1}
    assert CLAIM.format("ByPrior", "1", "") in noisy.guarantee().assumptions
    for name in ("clusters", "features"):
        with pytest.raises(ValueError, match=f"ByPrior takes no {name}"):
            labels.randomize(ByPrior(1.0, K), **{name: np.zeros(N, int)})


def test_round_trip_of_its_configuration():
    mechanism = NearbyResponse(0.5, K)
    data = json.loads(json.dumps(mechanism.to_json()))
    assert data["config"] == {"epsilon": 0.5, "num_classes": K}
    assert data["class_name"] == f"{__name__}.NearbyResponse"
    again = Mechanism.from_json(data)
    assert type(again) is NearbyResponse and again.to_json() == mechanism.to_json()


def test_no_plug_in_takes_the_name_of_a_mechanism_of_the_library():
    class RandomizedResponse(ClassificationMechanism):
        """The name of a mechanism of the library."""

        def __init__(self, epsilon, num_classes):
            self.epsilon, self.num_classes = epsilon, num_classes

        transition_matrix = NearbyResponse.transition_matrix
        randomize = NearbyResponse.randomize

    from tf_labeldp.mechanisms import RandomizedResponse as Ours

    assert type(Mechanism.from_json(Ours(1.0, K).to_json())) is Ours
    assert type(Mechanism.from_json(RandomizedResponse(1.0, K).to_json())) is RandomizedResponse
    assert RandomizedResponse(1.0, K).to_json() != Ours(1.0, K).to_json()


def test_a_subclass_of_a_mechanism_of_the_library_is_a_plug_in(checks):
    class Mine(RandomizedResponse):
        """A subclass that nobody reviewed."""

    noisy = vault().randomize(Mine(1.0, K))
    assert [type(mechanism) for mechanism in checks] == [Mine]
    assert CLAIM.format("Mine", "1", "") in noisy.guarantee().assumptions


@pytest.mark.parametrize("keep", ["store", "folder"])
def test_its_draws_are_kept(keep, tmp_path, checks):
    """A store and a file of noisy labels read it back where its class is imported."""
    mechanism = NearbyResponse(1.0, K)
    if keep == "store":
        first = vault(store=tmp_path / "store").randomize(mechanism, key="a")
        labels = vault(store=tmp_path / "store")
        again = labels.randomize(NearbyResponse(1.0, K), key="a")
        assert labels.mechanism("a").to_json() == mechanism.to_json()
        assert labels.guarantee().epsilon == 1.0
    else:
        first = vault().randomize(mechanism)
        first.save(tmp_path / "noisy")
        again = NoisyLabels.load(tmp_path / "noisy")
        assert type(again.mechanism) is NearbyResponse
    np.testing.assert_array_equal(again.values, first.values)
    assert again.guarantee() == first.guarantee()
    assert again.debiased().tolist() == first.debiased().tolist()
    assert len(checks) == 1  # A stored draw needs no check.


def test_noisy_labels_of_a_class_that_is_not_imported_are_refused(tmp_path, monkeypatch):
    name = f"{__name__}.NearbyResponse"
    message = f"unknown mechanism '{re.escape(name)}'.*Import the module that defines it first"
    vault().randomize(NearbyResponse(1.0, K)).save(tmp_path / "noisy")
    monkeypatch.delitem(_REGISTRY, name)  # Another process has not imported the class.
    with pytest.raises(ValueError, match=message):
        NoisyLabels.load(tmp_path / "noisy")


def test_only_the_first_use_of_a_configuration_is_checked(checks):
    labels = vault()
    for _ in range(2):
        labels.randomize(NearbyResponse(0.5, K))
        vault().randomize(NearbyResponse(0.5, K))
    assert [mechanism.epsilon for mechanism in checks] == [0.5]
    labels.randomize(NearbyResponse(0.25, K))
    labels.randomize(RandomizedResponse(0.25, K))
    numbers().randomize(LaplaceMechanism(1.0, 0.0, 10.0))
    assert [mechanism.epsilon for mechanism in checks] == [0.5, 0.25]
    labels.release(NoisyCounts(0.25, K))
    assert [type(mechanism).__name__ for mechanism in checks[2:]] == ["NoisyCounts"]


def test_a_changed_element_of_a_long_array_is_checked_again():
    """NumPy prints the ends of a long array alone."""

    class WithTable(NoisyNumbers):
        def __init__(self, epsilon):
            super().__init__(epsilon)
            self.honest = np.ones(5000, bool)

        def randomize(self, labels, public=None, *, rng=None):
            return super().randomize(labels, rng=rng) if self.honest.all() else labels + 0.0

    labels, mechanism = numbers(), WithTable(1.0)
    labels.randomize(mechanism)
    mechanism.honest[2500] = False
    with pytest.raises(ValueError, match="violates its epsilon"):
        labels.randomize(mechanism)


def test_a_redefined_class_is_checked_again():
    """A notebook cell that runs again makes another class of the same name."""

    def define(honest):
        class OfACell(NoisyNumbers):
            def randomize(self, labels, public=None, *, rng=None):
                return super().randomize(labels, rng=rng) if honest else labels + 0.0

        return OfACell

    labels = numbers()
    labels.randomize(define(honest=True)(1.0))
    with pytest.raises(ValueError, match="violates its epsilon"):
        labels.randomize(define(honest=False)(1.0))


@pytest.mark.parametrize(
    ("method", "broken", "message"),
    [
        ("randomize", lambda self, labels, *_, **__: labels, "do not follow its"),
        ("transition_matrix", lambda self, prior=None: np.eye(K), "worst log-ratio of inf"),
    ],
)
def test_a_defect_is_found_before_a_label_is_read(method, broken, message, monkeypatch):
    monkeypatch.setattr(NearbyResponse, method, broken)
    labels = vault()
    opened = []
    monkeypatch.setattr(type(labels._examples.sealed), "open", lambda *_: opened.append(1))
    for _ in range(2):  # The second use is checked too.
        with pytest.raises(ValueError, match=message):
            labels.randomize(NearbyResponse(1.0, K))
    assert not opened and labels.receipts == () and labels.guarantee().epsilon == 0.0


@pytest.mark.parametrize("epsilon", [0.0, float("nan"), None])
def test_a_bad_epsilon_is_refused(epsilon):
    labels = vault()
    with pytest.raises((ValueError, TypeError), match=r"NearbyResponse\.epsilon must be"):
        labels.randomize(NearbyResponse(epsilon, K))
    assert labels.receipts == ()


def test_it_is_run_on_made_up_labels_before_every_use(monkeypatch):
    """A wrong public input shows before a true label is read."""
    labels = vault()
    labels.randomize(NearbyResponse(1.0, K))
    calls = []
    randomize = NearbyResponse.randomize

    def record(self, labels, public=None, *, rng=None):
        calls.append((labels.copy(), rng))
        return randomize(self, labels, public, rng=rng)

    monkeypatch.setattr(NearbyResponse, "randomize", record)
    rows = np.array([3, 1, 4, 15])
    labels.randomize(NearbyResponse(1.0, K), rows)
    (made_up, rng), (true, _) = calls
    assert made_up.tolist() == [0] * 4 and rng is None
    np.testing.assert_array_equal(true, LABELS[rows])


def test_an_error_about_the_public_input_is_raised_and_costs_nothing():
    labels = vault()
    labels.randomize(ByPrior(1.0, K), priors=np.full(K, 1 / K))
    with pytest.raises(ValueError, match="priors must sum to one"):
        labels.randomize(ByPrior(1.0, K), priors=np.full(K, 0.3))
    assert len(labels.receipts) == 1


def test_an_error_on_made_up_labels_is_raised_and_costs_nothing(monkeypatch):
    labels = vault()
    labels.randomize(NearbyResponse(1.0, K))

    def broken(self, labels, public=None, *, rng=None):
        raise ZeroDivisionError("a plain mistake")

    monkeypatch.setattr(NearbyResponse, "randomize", broken)
    with pytest.raises(ZeroDivisionError, match="a plain mistake"):
        labels.randomize(NearbyResponse(1.0, K))
    assert len(labels.receipts) == 1


class Gaussian(NearbyResponse):
    """Has its own event."""

    def __init__(self, epsilon, num_classes, delta):
        super().__init__(epsilon, num_classes)
        self.delta = delta

    def dp_event(self):
        return dp_accounting.GaussianDpEvent(2.0 / self.epsilon)


def test_an_event_of_its_own_composes():
    labels = vault(2.0, 1e-4)
    labels.randomize(Gaussian(0.1, K, 1e-5))
    claim = CLAIM.format("Gaussian", "0.1", ", and its uses compose as its dp_event states")
    charge = Charge(0.1, 1e-5, dp_accounting.GaussianDpEvent(20.0), (claim,))
    assert [receipt.charge for receipt in labels.receipts] == [charge]
    assert labels.guarantee().epsilon == 0.1 and labels.guarantee().delta == 1e-5
    hundred = Charge.composed(Counter([charge] * 100), 1e-4)
    together = Charge.of_event(dp_accounting.GaussianDpEvent(20.0 / 100**0.5), 1e-4)
    assert hundred.epsilon == pytest.approx(together.epsilon, rel=1e-3) and hundred.epsilon < 10


class Approximate(NearbyResponse):
    """Has a delta, and the event of the base class."""

    def __init__(self, epsilon, num_classes, delta):
        super().__init__(epsilon, num_classes)
        self.delta = delta


def test_a_delta_without_an_event_of_its_own_is_counted():
    """A use that fails with probability 0.01 does not fit a delta of 0.001."""
    assert Approximate(0.1, K, 0.01).dp_event() != EventFields.randomized_response(0.1).dp_event()
    labels = vault(10.0, 1e-3)
    with pytest.raises(BudgetExceededError):
        labels.randomize(Approximate(0.1, K, 0.01))


class Strange(dp_accounting.DpEvent):
    """An event that JSON can't represent."""


def test_a_store_refuses_an_event_that_json_cannot_represent(monkeypatch, tmp_path):
    monkeypatch.setattr(NearbyResponse, "dp_event", lambda self: Strange())
    labels = vault(store=tmp_path / "store")
    with pytest.raises(ValueError, match="JSON can represent, got Strange"):
        labels.randomize(NearbyResponse(1.0, K))
    assert vault(store=tmp_path / "store").receipts == ()


@pytest.mark.parametrize("result", [{"a": 1.0}, [[1.0], [1.0, 2.0]], None], ids=type)
def test_a_statistic_that_is_no_array_of_numbers_is_refused(result, monkeypatch, tmp_path):
    """The release on made-up labels shows it, before a true label is read."""

    def release(self, labels, public_input=None, *, rng=None):
        if public_input is None:
            raise ValueError("it needs a public input, so it is not checked")
        return result

    monkeypatch.setattr(NoisyCounts, "release", release)
    labels = vault(store=tmp_path / "store")
    with pytest.raises((TypeError, ValueError), match="NoisyCounts"):
        labels.release(NoisyCounts(1.0, K), public_input=np.zeros(N))
    assert vault(store=tmp_path / "store").receipts == ()


class OfAny(AggregateMechanism):
    """Counts of one kind of labels, with a release of its own."""

    num_classes = None

    def __init__(self, release, kind, epsilon=0.1):
        self._release, self.epsilon = release, epsilon
        vars(self).update(kind)

    def get_config(self):
        return {"release": self._release.__name__}

    def label_range(self):
        return vars(self).get("range")

    def release(self, labels, public_input=None, *, rng=None):
        return self._release(np.asarray(labels), public_input)


def secret_from_ten_on(labels, public_input):
    """The labels, where there are enough of them."""
    return labels.astype(float) if len(labels) >= 10 else np.random.default_rng().laplace(size=3)


def secret_of_the_vault(labels, public_input):
    return np.where(len(labels) == N, labels.sum(), 0.0)


def secret_unless_all_but_one_are_equal(labels, public_input):
    counts = np.unique(labels, axis=0, return_counts=True)[1]
    return 0.0 if counts.max() >= len(labels) - 1 else labels.sum()


def secret_after_the_first_row(labels, public_input):
    return labels[1:].sum()


def secret_that_fails_on_few(labels, public_input):
    if len(labels) < 150:
        raise ValueError("expected more labels")
    return labels.sum()


def secret_with_its_public_input(labels, public_input):
    return np.sum(labels.reshape(N, -1) * public_input.reshape(N, -1))


SECRETS = [
    secret_from_ten_on,
    secret_of_the_vault,
    secret_unless_all_but_one_are_equal,
    secret_after_the_first_row,
    secret_that_fails_on_few,
    secret_with_its_public_input,
]
KINDS = {
    "classes": {"num_classes": K},
    "numbers": {"range": (0.0, 10.0)},
    "rows": {"num_labels": 3},
}


def of_kind(name):
    if name == "rows":
        rows = np.random.default_rng(93).integers(0, 2, (N, 3))
        return PrivateLabels(rows, Rows(3), budget=PrivacyBudget(10.0))
    return numbers() if name == "numbers" else vault()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("release", SECRETS, ids=lambda release: release.__name__)
def test_true_labels_are_found_at_any_size_row_and_background(release, kind):
    labels = of_kind(kind)
    public = np.ones(N) if release is secret_with_its_public_input else None
    with pytest.raises(ValueError, match=r"OfAny violates its epsilon of 0\.1"):
        labels.release(OfAny(release, KINDS[kind]), public_input=public)
    assert labels.receipts == ()


def fails_at_the_end_of_the_range(labels, public_input):
    if labels.min() == 0.0:
        raise ValueError("expected labels above zero")
    return np.random.default_rng().laplace(scale=100.0)


def test_a_failure_that_depends_on_made_up_labels_is_refused():
    labels = numbers()
    with pytest.raises(ValueError, match=r"fails on some of \d+ made-up labels and not on others"):
        labels.release(OfAny(fails_at_the_end_of_the_range, KINDS["numbers"]))
    assert labels.receipts == ()


def of_changing_length(labels, public_input):
    return np.random.default_rng().laplace(size=np.random.default_rng().integers(1, 9))


def sound(labels, public_input):
    return np.random.default_rng().laplace(scale=1e4)


@pytest.mark.parametrize(
    ("mechanism", "is_tested"),
    [
        (OfAny(sound, {"num_classes": K}), True),
        (OfAny(of_changing_length, {"num_classes": K}), False),
        # No number of draws would find an output that is the label.
        (OfAny(sound, {"num_classes": K}, epsilon=9.0), False),
    ],
    ids=["sound", "lengths", "epsilon"],
)
def test_what_could_not_be_tested_is_stated(mechanism, is_tested):
    for labels in (vault(), vault()):  # The second use finds the first one's check.
        stated = labels.release(mechanism).guarantee()
        (claim,) = (each for each in stated.assumptions if each.code == "claimed-mechanism")
        assert ("Its draws are untested" in claim) is not is_tested
        assert claim in str(labels.guarantee())


def shown_in(way, secret):
    """Shows a text as a mechanism may: on purpose, or by a library that it calls."""
    text = f"n1={secret}"
    ways = {
        "warning": lambda: warnings.warn(text, stacklevel=1),
        "warning with filters of its own": lambda: (
            warnings.simplefilter("always"),
            warnings.warn(text, stacklevel=1),
        ),
        "print": lambda: print(text),
        "stderr": lambda: print(text, file=sys.stderr),
        "log": lambda: logging.getLogger("plug-in").critical(text),
        "native": lambda: os.write(1, text.encode()) + os.write(2, text.encode()),
        "child": lambda: subprocess.run(["echo", text], check=True),
        "thread": lambda: in_a_thread(lambda: print(text)),
        "numpy": lambda: np.float64(1.0) / np.float64(0.0),
    }
    ways[way]()


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


WAYS = ["warning", "warning with filters of its own", "print", "stderr", "log", "native", "child",
        "thread", "numpy"]  # fmt: skip


SHOWN = r"7713771377|7\.71377e\+09"
"""A number as texts have it; a shorter one is in some digest by chance."""


class Shows(NearbyResponse):
    """Shows how many of the vault's labels are of class 1, and keeps it in its attributes."""

    def __init__(self, epsilon, num_classes, way):
        super().__init__(epsilon, num_classes)
        self.way = way

    def randomize(self, labels, public=None, *, rng=None):
        if np.array_equal(labels, LABELS):
            shown_in(self.way, 7713771377)
            self.epsilon = 7713771377.0
        return super().randomize(labels, public, rng=rng)

    def __repr__(self):
        return f"Shows({self.epsilon})"


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_a_plug_in_shows_leaves_it(way, capfd, caplog, tmp_path):
    labels = vault(store=tmp_path / "store")
    with warnings.catch_warnings(record=True) as warned, np.errstate(all="raise"):
        warnings.simplefilter("always")
        labels.randomize(Shows(1.0, K, way))
        assert not warned
        warnings.warn("after", stacklevel=1)  # What comes after the draw is shown again.
        assert len(warned) == 1
    print("after")
    logging.getLogger("plug-in").critical("after")
    os.write(2, b"after")
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("after\n", "after") and caplog.messages == ["after"]
    # Its text, its cost and its settings are those of before the draw.
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(re.search(SHOWN.encode(), content) for content in files)
    assert labels.guarantee().epsilon == 1.0
    assert not re.search(SHOWN, str(labels.history()))


def test_draws_of_two_threads_leave_warnings_and_streams_as_they_were(capfd):
    class Waits(NearbyResponse):
        def randomize(self, labels, public=None, *, rng=None):
            if np.array_equal(labels, LABELS):
                meeting.wait(timeout=60)
            return super().randomize(labels, public, rng=rng)

    meeting = threading.Barrier(2)
    before = list(warnings.filters), sys.stdout, sys.stderr, logging.root.manager.disable
    vaults = vault(), vault()
    threads = [
        threading.Thread(target=labels.randomize, args=(Waits(1.0, K),)) for labels in vaults
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(labels.receipts) for labels in vaults] == [1, 1]
    now = list(warnings.filters), sys.stdout, sys.stderr, logging.root.manager.disable
    assert now == before
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_mechanisms_of_the_library_neither_warn_nor_fail_by_settings():
    """A setting that turns warnings into errors would make a draw fail by its labels."""
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for mechanism in (RandomizedResponse(0.5, K), RRTopK(0.5, K, 2)):
            vault().randomize(mechanism, priors=np.eye(K)[0] if "TopK" in repr(mechanism) else None)
        numbers().randomize(LaplaceMechanism(0.5, 0.0, 10.0))
