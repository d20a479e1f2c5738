"""check_mechanism: every mechanism of the library passes, and planted defects are found."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest

from tf_labeldp.accounting.events import pure_dp_event
from tf_labeldp.mechanisms import (
    ALIBI,
    AggregateMechanism,
    ClassificationMechanism,
    HistogramMechanism,
    LaplaceMechanism,
    RandomizedResponse,
    RegressionMechanism,
    RRTopK,
    check_mechanism,
)
from tf_labeldp.mechanisms.base import LabelMechanism, checked_output
from tf_labeldp.mechanisms.clusters import PriorResampling


@pytest.mark.parametrize(
    "mechanism",
    [
        PriorResampling(1.0, 10, threshold=0.05),
        PriorResampling(0.5, 4, 0.9),
        PriorResampling(1.0, 10, 0.9, 0.05),
    ],
    ids=["threshold", "lambda", "both"],
)
def test_a_mechanism_that_refuses_some_priors_passes(mechanism):
    """The uniform prior is within every threshold; what it refuses it does not draw with."""
    check_mechanism(mechanism)


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


# --- Classes -------------------------------------------------------------------------------------


class OfClasses(ClassificationMechanism):
    """Randomized response, of which tests spoil a part."""

    def __init__(self, epsilon=1.0, num_classes=4, delta=0.0):
        self.epsilon, self.num_classes, self.delta = epsilon, num_classes, delta

    def transition_matrix(self, prior=None):
        return RandomizedResponse(1.0, 4).transition_matrix()

    def randomize(self, labels, public=None, *, rng=None):
        return RandomizedResponse(1.0, 4).randomize(labels, rng=rng)


def identity(labels):
    return labels


def of_epsilon(epsilon):
    return lambda labels: RandomizedResponse(epsilon, 4).randomize(labels)


def now_and_then(labels):
    """The true label in a share of the draws, randomized response in the others."""
    told = np.random.default_rng().uniform(size=labels.size) < 0.2
    return np.where(told, labels, of_epsilon(1.0)(labels))


def shifted(labels):
    return (of_epsilon(1.0)(labels) + 1) % 4


def never_the_last(labels):
    noisy = of_epsilon(1.0)(labels)
    return np.where(noisy == 3, 0, noisy)


def of_one_label(labels):
    """Honest about every label but one."""
    return np.where(labels == 2, labels, of_epsilon(1.0)(labels))


DRAWN = {
    "true labels": identity,
    "less noise": of_epsilon(2.0),
    "now and then": now_and_then,
    "shifted": shifted,
    "of one label": of_one_label,
    "constant": np.zeros_like,
}


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
def test_draws_unlike_the_channel_are_found(drawn, monkeypatch):
    monkeypatch.setattr(OfClasses, "randomize", lambda self, labels, *_, **__: drawn(labels))
    with pytest.raises(ValueError, match=r"draws of OfClasses do not follow its transition"):
        check_mechanism(OfClasses())


def test_draws_of_a_rare_output_that_the_channel_rules_out_are_found(monkeypatch):
    """One draw is enough, whatever the number of draws."""
    channel = RandomizedResponse(1.0, 4).transition_matrix()
    channel[:, 0] += channel[:, 3]
    channel[:, 3] = 0.0
    monkeypatch.setattr(OfClasses, "transition_matrix", lambda self, prior=None: channel)
    monkeypatch.setattr(
        OfClasses, "randomize", lambda self, labels, *_, **__: never_the_last(labels)
    )
    check_mechanism(OfClasses(2.0))

    def once(self, labels, *_, **__):
        noisy = never_the_last(labels)
        noisy[0] = 3
        return noisy

    monkeypatch.setattr(OfClasses, "randomize", once)
    with pytest.raises(ValueError, match="an output of probability 0 came in a share of"):
        check_mechanism(OfClasses(2.0))


def mixed(share):
    """Between no information and all of it."""
    return (1.0 - share) * np.full((4, 4), 0.25) + share * np.eye(4)


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (np.eye(4), "a worst log-ratio of inf, more than its epsilon of 1"),
        (RandomizedResponse(1.01, 4).transition_matrix(), "a worst log-ratio of 1.01, more than"),
        (mixed(0.2)[:3], r"must have shape \(4, 4\), P\[output \| input\], got \(3, 4\)"),
        (mixed(0.2) * 1.001, "probabilities that sum to one, got sums from 1.001 to 1.001"),
        (mixed(0.2) + [[0.5, -0.5, 0, 0]] * 4, "must be probabilities that sum to one"),
        (np.where(np.eye(4), np.nan, mixed(0.2)), "must be probabilities that sum to one"),
    ],
    ids=["identity", "a little over", "rows", "sum", "negative", "nan"],
)
def test_channels_that_are_not_private_or_none_are_found(channel, message, monkeypatch):
    monkeypatch.setattr(OfClasses, "transition_matrix", lambda self, prior=None: channel)
    with pytest.raises(ValueError, match=message):
        check_mechanism(OfClasses())


def test_an_epsilon_that_is_understated_is_found():
    with pytest.raises(ValueError, match=r"worst log-ratio of 1, more than its epsilon of 0\.999"):
        check_mechanism(OfClasses(0.999))
    check_mechanism(OfClasses(1.5))  # overstated is sound


def test_a_delta_does_not_excuse_any_channel(monkeypatch):
    """The hockey-stick divergence of the identity is one, far above delta."""
    monkeypatch.setattr(OfClasses, "transition_matrix", lambda self, prior=None: np.eye(4))
    monkeypatch.setattr(OfClasses, "randomize", lambda self, labels, *_, **__: labels)
    with pytest.raises(ValueError, match=r"needs delta=1 at its epsilon of 1, more than its delta"):
        check_mechanism(OfClasses(1.0, delta=0.1))


def test_an_event_that_promises_more_than_the_channel_keeps_is_found(monkeypatch):
    monkeypatch.setattr(OfClasses, "dp_event", lambda self: pure_dp_event(0.5), raising=False)
    with pytest.raises(ValueError, match=r"the dp_event of OfClasses promises epsilon="):
        check_mechanism(OfClasses())
    monkeypatch.setattr(OfClasses, "dp_event", lambda self: pure_dp_event(1.0))
    check_mechanism(OfClasses())


def test_a_channel_within_epsilon_and_delta_passes(monkeypatch):
    """With probability delta the label itself, else randomized response."""
    delta = 0.01
    channel = (1 - delta) * RandomizedResponse(1.0, 4).transition_matrix() + delta * np.eye(4)

    def told(self, labels, *_, **__):
        rare = np.random.default_rng().uniform(size=labels.size) < delta
        return np.where(rare, labels, of_epsilon(1.0)(labels))

    monkeypatch.setattr(OfClasses, "transition_matrix", lambda self, prior=None: channel)
    monkeypatch.setattr(OfClasses, "randomize", told)
    check_mechanism(OfClasses(1.0, delta=delta))


class OfPriors(ClassificationMechanism):
    """RRTop2, of which tests spoil a part."""

    public_input = "priors"

    def __init__(self, epsilon=1.0, num_classes=4):
        self.epsilon, self.num_classes = epsilon, num_classes
        self.sound = RRTopK(epsilon, num_classes, 2)

    def transition_matrix(self, prior=None):
        return self.sound.transition_matrix(prior)

    def randomize(self, labels, public=None, *, rng=None):
        return self.sound.randomize(labels, public, rng=rng)


def test_defects_at_a_prior_that_is_not_uniform_are_found(monkeypatch):
    check_mechanism(OfPriors())

    def told(self, labels, prior, **_):
        noisy = self.sound.randomize(labels, prior)
        return noisy if np.ptp(prior) == 0.0 else np.where(labels < 2, labels, noisy)

    with monkeypatch.context() as patched:
        patched.setattr(OfPriors, "randomize", told)
        with pytest.raises(ValueError, match="do not follow its transition_matrix"):
            check_mechanism(OfPriors())

    def certain(self, prior=None):
        return np.eye(4) if np.ptp(prior) else self.sound.transition_matrix(prior)

    monkeypatch.setattr(OfPriors, "transition_matrix", certain)
    with pytest.raises(ValueError, match="worst log-ratio of inf"):
        check_mechanism(OfPriors())


# --- Numbers -------------------------------------------------------------------------------------


def test_a_defect_at_a_prior_that_is_almost_uniform_is_found(monkeypatch):
    def certain(self, prior=None):
        almost = 0.0 < np.ptp(prior) < 0.1
        return np.eye(4) if almost else self._sound.transition_matrix(prior)

    monkeypatch.setattr(OfPriors, "transition_matrix", certain)
    with pytest.raises(ValueError, match="worst log-ratio of inf"):
        check_mechanism(OfPriors())


class Understated(OfClasses):
    """States an event that composes to less than its channel."""

    def dp_event(self):
        return dp_accounting.GaussianDpEvent(100.0)


def test_an_event_that_promises_less_than_the_channel_is_found():
    assert Understated(1.0).epsilon == OfClasses(1.0).epsilon
    with pytest.raises(ValueError, match=r"the dp_event of Understated promises .*Remove dp_event"):
        check_mechanism(Understated(1.0))


class OfNumbers(RegressionMechanism):
    """Laplace noise on [0, 10], of which tests spoil a part."""

    def __init__(self, epsilon=1.0, scale=10.0):
        self.epsilon, self.scale = epsilon, scale

    def label_range(self):
        return 0.0, 10.0

    def likelihood(self, outputs, labels):
        return np.exp(-np.abs(np.subtract.outer(np.asarray(outputs), labels)) / 10.0) / 20.0

    def randomize(self, labels, public=None, *, rng=None):
        rng = np.random.default_rng([int(labels[0]), len(labels)])  # 3 in 1,000 draws are missed
        return labels + rng.laplace(scale=self.scale, size=len(labels))


def test_enough_noise_on_numbers_passes():
    check_mechanism(OfNumbers(scale=10.0))
    check_mechanism(OfNumbers(scale=100.0))


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_too_little_noise_on_numbers_is_found(scale):
    with pytest.raises(ValueError, match=r"OfNumbers violates its epsilon of 1: a set of"):
        check_mechanism(OfNumbers(scale=scale))


def test_noise_that_one_label_lacks_is_found(monkeypatch):
    """Not at an end of the range: in its middle."""

    def told(self, labels, *_, **__):
        noisy = labels + np.random.default_rng().laplace(scale=10.0, size=len(labels))
        return np.where(labels == 5.0, labels, noisy)

    monkeypatch.setattr(OfNumbers, "randomize", told)
    with pytest.raises(ValueError, match="violates its epsilon"):
        check_mechanism(OfNumbers())


def test_a_likelihood_that_is_not_private_is_found(monkeypatch):
    def sharp(self, outputs, labels):
        return np.exp(-np.abs(np.subtract.outer(np.asarray(outputs), labels)) / 5.0)

    monkeypatch.setattr(OfNumbers, "likelihood", sharp)
    with pytest.raises(ValueError, match=r"likelihood of OfNumbers has a worst log-ratio of 2, mo"):
        check_mechanism(OfNumbers())
    with pytest.raises(ValueError, match="the likelihood of OfNumbers"):
        check_mechanism(OfNumbers(1.99))


def test_a_delta_excuses_as_much_as_it_says(monkeypatch):
    """Draws that show the label with probability 0.3 are not (1, 0.1)-DP, but (1, 0.35)-DP."""

    def told(self, labels, *_, **__):
        generator = np.random.default_rng()
        noisy = generator.laplace(scale=1000.0, size=len(labels))
        return np.where(generator.uniform(size=len(labels)) < 0.3, 1e6 + labels, noisy)

    monkeypatch.setattr(OfNumbers, "randomize", told)
    for delta, sound in ((0.0, False), (0.1, False), (0.35, True)):
        monkeypatch.setattr(OfNumbers, "delta", delta)
        if sound:
            check_mechanism(OfNumbers())
            continue
        with pytest.raises(ValueError, match="violates its epsilon"):
            check_mechanism(OfNumbers())


# --- Noisy rows ----------------------------------------------------------------------------------


class OfRows(LabelMechanism):
    """Noisy one-hot rows."""

    def __init__(self, epsilon=1.0, num_classes=3, scale=2.0):
        self.epsilon, self.num_classes, self.scale = epsilon, num_classes, scale

    def randomize(self, labels, public=None, *, rng=None):
        noise = np.random.default_rng().laplace(size=(len(labels), self.num_classes))
        return np.eye(self.num_classes)[labels] + self.scale * noise

    def check_output(self, noisy, size):
        return checked_output(self, noisy, (size, self.num_classes), "f")


def test_rows_with_too_little_noise_are_found():
    """The noise of L1 sensitivity 2 is needed, and a tenth of it is not enough."""
    check_mechanism(OfRows())
    for scale in (0.0, 0.2, 0.5):
        with pytest.raises(ValueError, match="OfRows violates its epsilon"):
            check_mechanism(OfRows(scale=scale))


# --- Statistics ----------------------------------------------------------------------------------


class Counts(AggregateMechanism):
    """Noisy counts of classes, of L1 sensitivity 2."""

    num_classes = 3

    def __init__(self, epsilon=1.0, scale=2.0):
        self.epsilon, self.scale = epsilon, scale

    def release(self, labels, public_input=None, *, rng=None):
        noise = np.random.default_rng().laplace(size=3)
        return np.bincount(labels, minlength=3) + self.scale * noise


class Sum(AggregateMechanism):
    """A noisy sum of numbers in [0, 10]."""

    def __init__(self, epsilon=1.0, scale=10.0):
        self.epsilon, self.scale = epsilon, scale

    def label_range(self):
        return 0.0, 10.0

    def release(self, labels, public_input=None, *, rng=None):
        return np.sum(labels) + self.scale * np.random.default_rng().laplace()


@pytest.mark.parametrize(
    ("kind", "resolved"), [(Sum, 0.5), pytest.param(Counts, 0.25, marks=pytest.mark.slow)]
)
@pytest.mark.holds("mechanisms.AggregateMechanism")
def test_a_statistic_without_enough_noise_is_found(kind, resolved):
    check_mechanism(kind())
    full = kind().scale
    for share in (0.0, 0.01, 0.1):
        with pytest.raises(ValueError, match=f"{kind.__name__} violates its epsilon"):
            check_mechanism(kind(scale=share * full))
    with pytest.raises(ValueError, match="violates its epsilon"):
        check_mechanism(kind(scale=resolved * full), draws=200_000)


def test_a_statistic_that_needs_a_public_input_is_not_drawn_from():
    """What the public input is is not known; a vault still checks its use on made-up labels."""

    class NeedsFeatures(Counts):
        def release(self, labels, public_input=None, *, rng=None):
            if public_input is None:
                raise ValueError("features are needed")
            return np.bincount(labels, minlength=3)

    check_mechanism(NeedsFeatures())


# --- Shape, dtype, range -------------------------------------------------------------------------

WRONG_CLASSES = {
    "short": (lambda y: y[1:], r"shape \(\d+,\), expected \(\d+,\), one per label"),
    "floats": (lambda y: y.astype(float), r"dtype float64, expected numbers \(iu\)"),
    "above": (lambda y: y + 1, r"classes that do not exist, expected 0\.\.3"),
    "negative": (lambda y: y - 1, r"classes that do not exist, expected 0\.\.3"),
    "nothing": (lambda y: None, r"shape \(\)"),
}


@pytest.mark.parametrize("case", WRONG_CLASSES)
def test_noisy_classes_of_a_wrong_shape_dtype_or_range_are_found(case, monkeypatch):
    spoil, message = WRONG_CLASSES[case]
    monkeypatch.setattr(OfClasses, "randomize", lambda self, labels, *_, **__: spoil(labels))
    with pytest.raises(ValueError, match=f"OfClasses returned noisy labels with {message}"):
        check_mechanism(OfClasses())


WRONG_NUMBERS = {
    "short": (lambda y: y[1:], r"shape \(\d+,\), expected"),
    "nan": (lambda y: np.where(np.arange(y.size) == 3, np.nan, y), "NaN or infinity"),
    "infinite": (lambda y: np.where(np.arange(y.size) == 3, np.inf, y), "NaN or infinity"),
    "text": (lambda y: y.astype(str), "dtype <U"),
}


@pytest.mark.parametrize("case", WRONG_NUMBERS)
def test_noisy_numbers_of_a_wrong_shape_or_dtype_are_found(case, monkeypatch):
    spoil, message = WRONG_NUMBERS[case]
    monkeypatch.setattr(OfNumbers, "randomize", lambda self, labels, *_, **__: spoil(labels))
    with pytest.raises(ValueError, match=f"OfNumbers returned noisy labels with {message}"):
        check_mechanism(OfNumbers())


# --- Arguments -----------------------------------------------------------------------------------


def test_bad_arguments():
    for epsilon in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"OfClasses\.epsilon must be finite and above zero"):
            check_mechanism(OfClasses(epsilon))
    for delta in (-1e-9, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"OfClasses\.delta must be in \[0, 1\)"):
            check_mechanism(OfClasses(delta=delta))
    with pytest.raises(ValueError, match="num_classes must be"):
        check_mechanism(OfClasses(num_classes=1))
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
    check_mechanism(type("Unknown", (LabelMechanism,), {**methods, **fields})())


def test_the_check_draws_by_secure_bits_and_leaves_seeds_alone(monkeypatch):
    """A mechanism that is sound only when seeded would pass otherwise."""
    seen = []
    sound = OfClasses.randomize

    def record(self, labels, public=None, *, rng=None):
        seen.append(rng)
        return sound(self, labels)

    monkeypatch.setattr(OfClasses, "randomize", record)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    check_mechanism(OfClasses())
    assert seen and all(rng is None for rng in seen)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_all_classes_of_a_few_and_some_of_many_are_drawn_from(monkeypatch):
    """In no order that a mechanism could rely on."""
    seen = []

    def record(self, labels, public=None, *, rng=None):
        seen.append(labels)
        return RandomizedResponse(1.0, self.num_classes).randomize(labels)

    monkeypatch.setattr(OfClasses, "randomize", record)
    monkeypatch.setattr(
        OfClasses,
        "transition_matrix",
        lambda self, prior=None: RandomizedResponse(1.0, self.num_classes).transition_matrix(),
    )
    for num_classes, drawn in ((4, 4), (100, 8)):
        check_mechanism(OfClasses(num_classes=num_classes))
        labels = seen.pop()
        assert np.unique(labels).size == drawn
        assert {0, num_classes - 1} <= set(labels.tolist())
        assert any(a > b for a, b in itertools.pairwise(labels.tolist()))
