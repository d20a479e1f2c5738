"""Where a release is spent: water-filling against a numerical optimum, and its limits."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import optimize

from tf_labeldp.heads import PrivateRidge, _ridge_path, one_release_head, public_rows

SPECTRA = {
    "two": [3.0, 1.0],
    "equal": [2.0, 2.0, 2.0, 2.0],
    "geometric": np.geomspace(1.0, 1e-4, 12).tolist(),
    "with-ties-and-zeros": [0.0, 5.0, 5.0, 0.1, 0.0, 1.0],
    "one": [7.0],
}


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def remaining_error(shares, eigenvalues, noise_to_signal):
    """``sum_j c_j^2 v_j / (c_j^2 + v_j)`` with ``c_j^2 = l_j / sum l``, ``v_j = noise / p_j``."""
    c2 = np.asarray(eigenvalues) / np.sum(eigenvalues)
    return float(np.sum(c2 * noise_to_signal / (c2 * shares + noise_to_signal)))


@pytest.mark.parametrize("noise", [1e-9, 1e-4, 0.03, 0.4, 5.0, 1e6])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_shares_are_those_of_the_least_error(name, noise):
    """No better than any other division: a numerical optimum, and 200 random ones."""
    eigenvalues = np.array(SPECTRA[name])
    shares = public_rows.spread_shares(eigenvalues, noise)
    assert shares.shape == eigenvalues.shape
    assert shares.sum() == pytest.approx(1.0, abs=1e-12)
    assert np.all(shares >= 0.0)
    least = remaining_error(shares, eigenvalues, noise)
    start = np.full(eigenvalues.size, 1.0 / eigenvalues.size)
    # In units of the error to be won, which is small when there is hardly any noise, or all noise.
    scale = max(abs(least - remaining_error(0.0 * start, eigenvalues, noise)), 1e-300)
    found = optimize.minimize(
        lambda p: (remaining_error(p, eigenvalues, noise) - least) / scale,
        start,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * eigenvalues.size,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1.0},
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert found.fun >= -1e-7
    if 1e-3 < noise < 1.0:  # elsewhere the error is flat, and only its value tells
        assert found.fun < 1e-4
        np.testing.assert_allclose(found.x / found.x.sum(), shares, atol=0.02)
    for other in np.random.default_rng(0).dirichlet(np.full(eigenvalues.size, 0.5), size=200):
        assert remaining_error(other, eigenvalues, noise) >= least * (1.0 - 1e-12)


def test_the_level_is_the_same_over_all_directions_under_water():
    eigenvalues, noise = np.array([4.0, 3.0, 2.0, 0.02]), 0.05
    shares = public_rows.spread_shares(eigenvalues, noise)
    levels = shares + noise * eigenvalues.sum() / eigenvalues
    assert shares[3] == 0.0 and np.all(shares[:3] > 0.0)
    np.testing.assert_allclose(levels[:3], levels[0])
    assert levels[3] > levels[0]


def test_hardly_any_noise_whitens_what_is_there():
    shares = public_rows.spread_shares(np.array([1e4, 1.0, 0.0, 1e-3]), 1e-14)
    np.testing.assert_allclose(shares, [1 / 3, 1 / 3, 0.0, 1 / 3], atol=1e-6)


@pytest.mark.parametrize("noise", [1e3, 1e15, 1e17, 1e200, 1e308])
def test_where_noise_is_all_the_strongest_direction_gets_it(noise):
    shares = public_rows.spread_shares(np.array([1.0, 0.0, 2.0, 1e-300]), noise)
    assert shares.tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("noise", [1e-12, 1.0, 1e18])
def test_equal_eigenvalues_get_equal_shares(noise):
    shares = public_rows.spread_shares(np.full(5, 0.3), noise)
    np.testing.assert_allclose(shares, 0.2, rtol=1e-12)


@pytest.mark.parametrize("noise", [1e-14, 1e-3])
def test_the_map_gives_each_direction_its_share(noise):
    """Of the mean squared length of the mapped rows; the map has no null directions."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 6)) * [3.0, 1.0, 0.5, 0.2, 0.1, 0.05]
    rows[:, 5] = rows[:, 0] - rows[:, 1]  # five directions
    rows -= rows.mean(axis=0)
    covariance = rows.T @ rows / len(rows)
    values = np.linalg.eigvalsh(covariance)
    map_ = public_rows.spread_map(np.asfortranarray(covariance), noise)
    expected = public_rows.spread_shares(np.where(values > 1e-9, values, 0.0), noise)
    expected = expected[expected > 0.0]
    assert map_.dtype == np.float32 and map_.shape == (6, expected.size)
    assert expected.size == 5 if noise == 1e-14 else expected.size < 5
    mapped = rows @ map_.astype(np.float64)
    np.testing.assert_allclose(mapped.T @ mapped / len(rows), np.diag(expected), atol=1e-5)


