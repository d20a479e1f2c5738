"""A finite channel given by its table: what is drawn, what is refused."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from tf_labeldp.mechanisms import ChannelMechanism, random_bits

TABLE = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
MECHANISM = ChannelMechanism(1.0, (0.0, 1.0, 4.0), (-1.0, 1.5, 6.0), TABLE)


def random_table(rng, k, m, epsilon):
    """A channel whose worst log-ratio is epsilon or a little less."""
    table = np.exp(rng.uniform(0.0, epsilon / 2, (k, m))) * rng.dirichlet(np.ones(m))
    return table / table.sum(axis=1, keepdims=True)


def randomized_response(k, epsilon):
    table = np.full((k, k), np.exp(-epsilon))
    np.fill_diagonal(table, 1.0)
    return table / table.sum(axis=1, keepdims=True)


def worst(table):
    return float(np.max(np.log(table.max(axis=0)) - np.log(table.min(axis=0))))


def drawn_units(mechanism):
    """The whole numbers of 2^-53 that the draws compare with, which doubles hold exactly."""
    return (mechanism.transition_matrix() * 2.0**53).astype(np.int64)


def power_of_e(epsilon):
    """A bound from below on e^epsilon for the double epsilon itself."""
    with localcontext() as context:
        context.prec = 60
        return Fraction(Decimal(epsilon).exp()) * (1 - Fraction(1, 10**40))


@pytest.mark.parametrize("epsilon", [1e-9, 0.3, 5.0, 36.0, 40.0, 700.0])
@pytest.mark.parametrize("k", [2, 17])
@pytest.mark.holds("mechanisms.ChannelMechanism")
def test_guarantee_the_drawn_channel_is_epsilon_dp_in_whole_numbers(epsilon, k):
    """Randomized response has no room: every column is at e^epsilon before it is rounded."""
    table = randomized_response(k, epsilon)
    mechanism = ChannelMechanism(epsilon, range(k), range(k), table)
    units = drawn_units(mechanism)
    assert units.min() >= 1 and np.all(units.sum(axis=1) == 1 << 53)
    bound = power_of_e(epsilon)
    for column in units.T.tolist():
        assert max(column) <= bound * min(column)
    # Rounding costs next to nothing, also where entries are below one unit.
    np.testing.assert_allclose(mechanism.transition_matrix(), table, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.holds("mechanisms.ChannelMechanism")
def test_guarantee_holds_just_at_the_worst_ratio_and_is_refused_just_below(epsilon):
    rng = np.random.default_rng(51)
    for k, m in ((2, 2), (3, 7), (9, 4), (20, 60)):
        table = random_table(rng, k, m, epsilon)
        exact = worst(table)
        mechanism = ChannelMechanism(exact, range(k), range(m), table)
        bound = power_of_e(exact)
        assert all(max(c) <= bound * min(c) for c in drawn_units(mechanism).T.tolist())
        with pytest.raises(ValueError, match=rf"worst log-ratio .* is {exact:.12g}, but"):
            ChannelMechanism(exact - 1e-6, range(k), range(m), table)


def test_a_ratio_that_is_too_large_by_rounding_alone_is_mended():
    table = randomized_response(4, 1.0)
    matrix = ChannelMechanism(1.0 - 5e-10, range(4), range(4), table).transition_matrix()
    assert worst(matrix) <= 1.0 - 5e-10 + 1e-15
    assert np.abs(matrix - table).max() < 1e-9 and np.all(matrix.sum(axis=1) == 1.0)


def test_an_output_that_one_label_alone_can_have_is_refused():
    with pytest.raises(ValueError, match=r"not epsilon-DP: the worst log-ratio .* is inf"):
        ChannelMechanism(50.0, (0, 1), (0, 1), ((1.0, 0.0), (0.5, 0.5)))


def test_an_output_of_probability_zero_is_never_drawn():
    mechanism = ChannelMechanism(1.0, (0, 1), (0, 1, 2), ((0.6, 0.0, 0.4), (0.4, 0.0, 0.6)))
    drawn = mechanism.randomize(np.zeros(10_000))
    assert set(drawn.tolist()) == {0.0, 2.0}


def test_every_random_integer_leads_to_the_output_of_its_share(monkeypatch):
    """Those at the ends of each output's share, of 2^53 integers in all."""
    mechanism = ChannelMechanism(1.2, (0.0, 1.0, 4.0), (-1.0, 1.5, 6.0), TABLE)
    for label, row in zip(mechanism.inputs, drawn_units(mechanism), strict=True):
        ends = np.cumsum(row)
        asked = np.array([[end - 1, end] for end in (0, *ends)]).ravel()[1:-1].astype(np.uint64)
        monkeypatch.setattr(random_bits, "uniform_integers", lambda n, rng, a=asked: a.copy())
        drawn = mechanism.randomize(np.full(asked.size, label))
        assert drawn.tolist() == np.repeat(mechanism.outputs, 2).tolist()


