"""Bad input of the mechanisms for numbers, and their configs."""

from __future__ import annotations

import numpy as np
import pytest
from numeric_cases import CONTINUOUS, DISCRETE, MECHANISMS

from tf_labeldp.mechanisms import ExponentialMechanism, RegressionMechanism
from tf_labeldp.mechanisms.base import LabelMechanism, checked_mechanism, deserialize, serialize


@pytest.fixture(params=MECHANISMS)
def mechanism(request):
    return MECHANISMS[request.param](1.0, 0, 400)


@pytest.mark.parametrize("name", MECHANISMS)
def test_epsilon_too_small_for_integers(name):
    with pytest.raises(ValueError, match=rf"at least 1e-06 for {name}, got 9.9e-07.*raise epsilon"):
        MECHANISMS[name](9.9e-7, 0, 1)
    high = 2**32
    noisy = MECHANISMS[name](1e-6, 0, high, *([False] if name != "ExponentialMechanism" else []))
    drawn = noisy.randomize(np.full(50_000, high // 2), rng=np.random.default_rng(4))
    # Nothing has wrapped around: the noise is symmetric and has the size that it should.
    scale = {"ExponentialMechanism": high / 12**0.5}.get(name, 2**0.5 * high * 1e6)
    assert abs(np.mean(drawn) - high / 2) < 5 * scale / 50_000**0.5
    assert np.std(drawn) == pytest.approx(scale, rel=0.03)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (0, -0.0)])
def test_ends_out_of_order(name, low, high):
    with pytest.raises(ValueError, match="low must be below high, got low="):
        MECHANISMS[name](1.0, low, high)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_ends_not_finite(name, bad):
    with pytest.raises(ValueError, match="low must be finite"):
        MECHANISMS[name](1.0, bad, 1)
    with pytest.raises(ValueError, match="high must be finite"):
        MECHANISMS[name](1.0, 0, bad)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("bad", ["0", None, True, 1j, [0]])
def test_ends_of_a_wrong_type(name, bad):
    with pytest.raises(TypeError, match="low must be a number, got"):
        MECHANISMS[name](1.0, bad, 10)


@pytest.mark.parametrize("name", DISCRETE)
def test_ends_that_are_not_whole(name):
    with pytest.raises(ValueError, match=rf"low must be a whole number.* for {name}, got 0.5"):
        MECHANISMS[name](1.0, 0.5, 3)
    with pytest.raises(ValueError, match="high must be a whole number of at most 2\\^53"):
        MECHANISMS[name](1.0, 0, 2.0**60)
    with pytest.raises(ValueError, match=r"high - low must be at most 2\^32"):
        MECHANISMS[name](1.0, -1, 2**32)
    assert MECHANISMS[name](1.0, 0.0, 3.0) == MECHANISMS[name](1.0, 0, 3)


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize(("low", "high"), [(-1.7e308, 1.7e308), (0.0, 1e-300)])
def test_ranges_that_doubles_cannot_divide(name, low, high):
    with pytest.raises(
        ValueError, match=r"high - low must be between 1e-290 and 1e\+290 for .*unit"
    ):
        MECHANISMS[name](1.0, low, high)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("bad", [0, 1, None, "yes"])
def test_clip_of_a_wrong_type(name, bad):
    with pytest.raises(TypeError, match="clip must be True or False, got"):
        MECHANISMS[name](1.0, 0, 1, clip=bad)


def test_the_exponential_mechanism_refuses_to_leave_its_range():
    with pytest.raises(ValueError, match=r"clip must be True.*by construction.*LaplaceMechanism"):
        ExponentialMechanism(1.0, 0, 1, clip=False)


