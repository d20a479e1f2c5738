"""The numerics of logistic regression from a release: gradient, fit, Stein's estimate, choice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import optimize, special

from tf_labeldp.heads import _logistic, _ridge_path
from tf_labeldp.heads._logistic import Likelihood, LikelihoodProblem
from tf_labeldp.heads._poisson import CountLikelihood

LIMIT = 5.2
"""Standard errors of a mean beyond which it is wrong by chance with a probability of 2e-7."""
SIGMA = 4.0


def data(softmax, n=150, d=4):
    """Rows (n, d) and centred codes (n, C): three classes, or two separate labels."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(n, d)) * np.geomspace(1.0, 0.2, d)
    scores = rows[:, :3] @ rng.normal(size=(3, 3)) * 2.0 + rng.gumbel(size=(n, 3))
    if softmax:
        return rows, np.eye(3)[np.argmax(scores, axis=1)] - 1.0 / 3.0
    return rows, (scores[:, :2] > 0.0) - 0.5


def problem(softmax, moments, rows, sigma=SIGMA, penalty=3.0):
    values, vectors = np.linalg.eigh(rows.T @ rows)
    likelihood = Likelihood((rows @ vectors).astype(np.float32), 1.0, softmax)
    d = values.size
    return LikelihoodProblem(
        likelihood,
        vectors.T @ moments,
        np.full(d, sigma**2),
        values,
        np.full(d, penalty),
        np.zeros(d, bool),
    )


def log_likelihood(rows, codes, coefficients, softmax):
    """By hand, in double precision: sum of log-losses of the labels behind centred codes."""
    scores = rows @ coefficients
    if softmax:
        return float((special.logsumexp(scores, axis=1) - (scores * (codes + 1 / 3)).sum(1)).sum())
    # log(1 + exp(s)) - y s for y = code + 1/2
    return float((np.logaddexp(0.0, scores) - scores * (codes + 0.5)).sum())


@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "sigmoid"])
def test_the_gradient_is_that_of_the_value(softmax):
    """By differences of the value in double precision, computed another way."""
    rows, codes = data(softmax)
    one = Likelihood(rows.astype(np.float32), 2.5, softmax)
    at = np.random.default_rng(1).normal(size=(4, codes.shape[1]))
    value, gradient = one.value_and_gradient(at)

    def exact(u):
        linear = rows.T @ (codes + 1 / 3 if softmax else codes)
        return 2.5 * (log_likelihood(rows, codes, u, softmax) + (linear * u).sum())

    assert value == pytest.approx(exact(at), rel=1e-5)
    flat = optimize.approx_fprime(at.ravel(), lambda u: exact(u.reshape(at.shape)), 1e-6)
    np.testing.assert_allclose(gradient.ravel(), flat, rtol=1e-3, atol=1e-3)


def test_the_gradient_of_counts_is_that_of_the_loss_below_and_above_the_largest_label():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 3)).astype(np.float32)
    likelihood = CountLikelihood(rows, 2.0, rate=0.3, middle=2.0, high=4.0)
    for size in (0.1, 3.0):
        at = size * rng.normal(size=3)
        inside = 0.3 * np.exp(rows @ at) < 4.0
        assert inside.any() and (size == 0.1) == inside.all()
        found = likelihood.value_and_gradient(at[:, np.newaxis])[1][:, 0]
        value = lambda u: likelihood.value_and_gradient(u[:, np.newaxis])[0]  # noqa: E731
        expected = optimize.approx_fprime(at, value, 1e-3)
        np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05 * np.abs(found).max())


@pytest.mark.parametrize(("softmax", "multiple"), [(True, 8.0), (False, 0.25)])
def test_the_fit_is_the_penalised_optimum(softmax, multiple):
    rows, codes = data(softmax)
    one = problem(softmax, rows.T @ codes, rows)
    found = one.fit(multiple, one.moments, np.zeros_like(one.moments))
    _, vectors = np.linalg.eigh(rows.T @ rows)
    shape = found.shape

    def objective(flat):
        u = flat.reshape(shape)
        return log_likelihood(rows, codes, u, softmax) + 1.5 * multiple * (u * u).sum()

    best = optimize.minimize(objective, np.zeros(found.size), method="BFGS", tol=1e-8)
    np.testing.assert_allclose(vectors @ found, best.x.reshape(shape), atol=2e-3)
    if softmax:
        np.testing.assert_allclose(found.sum(axis=1), 0.0, atol=1e-12)


def test_a_fixed_penalty_is_not_multiplied():
    rows, codes = data(True)
    one = problem(True, rows.T @ codes, rows)
    fixed = dataclasses.replace(one, fixed=np.ones(4, bool))
    start = np.zeros_like(one.moments)
    expected = one.fit(1.0, one.moments, start)
    np.testing.assert_allclose(fixed.fit(64.0, one.moments, start), expected, atol=1e-9)
    assert np.abs(one.fit(64.0, one.moments, start) - expected).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "sigmoid"])
