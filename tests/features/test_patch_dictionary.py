"""PatchDictionary: against a loop over patches, invariances, memory, and the exported model."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tf_labeldp.features import PatchDictionary
from tf_labeldp.features._patch_dictionary import spherical_kmeans, zca


def some_images(shape, n=40, seed=0, dtype="uint8"):
    rng = np.random.default_rng(seed)
    smooth = rng.normal(size=(n, *shape)).cumsum(axis=1).cumsum(axis=2)
    scaled = (smooth - smooth.min()) / np.ptp(smooth)
    return (255 * scaled).astype(dtype) if dtype == "uint8" else scaled.astype(dtype)


def naive(images, model):
    """One patch at a time, in float64, as the docstring of the layer says it."""
    x = images[..., np.newaxis] if images.ndim == 3 else images
    x = x.astype(np.float64)
    rows = []
    for image in x:
        parts = []
        for filters in model.filters_:
            side, k = filters.patch_size, model.num_atoms
            tops = range(0, image.shape[0] - side + 1)
            lefts = range(0, image.shape[1] - side + 1)
            cells = np.zeros((model.pooling, model.pooling, 2 * k))
            counts = np.zeros((model.pooling, model.pooling, 1))
            # A place is in cell c if floor(c m / p) <= place < floor((c + 1) m / p).
            row_edges = [c * len(tops) // model.pooling for c in range(model.pooling + 1)]
            column_edges = [c * len(lefts) // model.pooling for c in range(model.pooling + 1)]
            for i, top in enumerate(tops):
                for j, left in enumerate(lefts):
                    patch = image[top : top + side, left : left + side].ravel()
                    patch = (patch - patch.mean()) / np.sqrt(patch.var() + filters.contrast_floor)
                    r = patch @ filters.weights.astype(np.float64) - filters.offsets
                    a = max(c for c in range(model.pooling) if row_edges[c] <= i)
                    b = max(c for c in range(model.pooling) if column_edges[c] <= j)
                    t = model.threshold
                    cells[a, b] += np.r_[np.maximum(0, r - t), np.maximum(0, -r - t)]
                    counts[a, b] += 1
            parts.append((cells / counts).ravel())
        rows.append(np.concatenate(parts))
    return np.array(rows)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((9, 12), (3,)), ((10, 13, 3), (3,)), ((11, 8, 1), (3,)), ((9, 10, 2), (3, 5))],
)
def test_against_one_patch_at_a_time(shape, sizes):
    images = some_images(shape)
    model = PatchDictionary(6, sizes, pooling=2, threshold=0.3)
    features = model.fit_transform(images)
    expected = naive(images, model)
    assert features.shape == (40, model.n_features_out_) == (40, 2 * 6 * 4 * len(sizes))
    np.testing.assert_allclose(features, expected, atol=2e-5)


@pytest.mark.parametrize(("share", "block_bytes"), [(7, 20_000), (1, 2**24)])
def test_many_blocks_give_what_one_gives(monkeypatch, share, block_bytes):
    images = some_images((12, 12))
    model = PatchDictionary(5, (3, 4), pooling=2).fit(images)
    whole = model.transform(images)
    monkeypatch.setattr("tf_labeldp.features._patch_dictionary._SHARE", share)
    monkeypatch.setattr("tf_labeldp.features._patch_dictionary._BLOCK_BYTES", block_bytes)
    np.testing.assert_allclose(model.transform(images), whole, atol=1e-5)


def test_contrast_and_brightness_hardly_matter():
    """Two numbers a patch are taken out: what is left differs by the contrast floor alone."""
    images = some_images((12, 12), dtype="float64")
    model = PatchDictionary(8, 5, pooling=2, contrast=1e-9).fit(images)
    features = model.transform(images)
    np.testing.assert_allclose(model.transform(0.4 * images + 3.0), features, atol=1e-3)
    assert np.abs(model.transform(images[:, ::-1]) - features).max() > 0.05


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_the_unit_of_the_images_does_not_matter(scale):
    images = some_images((12, 12)).astype("float32")
    features = PatchDictionary(8, 5, pooling=2).fit_transform(images)
    scaled = PatchDictionary(8, 5, pooling=2).fit_transform(images * np.float32(scale))
    np.testing.assert_allclose(scaled, features, atol=2e-3)


def test_constant_images_are_finite_and_all_alike():
    images = some_images((12, 12))
    model = PatchDictionary(8, 5, pooling=2).fit(images)
    flat = model.transform(np.stack([np.full((12, 12), v, "uint8") for v in (0, 7, 255)]))
    assert np.all(np.isfinite(flat))
    np.testing.assert_allclose(flat, flat[:1].repeat(3, axis=0), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "arguments"),
    [
        ((12, 15, 3), "float32", {}),
        ((13, 12, 1), "uint8", {"patch_size": (3, 6), "threshold": 0.0}),
    ],
)
def test_keras_model_takes_raw_images_and_loads(tmp_path, shape, dtype, arguments):
    images = some_images(shape, n=60, dtype=dtype)
    images[0] = 0
    mapping = PatchDictionary(**{"num_atoms": 7, "patch_size": 5, "pooling": 2, **arguments})
    features = mapping.fit_transform(images)
    model = mapping.to_keras()
    assert model.trainable_weights == []
    np.testing.assert_allclose(model.predict(images, verbose=0), features, atol=1e-4)
    model.save(tmp_path / "map.keras")
    again = keras.models.load_model(tmp_path / "map.keras")
    for same in (images, images.astype("float32")):
        np.testing.assert_allclose(again.predict(same, verbose=0), features, atol=1e-4)


def test_keras_model_of_wide_contrast_keeps_its_digits():
    """Bright images of low contrast, where E[p^2] - E[p]^2 in float32 would be noise."""
    images = 1000.0 + some_images((12, 12), dtype="float32")
    mapping = PatchDictionary(8, 5, pooling=2)
    features = mapping.fit_transform(images)
    np.testing.assert_allclose(mapping.to_keras().predict(images, verbose=0), features, atol=5e-3)


def test_kmeans_finds_planted_directions():
    rng = np.random.default_rng(0)
    planted = np.linalg.qr(rng.normal(size=(12, 12)))[0][:5]
    rows = planted[rng.integers(5, size=4000)] * rng.choice([-1.0, 1.0], size=(4000, 1))
    rows = (rows + 0.02 * rng.normal(size=rows.shape)).astype("float32")
    atoms = spherical_kmeans(rows, 15, rng)
    np.testing.assert_allclose(np.linalg.norm(atoms, axis=1), 1.0, atol=1e-5)
    assert np.abs(planted @ atoms.T).max(axis=1).min() > 0.99


def test_zca_whitens():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5000, 4)) @ rng.normal(size=(4, 4)) + 3.0
    mean, matrix = zca(rows, 1e-9)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-9)
    np.testing.assert_allclose(np.cov(((rows - mean) @ matrix).T, bias=True), np.eye(4), atol=1e-6)


IMAGES = some_images((12, 12))


def test_bad_input_of_fit():
    for arguments, images, message in [
        ({}, IMAGES.reshape(40, -1), r"\(n, h, w\).*got \(40, 144\)"),
        ({}, np.full((3, 12, 12), 5), "expected images with contrast"),
        ({}, np.full((3, 12, 12), np.nan), "finite"),
        ({"patch_size": 11}, IMAGES, r"3 x 3 patches.*got 2 x 2 .*12 x 12"),
        ({"patch_size": 1}, IMAGES, "at least 2"),
        ({"num_atoms": 0}, IMAGES, "num_atoms must be at least 1"),
        ({"contrast": 0.0}, IMAGES, "contrast must be finite and above zero"),
    ]:
        with pytest.raises(ValueError, match=message):
            PatchDictionary(**{"num_atoms": 4, "patch_size": 5, **arguments}).fit(images)


def test_bad_input_of_transform():
    model = PatchDictionary(4, 5, pooling=2).fit(IMAGES)
    with pytest.raises(ValueError, match=r"shape \(m, 12, 12\) as in fit, got \(40, 12, 11\)"):
        model.transform(IMAGES[:, :, :11])
    broken = IMAGES.astype("float32")
    broken[3, 4, 5] = np.nan
    broken[7] = np.inf
    with pytest.raises(ValueError, match="2 of 40 have pixels that are NaN, infinite"):
        model.transform(broken)
    for method in (model.fit, model.transform):
        with pytest.raises(ValueError, match=r"2 of 40.*squares overflow float32"):
            method(np.where(np.isfinite(broken), broken, 1e30))
