"""Responses of patches to filters, pooled: the numpy side of the layer ``PatchFeatures``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from concurrent import futures

import numpy as np

from tf_labeldp.features._spherical_kmeans import spherical_kmeans, zca

_BLOCK_BYTES = 2**21
"""Memory of one block's responses: what stays in the cache of a core between the steps."""
_SHARE = 512
"""Images that a thread takes at a time."""


@dataclasses.dataclass(frozen=True)
class Filters:
    """What was learnt for one patch size; the arrays are those of the layer ``PatchFeatures``."""

    patch_size: int
    weights: np.ndarray  # float32 (patch_size^2 * channels, num_atoms), each column of sum zero
    offsets: np.ndarray  # float32 (num_atoms,)
    contrast_floor: float


def learn_filters(
    images: np.ndarray,
    patch_size: int,
    num_atoms: int,
    *,
    whitening: float,
    contrast: float,
    max_patches: int,
    rng: np.random.Generator,
) -> Filters:
    """Returns filters learnt from a sample of the patches of images.

    Args:
        images: (n, h, w, c), of any number dtype.
        patch_size: side of a patch.
        num_atoms: the number of filters.
        whitening: what is added to the eigenvalues of the covariance of normalised patches.
        contrast: what is added to a patch's variance, in units of the mean over the sample.
        max_patches: the size of the sample.
        rng: the source of the sample and of the first directions.
    """
    patches = _sample_patches(images, patch_size, max_patches, rng)
    patches -= patches.mean(axis=1, keepdims=True)
    variance = np.einsum("ij,ij->i", patches, patches) / patches.shape[1]
    mean_variance = float(variance.mean(dtype=np.float64))
    if mean_variance == 0.0:
        raise ValueError(
            f"images have no contrast: every patch of {patch_size} x {patch_size} pixels that was "
            "looked at is constant. Check how they were read."
        )
    contrast_floor = contrast * mean_variance
    patches /= np.sqrt(variance + contrast_floor)[:, np.newaxis]
    mean, whiten = zca(patches, whitening)
    whitened = ((patches - mean.astype(np.float32)) @ whiten.astype(np.float32)).astype(np.float32)
    atoms = spherical_kmeans(whitened, num_atoms, rng)
    weights = whiten @ atoms.T.astype(np.float64)
    # Patches have mean zero, so the part of a filter that is constant only costs digits.
    return Filters(
        patch_size,
        (weights - weights.mean(axis=0)).astype(np.float32),
        (mean @ weights).astype(np.float32),
        contrast_floor,
    )


def pooling_matrix(rows: int, columns: int, cells: int) -> np.ndarray:
    """Returns ``float32`` (rows * columns, cells^2), whose columns average over grid cells."""
    sides = []
    for size in (rows, columns):
        edges = np.arange(cells + 1) * size // cells
        cell_of = np.searchsorted(edges, np.arange(size), side="right") - 1
        one_hot = (cell_of[:, np.newaxis] == np.arange(cells)).astype(np.float64)
        sides.append(one_hot / one_hot.sum(axis=0))
    return np.einsum("ia,jb->ijab", *sides).reshape(rows * columns, -1).astype(np.float32)


def pooled_responses(
    images: np.ndarray,
    filters: Filters,
    pool: np.ndarray,
    stride: int,
    threshold: float,
    out: np.ndarray,
) -> None:
    """Fills ``out``, ``float32`` (n, cells * 2 * num_atoms), as the layer ``PatchFeatures`` does.

    Args:
        images: (n, h, w, c).
        filters: of k filters.
        pool: (positions, cells), columns of sum one.
        stride: step between patches.
        threshold: of the responses, both sides.
        out: may be some columns of a wider array.
    """
    cells, num_atoms = pool.shape[1], len(filters.offsets)
    rows = out.reshape(len(images), cells, 2, num_atoms)  # a view, as only one axis is split

    def fill(start: int) -> None:
        part = slice(start, start + _SHARE)
        _fill(images[part], filters, pool, stride, threshold, rows[part])

    with one_blas_thread(), futures.ThreadPoolExecutor(_cores()) as threads:
        for _ in threads.map(fill, range(0, len(images), _SHARE)):
            pass  # raises what a thread has raised


