"""ClusterRandomizedResponse: distributions, settings, costs, the vault, and bad input."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.accounting import BudgetExceededError, Charge, PrivacyBudget
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.plugins import PriorResampling
from tf_labeldp.vault import (
    ClusterRandomizedResponse,
    LabelStoreError,
    NoisyLabels,
    PrivateLabels,
)

N, K = 600, 4
BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)
CLUSTERS = np.random.default_rng(1).integers(0, 5, N)
LABELS = (CLUSTERS + (np.random.default_rng(2).uniform(size=N) < 0.2)) % K
ADAPTIVE = ClusterRandomizedResponse(K, 0.05, 4.0, draw_epsilon=1.0)
FIXED = ClusterRandomizedResponse(K, 0.05, 4.0, resampling_probability=0.9)


@pytest.fixture
def vault():
    """Makes a vault of the labels; keywords replace the arguments."""

    def make(epsilon=10.0, **arguments):
        arguments = {"labels": LABELS, "num_classes": K, **arguments}
        return PrivateLabels(**{"budget": PrivacyBudget(epsilon), **arguments})

    return make


def drawn(mechanism, labels=LABELS, clusters=CLUSTERS, seed=None):
    """Noisy labels from a vault of these labels, whose budget is large enough for anything."""
    vault = PrivateLabels(
        labels, mechanism.num_classes, budget=PrivacyBudget(1e9), insecure_seed=seed
    )
    return vault.randomize(mechanism, clusters=clusters)


def lambdas(noisy):
    """The resampling probability of each cluster."""
    return noisy.mechanism.resampling_probabilities(noisy.priors.probabilities)


def algorithm_1(counts, size, tau):
    """Lines 3 to 20, as they stand, for one cluster."""
    q = [max(tau, min(1.0, count / size)) for count in counts]
    delta = 1.0 - math.fsum(q)
    xi = [value - tau if delta < 0.0 else 1.0 - value for value in q]
    return [value + x / math.fsum(xi) * delta for value, x in zip(q, xi, strict=True)]


@st.composite
def noisy_clusters(draw):
    """Counts (C, K) with any noise, sizes (C,), and a threshold."""
    classes, clusters = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    count = st.floats(-1e6, 1e6) | st.floats(-1.0, 30.0) | st.just(0.0)
    counts = draw(st.lists(count, min_size=classes * clusters, max_size=classes * clusters))
    sizes = draw(st.lists(st.integers(0, 50), min_size=clusters, max_size=clusters))
    tau = draw(st.floats(0.0, 1.0)) / classes
    return np.array(counts).reshape(clusters, classes), np.array(sizes), min(tau, 1.0 / classes)


@BOUNDED
@given(noisy_clusters())
@pytest.mark.holds("mechanisms.PriorResampling.cluster_distributions")
def test_theorem_6_distributions_are_in_their_range_and_sum_to_one(case):
    counts, sizes, tau = case
    rows = PriorResampling.cluster_distributions(counts, sizes, tau)
    assert rows.shape == counts.shape
    assert rows.min() >= tau and rows.max() <= 1.0
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(rows[sizes == 0], 1.0 / counts.shape[1])


@BOUNDED
@given(noisy_clusters())
def test_distributions_are_those_of_the_algorithm_line_by_line(case):
    counts, sizes, tau = case
    tau = min(tau, 0.999 / counts.shape[1])  # where the lines divide by zero there is one answer
    rows = PriorResampling.cluster_distributions(counts, sizes, tau)
    for row, count, size in zip(rows, counts, sizes, strict=True):
        if size:
            np.testing.assert_allclose(row, algorithm_1(count, size, tau), rtol=0, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 49])
def test_a_threshold_of_one_over_k_is_uniform(classes):
    counts = np.random.default_rng(3).normal(size=(20, classes), scale=30)
    rows = PriorResampling.cluster_distributions(counts, np.full(20, 10), 1.0 / classes)
    np.testing.assert_array_equal(rows, 1.0 / classes)


@pytest.mark.parametrize("extreme", [[1e308, -1e308, 0.0], [-9.0] * 3, [1e300] * 3])
def test_extreme_noise(extreme):
    for tau in (0.0, 1e-300, 0.1, 0.333333333, 1 / 3):
        rows = PriorResampling.cluster_distributions(np.array([extreme]), np.array([3]), tau)
        assert rows.min() >= tau and abs(rows.sum() - 1.0) <= 1e-12


@pytest.mark.parametrize(
    ("sigma", "resampled"), [(0.5, 0.2), (4.0, 0.9), (4.0, 1.0), (math.inf, 0.2)]
)
@pytest.mark.holds("vault.ClusterRandomizedResponse")
def test_the_promise_is_two_over_sigma_and_the_draw_at_the_threshold(sigma, resampled, vault):
    tau = 0.25 if math.isinf(sigma) else 0.05
    mechanism = ClusterRandomizedResponse(4, tau, sigma, resampled, bias_correction=0.0)
    assert mechanism.distribution_epsilon == 2.0 / sigma
    draw = math.log(1.0 + (1.0 - resampled) / (resampled * tau))
    assert mechanism.epsilon == pytest.approx(2.0 / sigma + draw, rel=1e-12)
    charges = [Charge.of(part) for part in mechanism.parts(vault()).values()]
    assert math.fsum(one.epsilon for one in charges) == mechanism.epsilon
    assert all(one.delta == 0.0 for one in charges)
    event = ComposedDpEvent(tuple(one.event for one in charges))
    assert Charge.of_event(event, 0.0).epsilon == pytest.approx(mechanism.epsilon, rel=1e-3)


@pytest.mark.parametrize(("epsilon", "classes"), [(0.01, 10), (8.0, 2)])
def test_corollary_1_is_randomized_response(epsilon, classes):
    mechanism = ClusterRandomizedResponse.uniform(epsilon, classes)
    uniform = np.full(classes, 1.0 / classes)
    np.testing.assert_allclose(
        mechanism.transition_matrix(uniform),
        RandomizedResponse(epsilon, classes).transition_matrix(),
        rtol=0,
        atol=1e-12,
    )
    assert mechanism.epsilon == epsilon and mechanism.distribution_epsilon == 0.0
    resampled = mechanism.draw.resampling_probabilities(uniform)
    assert resampled == pytest.approx([classes / (classes - 1 + math.exp(epsilon))], rel=1e-9)
    # With the lambda written out it is the same mechanism.
    explicit = ClusterRandomizedResponse(classes, 1.0 / classes, math.inf, float(resampled[0]))
    assert explicit.epsilon == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 2.0])
def test_corollary_2_costs_three_epsilon(epsilon):
    mechanism = ClusterRandomizedResponse.from_heterogeneity(epsilon, 10, 0.05)
    assert (mechanism.threshold, mechanism.bias_correction) == (0.05, 0.0)
    assert mechanism.noise_scale == 1.0 / epsilon
    expected = 1.0 / (1.0 + math.expm1(epsilon) * 0.05)
    assert mechanism.resampling_probability == pytest.approx(expected, rel=1e-14)
    assert mechanism.epsilon == pytest.approx(3.0 * epsilon, rel=1e-12)


@pytest.mark.parametrize(("epsilon", "share"), [(0.01, 0.9), (0.3, 0.5), (7.7, 0.1)])
def test_for_epsilon_meets_it(epsilon, share):
    mechanism = ClusterRandomizedResponse.for_epsilon(epsilon, 10, distribution_share=share)
    assert mechanism.epsilon == pytest.approx(epsilon, rel=1e-12)
    assert mechanism.distribution_epsilon == pytest.approx(share * epsilon, rel=1e-12)
    assert mechanism.threshold <= 0.1 and mechanism.resampling_probability is None


@pytest.mark.parametrize(
    ("epsilon", "counts", "threshold"),
    [
        (0.1, 0.05, 0.01),
        (1.25, 0.25, 0.01),
        (2.0, 0.25, 0.04),
        (8.0, 0.25, 0.09),
    ],
)
def test_defaults_of_for_epsilon(epsilon, counts, threshold):
    mechanism = ClusterRandomizedResponse.for_epsilon(epsilon, 10)
    assert mechanism.distribution_epsilon == pytest.approx(counts, rel=1e-12)
    assert mechanism.threshold == pytest.approx(threshold, rel=1e-12)
    assert mechanism.epsilon == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize("tau", [1e-15, 1e-4, 0.2499, 0.25])
@pytest.mark.parametrize("resampled", [1e-6, 0.999999])
def test_the_draw_is_never_refused_for_distributions_that_it_made(tau, resampled):
    mechanism = ClusterRandomizedResponse(K, tau, 0.01, resampled)
    noisy = drawn(mechanism, seed=5)
    assert noisy.mechanism == mechanism.draw
    assert lambdas(noisy) == pytest.approx(np.full(5, resampled), rel=2e-6)


@pytest.mark.parametrize("mechanism", [ADAPTIVE, FIXED], ids=["adaptive", "fixed"])
@pytest.mark.holds("vault.ClusterRandomizedResponse")
def test_noisy_labels_follow_the_released_channel(chi_square_rejects, mechanism):
    classes, per_label = 3, 30_000
    mechanism = dataclasses.replace(mechanism, num_classes=classes)
    labels = np.tile(np.arange(classes), 2 * per_label)
    clusters = np.repeat([0, 2], classes * per_label)  # cluster 1 is empty
    clusters[labels == 2] = 0  # class 2 is in cluster 0 alone
    noisy = drawn(mechanism, labels, clusters, seed=6)
    flat = (clusters * classes + labels) * classes + noisy.values
    counts = np.bincount(flat, minlength=27).reshape(3, 3, 3)
    distributions = noisy.priors.probabilities
    for c in (0, 2):
        present = counts[c].sum(axis=1) > 0
        channel = mechanism.transition_matrix(distributions[c])[present]
        assert not chi_square_rejects(counts[c][present], channel)
        other = mechanism.transition_matrix(distributions[2 - c])[present]
        assert chi_square_rejects(counts[c][present], other)
    np.testing.assert_array_equal(distributions[1], 1 / 3)
    assert np.bincount(noisy.priors.groups).tolist() == [4 * per_label, 0, 2 * per_label]


def test_the_noisy_labels_and_their_receipts():
    noisy = drawn(ADAPTIVE, seed=1)
    assert isinstance(noisy, NoisyLabels)
    assert noisy.values.dtype == np.int64 and noisy.values.shape == (N,)
    np.testing.assert_array_equal(noisy.indices, np.arange(N))
    assert noisy.priors.probabilities.shape == (5, K) and noisy.priors.values is None
    np.testing.assert_array_equal(noisy.priors.groups, CLUSTERS)
    np.testing.assert_array_equal(np.asarray(noisy.priors), noisy.priors.probabilities[CLUSTERS])
    expected = 1.0 / (1.0 + math.expm1(1.0) * noisy.priors.probabilities.min(axis=1))
    np.testing.assert_allclose(lambdas(noisy), expected, rtol=1e-12)
    assert noisy.mechanism == ADAPTIVE.draw and isinstance(noisy.mechanism, PriorResampling)
    assert noisy.bias_correction == ADAPTIVE.bias_correction and noisy.remarks == ()
    counts, draw = noisy.receipts
    assert (counts.kind, counts.key) == ("release", "cluster-rr/distributions")
    assert (draw.kind, draw.key) == ("draw", "cluster-rr")
    assert (counts.charge.epsilon, draw.charge.epsilon) == (0.5, 1.0)
    assert counts.charge.event == ADAPTIVE.histogram.dp_event()
    assert draw.charge.event == ADAPTIVE.draw.dp_event()
    again = drawn(ADAPTIVE, clusters=CLUSTERS.astype(np.uint8), seed=1)
    np.testing.assert_array_equal(again.values, noisy.values)


def test_a_fixed_lambda_is_charged_as_promised_whatever_was_released(vault):
    """Before the draw; what the released distributions spared is a remark, and no promise."""
    labels = vault()
    noisy = labels.randomize(FIXED, clusters=CLUSTERS)
    least = noisy.priors.probabilities.min()
    assert least == 0.05  # clusters this pure reach the threshold: the promise is all spent
    assert noisy.remarks == ()
    assert noisy.receipts[1].charge.epsilon == FIXED.draw.epsilon
    assert labels.guarantee().epsilon == pytest.approx(FIXED.epsilon, rel=1e-12)

    labels = vault(labels=np.random.default_rng(7).integers(0, K, N), insecure_seed=7)
    mixed = labels.randomize(FIXED, clusters=CLUSTERS)
    least = mixed.priors.probabilities.min()
    assert least > 0.05
    for statement in (labels.guarantee(), mixed.guarantee()):
        assert statement.epsilon == pytest.approx(FIXED.epsilon, rel=1e-12)
    lost = 0.5 + math.log1p((0.1 / 0.9) / least)
    assert lost < FIXED.epsilon - 0.1
    (remark,) = mixed.remarks
    assert f"the promise is epsilon={FIXED.epsilon:.6g}, made before the draw" in remark
    assert f"this draw lost at most {lost:.6g}" in remark and "odometer" in remark
    assert mixed.guarantee().remarks == (remark,) and labels.guarantee().remarks == ()
    assert f"  remark: {remark}" in str(mixed.guarantee())


def test_without_noise_on_distributions_no_histogram_is_released(vault):
    mechanism = ClusterRandomizedResponse.uniform(1.0, K)
    assert mechanism.histogram is None
    labels = vault()
    noisy = labels.randomize(mechanism, clusters=CLUSTERS)
    assert not labels.has_draw("cluster-rr/distributions")
    np.testing.assert_array_equal(noisy.priors.probabilities, np.full((5, K), 1.0 / K))
    assert labels.guarantee().epsilon == noisy.guarantee().epsilon == 1.0
    assert len(noisy.receipts) == 1 and noisy.priors.receipts == ()


def test_lambda_of_one_costs_the_counts_alone(vault, chi_square_rejects):
    mechanism = ClusterRandomizedResponse(K, 0.05, 4.0, 1.0, bias_correction=0.0)
    assert mechanism.epsilon == 0.5 and mechanism.draw is None
    labels = vault(0.5)
    made = labels.randomize(mechanism, clusters=CLUSTERS)
    assert labels.guarantee().epsilon == 0.5 == made.guarantee().epsilon
    assert [one.key for one in made.receipts] == ["cluster-rr/distributions"]
    assert not labels.has_draw("cluster-rr") and lambdas(made).tolist() == [1.0] * 5
    again = labels.randomize(mechanism, clusters=CLUSTERS)
    np.testing.assert_array_equal(made.values, again.values)
    np.testing.assert_array_equal(made.indices, np.arange(N))
    distributions = made.priors.probabilities
    channel = mechanism.transition_matrix(distributions[0])
    np.testing.assert_allclose(channel, np.tile(distributions[0], (K, 1)), atol=1e-15)
    # Half of the labels were 0, half 1; the noisy ones are of the cluster, whatever the label.
    plain = drawn(mechanism, np.arange(40_000) % 2, np.zeros(40_000, int))
    counts = np.bincount(2 * plain.values + np.arange(40_000) % 2, minlength=2 * K)
    expected = np.tile(plain.priors.probabilities[0], (2, 1))
    assert not chi_square_rejects(counts.reshape(K, 2).T.copy(), expected)


def test_the_vault_charges_both_parts_once(vault, tmp_path):
    labels = vault(2.0, store=tmp_path / "store")
    noisy = labels.randomize(ADAPTIVE, clusters=CLUSTERS)
    assert labels.guarantee().epsilon == pytest.approx(noisy.guarantee().epsilon, rel=1e-12)
    assert labels.guarantee().epsilon == pytest.approx(1.5, rel=1e-12)
    assert labels.mechanism("cluster-rr/distributions") == ADAPTIVE.histogram
    assert labels.mechanism("cluster-rr") == noisy.mechanism
    for again in (labels, vault(2.0, store=tmp_path / "store")):
        repeated = again.randomize(ADAPTIVE, clusters=CLUSTERS)
        np.testing.assert_array_equal(repeated.values, noisy.values)
        np.testing.assert_array_equal(repeated.priors.probabilities, noisy.priors.probabilities)
        np.testing.assert_array_equal(repeated.priors.groups, CLUSTERS)
        assert [one.id for one in repeated.receipts] == [one.id for one in noisy.receipts]
        assert again.guarantee().epsilon == pytest.approx(1.5, rel=1e-12)
    # Another key is another draw, for which the budget has no room.
    with pytest.raises(BudgetExceededError):
        labels.randomize(ADAPTIVE, clusters=CLUSTERS, key="second")
    assert not labels.has_draw("second/distributions")


@pytest.mark.parametrize("fixed", [True, False], ids=["lambda", "draw epsilon"])
def test_prices_are_fixed_in_advance_and_compose_so(vault, tmp_path, fixed):
    """Those of a given lambda too: they are promised at the threshold, before the release."""
    price = {"resampling_probability": 0.9} if fixed else {"draw_epsilon": 0.1}
    mechanism = ClusterRandomizedResponse(K, 0.05, 20.0, **price)
    budget = PrivacyBudget(50.0, 1e-3)
    labels = vault(budget=budget, store=tmp_path / "store")
    noisy = [labels.randomize(mechanism, clusters=CLUSTERS, key=f"draw {i}") for i in range(8)]
    total = 8 * mechanism.epsilon
    assert sum(len(one.receipts) for one in noisy) == len(labels.receipts) == 16
    charges = [receipt.charge for one in noisy for receipt in one.receipts]
    tight = Charge.composed(Counter(charges), 1e-3).epsilon
    for again in (labels, vault(budget=budget, store=tmp_path / "store")):
        spent = again.guarantee()
        assert spent.epsilon == tight < 0.99 * total and spent.delta == 1e-3
        assert any("fixed in advance" in text for text in spent.assumptions)
    # The question whether the budget has room is asked in the same way.
    for epsilon, fits in ((mechanism.epsilon - 1e-3, False), (mechanism.epsilon, True)):
        short = vault(epsilon)
        if fits:
            short.randomize(mechanism, clusters=CLUSTERS)
            continue
        with pytest.raises(BudgetExceededError):
            short.randomize(mechanism, clusters=CLUSTERS)
        assert short.guarantee().epsilon == 0.0


def test_the_price_of_a_stored_draw_may_be_rounded_another_way(vault, monkeypatch):
    labels = vault()
    noisy = labels.randomize(FIXED, clusters=CLUSTERS)
    spent = labels.guarantee().epsilon
    log1p = math.log1p
    monkeypatch.setattr(math, "log1p", lambda x: log1p(x) * (1.0 + 4e-16))
    assert FIXED.draw != noisy.mechanism
    again = labels.randomize(FIXED, clusters=CLUSTERS)
    np.testing.assert_array_equal(again.values, noisy.values)
    assert again.mechanism == noisy.mechanism and labels.guarantee().epsilon == spent


@pytest.mark.parametrize("mechanism", [ADAPTIVE, FIXED], ids=["adaptive", "fixed"])
@pytest.mark.holds("vault.Randomizer")
def test_a_budget_for_one_part_alone_refuses_before_anything_is_drawn(mechanism, vault):
    labels = vault(mechanism.epsilon - 1e-3)
    for ask in (
        lambda: labels.randomize(mechanism, clusters=CLUSTERS),
        lambda: labels.check_budget(mechanism),
    ):
        with pytest.raises(BudgetExceededError, match=r"HistogramMechanism .* and PriorResampling"):
            ask()
        assert labels.guarantee().epsilon == 0.0
        assert not labels.has_draw("cluster-rr/distributions")
    enough = vault(mechanism.epsilon)
    enough.check_budget(mechanism)
    planned = enough.guarantee(after=mechanism).epsilon
    enough.randomize(mechanism, clusters=CLUSTERS)
    assert enough.guarantee().epsilon <= mechanism.epsilon * (1.0 + 1e-12)
    assert enough.guarantee().epsilon == planned


def test_an_interrupted_run_draws_what_is_missing(vault, monkeypatch, tmp_path):
    labels = vault(ADAPTIVE.epsilon, store=tmp_path / "store")

    def interrupted(*unused, **also_unused):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PriorResampling, "randomize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            labels.randomize(ADAPTIVE, clusters=CLUSTERS)
    assert labels.guarantee().epsilon == 0.5
    resumed = vault(ADAPTIVE.epsilon, store=tmp_path / "store")
    resumed.randomize(ADAPTIVE, clusters=CLUSTERS)
    assert resumed.guarantee().epsilon == pytest.approx(ADAPTIVE.epsilon)


@pytest.mark.parametrize("change", ["threshold", "noise_scale", "draw_epsilon", "clusters"])
def test_other_settings_under_the_same_key_are_refused(change, vault):
    labels = vault()
    labels.randomize(ADAPTIVE, clusters=CLUSTERS)
    spent = labels.guarantee().epsilon
    other, clusters = ADAPTIVE, CLUSTERS
    if change == "clusters":
        clusters = CLUSTERS[::-1]
    else:
        other = dataclasses.replace(ADAPTIVE, **{change: getattr(ADAPTIVE, change) * 1.01})
    with pytest.raises(LabelStoreError, match="made with other"):
        labels.randomize(other, clusters=clusters)
    assert labels.guarantee().epsilon == spent


def test_a_part_of_the_examples_and_other_public_inputs_are_refused(vault):
    labels = vault()
    for clusters in (CLUSTERS, None):
        with pytest.raises(ValueError, match="takes no priors"):
            labels.randomize(ADAPTIVE, clusters=clusters, priors=np.full((N, K), 1 / K))
    with pytest.raises(ValueError, match="draws for all examples; leave indices=None"):
        labels.randomize(ADAPTIVE, np.arange(10), clusters=CLUSTERS)
    assert labels.guarantee().epsilon == 0.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_classes": 1}, ValueError, "num_classes must be at least 2, got 1"),
        ({"threshold": 0.2501}, ValueError, r"threshold must be in \[0, 0.25\].*got 0.2501"),
        ({"threshold": 0.0}, ValueError, "threshold must be above zero"),
        ({"noise_scale": 0.0}, ValueError, r"noise_scale must be above zero, got 0.*2 / sigma"),
        ({"noise_scale": 1e-310}, ValueError, "noise_scale must be above zero"),
        ({"noise_scale": math.nan}, ValueError, "noise_scale must be above zero"),
        ({"noise_scale": math.inf}, ValueError, "noise_scale=inf makes .* uniform"),
        ({"resampling_probability": 0.5}, ValueError, "exactly one of resampling_probability"),
        ({"draw_epsilon": None}, ValueError, "exactly one of resampling_probability"),
        ({"draw_epsilon": 0.0}, ValueError, "draw_epsilon must be finite and above zero"),
        ({"bias_correction": 1.0}, ValueError, "bias_correction must be in .*singular"),
    ],
    ids=lambda value: str(sorted(value.items())) if isinstance(value, dict) else "",
)
def test_bad_settings(arguments, error, message):
    settings = {"num_classes": 4, "threshold": 0.1, "noise_scale": 2.0, "draw_epsilon": 1.0}
    with pytest.raises(error, match=message):
        ClusterRandomizedResponse(**{**settings, **arguments})


@pytest.mark.parametrize(
    ("resampled", "message"),
    [
        (0.0, r"must be in \(0, 1\], got 0"),
        (1.0, "bias_correction must be in .* got 1. At 1 the channel is singular"),
        (5e-324, "must be finite and above zero"),
    ],
)
def test_bad_lambda(resampled, message):
    with pytest.raises(ValueError, match=message):
        ClusterRandomizedResponse(4, 0.1, 2.0, resampling_probability=resampled)


def test_a_mechanism_that_uses_no_label_is_refused():
    with pytest.raises(ValueError, match="use no label"):
        ClusterRandomizedResponse(4, 0.25, math.inf, 1.0, bias_correction=0.0)


def test_bad_constructors():
    with pytest.raises(ValueError, match="epsilon must be finite"):
        ClusterRandomizedResponse.uniform(0.0, 4)
    with pytest.raises(ValueError, match=r"\[0, 0.25\].*got 0.3"):
        ClusterRandomizedResponse.from_heterogeneity(1.0, 4, 0.3)
    with pytest.raises(ValueError, match="threshold must be above zero"):
        ClusterRandomizedResponse.from_heterogeneity(1.0, 4, 0.0)
    for share in (0.0, 1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="distribution_share must be"):
            ClusterRandomizedResponse.for_epsilon(1.0, 4, distribution_share=share)


BAD_CLUSTERS = {
    "long": (np.zeros(N + 1, int), ValueError, rf"shape \({N},\), .* got \({N + 1},\)"),
    "floats": (np.zeros(N), TypeError, "clusters must be integers 0..C-1, got dtype float64"),
    "negative": (np.full(N, -1), ValueError, "clusters must be in 0..C-1, got -1"),
    "ids": (np.full(N, 1 << 40), ValueError, r"got 1,099,511,627,777 x .*0\.\.C-1: .*return_inv"),
    "none": (None, ValueError, "needs clusters=, .* takes nothing else; got nothing"),
}


@pytest.mark.parametrize("case", BAD_CLUSTERS)
def test_bad_clusters_are_refused_before_anything_is_charged(case, vault):
    clusters, error, message = BAD_CLUSTERS[case]
    labels = vault()
    for mechanism in (ADAPTIVE, ClusterRandomizedResponse.uniform(1.0, K)):
        with pytest.raises(error, match=message):
            labels.randomize(mechanism, clusters=clusters)
    assert labels.guarantee().epsilon == 0.0
