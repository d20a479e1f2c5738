"""Bad input of mechanisms for classes and for numbers, each with its message, and their configs."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from numeric_cases import DISCRETE, MECHANISMS

from tf_labeldp.accounting import PrivacyBudget, public_input
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    ExponentialMechanism,
    HistogramMechanism,
    Mechanism,
    RandomizedResponse,
    RRTopK,
    RRWithPrior,
)
from tf_labeldp.plugins import PriorResampling
from tf_labeldp.vault import Numbers, PrivateLabels

UNIFORM = np.full(4, 0.25)
WITH_PRIORS = [RRTopK(1.0, 4, 2), PriorResampling(1.0, 4, 0.9, 0.1)]


def test_bad_settings_of_classes():
    for k in (0, 5):
        with pytest.raises(ValueError, match=rf"k must be at (least 1|most num_.*=4), got {k}"):
            RRTopK(1.0, 4, k)
    with pytest.raises(TypeError, match="k must be an integer"):
        RRTopK(1.0, 4, 2.0)
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        RRWithPrior(1.0, 1)


BAD_CLASSES = {
    "above": (np.array([0, 1, 987654]), ValueError, r"must lie in 0..3, but 1 of 3 do not"),
    "negative": (np.array([-1, -2, 0]), ValueError, r"must lie in 0..3, but 2 of 3 do not"),
    "float": (np.array([0.0, 1.0]), TypeError, "must be integers 0..3, got dtype float64"),
    "bool": (np.array([True]), TypeError, "must be integers 0..3, got dtype bool"),
    "text": (["987654"], TypeError, "must be integers 0..3, got texts.*Classes"),
    "one-hot": (np.eye(4, dtype=int), ValueError, r"shape \(n,\), got shape \(4, 4\).*argmax"),
}


@pytest.mark.parametrize("case", BAD_CLASSES)
def test_bad_classes_are_refused_and_not_shown(case):
    labels, error, message = BAD_CLASSES[case]
    with pytest.raises(error, match=message) as caught:
        RandomizedResponse(1.0, 4).randomize(labels)
    assert "987654" not in str(caught.value)


BAD_PRIORS = {
    "nan": ([0.5, np.nan, 0.25, 0.25], "must be finite, but 1 row.*overflow"),
    "negative": ([0.5, -0.1, 0.3, 0.3], "must not be negative, but 1 row.*prior_from_logits"),
    "sum": ([0.5, 0.3, 0.1, 0.2], "must sum to one.*row 0 sums to 1.1"),
    "sum-just-off": (
        [0.25, 0.25, 0.25, 0.2502],
        r"must sum to one in every row \(tolerance 0.0001\)",
    ),
    "short": ([0.5, 0.5], r"must have shape \(4,\) or \(2, 4\), got \(2,\)"),
    "rows": (np.full((3, 4), 0.25), r"must have shape \(4,\) or \(2, 4\), got \(3, 4\)"),
    "second-row": ([[0.25] * 4, [0.0] * 4], "1 row.* row 1 sums to 0.*uniform"),
}


@pytest.mark.parametrize("case", BAD_PRIORS)
def test_bad_priors(case):
    priors, message = BAD_PRIORS[case]
    for mechanism in WITH_PRIORS:
        with pytest.raises(ValueError, match=message):
            mechanism.randomize([0, 3], priors)


def test_priors_missing_or_superfluous():
    for mechanism in WITH_PRIORS:
        with pytest.raises(ValueError, match=r"needs priors of shape \(4,\) or \(2, 4\)"):
            mechanism.randomize([0, 3])
        with pytest.raises(ValueError, match=r"needs one prior of shape \(4,\), got None"):
            mechanism.transition_matrix()
        with pytest.raises(ValueError, match=r"needs one prior of shape \(4,\), got \(1, 4\)"):
            mechanism.transition_matrix(UNIFORM[np.newaxis])
    for mechanism in (RandomizedResponse(1.0, 4), MECHANISMS["LaplaceMechanism"](1.0, 0, 3)):
        with pytest.raises(ValueError, match=r"takes no priors.*optimal_bins"):
            mechanism.randomize([0], UNIFORM)
    with pytest.raises(ValueError, match="its channel does not depend on them"):
        RandomizedResponse(1.0, 4).transition_matrix(UNIFORM)
    priors = np.array([0.25, 0.25, 0.25, 0.25009])  # within the tolerance
    assert RRWithPrior(1.0, 4).randomize([0, 3], priors).shape == (2,)


def test_swapped_arguments_are_told():
    with pytest.warns(UserWarning, match="Epsilon comes first: are the two swapped"):
        RandomizedResponse(10, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RandomizedResponse(9, 2)
        RandomizedResponse(10, 10)
        RandomizedResponse(10.5, 2)


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_smallest_epsilon_and_the_widest_range(name):
    with pytest.raises(ValueError, match=rf"at least 1e-06 for {name}, got 9.9e-07.*Raise epsilon"):
        MECHANISMS[name](9.9e-7, 0, 1)
    high = 2**32
    noisy = MECHANISMS[name](1e-6, 0, high, *([False] if name != "ExponentialMechanism" else []))
    drawn = noisy.randomize(np.full(50_000, high // 2), rng=np.random.default_rng(4))
    # Nothing has wrapped around: the noise is symmetric and has the size that it should.
    scale = {"ExponentialMechanism": high / 12**0.5}.get(name, 2**0.5 * high * 1e6)
    assert abs(np.mean(drawn) - high / 2) < 5 * scale / 50_000**0.5
    assert np.std(drawn) == pytest.approx(scale, rel=0.03)


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (1, 1, "low must be below high, got low="),
        (2, 1, "low must be below high, got low="),
        (float("nan"), 1, "low must be finite"),
        (0, float("inf"), "high must be finite"),
        (0.5, 3, "low must be a whole number.* got 0.5"),
        (0, 2.0**60, r"high must be a whole number of at most 2\^53"),
        (-1, 2**32, r"high - low must be at most 2\^32"),
    ],
)
def test_bad_ends_of_whole_numbers(low, high, message):
    with pytest.raises(ValueError, match=message):
        MECHANISMS["DiscreteLaplaceMechanism"](1.0, low, high)


def test_bad_settings_of_numbers():
    laplace = MECHANISMS["LaplaceMechanism"]
    for low, high in ((-1.7e308, 1.7e308), (0.0, 1e-300)):
        with pytest.raises(ValueError, match=r"must be between 1e-290 and 1e\+290 for .*unit"):
            laplace(1.0, low, high)
    with pytest.raises(TypeError, match="low must be a number, got"):
        laplace(1.0, "0", 10)
    with pytest.raises(TypeError, match="clip must be True or False, got"):
        laplace(1.0, 0, 1, clip="yes")
    with pytest.raises(ValueError, match=r"clip must be True.*never leave.*LaplaceMechanism"):
        ExponentialMechanism(1.0, 0, 1, clip=False)


BAD_NUMBERS = {
    "above": ([0, 1, 987654], ValueError, r"must lie in \[0, 400\], but 1 of 3 do not.*clip"),
    "below": ([-1e-3, -2.0, 3.0], ValueError, r"but 2 of 3 do not"),
    "infinite": ([np.inf, -np.inf], ValueError, "but 2 of 2 do not"),
    "nan": ([np.nan, 987654, 2], ValueError, "1 of 3 labels are missing"),
    "text": (["987654"], TypeError, "must be numbers, got texts"),
    "object": (np.array([987654], dtype=object), ValueError, "but 1 of 1 do not"),
    "other object": (np.array([{}], dtype=object), TypeError, "must be numbers, got dtype object"),
    "column": (np.full((3, 1), 987654), ValueError, r"shape \(n,\), got shape \(3, 1\).*ravel"),
}


@pytest.mark.parametrize("case", BAD_NUMBERS)
def test_bad_numbers_are_refused_and_not_shown(case):
    labels, error, message = BAD_NUMBERS[case]
    mechanism = MECHANISMS["LaplaceMechanism"](1.0, 0, 400)
    for call in (
        mechanism.randomize,
        lambda y: mechanism.likelihood([0.0], y),
    ):
        with pytest.raises(error, match=message) as caught:
            call(labels)
        assert "987654" not in str(caught.value)


@pytest.mark.parametrize("name", DISCRETE)
def test_labels_that_are_not_whole_are_rounded(name):
    """A refusal would tell which labels are whole, at no charge."""
    mechanism = MECHANISMS[name](1.0, 0, 400)
    found, expected = ([mechanism.likelihood([2.0, 123.0], y)] for y in ([123.25], [123.0]))
    np.testing.assert_array_equal(found, expected)
    assert mechanism.randomize([1.0, 123.25, 2.5]).shape == (3,)


@pytest.mark.parametrize("name", MECHANISMS)
def test_numbers_of_any_type_give_the_same_draw_and_are_left_alone(name, seeded):
    mechanism, labels = MECHANISMS[name](1.0, 0, 400), np.arange(3000) % 200
    expected, before = mechanism.randomize(labels, rng=seeded()), labels.copy()
    for same in (labels.astype("uint8"), labels.astype(">i8"), labels.astype("float16"), [*labels]):
        np.testing.assert_array_equal(mechanism.randomize(same, rng=seeded()), expected)
    np.testing.assert_array_equal(labels, before)
    noisy = mechanism.randomize(np.empty(0))
    assert noisy.shape == (0,) and noisy.dtype == np.float64
    assert mechanism.likelihood([np.inf, -np.inf], [0.0]).tolist() == [[0.0], [0.0]]


def test_numpy_scalars_become_python_numbers():
    made = RRTopK(np.float32(0.5), np.int32(4), np.int64(2))
    assert made.to_json()["config"] == {"epsilon": 0.5, "num_classes": 4, "k": 2}
    assert [type(value) for value in made.get_config().values()] == [float, int, int]
    kind = MECHANISMS["DiscreteLaplaceMechanism"]
    made = kind(np.float32(0.5), np.int32(-4), np.int64(2), np.bool_(False))
    assert made.to_json()["config"] == {"epsilon": 0.5, "low": -4, "high": 2, "clip": False}
    assert [type(value) for value in made.get_config().values()] == [float, int, int, bool]
    assert Mechanism.from_json(made.to_json()) == made


def test_unknown_mechanism():
    with pytest.raises(ValueError, match=r"RRTopK.*, got unknown mechanism 'Nothing'"):
        Mechanism.from_json({"class_name": "Nothing", "config": {}})


def test_receipts_of_public_arguments_go_with_the_mechanism():
    budget, numbers = PrivacyBudget(2.0), np.arange(60) % 3
    vault = PrivateLabels(numbers, num_classes=3, budget=budget)
    released = vault.release(HistogramMechanism(0.5, 3))
    values = public_input(released).with_value((0.0, 1.0, 2.0))
    mechanism, plain = (HistogramMechanism(0.25, values=each) for each in (values, values.value))
    again = Mechanism.from_json(json.loads(json.dumps(mechanism.to_json())))
    for each in (mechanism, again):
        assert each == plain and [one.id for one in each.receipts] == [released.receipts[0].id]
        assert (
            each.to_json(with_receipts=False)
            == plain.to_json(with_receipts=False)
            == plain.to_json()
        )
    other = PrivateLabels(numbers * 1.0, Numbers(0.0, 2.0), budget=budget)
    assert other.release(mechanism).guarantee().epsilon == 0.75


def test_arguments_of_a_plug_in_are_plain_or_refused():
    class WithArgument(ClassificationMechanism):
        """Of any argument."""

        epsilon, num_classes = 1.0, 3
        randomize = transition_matrix = None

        def __init__(self, argument):
            self.argument = argument

    found = WithArgument([np.arange(2), np.float64(0.5)]).to_json()
    assert found["config"] == {"argument": [[0, 1], 0.5]}
    with pytest.raises(TypeError, match=r"numbers, strings, None, lists or arrays, got function"):
        WithArgument(lambda: 0).to_json()
