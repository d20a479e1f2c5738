"""The pass over the features: Gram matrix, digest, sample, memory; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.heads import _gram


def rows_of(source, center=True, intercept=0.2, max_bytes=8e9):
    return _gram.PublicRows(source, center=center, intercept=intercept, max_bytes=max_bytes)


def table(n=500, d=7, dtype=np.float32):
    return (np.random.default_rng(0).normal(size=(n, d)) + 0.3).astype(dtype)


def scaled_by_hand(x, center, intercept):
    x = x.astype(np.float64)
    x = x - x.mean(axis=0) if center else x
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    if intercept:
        x = np.concatenate([x, np.full((len(x), 1), intercept)], axis=1)
    return x / np.sqrt(1 + intercept**2)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("intercept", [0.0, 0.2])
def test_the_gram_matrix_is_that_of_unit_rows(center, intercept, monkeypatch):
    monkeypatch.setattr(_gram, "_BLOCK_BYTES", 4096)  # nine blocks
    x = table()
    rows = rows_of(x, center, intercept)
    scan = rows.scan()
    expected = scaled_by_hand(x, center, intercept)
    np.testing.assert_allclose(np.triu(scan.gram), np.triu(expected.T @ expected), atol=1e-10)
    np.testing.assert_allclose(np.concatenate(list(rows.blocks())), expected, atol=1e-12)
    norms = np.linalg.norm(np.concatenate(list(rows.blocks())), axis=1)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-14)
    assert scan.num_rows == 500
    assert scan.max_l1 == pytest.approx(np.abs(expected).sum(axis=1).max())


def test_the_digest_knows_the_rows_and_not_how_they_are_cut(monkeypatch):
    x = table()
    digest = rows_of(x).digest()
    monkeypatch.setattr(_gram, "_BLOCK_BYTES", 1000)
    assert rows_of(x.copy()).digest() == digest
    other = x.copy()
    other[3, 2] += 1e-6
    assert rows_of(other).digest() != digest
    assert rows_of(x, center=False).digest() != digest
    assert rows_of(x, intercept=0.0).digest() != digest
    assert rows_of(x[::-1]).digest() != digest


def test_the_sample_is_uniform_and_the_same_however_it_is_cut(monkeypatch):
    monkeypatch.setattr(_gram, "_SAMPLE_ROWS", 1000)
    x = np.column_stack([np.arange(20_000.0), np.ones(20_000)])
    whole, parts = _gram._Sample(), _gram._Sample()
    whole.add(x)
    for part in np.array_split(x, 37):
        parts.add(part)
    np.testing.assert_array_equal(whole.rows(), parts.rows())
    kept = whole.rows()[:, 0]
    assert kept.size == 1000 and np.all(np.diff(kept) > 0)
    # Odd rows are binomial(1000, 1/2): beyond five standard deviations with p = 6e-7.
    assert abs(np.count_nonzero(kept % 2) - 500) < 5 * np.sqrt(250)
    assert abs(kept.mean() - 10_000) < 5 * 20_000 / np.sqrt(12 * 1000)


def test_a_memory_mapped_array_is_read_in_place(tmp_path):
    np.save(tmp_path / "x.npy", table())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(rows_of(mapped).scan().gram, rows_of(table()).scan().gram)


def test_a_long_pass_says_how_far_it_is(monkeypatch, capsys):
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr(_gram.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(_gram, "_BLOCK_BYTES", 4096)
    rows_of(table(), center=False).scan()
    said = capsys.readouterr().err
    assert "Gram matrix: 73 of 500 rows, 12 a second" in said
    assert "Gram matrix: 500 rows in" in said


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("center", [False, True])
def test_rows_that_are_not_finite_are_refused(bad, center):
    x = table()
    x[[17, 30], 2] = bad
    with pytest.raises(ValueError, match=r"2 row\(s\) hold NaN, infinity .* first at row 17"):
        rows_of(x, center).scan()


@pytest.mark.parametrize("center", [False, True])
def test_rows_of_zeros_are_refused(center):
    x = table()
    x[[3, 9, 100]] = 0.0
    with pytest.raises(
        ValueError, match=r"3 row\(s\) of features are all zero, the first at row 3"
    ):
        rows_of(x, center).scan()


def test_rows_that_equal_the_mean_are_refused():
    with pytest.raises(ValueError, match=r"equal to the mean of all rows.*center=False"):
        rows_of(np.ones((10, 3))).scan()


def test_too_many_features_say_how_many_fit():
    with pytest.raises(
        ValueError, match=r"9001 columns need \d.\d GB; at most (\d+) fit"
    ) as caught:
        rows_of(np.ones((2, 9000), np.float32) + np.eye(2, 9000), max_bytes=2e9).scan()
    fit = int(str(caught.value).split("at most ")[1].split()[0])
    _gram.check_memory(fit, 2e9)
    with pytest.raises(ValueError, match="at most"):
        _gram.check_memory(fit + 1, 2e9)


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        (np.ones(5), ValueError, r"features must have shape \(n, d\), got \(5,\)"),
        (np.ones((5, 28, 28)), ValueError, "Flatten images"),
        (np.array([["a", "b"]]), TypeError, "features must be numbers"),
        (np.ones((0, 3)), ValueError, "features hold no rows"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(features, error, message):
    with pytest.raises(error, match=message):
        rows_of(features).scan()