def test_the_estimated_log_loss_is_unbiased(softmax, monkeypatch):
    """Mean over 500 releases less the exact log-loss of the same fits: zero within its error.

    One probe a release will do for that. The sharpness is held, since the least of many estimates
    is too low by its nature, and so is the agreement, which is kept below its ceiling afterwards.
    Without the divergence the estimate is far too low, and with twice the divergence far too high.
    """
    monkeypatch.setattr(_ridge_path, "softmax_sharpness", lambda scores, agreement: 1.0)
    monkeypatch.setattr(_ridge_path, "believable_agreement", lambda s, agreement, error: agreement)
    monkeypatch.setattr(_logistic, "_MOST_PROBES", 1)
    rows, codes = data(softmax)
    n, exact = len(rows), rows.T @ codes
    rng = np.random.default_rng(3)
    gaps, without, twice = [], [], []
    _, vectors = np.linalg.eigh(rows.T @ rows)
    for seed in range(500):
        released = exact + rng.normal(0.0, SIGMA, exact.shape)
        if softmax:
            released -= released.mean(axis=1, keepdims=True)
        one = problem(softmax, released, rows)
        fit = one.assess(2.0, np.zeros_like(released), n, probe_seed=seed)
        u = fit.coefficients
        columns = 1 if softmax else codes.shape[1]
        true = log_likelihood(rows, codes, vectors @ u, softmax) / n / columns
        naive = true + float((u * (vectors.T @ exact - one.moments)).sum()) / n / columns
        gaps.append(fit.loss - true)
        without.append(naive - true)
        twice.append(2.0 * fit.loss - naive - true)

    def errors(values):
        return np.mean(values) / (np.std(values) / np.sqrt(len(values)))

    assert abs(errors(gaps)) < LIMIT
    assert errors(without) < -LIMIT
    assert errors(twice) > LIMIT


def test_the_choice_goes_downhill_to_a_least_power_of_two():
    for least in (-1.3, 0.2, 3.4, 9.0):
        seen = {}

        def loss(multiple, least=least, seen=seen):
            seen[multiple] = (np.log2(multiple) - least) ** 2
            return seen[multiple]

        best = _logistic._descend(loss, 8.0)
        assert best == 2.0 ** round(least)
        assert seen[best] <= min(seen[best / 2.0], seen[best * 2.0])  # both were tried


def test_pure_noise_is_not_sharpened_into_certainties():
    """Releases of noise alone, forty times as large as their signal could be."""
    rows, codes = data(softmax=True)
    rng = np.random.default_rng(4)
    sharp = []
    for _ in range(10):
        released = rng.normal(0.0, 500.0, (rows.T @ codes).shape)
        released -= released.mean(axis=1, keepdims=True)
        one = problem(True, released, rows, 500.0, 10.0)
        fit = one.assess(4.0, np.zeros_like(released), len(rows))
        scores = fit.sharpness * one.likelihood.scores(fit.coefficients)
        sharp.append(special.softmax(scores, axis=1).max(axis=1).mean())
    # Were a Stein estimate taken as it is, half of them would be near one.
    assert np.count_nonzero(np.array(sharp) > 0.9) <= 3


def test_the_log_loss_is_that_of_sharpened_softmax():
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(200, 3))
    scores -= scores.mean(axis=1, keepdims=True)
    labels = np.argmax(scores + rng.gumbel(size=(200, 3)), axis=1)
    agreement = scores[np.arange(200), labels].mean()
    sharpness = _ridge_path.softmax_sharpness(scores, agreement)

    def loss(beta):
        return -special.log_softmax(beta * scores, axis=1)[np.arange(200), labels].mean()

    assert _ridge_path.log_loss(scores, agreement, sharpness) == pytest.approx(loss(sharpness))
    assert loss(sharpness) <= min(loss(0.98 * sharpness), loss(1.02 * sharpness))
    assert _ridge_path.softmax_sharpness(scores, -0.1) == 0.0
    assert _ridge_path.log_loss(scores, -0.1, 0.0) == pytest.approx(np.log(3.0))
    assert np.isfinite(_ridge_path.softmax_sharpness(scores, 100.0))


def test_an_agreement_stays_below_its_ceiling():
    """The mean of a normal law cut off there, by quadrature."""
    from scipy import integrate, stats

    scores = np.random.default_rng(7).normal(size=(50, 3))
    ceiling = scores.max(axis=1).mean()
    for agreement in (ceiling - 5.0, ceiling - 0.1, ceiling, ceiling + 2.0):
        law = stats.norm(agreement, 0.5)
        mass, first = (
            integrate.quad(lambda x, k=k, law=law: x**k * law.pdf(x), ceiling - 9.0, ceiling)[0]
            for k in (0, 1)
        )
        found = _ridge_path.believable_agreement(scores, agreement, 0.5)
        assert found == pytest.approx(first / mass, abs=1e-6)
        assert found < ceiling
    # However far off the estimate is, and where there is no error.
    assert _ridge_path.believable_agreement(scores, 1e9, 1.0) == pytest.approx(ceiling, abs=1e-6)
    assert _ridge_path.believable_agreement(scores, ceiling + 1.0, 0.0) == ceiling
    assert _ridge_path.believable_agreement(scores, -3.0, 0.0) == -3.0
