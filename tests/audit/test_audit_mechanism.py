"""Bounds for mechanisms: just below epsilon, and above it where there is a defect."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp import audit
from tf_labeldp.accounting import dp_sgd_guarantee
from tf_labeldp.mechanisms import (
    HistogramMechanism,
    LabelMomentMechanism,
    LaplaceMechanism,
    RandomizedResponse,
    RROnBins,
    RRWithPrior,
    optimal_bins,
)
from tf_labeldp.training import GaussianNoise

PRIOR = np.array([0.3, 0.27, 0.23, 0.2])
PEAKED = np.array([0.5, 0.3, 0.15, 0.05])
EPSILONS = (0.5, 2.0)
# Confidence for tests that must not fail by chance.
SURE = 1.0 - 1e-6


def bins(epsilon: float) -> RROnBins:
    return optimal_bins(np.arange(8.0), np.full(8, 0.125), epsilon)


CHANNELS = {
    "RandomizedResponse": lambda epsilon: (RandomizedResponse(epsilon, 10), None),
    "RRWithPrior": lambda epsilon: (RRWithPrior(epsilon, 4), PRIOR),
    "RROnBins": lambda epsilon: (bins(epsilon), None),
    "Laplace": lambda epsilon: (LaplaceMechanism(epsilon, low=0.0, high=4.0), None),
}


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", CHANNELS)
def test_bounds_are_within_ten_percent_of_epsilon_and_below_it(name: str, epsilon: float) -> None:
    mechanism, public = CHANNELS[name](epsilon)
    found = audit.audit_mechanism(mechanism, public=public, seed=1)
    # Outputs of Laplace are binned, which loses some of epsilon.
    least = 0.8 if name == "Laplace" else 0.9
    assert least * epsilon < found.lower_bound <= epsilon
    assert found.claimed == epsilon and not found.refutes
    assert "no contradiction" in str(found)


@pytest.mark.slow
def test_many_classes() -> None:
    found = audit.audit_mechanism(RandomizedResponse(2.0, 500), seed=1)
    assert 0.8 * 2.0 < found.lower_bound <= 2.0


def test_a_prior_that_leaves_one_answer_shows_nothing() -> None:
    mechanism = RRWithPrior(0.5, 4)
    assert int(mechanism.optimal_k(PEAKED)[0]) == 1
    assert audit.audit_mechanism(mechanism, public=PEAKED, seed=1).lower_bound == 0.0


def test_sound_mechanisms_pass_as_often_as_the_confidence_says() -> None:
    above = sum(
        audit.audit_mechanism(
            RandomizedResponse(1.0, 2), draws=2000, confidence=0.5, seed=seed
        ).refutes
        for seed in range(200)
    )
    # At most 100 are expected; the bounds are binomial at 1e-7.
    assert 20 < above < 136


def test_a_refutation_shows_its_digits_and_how_often_it_is_wrong() -> None:
    text = str(audit.AuditResult(1.0000421, SURE, 1.0, 0.0, "draws"))
    assert "epsilon is at least 1.00004, with 0.999999 confidence" in text
    assert "claimed: 1: the claim is FALSE" in text and "claimed: 1.0" not in text
    assert "at most 1 audit in 1,000,000 ends like this: repeat the audit" in text
    text = str(audit.AuditResult(0.9999, 0.95, 1.0, 0.0, "draws"))
    assert "at least 1, with 0.95 confidence" in text and "repeat" not in text


def gaussian(noise: float, steps: int = 1):
    """A sum that a label moves from -1 to 1 in each step, with noise of ``LabelDPOptimizer``."""

    def draw(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        source = GaussianNoise(noise, insecure_seed=int(rng.integers(2**31)))
        total = np.zeros(labels.size)
        for _ in range(steps):
            clipped = tf.constant(2.0 * labels - 1.0, tf.float32)
            total += source.add_noise([clipped], 1.0, ())[0][0].numpy()
        return total

    return draw


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("steps", [1, 20])
def test_full_batch_dp_sgd_is_within_thirty_percent(epsilon: float, steps: int) -> None:
    noise = 5.0 * math.sqrt(steps) / epsilon
    claimed = dp_sgd_guarantee(noise, 1.0, steps, 1e-5).epsilon
    found = audit.audit_mechanism(
        gaussian(noise, steps), [0, 1], claimed=claimed, delta=1e-5, family="gaussian", seed=2
    )
    assert 0.7 * claimed < found.lower_bound <= claimed


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_a_release_of_a_head_is_within_thirty_percent(epsilon: float) -> None:
    """Each row has its own direction, so that its moment is a release of one label."""
    mechanism = LabelMomentMechanism(epsilon, 1e-5, num_classes=2)

    def draw(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        parts = np.array_split(labels.astype(int), max(1, labels.size // 500))
        moments = [mechanism.release(part, np.eye(part.size), rng=rng)[:, 0] for part in parts]
        return np.concatenate(moments)

    found = audit.audit_mechanism(
        draw, [0, 1], claimed=epsilon, delta=1e-5, family="gaussian", draws=200_000, seed=3
    )
    assert 0.7 * epsilon < found.lower_bound <= epsilon


def test_half_the_noise_is_found() -> None:
    noise = 10.0
    claimed = dp_sgd_guarantee(noise, 1.0, 4, 1e-5).epsilon
    found = audit.audit_mechanism(
        gaussian(0.5 * noise, 4), [0, 1], claimed=claimed, delta=1e-5, family="gaussian",
        confidence=SURE, seed=4,
    )  # fmt: skip
    assert found.refutes and "FALSE" in str(found)


@pytest.mark.slow
def test_a_fresh_draw_in_each_epoch_is_found() -> None:
    mechanism = RandomizedResponse(1.0, 3)

    def redrawn(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.stack([mechanism.randomize(labels, rng=rng) for _ in range(3)], axis=1)

    found = audit.audit_mechanism(redrawn, range(3), claimed=1.0, confidence=SURE, seed=5)
    assert found.refutes and 2.5 < found.lower_bound <= 3.0


def test_a_histogram_that_is_charged_for_one_count_is_found() -> None:
    """``esfandiari2022``, Theorem 1: 1 / sigma, where a changed label moves two counts."""
    scale = 1.0
    mechanism = HistogramMechanism(2.0 / scale, num_classes=2, noise="laplace")

    def draw(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        groups = np.arange(labels.size)
        return mechanism.release(labels.astype(int), groups, rng=rng)

    found = audit.audit_mechanism(
        draw, [0, 1], claimed=1.0 / scale, confidence=SURE, draws=200_000, seed=6
    )
    assert found.refutes and found.lower_bound <= 2.0


def test_a_k_that_was_chosen_with_the_true_label_is_found() -> None:
    mechanism = RRWithPrior(1.0, 4)
    best = int(mechanism.optimal_k(PEAKED)[0])
    assert best < 4

    def draw(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        # The prior sorts the classes.
        sizes = np.maximum(best, labels.astype(int) + 1)
        keep = math.e / (math.e + sizes - 1.0)
        others = (labels.astype(int) + rng.integers(1, sizes)) % sizes
        return np.where(rng.random(labels.size) < keep, labels, others)

    assert audit.audit_mechanism(draw, range(4), claimed=1.0, confidence=SURE, seed=7).refutes


def test_accounting_for_added_examples_is_found_where_labels_are_replaced() -> None:
    # Adding an example moves the sum by one clip, and replacing its label by two.
    noise = 2.0
    claimed = dp_sgd_guarantee(2.0 * noise, 1.0, 1, 1e-5).epsilon
    found = audit.audit_mechanism(
        gaussian(noise), [0, 1], claimed=claimed, delta=1e-5, family="gaussian", confidence=SURE,
        seed=8,
    )  # fmt: skip
    assert found.refutes


def test_bad_arguments() -> None:
    mechanism = RandomizedResponse(1.0, 2)
    for arguments, error, match in (
        ({"draws": 10}, ValueError, "draws"),
        ({"confidence": 1.0}, ValueError, "confidence"),
        ({"labels": [1, 1]}, ValueError, "two or more different labels"),
        ({"family": "gaussian"}, ValueError, "needs delta above zero"),
        ({"delta": 1.0}, ValueError, "delta"),
    ):
        with pytest.raises(error, match=match):
            audit.audit_mechanism(mechanism, **arguments)
    with pytest.raises(TypeError, match="Wrap a noisy statistic in a function"):
        audit.audit_mechanism(HistogramMechanism(1.0, 2))
    with pytest.raises(ValueError, match="for 200000 labels"):
        audit.audit_mechanism(lambda labels, rng: 0.0, [0, 1])


def test_a_plot_is_written(tmp_path) -> None:
    found = audit.audit_mechanism(RandomizedResponse(1.0, 2), draws=2000, seed=0)
    found.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 5000
