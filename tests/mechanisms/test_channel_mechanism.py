"""A channel that is written as a table, of numbers or classes: what is drawn, what is refused."""

from __future__ import annotations

import functools
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from tf_labeldp import NoisyLabels, PrivacyBudget, PrivateLabels
from tf_labeldp.mechanisms import (
    ChannelMechanism,
    ClassChannel,
    PriorMechanism,
    RandomizedResponse,
    check_mechanism,
    random_bits,
)
from tf_labeldp.scale import ReleaseKey, randomize_batch
from tf_labeldp.vault import Keyed

TABLE = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
MECHANISM = ChannelMechanism(1.0, (0.0, 1.0, 4.0), (-1.0, 1.5, 6.0), TABLE)


class TableOfClasses(ClassChannel):
    """A channel of classes as its author writes it."""

    def __init__(self, epsilon, rows):
        self.epsilon, self.rows, self.num_classes = epsilon, np.asarray(rows).tolist(), len(rows)

    def table(self):
        return self.rows


class TableOfAnswers(TableOfClasses):
    outputs_are_classes = False


def of_numbers(epsilon, table):
    return ChannelMechanism(epsilon, *map(range, np.shape(table)), table)


def of_classes(epsilon, table):
    mechanism = TableOfAnswers(epsilon, table)
    mechanism.transition_matrix()  # It is refused where its table is used.
    return mechanism


