"""Algorithm 3 of ghazi2023: its cost, its noisy labels, and its errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.estimation.priors import ordered_prior
from tf_labeldp.mechanisms import (
    ChannelMechanism,
    HistogramMechanism,
    LaplaceMechanism,
    RROnBins,
    optimal_bins,
)
from tf_labeldp.plugins import histogram_prior
from tf_labeldp.vault import LabelRandomizer, LabelStoreError, Numbers, PrivateLabels

AMOUNTS = np.random.default_rng(6).gamma(1.0, 80.0, 5000).clip(0.0, 400.0)


def make(labels=AMOUNTS, epsilon=1.0, **arguments):
    arguments = {"kind": Numbers(0.0, 400.0), **arguments}
    return PrivateLabels(labels, budget=PrivacyBudget(epsilon), **arguments)


def spent_on_prior(noisy):
    return sum(receipt.charge.epsilon for receipt in noisy.priors.receipts)


@pytest.mark.parametrize("epsilon", [0.05, 8.0])
@pytest.mark.holds("vault.LabelRandomizer")
def test_theorem_6_prior_and_draw_together_are_epsilon(epsilon):
    vault = make(epsilon=epsilon)
    noisy = vault.randomize(LabelRandomizer(epsilon))
    assert vault.guarantee().epsilon == pytest.approx(epsilon, rel=1e-12)
    assert (
        noisy.guarantee() == vault.guarantee()
    )  # of the prior too, without which there is no draw
    assert [one.kind for one in noisy.receipts] == ["release", "draw"]
    assert noisy.mechanism.epsilon + spent_on_prior(noisy) == pytest.approx(epsilon, rel=1e-12)
    assert set(noisy.values) <= set(noisy.mechanism.outputs)
    # From the other side: each of the two costs something, and a vault with less refuses.
    assert 0.0 < spent_on_prior(noisy) < epsilon
    assert noisy.priors.guarantee().epsilon == spent_on_prior(noisy)
    short = make(epsilon=epsilon * (1.0 - 1e-6))
    with pytest.raises(BudgetExceededError):
        short.randomize(LabelRandomizer(epsilon))
    assert short.guarantee().epsilon == 0.0 and short.receipts == ()


@pytest.mark.holds("vault.LabelRandomizer")
def test_theorem_6_is_tight_on_the_worst_pair():
    """Two values, ten known labels of each: the ratio of (histogram, draw) reaches e^epsilon."""
    values, prior_epsilon, rest, known = (0.0, 1.0), 0.4, 1.1, 10
    ratio = math.exp(-prior_epsilon / 2.0)

    def log_mass(zeros, ones):  # of the noise that test_histogram.py finds HistogramMechanism has
        return (abs(zeros) + abs(ones)) * math.log(ratio)

    worst = 0.0
    for zeros in range(5, 16):
        for ones in range(5, 16):
            histogram = log_mass(zeros - known - 1, ones - known) - log_mass(
                zeros - known, ones - known - 1
            )
            prior = ordered_prior(np.array([zeros, ones]), 2 * known + 1, 1.0)
            matrix = optimal_bins(values, prior, rest).transition_matrix()
            worst = max(worst, np.max(np.abs(histogram + np.log(matrix[0] / matrix[1]))))
    assert worst == pytest.approx(prior_epsilon + rest, abs=1e-12)


def test_the_split_is_four_times_that_of_theorem_7():
    randomizer = LabelRandomizer(1.0, values=tuple(np.linspace(0.0, 400.0, 401)))
    values, prior_epsilon = randomizer.split(1_000_000, 0.0, 400.0)
    assert values.size == 401 and prior_epsilon == 4.0 * math.sqrt(401 / 1_000_000)
    values, prior_epsilon = LabelRandomizer(3.0).split(100_000, 0.0, 400.0)
    assert values.size == 64 and prior_epsilon == 4.0 * math.sqrt(64 / 100_000)
    values, prior_epsilon = LabelRandomizer(1.0, whole_numbers=True).split(5000, 0.0, 7.0)
    assert values.tolist() == list(range(8)) and prior_epsilon == 4.0 * math.sqrt(8 / 5000)


def test_the_prior_of_few_labels_has_a_quarter_of_epsilon():
    for epsilon, size in ((0.05, 5000), (0.2, 5000), (1e9, 1), (1.0, 1)):
        assert LabelRandomizer(epsilon).split(size, 0.0, 400.0)[1] == pytest.approx(
            min(epsilon / 4.0, 4.0 * math.sqrt(64 / size))
        )


def test_a_split_by_hand():
    vault = make()
    settings = {"prior_epsilon": 0.3, "max_values": 200}
    noisy = vault.randomize(LabelRandomizer(1.0, **settings), key="x")
    assert isinstance(vault.mechanism("x/prior"), HistogramMechanism)
    assert spent_on_prior(noisy) == 0.3 and noisy.mechanism.epsilon == 0.7
    assert noisy.priors.values.size == noisy.priors.probabilities.size == 200


def test_a_split_with_nothing_left():
    with pytest.raises(ValueError, match=r"leaves nothing of epsilon=1 for the draw"):
        LabelRandomizer(1.0, prior_epsilon=1.0)


def test_a_public_prior_costs_nothing():
    values = tuple(np.arange(0.0, 401.0, 50.0))
    prior = tuple(np.full(9, 1 / 9))
    vault = make(epsilon=0.5)
    noisy = vault.randomize(LabelRandomizer(0.5, values=values, prior=prior))
    assert noisy.priors.receipts == () and noisy.mechanism == optimal_bins(values, prior, 0.5)
    np.testing.assert_array_equal(noisy.priors.probabilities, prior)
    np.testing.assert_array_equal(noisy.priors.values, values)
    assert vault.guarantee().epsilon == noisy.guarantee().epsilon == 0.5


@pytest.mark.parametrize("loss", ["absolute_error", "poisson"])
def test_bins_are_optimal_for_the_prior_that_was_released(loss):
    noisy = make(epsilon=2.0, insecure_seed=1).randomize(LabelRandomizer(2.0, loss))
    values, prior = noisy.priors.values, noisy.priors.probabilities
    assert noisy.mechanism == optimal_bins(values, prior, noisy.mechanism.epsilon, loss)
    exact = np.bincount(np.searchsorted(values, AMOUNTS).clip(0, values.size - 1))
    assert np.abs(prior[:5] - exact[:5] / AMOUNTS.size).max() < 0.1


def _shapes(rng, size=100_000):
    """Labels whose histograms are empty for the most part: name, labels, high, whole."""
    claims = np.where(rng.random(size) < 0.1, rng.lognormal(6.0, 1.2, size), 0.0)
    yield rng.gamma(1.0, 80.0, size).clip(0.0, 2000.0), 2000.0, False
    yield claims.clip(0.0, 5000.0), 5000.0, False
    yield rng.poisson(0.15, size).clip(0, 7).astype(float), 7.0, True


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_noisy_labels_add_up(epsilon):
    """Totals were 21 to 43 % too high, where negative counts became zero."""
    for labels, high, whole in _shapes(np.random.default_rng(11)):
        randomizer = LabelRandomizer(epsilon, whole_numbers=whole)
        means, scores = [], []
        for seed in range(20):
            vault = make(labels, epsilon, kind=Numbers(0.0, high), insecure_seed=seed)
            noisy = vault.randomize(randomizer)
            means.append([noisy.values.mean(), noisy.debiased().mean()])
            if seed < 8:
                total, error = randomizer.total(noisy)
                assert total == pytest.approx(noisy.debiased().sum(), rel=1e-12)
                scores.append((total - labels.sum()) / error)
        off = np.array(means) / labels.mean() - 1.0
        bias, error = off.mean(axis=0), off.std(axis=0, ddof=1) / math.sqrt(len(off))
        assert np.all(np.abs(bias) < [0.03, 0.02] + 3.0 * error) and np.all(error < 0.03)
        # chi-squared of eight, at 1 in 10^4 on each side, with room for the bias.
        assert 0.9 < np.sum(np.square(scores)) < 45.0
        # Before: negative counts to zero on equally spaced values, by Theorem 7's split.
        values = np.linspace(0.0, high, 8 if whole else 64)
        histogram = HistogramMechanism(math.sqrt(values.size / labels.size), values=tuple(values))
        counts = np.tile(histogram.exact_counts(labels), (20, 1))
        released = histogram.add_noise(counts, rng=np.random.default_rng(0))
        assert np.mean(histogram_prior(released) @ values) > 1.05 * labels.mean()


@pytest.mark.holds("vault.LabelRandomizer.total")
def test_a_total_is_of_its_own_noisy_labels():
    noisy = make(epsilon=1.0).randomize(LabelRandomizer(1.0))
    for other in (
        LabelRandomizer(2.0).total,
        LabelRandomizer(1.0, values=(0.0, 400.0), prior=(0.5, 0.5)).total,
    ):
        with pytest.raises(ValueError, match="drawn by this LabelRandomizer of epsilon"):
            other(make(epsilon=1.0).randomize(LaplaceMechanism(1.0, 0.0, 400.0)))
    with pytest.raises(ValueError, match="drawn by this LabelRandomizer of epsilon=2"):
        LabelRandomizer(2.0).total(noisy)
    values = tuple(np.linspace(0.0, 400.0, 65))
    known = np.bincount(np.rint(AMOUNTS / 6.25).astype(int), minlength=65) / AMOUNTS.size
    public = LabelRandomizer(1.0, values=values, prior=tuple(known))
    total, error = public.total(make(epsilon=1.0, insecure_seed=3).randomize(public))
    assert abs(total - AMOUNTS.sum()) < 4.0 * error < 0.2 * AMOUNTS.sum()


@pytest.mark.holds("vault.LabelRandomizer", "vault.LabelRandomizer.total")
def test_totals_of_groups_add_up_by_unbiased_labels_and_not_by_debiased_bins(tmp_path):
    """Ratings of two groups with other laws: bins take each label for the mean of its bin."""
    rng, size = np.random.default_rng(8), 60_000
    group = np.arange(size) % 2
    ratings = np.clip(np.round(rng.normal(3.0 + (group - 0.5), 1.1)), 1, 5)
    # Two standard errors of a group's mean: 1.3 (bins) and 2.2 (unbiased) over sqrt(30,000).
    limits, kind = {False: 0.015, True: 0.025}, {"kind": Numbers(1.0, 5.0)}
    for unbiased, limit in limits.items():
        randomizer = LabelRandomizer(2.0, whole_numbers=True, unbiased=unbiased)
        vault = make(ratings, 2.0, insecure_seed=4, store=tmp_path / f"{unbiased}", **kind)
        noisy = vault.randomize(randomizer)
        assert noisy.guarantee().epsilon == vault.guarantee().epsilon == pytest.approx(2.0)
        off = [(noisy.debiased() - ratings)[group == one].mean() for one in (0, 1)]
        assert (max(np.abs(off)) < limit) == unbiased
        total, error = randomizer.total(noisy)
        assert total == pytest.approx(noisy.debiased().sum())
        assert abs(total - ratings.sum()) < 4.0 * error < 0.02 * ratings.sum()
    assert isinstance(noisy.mechanism, ChannelMechanism) and len(noisy.mechanism.outputs) <= 10
    np.testing.assert_array_equal(noisy.debiased(), noisy.values)
    again = make(ratings, 2.0, insecure_seed=4, store=tmp_path / "True", **kind)
    np.testing.assert_array_equal(again.randomize(randomizer).values, noisy.values)
    with pytest.raises(LabelStoreError, match="made with other settings"):
        again.randomize(LabelRandomizer(2.0, whole_numbers=True))
    with pytest.raises(ValueError, match="expected loss='squared_error' with unbiased=True"):
        LabelRandomizer(1.0, "poisson", unbiased=True)


def test_killed_between_prior_and_draw(tmp_path, monkeypatch):
    """A second run reads the prior that was paid for, draws once, and a third reads both."""
    first = make(store=tmp_path / "s")

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tf_labeldp.vault._label_randomizer.optimal_bins", killed)
    with pytest.raises(KeyboardInterrupt):
        first.randomize(LabelRandomizer(1.0))
    monkeypatch.undo()
    spent = first.guarantee().epsilon
    assert 0.0 < spent < 1.0

    second = make(store=tmp_path / "s")
    assert second.guarantee().epsilon == spent
    noisy = second.randomize(LabelRandomizer(1.0))
    assert second.guarantee().epsilon == pytest.approx(1.0)
    third = make(store=tmp_path / "s")
    again = third.randomize(LabelRandomizer(1.0))
    np.testing.assert_array_equal(again.values, noisy.values)
    np.testing.assert_array_equal(again.priors.probabilities, noisy.priors.probabilities)
    np.testing.assert_array_equal(again.posterior(), noisy.posterior())
    assert [one.id for one in again.receipts] == [one.id for one in noisy.receipts]
    assert again.guarantee() == noisy.guarantee()
    assert third.guarantee().epsilon == pytest.approx(1.0)


def test_a_name_of_another_draw_is_refused_before_anything_is_paid():
    vault = make(epsilon=2.0)
    vault.randomize(LaplaceMechanism(1.0, 0.0, 400.0), key="x")
    with pytest.raises(LabelStoreError, match="made with other settings"):
        vault.randomize(LabelRandomizer(1.0), key="x")
    assert vault.guarantee().epsilon == 1.0


def test_a_stored_draw_survives_another_choice_among_equal_medians(tmp_path, monkeypatch):
    """Bins of the same loss, of which another machine's rounding may pick others."""
    labels = np.repeat(np.arange(4.0), 500)
    arguments = {"labels": labels, "epsilon": 50.0, "store": tmp_path / "s"}
    arguments["kind"] = Numbers(0.0, 3.0)
    randomizer = LabelRandomizer(50.0, "absolute_error", whole_numbers=True)

    def tied(bins):
        return lambda values, prior, epsilon, loss: RROnBins(epsilon, values, (0.0, 3.0), bins)

    monkeypatch.setattr("tf_labeldp.vault._label_randomizer.optimal_bins", tied((0, 0, 1, 1)))
    monkeypatch.setattr(
        "tf_labeldp.vault.noisy_labels.ordered_prior", lambda *_: np.array([0.25] * 4)
    )
    noisy = make(**arguments).randomize(randomizer)
    monkeypatch.setattr("tf_labeldp.vault._label_randomizer.optimal_bins", tied((0, 1, 1, 1)))
    with pytest.raises(LabelStoreError, match="not optimal"):
        make(**arguments).randomize(randomizer)
    monkeypatch.setattr(
        "tf_labeldp.vault.noisy_labels.ordered_prior", lambda *_: np.array([0.5, 0.0, 0.0, 0.5])
    )
    again = make(**arguments).randomize(randomizer)
    np.testing.assert_array_equal(again.values, noisy.values)