BAD_LABELS = {
    "above": ([0, 1, 987654], ValueError, r"must lie in \[0, 400\], but 1 of 3 do not.*clip"),
    "below": ([-1e-3, -2.0, 3.0], ValueError, r"but 2 of 3 do not"),
    "infinite": ([np.inf, -np.inf], ValueError, "but 2 of 2 do not"),
    "nan": ([np.nan, 987654, 2], ValueError, "1 of 3 are NaN"),
    "bool": ([True], TypeError, "must be numbers, got dtype bool"),
    "text": (["987654"], TypeError, "must be numbers, got dtype <U6"),
    "complex": ([1j], TypeError, "must be numbers, got dtype complex128"),
    "object": (np.array([987654], dtype=object), TypeError, "must be numbers, got dtype object"),
    "column": (np.full((3, 1), 987654), ValueError, r"shape \(n,\), got shape \(3, 1\).*ravel"),
    "scalar": (987654, ValueError, r"shape \(n,\), got shape \(\)"),
    "too large for int64": (np.array([2**64 - 1], np.uint64), ValueError, "1 of 1 do not"),
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_bad_labels(mechanism, case):
    labels, error, message = BAD_LABELS[case]
    for call in (
        mechanism.randomize,
        lambda y: mechanism.cdf([0.0], y),
        lambda y: mechanism.likelihood([0.0], y),
    ):
        with pytest.raises(error, match=message) as caught:
            call(labels)
        assert "987654" not in str(caught.value)
        assert "18446744073709551615" not in str(caught.value)


@pytest.mark.parametrize("name", DISCRETE)
def test_labels_that_are_not_whole_are_rounded(name):
    """A refusal would tell which labels are whole, at no charge."""
    mechanism = MECHANISMS[name](1.0, 0, 400)
    found, expected = ([mechanism.likelihood([2.0, 123.0], y)] for y in ([123.25], [123.0]))
    np.testing.assert_array_equal(found, expected)
    assert mechanism.randomize([1.0, 123.25, 2.5]).shape == (3,)


@pytest.mark.parametrize("case", ["column", "text", "nan"])
def test_bad_outputs(mechanism, case):
    outputs, error, _ = BAD_LABELS[case]
    for call in (mechanism.cdf, mechanism.likelihood):
        with pytest.raises(error, match="outputs must"):
            call(outputs, [0.0])


def test_infinite_outputs_are_never_drawn(mechanism):
    assert mechanism.likelihood([np.inf, -np.inf], [0.0]).tolist() == [[0.0], [0.0]]
    assert mechanism.cdf([np.inf, -np.inf], [0.0]).tolist() == [[1.0], [0.0]]


def test_who_has_priors_for_numbers_is_sent_to_optimal_bins(mechanism):
    with pytest.raises(ValueError, match=r"takes no priors.*optimal_bins"):
        mechanism.randomize([0], np.array([1.0]))


def test_priors_are_refused(mechanism):
    with pytest.raises(ValueError, match=rf"{type(mechanism).__name__} takes no priors"):
        mechanism.randomize([0], np.array([1.0]))
    with pytest.raises(ValueError, match="one channel for every prior"):
        mechanism.transition_matrix(np.array([1.0]))
    assert mechanism.public_input is None


def test_no_matrix_for_continuous_unbounded_or_huge_outputs():
    for name in CONTINUOUS:
        with pytest.raises(ValueError, match=rf"{name} are continuous.*likelihood.*cdf"):
            MECHANISMS[name](1.0, 0, 3).transition_matrix()
    for name in DISCRETE:
        with pytest.raises(ValueError, match=r"clip=False have no bound.*likelihood.*cdf"):
            MECHANISMS[name](1.0, 0, 3, clip=False).transition_matrix()
        with pytest.raises(ValueError, match=r"1000001 x 1000001 cells.*likelihood.*cdf"):
            MECHANISMS[name](1.0, 0, 10**6).transition_matrix()


@pytest.mark.parametrize("dtype", ["uint8", "int32", ">i8", "uint64", "float16", "float32", ">f8"])
def test_labels_of_any_real_type_give_the_same_draw(mechanism, dtype, seeded):
    labels = np.arange(3000) % 200
    expected = mechanism.randomize(labels, rng=seeded())
    got = mechanism.randomize(labels.astype(dtype), rng=seeded())
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(mechanism.randomize(labels.tolist(), rng=seeded()), expected)


def test_no_labels_give_no_noisy_labels(mechanism):
    noisy = mechanism.randomize(np.empty(0))
    assert noisy.shape == (0,) and noisy.dtype == np.float64
    assert mechanism.likelihood(np.empty(0), [1, 2]).shape == (0, 2)
    assert mechanism.cdf([1.0], np.empty(0)).shape == (1, 0)


def test_randomize_leaves_its_argument_alone(mechanism, seeded):
    labels = np.arange(1000.0) % 7
    before = labels.copy()
    mechanism.randomize(labels, rng=seeded())
    np.testing.assert_array_equal(labels, before)


def test_contract(mechanism):
    assert checked_mechanism(mechanism, RegressionMechanism) is mechanism
    assert isinstance(mechanism, LabelMechanism)
    assert mechanism.label_range() == (0.0, 400.0)
    assert [type(end) for end in mechanism.label_range()] == [float, float]


@pytest.mark.parametrize("name", DISCRETE)
def test_round_trip_without_clipping_and_from_numpy_scalars(name):
    made = MECHANISMS[name](np.float32(0.5), np.int32(-4), np.int64(2), np.bool_(False))
    config = serialize(made)["config"]
    assert config == {"epsilon": 0.5, "low": -4, "high": 2, "clip": False}
    assert [type(value) for value in made.get_config().values()] == [float, int, int, bool]
    assert deserialize(serialize(made)) == made
