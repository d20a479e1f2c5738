"""Bounds for training and for finished models: sound, tight where possible, and not blind."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from scipy import stats

import tf_labeldp as ldp
from tf_labeldp import audit
from tf_labeldp.training import GaussianNoise

N = 5000
# Delta 1e-6 takes its share of the failure probability, so 0.999 is about the most.
SURE = 0.999
ZEROS = np.zeros(N, int)


def vault(labels: np.ndarray, epsilon: float, delta: float = 1e-6) -> ldp.PrivateLabels:
    budget = ldp.PrivacyBudget(epsilon, delta)
    return ldp.PrivateLabels(labels, 3, budget=budget, insecure_seed=0)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_noisy_labels_are_within_their_epsilon_and_not_far_below(epsilon: float) -> None:
    def fit(labels: np.ndarray) -> np.ndarray:
        return np.eye(3)[vault(labels, epsilon).randomize(ldp.RandomizedResponse(epsilon, 3))]

    zeros = np.zeros(10 * N, int)
    found = audit.audit_training(fit, zeros, 3, canaries=zeros.size, claimed=epsilon, seed=1)
    # The bound takes 2.5 standard deviations off some 30,000 guesses; four more are luck.
    assert 0.8 * epsilon < found.lower_bound <= epsilon


@pytest.mark.slow
def test_multi_stage_training_and_heads_pass() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 4)).astype("float32")

    def stages(labels: np.ndarray) -> np.ndarray:
        training = ldp.MultiStageTraining(
            x, vault(labels, 1.0), epsilon=1.0, fractions=(0.5, 0.5), epochs_per_stage=2, verbose=0
        )
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, "relu"),
                                  keras.layers.Dense(3, "softmax")])  # fmt: skip
        model.compile("adam", "categorical_crossentropy")
        model.fit(training.dataset(), epochs=training.epochs, callbacks=[training], verbose=0)
        return model.predict(x, verbose=0)

    def head(labels: np.ndarray) -> np.ndarray:
        return ldp.PrivateLogisticRegression(1.0, 1e-6).fit(x, vault(labels, 1.0)).predict_proba(x)

    start = np.arange(1500) % 3
    for fit, delta in ((stages, 0.0), (head, 1e-6)):
        found = audit.audit_training(fit, start, 3, canaries=1500, claimed=1.0, delta=delta, seed=2)
        assert not found.refutes and "1,500 canaries" in found.attack


def noisy_gradient(noise: float):
    """Scores of one full batch in which each example has its own weight and clipped gradient."""

    def fit(labels: np.ndarray) -> np.ndarray:
        signs = 2.0 * (labels[:, np.newaxis] == np.arange(3)) - 1.0
        clipped = signs / math.sqrt(3.0)
        [noisy], _ = GaussianNoise(noise, insecure_seed=3).add_noise(
            [keras.ops.convert_to_tensor(clipped, "float32")], 1.0, ()
        )
        return noisy.numpy()

    return fit


def test_dp_sgd_passes_and_a_tenth_of_its_noise_does_not() -> None:
    noise = 5.0
    claimed = ldp.accounting.dp_sgd_guarantee(noise, 1.0, 1, 1e-6).epsilon
    settings = {"canaries": N, "delta": 1e-6, "claimed": claimed, "seed": 4}
    sound = audit.audit_training(noisy_gradient(noise), ZEROS, 3, **settings)
    assert 0.2 * claimed < sound.lower_bound <= claimed
    # Canaries of one run show less than the worst case, but always show a tenth of the noise.
    weak = audit.audit_training(noisy_gradient(0.1 * noise), ZEROS, 3, confidence=SURE, **settings)
    assert weak.refutes


def test_a_loss_that_leaks_a_label_is_found() -> None:
    """A penalty on the true labels next to clipped gradients, as a layer's ``add_loss`` adds."""
    private = noisy_gradient(5.0)

    def fit(labels: np.ndarray) -> np.ndarray:
        return private(labels) + 40.0 * np.eye(3)[labels]

    claimed = ldp.accounting.dp_sgd_guarantee(5.0, 1.0, 1, 1e-6).epsilon
    found = audit.audit_training(
        fit, ZEROS, 3, canaries=N, delta=1e-6, claimed=claimed, confidence=SURE, seed=5
    )
    assert found.refutes