def test_a_stored_draw_survives_another_rounding_of_its_outputs(tmp_path, monkeypatch):
    noisy = make(store=tmp_path / "s").randomize(LabelRandomizer(1.0))

    def other_machine(*arguments):
        found = optimal_bins(*arguments)
        outputs = tuple(np.nextafter(found.outputs, 0.0))
        return type(found)(found.epsilon, found.inputs, outputs, found.bin_of_input)

    monkeypatch.setattr("tf_labeldp.vault._label_randomizer.optimal_bins", other_machine)
    again = make(store=tmp_path / "s").randomize(LabelRandomizer(1.0))
    assert again.mechanism == noisy.mechanism
    np.testing.assert_array_equal(again.values, noisy.values)


def test_a_stored_draw_of_other_settings_is_refused(tmp_path):
    make(epsilon=2.0, store=tmp_path / "s").randomize(LabelRandomizer(2.0))
    again = make(epsilon=2.0, store=tmp_path / "s")
    for other in ({"loss": "absolute_error"}, {"max_values": 20}, {"prior_epsilon": 0.5}):
        with pytest.raises(LabelStoreError, match="exists and was made with other settings"):
            again.randomize(LabelRandomizer(2.0, **other))
    assert again.guarantee().epsilon == pytest.approx(2.0)
    with pytest.raises(BudgetExceededError):
        again.randomize(LabelRandomizer(2.0), key="another")