def test_rounding_gets_no_share_at_any_budget():
    """A null direction of rows in single precision has an eigenvalue of about 1e-15."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(500, 8)).astype(np.float32)
    rows[:, 7] = 1.0 - rows[:, :7].sum(axis=1)  # like one-hot columns: their sum says nothing
    rows = (rows - rows.mean(axis=0)).astype(np.float64)
    covariance = np.asfortranarray(rows.T @ rows / len(rows))
    assert 0.0 < abs(np.linalg.eigvalsh(covariance)[0]) < 1e-12
    assert public_rows.spread_map(covariance, 1e-30).shape == (8, 7)


def test_the_signs_of_the_directions_are_fixed():
    """Those of an eigensolver are not; a stored release is of use for the same ones alone."""
    rows = np.random.default_rng(2).normal(size=(100, 5)) * [5.0, 4.0, 3.0, 2.0, 1.0]
    map_ = public_rows.spread_map(np.asfortranarray(rows.T @ rows), 1e-4)
    largest = np.abs(map_).argmax(axis=0)
    assert np.all(map_[largest, np.arange(map_.shape[1])] > 0.0)


def test_the_spread_costs_nothing_where_the_labels_follow_the_prior_of_ridge():
    """With equal variances after the spread alone it lost 1.6 points here.

    Means over 8 fixed seeds; the standard error of a difference is 0.25.
    """
    warnings.filterwarnings("ignore", "this is fit number")
    rng = np.random.default_rng(5)
    strength = np.arange(1.0, 201.0) ** -1.5
    x = rng.normal(size=(10_000, 200)) * np.sqrt(strength)
    scores = x @ (rng.normal(size=(200, 5)) * np.sqrt(strength)[:, np.newaxis])
    y = (3.0 * scores / scores.std() + rng.gumbel(size=scores.shape)).argmax(axis=1)
    accuracies = {}
    for spread in (False, True):
        heads = [
            PrivateRidge(0.5, 1e-5, num_classes=5, spread=spread, insecure_seed=seed)
            for seed in range(8)
        ]
        found = [100.0 * one.fit(x[:8000], y[:8000]).score(x[8000:], y[8000:]) for one in heads]
        accuracies[spread] = np.mean(found)
    assert accuracies[True] > accuracies[False] - 0.5


@pytest.mark.parametrize(
    ("after", "before", "stddev", "chosen"),
    [
        (-100.0, -105.0, 1.0, "before"),
        (-100.0, -101.5, 1.0, "after"),  # by more than noise, but by little
        (-100.0, -105.0, 6.0, "after"),  # by less than noise
        (-100.0, -90.0, 1.0, "after"),
    ],
)
def test_a_prior_before_the_spread_has_to_have_clearly_less_risk(
    after, before, stddev, chosen, monkeypatch
):
    """On smoothed patches of Fashion-MNIST a gain of 0.7 % in risk lost 1.5 points of accuracy."""

    def problem(*unused, scale, **also_unused):
        risk = after if scale is None else before
        spectrum = SimpleNamespace(k_eff=1, risk=lambda _: risk, risk_stddev=lambda _: stddev)
        return SimpleNamespace(spectrum=spectrum, name="after" if scale is None else "before")

    path = SimpleNamespace(
        decompose=problem, prior_variances=lambda *_: (1.0, 1.0), bayes_filter=lambda *_: None
    )
    monkeypatch.setattr(one_release_head, "_ridge_path", path)
    head = SimpleNamespace(
        _scaling=SimpleNamespace(spread=np.eye(2)), _has_prior=True, intercept=True, noise_stddev_=1
    )
    kind, mechanism = SimpleNamespace(code_variance=1.0), SimpleNamespace(num_classes=2)
    source = SimpleNamespace(kind=kind, mechanism=mechanism)
    rows = SimpleNamespace(gram=np.eye(2))
    found, _ = PrivateRidge._least_risk(head, rows, None, source)
    assert found.name == chosen


def test_the_noise_of_scaled_columns_is_that_of_their_directions():
    """By simulation: energies of pure noise have the variances that the spectrum states."""
    rng = np.random.default_rng(0)
    rows = np.hstack([rng.normal(size=(500, 6)), np.full((500, 1), 0.2)])
    scale = rng.uniform(0.2, 3.0, 6)
    energies, stated, draws = np.zeros(6), None, 4000
    for _ in range(draws):
        problem = _ridge_path.decompose(
            (rows.T @ rows).copy(order="F"),
            rng.normal(size=(7, 1)),
            1.0,
            centred=False,
            intercept=True,
            scale=scale,
        )
        stated = problem.spectrum.noise
        energies += problem.spectrum.energies / draws
    np.testing.assert_allclose(energies, stated, rtol=5 * np.sqrt(2.0 / draws))
