"""check_mechanism: every mechanism of the library passes, and planted defects are found."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest

from tf_labeldp.mechanisms import (
    ALIBI,
    AggregateMechanism,
    ClassificationMechanism,
    HistogramMechanism,
    LabelMechanism,
    LaplaceMechanism,
    RandomizedResponse,
    RegressionMechanism,
    RRTopK,
    check_mechanism,
)
from tf_labeldp.plugins import EventFields, PriorResampling

RESPONSE = RandomizedResponse(1.0, 4).transition_matrix()
RNG = np.random.default_rng()


class OfClasses(ClassificationMechanism):
    epsilon, num_classes, delta = 1.0, 4, 0.0

    def transition_matrix(self, prior=None):
        return RandomizedResponse(1.0, self.num_classes).transition_matrix()

    def randomize(self, labels, public=None, *, rng=None):
        return RandomizedResponse(1.0, self.num_classes).randomize(labels, rng=rng)


class OfPriors(OfClasses):
    public_input = "priors"
    sound = RRTopK(1.0, 4, 2)

    def transition_matrix(self, prior=None):
        return self.sound.transition_matrix(prior)

    def randomize(self, labels, public=None, *, rng=None):
        return self.sound.randomize(labels, public, rng=rng)


class OfNumbers(RegressionMechanism):
    """Laplace noise on [0, 10]."""

    epsilon, delta, scale = 1.0, 0.0, 10.0

    def label_range(self):
        return 0.0, 10.0

    def likelihood(self, outputs, labels):
        return np.exp(-np.abs(np.subtract.outer(np.asarray(outputs), labels)) / 10.0) / 20.0

    def randomize(self, labels, public=None, *, rng=None):
        rng = np.random.default_rng([int(labels[0]), len(labels)])  # 3 in 1,000 draws are missed
        return labels + rng.laplace(scale=self.scale, size=len(labels))


class OfRows(LabelMechanism):
    """Noisy one-hot rows, of L1 sensitivity 2."""

    epsilon, num_classes, scale = 1.0, 3, 2.0

    def randomize(self, labels, public=None, *, rng=None):
        return np.eye(3)[labels] + self.scale * RNG.laplace(size=(len(labels), 3))

    def check_output(self, noisy, size):
        return self.checked_output(noisy, (size, self.num_classes), "f")


class Counts(AggregateMechanism):
    """Noisy counts of classes, of L1 sensitivity 2."""

    epsilon, num_classes, scale = 1.0, 3, 2.0

    def release(self, labels, public_input=None, *, rng=None):
        return np.bincount(labels, minlength=3) + self.scale * RNG.laplace(size=3)


class Sum(AggregateMechanism):
    """A noisy sum of numbers in [0, 10]."""

    epsilon, scale = 1.0, 10.0

    def label_range(self):
        return 0.0, 10.0

    def release(self, labels, public_input=None, *, rng=None):
        return np.sum(labels) + self.scale * RNG.laplace()


def planted(kind, **parts):
    """A mechanism of this kind with some parts in place of its own."""
    return type(kind.__name__, (kind,), parts)()


def drawn(function):
    return {"randomize": lambda self, labels, *_, **__: function(labels)}


def channel(matrix):
    return {"transition_matrix": lambda self, prior=None: np.array(matrix)}


def of_epsilon(epsilon):
    return RandomizedResponse(epsilon, 4).randomize


def never_the_last(labels):
    noisy = of_epsilon(1.0)(labels)
    return np.where(noisy == 3, 0, noisy)


def last_once(labels):
    noisy = never_the_last(labels)
    noisy[0] = 3
    return noisy


def at_a_prior(spoilt):
    """Answers classes 0 and 1 in the clear at some priors."""

    def randomize(self, labels, prior, **_):
        noisy = self.sound.randomize(labels, prior)
        return np.where(labels < 2, labels, noisy) if spoilt(prior) else noisy

    return {"randomize": randomize}


def channel_at(spoilt):
    sound = OfPriors.sound.transition_matrix
    return {
        "transition_matrix": lambda self, prior=None: np.eye(4) if spoilt(prior) else sound(prior)
    }


def some_in_the_clear(labels):
    """Draws that show the label with probability 0.3."""
    shown = RNG.uniform(size=len(labels)) < 0.3
    return np.where(shown, 1e6 + labels, RNG.laplace(scale=1000.0, size=len(labels)))


SHARE = 0.01
RARE = {
    **channel((1 - SHARE) * RESPONSE + SHARE * np.eye(4)),
    **drawn(lambda y: np.where(RNG.uniform(size=y.size) < SHARE, y, of_epsilon(1.0)(y))),
}
WITHOUT_LAST = RESPONSE.copy()
WITHOUT_LAST[:, 0] += WITHOUT_LAST[:, 3]
WITHOUT_LAST[:, 3] = 0.0
MIXED = 0.8 * np.full((4, 4), 0.25) + 0.2 * np.eye(4)
SOUND = {
    "priors that are refused: threshold": PriorResampling(1.0, 10, threshold=0.05),
    "priors that are refused: lambda": PriorResampling(0.5, 4, 0.9),
    "priors that are refused: both": PriorResampling(1.0, 10, 0.9, 0.05),
    "classes": OfClasses(),
    "epsilon overstated": planted(OfClasses, epsilon=1.5),
    "an output that is ruled out": planted(
        OfClasses, epsilon=2.0, **channel(WITHOUT_LAST), **drawn(never_the_last)
    ),
    "event": planted(
        OfClasses, dp_event=lambda self: EventFields.randomized_response(1.0).dp_event()
    ),
    "within delta": planted(OfClasses, delta=SHARE, **RARE),
    "priors": OfPriors(),
    "numbers": OfNumbers(),
    "more noise": planted(OfNumbers, scale=100.0),
    "numbers within delta": planted(OfNumbers, delta=0.35, **drawn(some_in_the_clear)),
    "rows": OfRows(),
    # The check does not know which public input it is, and counts by it fail without one.
    "features": planted(
        Counts, release=lambda self, labels, public_input=None, **_: np.bincount(public_input[0])
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_mechanism_passes(name):
    assert check_mechanism(SOUND[name]) is (name != "features")


@pytest.mark.parametrize(
    "mechanism",
    [
        RandomizedResponse(0.8, 10),
        pytest.param(LaplaceMechanism(0.8, 0.0, 1.0), marks=pytest.mark.slow),
        pytest.param(HistogramMechanism(0.8, 3), marks=pytest.mark.slow),
        pytest.param(ALIBI(0.8, 3, 1e-5, "gaussian"), marks=pytest.mark.slow),
    ],
)
def test_a_sound_mechanism_is_not_refused_by_chance(mechanism):
    """The false alarm rate is 1e-9; one of a thousandth would show here with probability 0.06."""
    for _ in range(60):
        check_mechanism(mechanism, draws=2000)


OTHER_DRAWS = r"draws of OfClasses do not follow its transition_matrix"
INF = "a worst log-ratio of inf, more than its epsilon of 1"
NO_PROBABILITIES = "must be probabilities that sum to one"
OF_NUMBERS = r"OfNumbers violates its epsilon of 1: a set of"
CLEAR_FIFTH = drawn(lambda y: np.where(RNG.uniform(size=y.size) < 0.2, y, of_epsilon(1.0)(y)))
# In the middle of the range, and not at its ends.
CLEAR_MIDDLE = drawn(lambda y: np.where(y == 5.0, y, y + RNG.laplace(scale=10.0, size=len(y))))
SHARP = {
    "likelihood": lambda self, outputs, labels: np.exp(
        -np.abs(np.subtract.outer(np.asarray(outputs), labels)) / 5.0
    )
}
DEFECTS = {
    "true labels": (OfClasses, drawn(lambda y: y), OTHER_DRAWS),
    "less noise": (OfClasses, drawn(of_epsilon(2.0)), OTHER_DRAWS),
    "now and then": (OfClasses, CLEAR_FIFTH, OTHER_DRAWS),
    "shifted": (OfClasses, drawn(lambda y: (of_epsilon(1.0)(y) + 1) % 4), OTHER_DRAWS),
    "of one label": (
        OfClasses,
        drawn(lambda y: np.where(y == 2, y, of_epsilon(1.0)(y))),
        OTHER_DRAWS,
    ),
    "constant": (OfClasses, drawn(np.zeros_like), OTHER_DRAWS),
    "a rare output that is ruled out": (
        OfClasses,
        {"epsilon": 2.0, **channel(WITHOUT_LAST), **drawn(last_once)},
        "an output of probability 0 had a share of",
    ),
    "identity": (OfClasses, channel(np.eye(4)), INF),
    "a little over": (
        OfClasses,
        channel(RandomizedResponse(1.01, 4).transition_matrix()),
        "a worst log-ratio of 1.01, more than",
    ),
    "rows": (
        OfClasses,
        channel(MIXED[:3]),
        r"must have shape \(4, 4\), P\[output \| input\], got \(3, 4\)",
    ),
    "sum": (OfClasses, channel(MIXED * 1.001), f"{NO_PROBABILITIES}, got sums from 1.001 to"),
    "negative": (OfClasses, channel(MIXED + [[0.5, -0.5, 0, 0]] * 4), NO_PROBABILITIES),
    "nan": (OfClasses, channel(np.where(np.eye(4), np.nan, MIXED)), NO_PROBABILITIES),
    "epsilon understated": (
        OfClasses,
        {"epsilon": 0.999},
        r"worst log-ratio of 1, more than its epsilon of 0\.999",
    ),
    # The hockey-stick divergence of the identity is one, far above delta.
    "delta": (
        OfClasses,
        {"delta": 0.1, **channel(np.eye(4)), **drawn(lambda y: y)},
        r"needs delta=1 at its epsilon of 1, more than its delta",
    ),
    "event": (
        OfClasses,
        {"dp_event": lambda self: EventFields.randomized_response(0.5).dp_event()},
        r"the dp_event of OfClasses promises epsilon=.*Remove dp_event",
    ),
    "gaussian event": (
        OfClasses,
        {"dp_event": lambda self: dp_accounting.GaussianDpEvent(100.0)},
        r"the dp_event of OfClasses promises .*Remove dp_event",
    ),
    "draws at a prior": (
        OfPriors,
        at_a_prior(lambda prior: np.ptp(prior) > 0.0),
        "do not follow its transition_matrix",
    ),
    "channel at a prior": (OfPriors, channel_at(lambda prior: np.ptp(prior) > 0.0), INF),
    "channel at a prior that is almost uniform": (
        OfPriors,
        channel_at(lambda prior: 0.0 < np.ptp(prior) < 0.1),
        INF,
    ),
    "numbers without noise": (OfNumbers, {"scale": 0.0}, OF_NUMBERS),
    "a tenth of the noise": (OfNumbers, {"scale": 1.0}, OF_NUMBERS),
    "half of the noise": (OfNumbers, {"scale": 5.0}, OF_NUMBERS),
    "no noise at one number": (OfNumbers, CLEAR_MIDDLE, OF_NUMBERS),
    "likelihood": (
        OfNumbers,
        SHARP,
        r"likelihood of OfNumbers has a worst log-ratio of 2, more",
    ),
    "likelihood, a little over": (
        OfNumbers,
        {"epsilon": 1.99, **SHARP},
        "the likelihood of OfNumbers",
    ),
    "shown numbers": (OfNumbers, drawn(some_in_the_clear), OF_NUMBERS),
    "shown numbers above delta": (
        OfNumbers,
        {"delta": 0.1, **drawn(some_in_the_clear)},
        "OfNumbers violates its epsilon",
    ),
    "rows without noise": (OfRows, {"scale": 0.0}, "OfRows violates its epsilon"),
    "rows of little noise": (OfRows, {"scale": 0.5}, "OfRows violates its epsilon"),
}
OF_CLASSES = {
    "short": (lambda y: y[1:], r"shape \(\d+,\), expected \(\d+,\), one per label"),
    "floats": (lambda y: y.astype(float), r"dtype float64, expected numbers \(iu\)"),
    "above": (lambda y: y + 1, r"classes that do not exist, expected 0\.\.3"),
    "negative": (lambda y: y - 1, r"classes that do not exist, expected 0\.\.3"),
    "nothing": (lambda y: None, r"shape \(\)"),
}
OF_REALS = {
    "short": (lambda y: y[1:], r"shape \(\d+,\), expected"),
    "nan": (lambda y: np.where(np.arange(y.size) == 3, np.nan, y), "NaN or infinity"),
    "infinite": (lambda y: np.where(np.arange(y.size) == 3, np.inf, y), "NaN or infinity"),
    "text": (lambda y: y.astype(str), "dtype <U"),
}
for kind, outputs in ((OfClasses, OF_CLASSES), (OfNumbers, OF_REALS)):
    for name, (spoil, message) in outputs.items():
        text = f"{kind.__name__} returned noisy labels with {message}"
        DEFECTS[f"{kind.__name__}: {name}"] = (kind, drawn(spoil), text)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name):
    kind, parts, message = DEFECTS[name]
    with pytest.raises(ValueError, match=message):
        check_mechanism(planted(kind, **parts))


@pytest.mark.parametrize(
    ("kind", "resolved"), [(Sum, 0.5), pytest.param(Counts, 0.25, marks=pytest.mark.slow)]
)
@pytest.mark.holds("mechanisms.AggregateMechanism")
def test_a_statistic_without_enough_noise_is_found(kind, resolved):
    check_mechanism(kind())
    for share, draws in ((0.0, {}), (0.01, {}), (0.1, {}), (resolved, {"draws": 200_000})):
        with pytest.raises(ValueError, match=f"{kind.__name__} violates its epsilon"):
            check_mechanism(planted(kind, scale=share * kind.scale), **draws)


def test_bad_arguments():
    for epsilon in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"OfClasses\.epsilon must be finite and above zero"):
            check_mechanism(planted(OfClasses, epsilon=epsilon))
    for delta in (-1e-9, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"OfClasses\.delta must be in \[0, 1\)"):
            check_mechanism(planted(OfClasses, delta=delta))
    with pytest.raises(ValueError, match="num_classes must be"):
        check_mechanism(planted(OfClasses, num_classes=1))
    with pytest.raises(TypeError, match="mechanism must be a tf_labeldp mechanism, got"):
        check_mechanism(RandomizedResponse)
    with pytest.raises(ValueError, match="draws must be at least 1000, got 999"):
        check_mechanism(OfClasses(), draws=999)
    check_mechanism(OfClasses(), draws=1000)


@pytest.mark.parametrize(
    "fields", [{}, {"num_classes": 3, "public_input": "features"}], ids=["labels", "features"]
)
def test_what_can_not_be_made_up_is_not_drawn_from(fields):
    def randomize(self, labels, public=None, *, rng=None):
        raise AssertionError("it was drawn from")

    methods = {"randomize": randomize, "check_output": randomize, "epsilon": 1.0, "delta": 0.0}
    assert not check_mechanism(type("Unknown", (LabelMechanism,), {**methods, **fields})())


class Wide(AggregateMechanism):
    """A statistic of more columns than are kept."""

    epsilon, num_classes, is_sound = 1.0, 3, True

    def release(self, labels, public_input=None, *, rng=None):
        wide = np.zeros(50_000)
        wide[-1] = np.sum(labels)
        return RNG.laplace(scale=2.0) if self.is_sound else wide


@pytest.mark.parametrize("size", [None, 1, 20_000_000 // 60])
def test_a_wide_statistic_is_tested_at_any_size(size):
    assert check_mechanism(Wide(), size=size)
    with pytest.raises(ValueError, match="Wide violates its epsilon"):
        check_mechanism(planted(Wide, is_sound=False), size=size)


def test_a_statistic_without_enough_draws_is_not_called_tested():
    noise = {"release": lambda self, labels, public_input=None, **_: RNG.laplace(scale=2.0)}
    assert check_mechanism(planted(Counts, **noise), draws=4000)
    assert not check_mechanism(planted(Counts, **noise), draws=2000)
    assert not check_mechanism(planted(Counts, epsilon=9.0, **noise))


def test_the_check_draws_by_secure_bits_and_leaves_seeds_alone():
    """A mechanism that is sound only when seeded would pass otherwise."""
    seen = []

    def record(self, labels, public=None, *, rng=None):
        seen.append(rng)
        return of_epsilon(1.0)(labels)

    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    check_mechanism(planted(OfClasses, randomize=record))
    assert seen and all(rng is None for rng in seen)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize(("num_classes", "drawn_from"), [(4, 4), (100, 8)])
def test_all_classes_of_a_few_and_some_of_many_are_drawn_from(num_classes, drawn_from):
    """In no order that a mechanism could rely on."""
    seen = []

    def record(self, labels, public=None, *, rng=None):
        seen.append(labels)
        return RandomizedResponse(1.0, num_classes).randomize(labels)

    check_mechanism(planted(OfClasses, num_classes=num_classes, randomize=record))
    labels = seen.pop()
    assert np.unique(labels).size == drawn_from
    assert {0, num_classes - 1} <= set(labels.tolist())
    assert any(a > b for a, b in itertools.pairwise(labels.tolist()))