def test_bad_arguments_are_refused_at_once():
    for arguments, message in [
        ({"epsilon": 0.0}, "epsilon must be finite and above zero"),
        ({"epsilon": 1.0, "values": (1.0, 0.0)}, "values must be strictly increasing"),
        ({"epsilon": 1.0, "prior": (0.5, 0.5)}, "needs its values"),
        (
            {"epsilon": 1.0, "prior": (0.5, 0.5), "values": (0, 1), "prior_epsilon": 0.1},
            "no prior_epsilon",
        ),
        ({"epsilon": 1.0, "prior": (0.5, 0.6), "values": (0, 1)}, "must sum to one"),
        ({"epsilon": 1.0, "loss": "mse"}, "loss must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            LabelRandomizer(**arguments)


def test_values_that_do_not_cover_the_range():
    with pytest.raises(ValueError, match="values reach from 0 to 300, the labels from 0 to 400"):
        make().randomize(LabelRandomizer(1.0, values=(0.0, 300.0)))


def test_labels_that_are_classes():
    vault = PrivateLabels([0, 1], num_classes=2, budget=PrivacyBudget(1.0))
    with pytest.raises(ValueError, match="LabelRandomizer is for numbers"):
        vault.randomize(LabelRandomizer(1.0))


def test_it_draws_from_a_vault_alone_and_for_all_of_it():
    assert not hasattr(LabelRandomizer(1.0), "randomize")
    vault = make()
    for arguments, message in (
        ({"indices": [0, 1]}, "LabelRandomizer draws for all examples; leave indices=None"),
        ({"priors": [0.5, 0.5]}, r"r takes no priors.*r\(values=..., prior=...\) a public"),
        ({"clusters": np.zeros(5000, int)}, "LabelRandomizer takes no clusters"),
        ({"features": np.zeros((5000, 2))}, "LabelRandomizer takes no features"),
    ):
        with pytest.raises(ValueError, match=message):
            vault.randomize(LabelRandomizer(1.0), **arguments)
    assert vault.guarantee().epsilon == 0.0


def test_poisson_with_negative_labels_spends_nothing():
    vault = make(np.array([-1.0, 2.0]), kind=Numbers(-1.0, 400.0))
    with pytest.raises(ValueError, match="Poisson loss needs labels of at least zero"):
        vault.randomize(LabelRandomizer(1.0, "poisson"))
    assert vault.guarantee().epsilon == 0.0
