"""Many classes: the sets that projective geometry response answers, their draws and estimates."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp import estimation
from tf_labeldp.mechanisms import ProjectiveGeometryResponse, RandomizedResponse, random_bits
from tf_labeldp.vault import Classes

CASES = [(1.0, 50), (0.1, 20), (2.0, 57), (3.0, 25), (6.0, 9), (1.0, 2)]


def sets(mechanism):
    return mechanism.members(np.arange(mechanism.num_outputs))


def is_prime(q):
    return all(q % d for d in range(2, q))


def best_by_hand(epsilon, k, best_for):
    """The best score among the primes up to 3 e^epsilon + K, by the counts of subspaces."""
    scores = []
    for q in [q for q in range(2, 3 * int(np.exp(epsilon)) + 2 * k) if is_prime(q)]:
        t = next(t for t in range(2, 99) if (q**t - 1) // (q - 1) >= k)
        one, both = ((q**n - 1) // (q - 1) for n in (t - 1, t - 2))
        total = one * np.exp(epsilon) + q ** (t - 1)
        own, other = one * np.exp(epsilon) / total, (both * np.exp(epsilon) + one - both) / total
        gap = own - other
        scores.append(gap if best_for == "pairs" else gap**2 / (other * (1 - other)))
    return max(scores)


@pytest.mark.parametrize("best_for", ["pairs", "shares"])
def test_the_prime_is_nearly_the_best_of_all(best_for):
    for epsilon, k in ((0.5, 60), (1.0, 100), (2.0, 300), (4.0, 500), (4.0, 50)):
        own, other = ProjectiveGeometryResponse(epsilon, k, best_for).inclusion_probabilities
        gap = own - other
        score = gap if best_for == "pairs" else gap**2 / (other * (1 - other))
        assert score >= 0.97 * best_by_hand(epsilon, k, best_for)
    with pytest.raises(ValueError, match="best_for must be"):
        ProjectiveGeometryResponse(1.0, 9, "anything")


def test_the_divergence_of_two_classes_is_epsilon_times_the_gap():
    mechanism = ProjectiveGeometryResponse(4.0, 100, "pairs")
    channel, (own, other) = mechanism.transition_matrix(), mechanism.inclusion_probabilities
    divergence = np.sum(channel[3] * np.log(channel[3] / channel[8]))
    assert divergence == pytest.approx(4.0 * (own - other), rel=1e-12)
    of_shares = ProjectiveGeometryResponse(4.0, 100).inclusion_probabilities
    assert own - other > 1.3 * (of_shares[0] - of_shares[1])


@pytest.mark.parametrize(("epsilon", "k"), CASES)
def test_every_class_is_in_as_many_sets_and_every_pair_too(epsilon, k):
    mechanism = ProjectiveGeometryResponse(epsilon, k)
    shared = sets(mechanism).T.astype(int) @ sets(mechanism)
    assert np.unique(np.diagonal(shared)).size == 1
    assert np.unique(shared[~np.eye(k, dtype=bool)]).size == 1
    own, other = mechanism.inclusion_probabilities
    included = mechanism.transition_matrix() @ sets(mechanism)
    np.testing.assert_allclose(included, np.where(np.eye(k), own, other), rtol=1e-12)


@pytest.mark.parametrize(("epsilon", "k"), CASES)
def test_every_random_number_gives_another_set_of_its_kind(epsilon, k, monkeypatch):
    """All choices enumerated: each set with the label comes up once, and each set without it."""
    mechanism = ProjectiveGeometryResponse(epsilon, k)
    with_label = int(sets(mechanism)[:, 0].sum())
    for flip, number in ((1 << 53) - 1, with_label), (0, mechanism.num_outputs - with_label):
        flips = np.full(number, flip, dtype=np.uint64)
        monkeypatch.setattr(random_bits, "uniform_integers", lambda n, rng, f=flips: f)
        monkeypatch.setattr(random_bits, "uniform_below", lambda b, rng: np.arange(b.size))
        for label in {0, 1, k // 2, k - 1}:
            drawn = mechanism.randomize(np.full(number, label))
            assert np.unique(drawn).size == number
            assert np.all(mechanism.members(drawn)[:, label] == (flip > 0))


@pytest.mark.parametrize("epsilon", [2e-12, 1e-9, 0.1, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("k", [2, 50, 1000])
@pytest.mark.holds("mechanisms.ProjectiveGeometryResponse")
def test_guarantee_the_drawn_channel_is_never_less_private_than_stated(epsilon, k, monkeypatch):
    """In whole numbers: the least number that does not flip, found by bisection of the code."""
    mechanism = ProjectiveGeometryResponse(epsilon, k)
    low, high = 0, 1 << 53  # flips below, not from here on
    while high - low > 1:
        middle = (low + high) // 2
        bits = np.array([middle], dtype=np.uint64)
        monkeypatch.setattr(random_bits, "uniform_integers", lambda n, rng, b=bits: b)
        monkeypatch.setattr(random_bits, "uniform_below", lambda b, rng: np.zeros(1, np.int64))
        flipped = not mechanism.members(mechanism.randomize([0]))[0, 0]
        low, high = (middle, high) if flipped else (low, middle)
    inside = int(sets(mechanism)[:, 0].sum())
    outside = mechanism.num_outputs - inside
    with localcontext() as context:
        context.prec = 60
        bound = Fraction(Decimal(epsilon).exp())

    def ratio(threshold):
        return Fraction((1 << 53) - threshold, inside) / Fraction(threshold, outside)

    assert 1 / bound <= ratio(high) <= bound * (1 - Fraction(1, 10**40))
    # From the other side: rounding costs a few units of 2^-53 and a share of 2^-47.
    less = high - 3 - (high >> 46)
    if high > 100:
        assert ratio(less) > bound


def test_an_audit_finds_most_of_epsilon():
    found = ldp.audit.audit_mechanism(ProjectiveGeometryResponse(1.0, 30), draws=100_000, seed=0)
    assert 0.7 < found.lower_bound <= 1.0 and not found.refutes
    too_little = ProjectiveGeometryResponse(1.5, 30)
    assert ldp.audit.audit_mechanism(too_little, claimed=1.0, draws=100_000, seed=0).refutes


@pytest.mark.parametrize(("epsilon", "k"), CASES)
def test_debiased_rows_are_unbiased_and_sum_to_one(epsilon, k):
    mechanism = ProjectiveGeometryResponse(epsilon, k)
    rows = estimation.debiased(mechanism, np.arange(mechanism.num_outputs))
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-9)
    np.testing.assert_allclose(mechanism.transition_matrix() @ rows, np.eye(k), atol=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "k", "size"),
    [
        (1.0, 400, 3000),  # by Fourier transforms
        (0.05, 400, 3000),
        (2.0, 2, 50),
        (1.0, 400, 5),  # by lines of classes
        (4.0, 3000, 3000),
        (10.0, 400, 3000),
        (9.0, 100_000, 90),  # 65 million sets, of 12 classes each
    ],
)
def test_counts_without_a_table_are_those_of_the_sets(epsilon, k, size):
    mechanism, rng = ProjectiveGeometryResponse(epsilon, k), np.random.default_rng(3)
    noisy = rng.integers(0, mechanism.num_outputs, size)
    expected = mechanism.members(noisy).sum(axis=0)
    np.testing.assert_array_equal(mechanism.set_counts(noisy), expected)
    assert not mechanism.set_counts(noisy[:0]).any()


@pytest.mark.holds("vault.NoisyLabels.class_shares")
def test_shares_of_100_000_classes_need_no_table_of_labels_and_classes():
    k, n, rng = 100_000, 400_000, np.random.default_rng(5)
    y = np.where(rng.random(n) < 0.5, 7, rng.integers(0, k, n))
    for make in (ProjectiveGeometryResponse, RandomizedResponse):
        labels = ldp.PrivateLabels(y, k, budget=ldp.PrivacyBudget(1.0), insecure_seed=1)
        noisy = labels.randomize(make(1.0, k))
        spent = labels.guarantee()
        shares = noisy.class_shares()
        assert labels.guarantee() == noisy.guarantee() == spent
        assert shares.shape == (k,) and shares.min() > 0.0 and shares.sum() == pytest.approx(1.0)
        if make is ProjectiveGeometryResponse:  # standard error sqrt(3.8 / n) = 0.003
            assert abs(shares[7] - 0.5) < 0.03 and noisy.values.nbytes == 8 * n


def test_shares_are_much_closer_than_those_of_randomized_response():
    """With 1,000 classes at epsilon 1 the squared error is 90 times less before it is shrunk."""
    k, n, rng = 1000, 50_000, np.random.default_rng(6)
    true = rng.dirichlet(np.full(k, 0.02))
    y = rng.choice(k, n, p=true)
    errors = []
    for make in (ProjectiveGeometryResponse, RandomizedResponse):
        labels = ldp.PrivateLabels(y, k, budget=ldp.PrivacyBudget(1.0), insecure_seed=2)
        shares = labels.randomize(make(1.0, k)).class_shares()
        errors.append(np.square(shares - np.bincount(y, minlength=k) / n).sum())
    assert errors[0] < errors[1] / 5


def test_noisy_labels_are_sets_and_no_classes():
    names = [f"word {number}" for number in range(57)]
    labels = ldp.PrivateLabels(names, Classes(names), budget=ldp.PrivacyBudget(2.0))
    noisy = labels.randomize(ProjectiveGeometryResponse(2.0, 57))  # 57 sets too
    assert noisy.mechanism.num_outputs == 57
    with pytest.raises(TypeError, match="expected noisy labels that are classes, got those of Pro"):
        noisy.decode()
    assert noisy.posterior().shape == (57, 57)
    found = noisy.evaluate(np.arange(57), "accuracy", model=None)
    assert found.standard_error > 0.0


@pytest.mark.slow
def test_a_network_trains_on_posteriors_and_debiased_rows():
    import keras

    rng, k = np.random.default_rng(0), 51
    y = rng.integers(0, k, 6000)
    x = np.eye(k, dtype=np.float32)[y]
    labels = ldp.PrivateLabels(y, k, budget=ldp.PrivacyBudget(4.0), insecure_seed=3)
    mechanism = ProjectiveGeometryResponse(4.0, k)
    noisy = labels.randomize(mechanism)
    losses = {
        "posterior": keras.losses.CategoricalCrossentropy(from_logits=True),
        "debiased": ldp.keras_layers.LabelWeightedLoss(from_logits=True),
        "values": ldp.keras_layers.ForwardCorrectedLoss(
            mechanism.transition_matrix(), from_logits=True
        ),
    }
    for targets, loss in losses.items():
        model = keras.Sequential([keras.Input((k,)), keras.layers.Dense(k)])
        model.compile(keras.optimizers.SGD(50.0), loss)
        ldp.fit(model, x, noisy, targets=targets, epochs=4, batch_size=1000, verbose=0)
        assert ldp.guarantee(model).epsilon == 4.0
        predicted = model.predict(np.eye(k, dtype=np.float32), verbose=0).argmax(axis=1)
        assert np.mean(predicted == np.arange(k)) > 0.9, targets
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match="targets='values', got those of ProjectiveGeometryResp"):
        ldp.fit(model, x, noisy, targets="values", verbose=0)


def test_epsilons_that_doubles_cannot_resolve():
    """Flips are rounded up by 2^-48 of their odds, which may not exceed twice epsilon."""
    for make in (ProjectiveGeometryResponse, RandomizedResponse):
        with pytest.raises(ValueError, match="num_classes must be at most 28 at epsilon=5e-14"):
            make(5e-14, 29)
        assert make(5e-14, 28).randomize([0]).shape == (1,)
    with pytest.warns(UserWarning, match="epsilon=1000 protects next to nothing"):
        mechanism = ProjectiveGeometryResponse(1000.0, 30)  # where e^-epsilon is zero
    members = mechanism.members(mechanism.randomize(np.arange(30)))
    np.testing.assert_array_equal(members, np.eye(30))


@pytest.mark.parametrize("k", [1, 0, (1 << 24) + 1, 1 << 32])
def test_other_numbers_of_classes_are_refused(k):
    with pytest.raises(ValueError, match=r"num_classes must be at (least 2|most 16,777,216)"):
        ProjectiveGeometryResponse(1.0, k)


def test_the_most_classes_are_drawn_and_more_counts_than_memory_are_refused(monkeypatch):
    mechanism = ProjectiveGeometryResponse(8.0, 1 << 24)
    noisy = mechanism.randomize([0, (1 << 24) - 1])
    assert noisy.max() < mechanism.num_outputs
    with pytest.raises(ValueError, match="expected a channel of at most"):
        mechanism.transition_matrix()
    several = ProjectiveGeometryResponse(4.0, 1 << 24)  # 426 million sets
    monkeypatch.setattr(np, "unique", lambda noisy, **_: (np.arange(53**2), None))
    with pytest.raises(ValueError, match="expected counts of at most"):
        several.set_counts(noisy % 9)
    with pytest.raises(ValueError, match="noisy labels must lie in"):
        mechanism.members([mechanism.num_outputs])