KINDS = pytest.mark.parametrize("make", [of_numbers, of_classes])


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
@KINDS
@pytest.mark.holds("mechanisms.ChannelMechanism", "mechanisms.ClassChannel")
def test_guarantee_the_drawn_channel_is_epsilon_dp_in_whole_numbers(make, epsilon, k):
    """Randomized response has no room: every column is at e^epsilon before it is rounded."""
    table = randomized_response(k, epsilon)
    mechanism = make(epsilon, table)
    units = drawn_units(mechanism)
    assert units.min() >= 1 and np.all(units.sum(axis=1) == 1 << 53)
    bound = power_of_e(epsilon)
    for column in units.T.tolist():
        assert max(column) <= bound * min(column)
    # Rounding costs next to nothing, also where entries are below one unit.
    np.testing.assert_allclose(mechanism.transition_matrix(), table, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@KINDS
@pytest.mark.holds("mechanisms.ChannelMechanism", "mechanisms.ClassChannel")
def test_guarantee_holds_just_at_the_worst_ratio_and_is_refused_just_below(make, epsilon):
    rng = np.random.default_rng(51)
    for k, m in ((2, 2), (3, 7), (9, 4), (20, 60)):
        table = random_table(rng, k, m, epsilon)
        exact = worst(table)
        mechanism = make(exact, table)
        bound = power_of_e(exact)
        assert all(max(c) <= bound * min(c) for c in drawn_units(mechanism).T.tolist())
        with pytest.raises(ValueError, match=rf"worst log-ratio .* is {exact:.12g}, but"):
            make(exact - 1e-6, table)


def test_a_ratio_that_is_too_large_by_rounding_alone_is_mended():
    table = randomized_response(4, 1.0)
    matrix = ChannelMechanism(1.0 - 5e-10, range(4), range(4), table).transition_matrix()
    assert worst(matrix) <= 1.0 - 5e-10 + 1e-15
    assert np.abs(matrix - table).max() < 1e-9 and np.all(matrix.sum(axis=1) == 1.0)


@KINDS
def test_an_output_that_one_label_alone_can_have_is_refused(make):
    with pytest.raises(ValueError, match=r"not epsilon-DP: the worst log-ratio .* is inf"):
        make(50.0, ((1.0, 0.0), (0.5, 0.5)))


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


@pytest.mark.parametrize("case", [case for case in BAD_TABLES if case != "shape"])
def test_bad_tables_of_classes(case):
    table, message = BAD_TABLES[case]
    with pytest.raises(ValueError, match=rf"^TableOfClasses\.table\(\) must .*{message}"):
        TableOfClasses(1.0, table).randomize([0])


def test_noisy_classes_have_as_many_columns_as_rows():
    with pytest.raises(ValueError, match=r"table\(\) must have shape \(2, 2\), got \(2, 3\)"):
        TableOfClasses(1.0, TABLE[:2]).transition_matrix()


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_bad_numbers(name):
    for numbers, message in (
        ((0.0, 2.0, 1.0), "must be strictly increasing, but 2 at place 1"),
        ((0.0, 1.0, np.inf), "must be finite, but 1 of 3"),
    ):
        given = {"inputs": (0, 1, 4), "outputs": (-1, 1.5, 6), name: numbers}
        with pytest.raises(ValueError, match=f"{name} {message}"):
            ChannelMechanism(1.0, probabilities=TABLE, **given)


def test_classes_are_drawn_as_numbers_are(seeded):
    labels = np.arange(10_000) % 3
    numbers = ChannelMechanism(1.0, range(3), range(3), TABLE).randomize(labels, rng=seeded())
    drawn = TableOfClasses(1.0, TABLE).randomize(labels, rng=seeded())
    assert drawn.dtype == np.int64 and drawn.tolist() == numbers.tolist()


def test_a_channel_of_classes_has_the_targets_of_its_table_and_opens_from_its_files(tmp_path):
    table = random_table(np.random.default_rng(54), 3, 5, 2.0)
    mechanism = TableOfAnswers(2.0, table)
    assert check_mechanism(mechanism) and mechanism.num_outputs == 5
    opened = functools.partial(
        PrivateLabels, np.arange(99) % 3, 3, budget=PrivacyBudget(2.0), store=tmp_path / "store"
    )
    noisy = opened().randomize(mechanism, key="answers")
    np.testing.assert_allclose(
        noisy.posterior(np.full(3, 1 / 3)), (table / table.sum(axis=0)).T[noisy.values], rtol=1e-12
    )
    # The mean of debiased targets under each label is its one-hot code.
    every = NoisyLabels(np.arange(5), np.arange(5), mechanism)
    np.testing.assert_allclose(table @ every.debiased(), np.eye(3), atol=1e-12)
    noisy.save(tmp_path / "noisy")
    again = NoisyLabels.load(tmp_path / "noisy")
    assert again.values.tolist() == noisy.values.tolist() and again.guarantee().epsilon == 2.0
    for found in (again.mechanism, opened().mechanism("answers")):
        assert type(found) is TableOfAnswers and found.get_config() == mechanism.get_config()


def test_a_channel_of_classes_is_drawn_by_a_key(tmp_path):
    mechanism, key = TableOfClasses(1.0, TABLE), ReleaseKey.create(tmp_path / "labels.key")
    ids, labels = np.arange(3000), np.arange(3000) % 3
    key.register("first", mechanism)
    drawn = randomize_batch(ids, labels, mechanism, key.secret, "first")
    part = randomize_batch(ids[700:900], labels[700:900], mechanism, key.secret, "first")
    assert drawn[700:900].tolist() == part.tolist()
    assert "its author's claim" in key.statement("first")
    options = {"budget": PrivacyBudget(1.0), "store": tmp_path / "store"}
    vault = PrivateLabels(labels, 3, draws=Keyed(ids), **options)
    assert "its author's claim" in str(vault.randomize(mechanism).guarantee())


def test_a_draw_of_its_own_takes_a_plug_in_its_keyed_draws():
    class WithOwnDraw(TableOfClasses):
        def randomize(self, labels, public=None, *, rng=None):
            return super().randomize(labels, public, rng=rng)

    class WithOwnNoise(TableOfClasses):
        def _noisy(self, labels, rng):
            return super()._noisy(labels, None)

    class WithCopiedName(RandomizedResponse):
        @functools.wraps(RandomizedResponse.randomize)
        def randomize(self, labels, priors=None, *, rng=None):
            return super().randomize(labels, priors)

    class ByPrior(PriorMechanism):
        def set_sizes(self, priors):
            return np.full(len(priors), 2)

    own = (WithOwnDraw(1.0, TABLE), WithOwnNoise(1.0, TABLE), WithCopiedName(1.0, 3))
    for mechanism in own:
        name = type(mechanism).__name__
        with pytest.raises(TypeError, match=rf"keyed draws need .*TableOfClasses.*, got {name}"):
            randomize_batch([1], [0], mechanism, bytes(32), "first")
    drawn = randomize_batch([1], [0], ByPrior(1.0, 3), bytes(32), "first", np.full(3, 1 / 3))
    assert drawn.shape == (1,)


def test_the_next_draw_is_by_the_epsilon_that_it_is_charged():
    mechanism = TableOfClasses(1.0, TABLE)
    mechanism.randomize([0, 1])
    mechanism.epsilon = 0.5
    with pytest.raises(ValueError, match="not epsilon-DP"):
        mechanism.randomize([0, 1])