def test_draws_follow_the_table(chi_square_rejects, seeded):
    rng = np.random.default_rng(52)
    table = random_table(rng, 4, 9, 2.0)
    mechanism = ChannelMechanism(2.0, range(4), range(9), table)
    labels = np.random.default_rng(53).integers(0, 4, 400_000)
    drawn = mechanism.randomize(labels, rng=seeded())
    assert drawn.dtype == np.float64
    counts = np.bincount(9 * labels + drawn.astype(int), minlength=36).reshape(4, 9)
    assert not chi_square_rejects(counts, mechanism.transition_matrix())
    assert chi_square_rejects(counts, random_table(rng, 4, 9, 2.0))
    assert chi_square_rejects(counts[::-1], mechanism.transition_matrix())
    assert np.array_equal(drawn, mechanism.randomize(labels, rng=seeded()))


def test_secure_draws_follow_the_table(chi_square_rejects):
    """Not repeatable: fails once in a million runs."""
    drawn = MECHANISM.randomize(np.full(60_000, 1.0))
    counts = np.array([np.sum(drawn == output) for output in MECHANISM.outputs])
    assert not chi_square_rejects(counts, TABLE[1])
    assert chi_square_rejects(counts, TABLE[0])


def test_a_label_counts_as_the_nearest_input():
    labels = np.array([0.0, 0.5, 0.51, 2.5, 2.51, 4.0])
    likelihood = MECHANISM.likelihood([1.5], labels)[0]
    assert likelihood.tolist() == TABLE[[0, 0, 1, 1, 2, 2], 1].tolist()
    always = ChannelMechanism(40.0, (0.0, 1.0), (0.0, 1.0), ((1 - 1e-17, 1e-17), (1e-17, 1.0)))
    assert always.randomize([0.0, 0.5, 0.51, 1.0]).tolist() == [0.0, 0.0, 1.0, 1.0]


def test_likelihood_is_the_transposed_channel_and_zero_elsewhere():
    assert "0.25" not in repr(MECHANISM)  # a table of thousands does not belong in a message
    np.testing.assert_array_equal(
        MECHANISM.likelihood(MECHANISM.outputs, MECHANISM.inputs), MECHANISM.transition_matrix().T
    )
    strange = MECHANISM.likelihood([-9.0, 0.0, 1.5, 99.0, np.inf], [1.0])
    assert strange.tolist() == [[0.0], [0.0], [0.5], [0.0], [0.0]]


@pytest.mark.parametrize("loss", ["squared_error", "absolute_error", "poisson"])
def test_expected_loss_by_enumeration(loss):
    mechanism = ChannelMechanism(1.0, (0.0, 1.0, 4.0), (0.5, 1.5, 6.0), TABLE)
    formula = {
        "squared_error": lambda y_hat, y: (y_hat - y) ** 2,
        "absolute_error": lambda y_hat, y: abs(y_hat - y),
        "poisson": lambda y_hat, y: y_hat - y * np.log(y_hat),
    }[loss]
    prior = (0.2, 0.3, 0.5)
    total = sum(
        prior[y] * TABLE[y, o] * formula(mechanism.outputs[o], mechanism.inputs[y])
        for y in range(3)
        for o in range(3)
    )
    assert mechanism.expected_loss(prior, loss) == pytest.approx(total, rel=1e-13)


BAD_TABLES = {
    "shape": (TABLE[:2], r"must have shape \(3, 3\), got \(2, 3\)"),
    "nan": (np.where(TABLE == 0.5, np.nan, TABLE), "finite and not negative"),
    "negative": (TABLE - [[0.3, 0, -0.3]], "finite and not negative"),
    "sum": (TABLE * [[1.0], [1.0], [1 + 1e-7]], "sum to one .* a sum is off by 1e-07"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables(case):
    table, message = BAD_TABLES[case]
    with pytest.raises(ValueError, match=message):
        ChannelMechanism(1.0, (0, 1, 4), (-1, 1.5, 6), table)


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_bad_numbers(name):
    for numbers, message in (
        ((0.0, 2.0, 1.0), "must be strictly increasing, but 2 at place 1"),
        ((0.0, 1.0, np.inf), "must be finite, but 1 of 3"),
    ):
        given = {"inputs": (0, 1, 4), "outputs": (-1, 1.5, 6), name: numbers}
        with pytest.raises(ValueError, match=f"{name} {message}"):
            ChannelMechanism(1.0, probabilities=TABLE, **given)
