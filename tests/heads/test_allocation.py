"""Where a release is spent: water-filling against a numerical optimum, and its limits."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
from scipy import optimize

from tf_labeldp.heads import PrivateRidge
from tf_labeldp.plugins import PublicRows

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


def water_filling(noise_to_signal):
    return functools.partial(PublicRows.spread_shares, noise_to_signal=noise_to_signal)


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("geometric", 1e-9),
        ("geometric", 0.03),
        ("with-ties-and-zeros", 0.4),
        ("equal", 0.4),
        ("two", 5.0),
        ("one", 0.03),
        ("with-ties-and-zeros", 1e6),
    ],
)
def test_the_shares_are_those_of_the_least_error(name, noise):
    """No better than any other division: a numerical optimum, and 200 random ones."""
    eigenvalues = np.array(SPECTRA[name])
    shares = PublicRows.spread_shares(eigenvalues, noise)
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


def test_hardly_any_noise_whitens_what_is_there():
    shares = PublicRows.spread_shares(np.array([1e4, 1.0, 0.0, 1e-3]), 1e-14)
    np.testing.assert_allclose(shares, [1 / 3, 1 / 3, 0.0, 1 / 3], atol=1e-6)


@pytest.mark.parametrize("noise", [1e3, 1e308])
def test_where_noise_is_all_the_strongest_direction_gets_it(noise):
    shares = PublicRows.spread_shares(np.array([1.0, 0.0, 2.0, 1e-300]), noise)
    assert shares.tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("noise", [1e-9, 1e-4, 0.03, 1.0])
def test_half_a_spread_is_between_water_filling_and_the_features(noise):
    """At most twice the noise of either; at a large budget weak directions do not grow further."""
    eigenvalues = np.array(SPECTRA["geometric"])
    own, full = eigenvalues / eigenvalues.sum(), PublicRows.spread_shares(eigenvalues, noise)
    half = PublicRows.half_spread_shares(eigenvalues, noise)
    assert half.sum() == pytest.approx(1.0) and np.all((half > 0.0) == (full > 0.0))
    kept = full > 0.0
    assert np.all(half[kept] >= 0.5 * own[kept])
    gains = half[kept] / own[kept]
    assert gains.max() <= 4.0 * gains.min() / 0.5
    errors = [remaining_error(shares, eigenvalues, noise) for shares in (full, half, own)]
    assert errors[0] <= errors[1] <= errors[2]
    rows = np.random.default_rng(0).normal(size=(300, 12)) * np.sqrt(eigenvalues)
    covariance = np.asfortranarray(rows.T @ rows / 300)
    values = np.linalg.eigvalsh(covariance)
    halves = functools.partial(PublicRows.half_spread_shares, noise_to_signal=noise)
    mapped = rows @ PublicRows.spread_map(covariance.copy(order="F"), halves)[0]
    expected = halves(values)
    found = np.square(mapped).mean(axis=0)
    np.testing.assert_allclose(found, expected[expected > 0.0], atol=1e-5)


def test_an_unknown_spread_is_refused_before_the_release():
    with pytest.raises(ValueError, match="spread must be one of half, got 'quarter'"):
        PrivateRidge(1.0, 1e-6, num_classes=2, spread="quarter").fit(np.eye(4), [0, 1, 0, 1])


@pytest.mark.parametrize("noise", [1e-14, 1e-3])
def test_the_map_gives_each_direction_its_share(noise):
    """Of the mean squared length of the mapped rows; the map has no null directions."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 6)) * [3.0, 1.0, 0.5, 0.2, 0.1, 0.05]
    rows[:, 5] = rows[:, 0] - rows[:, 1]  # five directions
    rows -= rows.mean(axis=0)
    covariance = rows.T @ rows / len(rows)
    values = np.linalg.eigvalsh(covariance)
    map_, _ = PublicRows.spread_map(np.asfortranarray(covariance), water_filling(noise))
    expected = PublicRows.spread_shares(np.where(values > 1e-9, values, 0.0), noise)
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
    assert PublicRows.spread_map(covariance, water_filling(1e-30))[0].shape == (8, 7)


def test_the_signs_of_the_directions_are_fixed():
    """Those of an eigensolver are not; a stored release is of use for the same ones alone."""
    rows = np.random.default_rng(2).normal(size=(100, 5)) * [5.0, 4.0, 3.0, 2.0, 1.0]
    map_, _ = PublicRows.spread_map(np.asfortranarray(rows.T @ rows), water_filling(1e-4))
    largest = np.abs(map_).argmax(axis=0)
    assert np.all(map_[largest, np.arange(map_.shape[1])] > 0.0)
