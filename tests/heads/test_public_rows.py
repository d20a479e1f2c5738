"""Features as rows of unit norm: scaling, Gram matrix, samples, digest, memory; what is refused."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_labeldp.heads import public_rows
from tf_labeldp.plugins import FeatureRows, PublicRows

FALSE_ALARM = 1e-6


def survey(source, max_bytes=8e9):
    return PublicRows.survey(FeatureRows(source), max_bytes)


def designed(source, center=True, intercept=0.2, noise_to_signal=0.01, max_bytes=8e9):
    """The scaled rows, and their scaling."""
    rows, sample = survey(source, max_bytes)
    scaling = rows.scaling(
        sample, center=center, intercept=intercept, noise_to_signal=noise_to_signal
    )
    return rows.scaled(scaling), scaling


def table(n=500, d=7, dtype=np.float32):
    scales = np.geomspace(2.0, 0.05, d)
    return (np.random.default_rng(0).normal(size=(n, d)) * scales + 0.3).astype(dtype)


def in_blocks(x, size):
    return tf.data.Dataset.from_tensor_slices(x).batch(size)


def all_rows(rows):
    return np.concatenate(list(rows.blocks()))


def scaled_by_hand(x, center, intercept, spread):
    x = x.astype(np.float64)
    x = x - x.mean(axis=0) if center else x
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    if spread is not None:
        x = x.astype(np.float32) @ spread
        x = x / np.linalg.norm(x, axis=1, keepdims=True).astype(np.float64)
    if intercept:
        x = np.concatenate([x, np.full((len(x), 1), intercept)], axis=1)
    return x / np.sqrt(1 + intercept**2)


@pytest.mark.parametrize(
    ("center", "intercept", "noise_to_signal"),
    [
        (False, 0.0, None),
        (True, 0.2, None),
        (True, 0.0, 1e-6),
        (False, 0.2, 1e-6),
        (True, 0.2, 0.3),
    ],
)
def test_rows_have_unit_norm_and_their_gram_matrix(center, intercept, noise_to_signal):
    x = table()
    rows, scaling = designed(in_blocks(x, 73), center, intercept, noise_to_signal)
    assert (scaling.spread is None) == (noise_to_signal is None)
    if noise_to_signal == 0.3:
        assert scaling.spread.shape[1] < 7  # what noise would drown gets nothing
    rows = rows.scan()
    found = all_rows(rows)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=0, atol=1e-12)
    expected = scaled_by_hand(x, center, intercept, scaling.spread)
    np.testing.assert_allclose(found, expected, atol=1e-6 if noise_to_signal else 1e-12)
    np.testing.assert_allclose(np.triu(rows.gram), np.triu(found.T @ found), atol=1e-10)
    assert rows.rows.num_rows == 500
    assert rows.max_l1 == np.abs(found).sum(axis=1).max()
    np.testing.assert_allclose(rows.sample.rows, found, atol=1e-7)  # there was room for all


def test_a_row_equal_to_the_mean_has_the_constant_alone():
    x = table(dtype=np.float64)
    _, scaling = designed(x)
    at_mean = scaling.rows(scaling.mean[np.newaxis])
    np.testing.assert_array_equal(at_mean[0, :-1], 0.0)
    assert at_mean[0, -1] == 0.2 / np.hypot(1.0, 0.2)
    # Also up to the rounding of the mean, which must not become a direction.
    near = scaling.rows(scaling.mean[np.newaxis] * (1.0 + 1e-15))
    np.testing.assert_array_equal(near, at_mean)
    with_mean_row = np.array([[1.0, 5.0], [3.0, 5.0], [2.0, 5.0]], np.float32)
    rows, _ = designed(with_mean_row, intercept=0.0)
    np.testing.assert_allclose(np.linalg.norm(all_rows(rows), axis=1), [1.0, 1.0, 0.0])
    assert np.all(np.isfinite(rows.scan().gram))


def test_a_row_outside_of_all_directions_is_zero():
    """Rows of prediction may lie where no training row did."""
    x = table()
    x[:, 6] = 0.0
    _, scaling = designed(x, center=False, intercept=0.0, noise_to_signal=1e-6)
    assert scaling.spread.shape == (7, 6)
    np.testing.assert_array_equal(scaling.spread[6], 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(scaling.rows(np.eye(7)[6:]), 0.0)


def scanned(source, **how):
    return designed(source, **how)[0].scan()


def test_the_digest_knows_the_rows_and_not_how_they_are_cut_or_rounded():
    x = table()
    digest = scanned(x).digest()
    assert scanned(x).digest() == digest
    noise = 1e-6 * np.random.default_rng(5).normal(size=x.shape)
    for source in (x.copy(), in_blocks(x, 33), x.astype(np.float64), x + noise):
        assert scanned(source).matches(digest)
    changed = x.copy()
    changed[:50] += 0.5
    for source, how in [
        (changed, {}),
        (x[::-1], {}),
        (np.roll(x, 1, axis=0), {}),
        (-x, {}),
        (x[:-100], {}),
        (x, {"center": False}),
        (x, {"intercept": 0.0}),
        (x, {"intercept": 0.3}),
        (x, {"noise_to_signal": None}),
        (x, {"noise_to_signal": 0.1}),
    ]:
        assert not scanned(source, **how).matches(digest)
    plain = scanned(x, noise_to_signal=None).digest()
    assert not scanned(x[:, ::-1], noise_to_signal=None).matches(plain)
    for other in ("", "0x1p0", "3f2a", digest + " 0x1p0"):
        assert not scanned(x).matches(other)


def test_the_sample_is_uniform_and_the_same_however_it_is_cut():
    """A chi-square test over 20 parts of the stream, and of odd against even places."""
    stream = np.arange(30_000, dtype=np.float64)[:, np.newaxis]
    kept = []
    for cuts in (1, 7, 30_000 // 13):
        sample = public_rows.Reservoir(1, 2000)
        for part in np.array_split(stream, cuts):
            sample.add(part)
        kept.append(sample.sample().rows)
    assert all(np.array_equal(one, kept[0]) for one in kept)
    places = kept[0][:, 0].astype(int)
    assert kept[0].dtype == np.float32 and np.unique(places).size == 2000
    parts = np.bincount(places // 1500, minlength=20)
    # Drawn without replacement, the counts vary a little less than a multinomial's.
    assert stats.chisquare(parts).pvalue > FALSE_ALARM
    assert stats.binomtest(int(np.count_nonzero(places % 2)), 2000).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1e39])
def test_rows_that_are_not_finite_are_refused(bad):
    x = table(dtype=np.float64)
    x[[17, 19, 30], 2] = bad
    with pytest.raises(
        ValueError, match=r"3 row\(s\) have NaN, infinity .* first at row 17, column\(s\) 2\."
    ):
        survey(x)


def test_large_and_small_units_make_no_difference():
    expected = all_rows(designed(table(dtype=np.float64))[0])
    for unit in (1e30, 1e-30):
        found = all_rows(designed(table(dtype=np.float64) * unit)[0])
        np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-4)


def test_rows_of_zeros_are_no_longer_than_others():
    x = table()
    x[[3, 9, 100]] = 0.0
    for noise_to_signal in (None, 0.1):
        lengths = np.linalg.norm(all_rows(designed(x, noise_to_signal=noise_to_signal)[0]), axis=1)
        np.testing.assert_allclose(lengths, 1.0, atol=1e-5)


@pytest.mark.parametrize(("value", "noise_to_signal"), [(0.1, None), (1e-20, 0.1)])
def test_features_that_never_change_are_refused(value, noise_to_signal):
    with pytest.raises(ValueError, match="got equal rows"):
        designed(np.full((10, 3), value), noise_to_signal=noise_to_signal)


def test_too_many_features_say_how_many_fit():
    wide = np.eye(2, 9000, dtype=np.float32)
    with pytest.raises(
        ValueError, match=r"at most \d+ features .* got 9000, which need 3\.2 GB"
    ) as caught:
        survey(wide, max_bytes=2e9)
    fit = int(str(caught.value).split("at most ")[1].split()[0])
    PublicRows.check_memory(fit, 2e9)
    with pytest.raises(ValueError, match="at most"):
        PublicRows.check_memory(fit + 1, 2e9)


def test_a_sample_keeps_within_its_share_of_the_memory():
    x = np.random.default_rng(0).normal(size=(5000, 7)).astype(np.float32)
    rows, sample = survey(x, max_bytes=4 * 28 * 1000)
    assert sample.rows.shape == (1000, 7) and rows.num_rows == 5000


def test_nearly_any_two_rows_that_change_places_are_noticed():
    """Weights of one size, of either sign, would take half of all pairs for the same."""
    x = np.random.default_rng(3).normal(size=(12, 4)).astype(np.float32)
    digest = scanned(x).digest()
    missed = 0
    for first, second in itertools.combinations(range(12), 2):
        swapped = x.copy()
        swapped[[first, second]] = x[[second, first]]
        missed += scanned(swapped).matches(digest)
    assert missed <= 3  # of 66: some weights are close to each other


def unit_rows(n, width, spread):
    rows = 1.0 + spread * np.random.default_rng(4).normal(size=(n, width))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def gram_error(rows, dtype=np.float64, block=700):
    """The largest error of an entry (i, j), over sqrt(A_ii A_jj)."""
    gram = np.zeros((rows.shape[1], rows.shape[1]), order="F")
    for start in range(0, len(rows), block):
        gram = PublicRows.add_gram(gram, rows[start : start + block].astype(dtype))
    expected = rows.T @ rows
    sizes = np.sqrt(np.diag(expected))
    return np.abs(np.triu(gram - expected) / np.outer(sizes, sizes)).max()


def test_the_gram_matrix_in_single_precision_is_within_its_bound():
    """Random rows are far below; rows that are all the same round the same way at each step."""
    unit, terms, stated = 2.0**-24, 2048 + 1, 1.25e-4  # in the docstrings
    rounded = terms * unit / (1.0 - terms * unit)
    assert 0.95 * stated < (1.0 + unit) ** 2 * (1.0 + rounded) - 1.0 < stated
    for spread, least, most in ((1e3, 1e-8, 5e-7), (0.0, 5e-7, stated)):
        rows = unit_rows(6000, 520, spread)
        assert least < gram_error(rows, np.float32, block=6000) < most
        assert gram_error(rows) < 1e-12


@pytest.mark.parametrize(("width", "least", "most"), [(511, 0.0, 1e-12), (512, 1e-12, 1e-4)])
def test_only_a_wide_matrix_is_summed_in_single_precision(width, least, most):
    """Few columns take no time."""
    x = unit_rows(600, width, 1e3)
    rows = scanned(x, intercept=0.0, noise_to_signal=1e-9)
    assert rows.gram.shape == (width, width)
    found = all_rows(rows)
    assert least <= np.abs(np.triu(rows.gram - found.T @ found)).max() < most


@pytest.mark.parametrize("max_bytes", [8e9, 3e4])
def test_the_release_reads_rows_again_only_where_they_were_not_kept(max_bytes):
    """The same rows, matrix, sample and digest with little memory, in one reading more."""
    x, readings = table(), []
    source = FeatureRows(x)
    blocks = source.blocks
    source.blocks = lambda see: readings.append(1) or blocks(see)
    # With little memory, the scaling would be of fewer rows.
    rows = PublicRows.survey(source, max_bytes)[0].scaled(designed(x)[1]).scan(100)
    found = all_rows(rows)
    assert len(readings) == (2 if max_bytes == 8e9 else 3)
    apart = designed(x)[0]
    np.testing.assert_array_equal(found, all_rows(apart))
    apart = apart.scan()
    np.testing.assert_array_equal(rows.gram, apart.gram)
    sample = rows.sample.rows
    assert len(sample) == 100 and np.isin(sample, apart.sample.rows).all()
    assert rows.digest() == apart.digest() and rows.max_l1 == apart.max_l1