def count_too_large(images: np.ndarray) -> int:
    """Returns how many images have no finite sum of squares in float32."""
    bad = 0
    for start in range(0, len(images), 1024):
        with np.errstate(over="ignore"):
            part = images[start : start + 1024].astype(np.float32).reshape(-1, images[0].size)
            bad += int(np.count_nonzero(~np.isfinite(np.einsum("ij,ij->i", part, part))))
    return bad


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keeps the linear algebra of this process on the calling threads.

    Products here are small: several threads for one of them wait for each other longer than they
    compute, above all when the cores have other work (a factor of five to twenty was seen).
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(1, user_api="blas"):
        yield


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fill(
    images: np.ndarray,
    filters: Filters,
    pool: np.ndarray,
    stride: int,
    threshold: float,
    out: np.ndarray,
) -> None:
    """Fills ``out`` (n, cells, 2, num_atoms), some images at a time."""
    positions, cells = pool.shape
    num_atoms = len(filters.offsets)
    block = max(1, _BLOCK_BYTES // (4 * positions * max(num_atoms, len(filters.weights))))
    block = min(block, len(images))
    # Reused by all blocks: fresh memory costs more here than the arithmetic.
    buffers = [
        np.empty(len(filters.weights) * block * positions, np.float32),
        *(np.empty(num_atoms * block * positions, np.float32) for _ in range(2)),
    ]
    transposed = np.ascontiguousarray(filters.weights.T)
    high = (filters.offsets + np.float32(threshold))[:, np.newaxis]
    low = (filters.offsets - np.float32(threshold))[:, np.newaxis]
    for start in range(0, len(images), block):
        part = images[start : start + block]
        used = len(part) * positions
        patches = buffers[0][: len(transposed[0]) * used].reshape(-1, used)
        responses, above = (
            buffer[: num_atoms * used].reshape(num_atoms, used) for buffer in buffers[1:]
        )
        _normalised_patches(part, filters, stride, patches)
        np.matmul(transposed, patches, out=responses)
        np.maximum(responses, high, out=above)
        below = np.minimum(responses, low, out=responses)
        # The pool's columns sum to one, so that what is subtracted may be subtracted after it.
        for side, (values, bound) in enumerate(((above, high), (below, low))):
            pooled = (values.reshape(-1, positions) @ pool).reshape(num_atoms, len(part), cells)
            pooled = np.abs(pooled - bound[:, :, np.newaxis])
            out[start : start + len(part), :, side] = pooled.transpose(1, 2, 0)


def _normalised_patches(images: np.ndarray, filters: Filters, stride: int, out: np.ndarray) -> None:
    """Fills ``out`` (patch pixels, images * positions) with patches over their contrast.

    Pixels come first, so that each row is one shifted copy of the images.
    """
    side = filters.patch_size
    n, height, width, channels = images.shape
    rows, columns = (height - side) // stride + 1, (width - side) // stride + 1
    x = images.astype(np.float32)
    x -= x.mean(axis=(1, 2, 3), keepdims=True)  # large numbers would cost digits below
    patches = out.reshape(side, side, channels, n, rows, columns)
    for i in range(side):
        for j in range(side):
            window = x[
                :,
                i : i + stride * (rows - 1) + 1 : stride,
                j : j + stride * (columns - 1) + 1 : stride,
            ]
            patches[i, j] = window.transpose(3, 0, 1, 2)
    out -= out.mean(axis=0)
    # Two passes, not E[p^2] - E[p]^2: the latter loses a patch of low contrast to rounding.
    variance = np.einsum("ij,ij->j", out, out) / np.float32(len(out))
    out /= np.sqrt(variance + np.float32(filters.contrast_floor))


def _sample_patches(
    images: np.ndarray, side: int, max_patches: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns random patches, ``float32`` (m, side^2 * channels); no more than there are."""
    n, height, width, channels = images.shape
    rows, columns = height - side + 1, width - side + 1
    size = min(max_patches, n * rows * columns)
    length = side * side * channels
    image = rng.integers(n, size=size)
    top, left = rng.integers(rows, size=size), rng.integers(columns, size=size)
    windows = np.lib.stride_tricks.sliding_window_view(images, (side, side), axis=(1, 2))
    patches = np.empty((size, length), np.float32)
    for start in range(0, size, 8192):
        part = slice(start, start + 8192)
        chosen = windows[image[part], top[part], left[part]]  # (m, c, side, side)
        patches[part] = chosen.transpose(0, 2, 3, 1).reshape(-1, length)
    return patches