def test_training_in_the_clear_is_found_in_a_finished_model() -> None:
    rng = np.random.default_rng(6)
    proxy = rng.dirichlet([2.0, 2.0, 2.0], N)
    labels = (proxy.cumsum(axis=1) < rng.random((N, 1))).sum(axis=1)
    channel = ldp.RandomizedResponse(2.0, 3)
    noisy = channel.randomize(labels, rng=rng)
    # No attacker can infer more from the noisy labels and the proxy.
    posterior = np.log(channel.transition_matrix()[:, noisy].T * proxy)
    found = audit.audit_model(posterior, labels, proxy, claimed=2.0, seed=7)
    assert 1.2 < found.lower_bound <= 2.0
    true = np.log(0.98 * np.eye(3)[labels] + 0.01)
    assert audit.audit_model(true, labels, proxy, claimed=2.0, confidence=SURE, seed=7).refutes
    assert audit.audit_model(np.log(proxy), labels, proxy, seed=7).lower_bound < 0.1
    inferred = audit.label_inference(posterior, labels, proxy)
    low, high = inferred.interval
    assert 0.0 < low < inferred.advantage < high
    assert audit.label_inference(np.log(proxy), labels, proxy).advantage == 0.0


@pytest.mark.parametrize("delta", [0.0, 1e-4])
@pytest.mark.parametrize("wrong", [100, 8])
def test_the_bound_of_one_run_is_that_of_the_theorem(wrong: int, delta: float) -> None:
    size = 400
    signs = np.where(np.arange(size) % wrong == 0, -1.0, 1.0)[:, np.newaxis]
    found = audit.audit_training(
        lambda labels: signs * np.eye(3)[labels],
        ZEROS[:size],
        3,
        canaries=size,
        delta=delta,
        seed=0,
    )
    hits, guesses = (int(found.attack.split()[word]) for word in (0, 2))
    rate = 1.0 / (1.0 + math.exp(-found.lower_bound))
    tail = stats.binom.sf(hits - 1, guesses, rate)
    masses = stats.binom.pmf(np.arange(hits - 1, -1, -1), guesses, rate).cumsum()
    expected = tail + 2 * size * delta * (masses / np.arange(1, hits + 1)).max()
    assert expected == pytest.approx(0.05 / 7, rel=1e-3)
    assert hits == sum(signs > 0) and guesses == size


@pytest.mark.slow
def test_bounds_of_one_run_fail_no_more_often_than_stated() -> None:
    rng = np.random.default_rng(8)
    response = ldp.RandomizedResponse(1.0, 2)
    above = [
        audit.audit_training(
            lambda labels: np.eye(2)[response.randomize(labels, rng=rng)],
            ZEROS[:500], 2, canaries=500, claimed=1.0, confidence=0.9, seed=seed,
        ).refutes
        for seed in range(400)
    ]  # fmt: skip
    assert np.mean(above) < 0.1 + 5.0 * math.sqrt(0.09 / 400)


def test_bad_arguments() -> None:
    fit = lambda labels: np.eye(3)[labels]  # noqa: E731
    for arguments, match in (
        ({"canaries": 0}, "canaries must be in 1..5000"),
        ({"canaries": 10, "delta": 1.0}, "delta"),
        ({"canaries": 10, "confidence": 0.0}, "confidence"),
    ):
        with pytest.raises(ValueError, match=match):
            audit.audit_training(fit, ZEROS, 3, **arguments)
    with pytest.raises(ValueError, match="expected the scores of fit to be finite"):
        audit.audit_training(lambda labels: labels, ZEROS, 3, canaries=10)
    proxy = np.full((N, 3), 1 / 3)
    with pytest.raises(ValueError, match="proxy must be above zero"):
        audit.audit_model(proxy, ZEROS, np.eye(3)[ZEROS])
    with pytest.raises(ValueError, match=r"shape \(4999, 3\), got shape \(5000, 3\)"):
        audit.audit_model(proxy, ZEROS[1:], proxy)


def test_canaries_have_one_of_two_labels_in_one_run() -> None:
    runs = []

    def fit(labels: np.ndarray) -> np.ndarray:
        runs.append(labels.copy())
        return np.eye(3)[labels]

    for _ in range(2):
        audit.audit_training(fit, ZEROS, 3, canaries=1000, seed=8)
    first, second = runs  # One run for each audit.
    np.testing.assert_array_equal(first, second)
    for seed in range(9, 29):
        audit.audit_training(fit, ZEROS, 3, canaries=1000, seed=seed)
    assert all(np.sum(labels != 0) <= 1000 for labels in runs)
    # A third of the canaries has no pair with the class 0; the others have it in half of the coins.
    shares = [np.bincount(labels, minlength=3)[1:].sum() / 1000 for labels in runs]
    assert abs(np.mean(shares) - 2 / 3) < 0.02
