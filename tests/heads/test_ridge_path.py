"""The numerics of the path: unbiased risk, standard errors, intercept, prior; by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from tf_labeldp.heads._ridge_path import Problem, SampleScores, Spectrum

SIGMA = 3.0
REPEATS = 4000
LIMIT = 5.2
"""Standard errors of a mean beyond which it is wrong by chance with a probability of 2e-7."""


def data(intercept, classes=4, n=300, d=6):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(n, d)) * np.geomspace(1.0, 0.05, d) + 0.05
    if intercept:
        rows = np.concatenate([rows, np.full((n, 1), 0.3)], axis=1)
    labels = np.argmax(rows[:, :3] @ rng.normal(size=(3, classes)), axis=1)
    return rows, np.eye(classes)[labels] - 1.0 / classes


def problem(rows, moments, intercept):
    gram = np.asfortranarray(rows.T @ rows)
    return Problem.of(gram, moments, SIGMA, centred=True, intercept=intercept)


def releases(rows, codes, intercept):
    rng = np.random.default_rng(1)
    exact = rows.T @ codes
    for _ in range(REPEATS):
        yield problem(rows, exact + rng.normal(0, SIGMA, exact.shape), intercept)


@pytest.mark.parametrize("intercept", [False, True])
def test_the_risk_is_unbiased_for_ridge_and_for_any_filter(intercept):
    """The estimate less the true squared error, over releases: mean zero up to a constant.

    The constant is ||Y||^2, of the codes less what the constant column takes. With the wrong number
    of noisy directions, K instead of K - 1, the estimate is far off.
    """
    rows, codes = data(intercept)
    features = rows[:, :-1] if intercept else rows
    if intercept:  # the spectrum is that of rows and codes without their means
        features, codes_left = features - features.mean(0), codes - codes.mean(0)
    else:
        codes_left = codes
    energy = np.square(codes_left).sum()
    gaps, wrong = [], []
    for one in releases(rows, codes, intercept):
        spectrum = one.spectrum
        for chosen in (
            spectrum.ridge_filter(5.0),
            spectrum.values / (spectrum.values**2 + 40.0),
        ):
            weights = spectrum.coefficients(chosen)
            true = np.square(features @ weights - codes_left).sum() - energy
            gaps.append(spectrum.risk(chosen) - true)
            wrong.append(gaps[-1] + 2.0 * (chosen @ spectrum.noise))
    for which in range(2):
        gap = np.array(gaps[which::2])
        assert abs(gap.mean()) < LIMIT * gap.std() / np.sqrt(REPEATS)
        gap = np.array(wrong[which::2])
        assert abs(gap.mean()) > LIMIT * gap.std() / np.sqrt(REPEATS)


def test_the_noise_of_scaled_columns_is_that_of_their_directions():
    """Energies of pure noise have the variances that the spectrum states."""
    rng = np.random.default_rng(0)
    rows = np.hstack([rng.normal(size=(500, 6)), np.full((500, 1), 0.2)])
    gram = np.asfortranarray(rows.T @ rows)
    settings = {"centred": False, "intercept": True, "scale": rng.uniform(0.2, 3.0, 6)}
    spectra = [
        Problem.of(gram.copy("F"), rng.normal(size=(7, 1)), 1.0, **settings).spectrum
        for _ in range(REPEATS)
    ]
    energies = np.mean([one.energies for one in spectra], axis=0)
    np.testing.assert_allclose(energies, spectra[0].noise, rtol=LIMIT * np.sqrt(2.0 / REPEATS))


def test_the_cross_moment_is_that_of_releases_that_follow_the_prior():
    """The estimate of ``tr(W^T B)`` against B itself, with t and s known: unbiased."""
    rng = np.random.default_rng(8)
    d, k, t, s = 40, 3, 0.3, 0.7
    values, noise = np.sort(rng.gamma(0.5, 40.0, d)), np.full(d, SIGMA**2)
    gaps = []
    for _ in range(REPEATS // 4):
        signal = rng.normal(size=(d, k)) * np.sqrt(t**2 * values**2 + s**2 * values)[:, None]
        moments = signal + rng.normal(0.0, SIGMA, (d, k))
        spectrum = Spectrum(values, np.eye(d), moments, noise, k)
        one = Problem(spectrum, SIGMA, np.zeros(d), 0.0, np.zeros(k))
        chosen = spectrum.bayes_filter(t**2, s**2)
        true = float((spectrum.coefficients(chosen) * signal).sum())
        gaps.append(one.cross_moment(chosen, t**2, s**2) - true)
    assert abs(np.mean(gaps)) < LIMIT * np.std(gaps) / np.sqrt(len(gaps))


def test_without_noise_it_is_ridge_with_a_free_intercept():
    rows, codes = data(intercept=True)
    gram = np.asfortranarray(rows.T @ rows)
    expected = np.linalg.solve(gram + np.diag([7.0] * 6 + [0.0]), rows.T @ codes)
    one = Problem.of(gram, rows.T @ codes, 1e-9, centred=True, intercept=True)
    weights, last = one.solve(one.spectrum.ridge_filter(7.0))
    np.testing.assert_allclose(weights, expected[:-1], atol=1e-9)
    np.testing.assert_allclose(last, expected[-1], atol=1e-6)


def test_the_prior_is_found_from_releases_that_follow_it():
    """t and s from 2,000 directions times 9 columns: within a few per cent, and not elsewhere."""
    rng = np.random.default_rng(3)
    d, k, t, s = 2000, 9, 0.3, 0.7
    values = np.sort(rng.gamma(0.5, 40.0, d))
    stddev = np.sqrt(t**2 * values**2 + s**2 * values + SIGMA**2)
    moments = rng.normal(size=(d, k)) * stddev[:, None]
    noise = np.full(d, SIGMA**2)
    one = Spectrum(values, np.eye(d), moments, noise, k)
    t2, s2 = one.prior_variances(label_variance=4.0)
    assert np.sqrt(t2) == pytest.approx(t, rel=0.05)
    assert np.sqrt(s2) == pytest.approx(s, rel=0.15)
    np.testing.assert_allclose(
        one.bayes_filter(t2, s2), t2 * values / (t2 * values**2 + s2 * values + 9.0)
    )


def test_the_log_loss_is_that_of_sharpened_softmax():
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(200, 3))
    scores -= scores.mean(axis=1, keepdims=True)
    labels = np.argmax(scores + rng.gumbel(size=(200, 3)), axis=1)
    agreement = scores[np.arange(200), labels].mean()
    sample = SampleScores(scores)
    sharpness = sample.sharpness(agreement)

    def loss(beta):
        return -special.log_softmax(beta * scores, axis=1)[np.arange(200), labels].mean()

    assert sample.log_loss(agreement, sharpness) == pytest.approx(loss(sharpness))
    assert loss(sharpness) <= min(loss(0.98 * sharpness), loss(1.02 * sharpness))
    assert sample.sharpness(-0.1) == 0.0
    assert sample.log_loss(-0.1, 0.0) == pytest.approx(np.log(3.0))
    assert np.isfinite(sample.sharpness(100.0))


def test_an_agreement_stays_below_its_ceiling():
    """The mean of a normal law cut off there, by quadrature."""
    from scipy import integrate, stats

    scores = np.random.default_rng(7).normal(size=(50, 3))
    sample, ceiling = SampleScores(scores), scores.max(axis=1).mean()
    for agreement in (ceiling - 5.0, ceiling - 0.1, ceiling, ceiling + 2.0):
        law = stats.norm(agreement, 0.5)
        mass, first = (
            integrate.quad(lambda x, k=k, law=law: x**k * law.pdf(x), ceiling - 9.0, ceiling)[0]
            for k in (0, 1)
        )
        found = sample.believable_agreement(agreement, 0.5)
        assert found == pytest.approx(first / mass, abs=1e-6)
        assert found < ceiling
    # However far off the estimate is, and where there is no error.
    assert sample.believable_agreement(1e9, 1.0) == pytest.approx(ceiling, abs=1e-6)
    assert sample.believable_agreement(ceiling + 1.0, 0.0) == ceiling
    assert sample.believable_agreement(-3.0, 0.0) == -3.0


@pytest.mark.parametrize("classes, most", [(2, 10), (300, 25)])
def test_shifts_match_the_means_in_few_passes(classes, most, monkeypatch):
    passes = []

    def counted(*args):
        passes.append(args)
        return mean_softmax(*args)

    mean_softmax = SampleScores.mean_softmax
    monkeypatch.setattr(SampleScores, "mean_softmax", counted)
    rng = np.random.default_rng(0)
    scores = rng.normal(scale=3.0, size=(2000, classes)).astype(np.float32)
    means = rng.uniform(0.5, 1.5, classes)
    means /= means.sum()
    shifts = SampleScores(scores).matching_shifts(means - 1.0 / classes, 0.0)
    assert len(passes) <= most
    found = special.softmax(scores + shifts, axis=1).mean(axis=0)
    np.testing.assert_allclose(found, means, rtol=1e-3)
