"""``FitPrivateHead``: a linear head on distributed rows."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.window import GlobalWindows

from tf_labeldp.accounting import Private, Receipts, Setting, public_input
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads.design import HeadTerms
from tf_labeldp.heads.label_source import LabelSource
from tf_labeldp.heads.one_release_head import OneReleaseHead
from tf_labeldp.heads.public_rows import PublicRows, Scaling
from tf_labeldp.scale.beam._exact_sums import PrivateMoments
from tf_labeldp.scale.beam._files import write_whole
from tf_labeldp.vault import LabelKind
from tf_labeldp.vault.keyed_draws import ReleaseKey
from tf_labeldp.vault.records import Arrays

Survey = tuple[int, np.ndarray, np.ndarray]
"""A number of rows, and a sample of them: hashes and features."""

_SAMPLE_BYTES = 1 << 28
"""Bytes of the sample, which one worker has in memory."""
_LEAST_SAMPLE = 1 << 13
"""Rows of the sample, at least, where rows are wide."""
_BATCH_ROWS = 4096
"""Pairs of a bundle that wait to be merged, which bounds a worker's memory."""


class FitPrivateHead:
    """Fits a linear head in two passes of a pipeline: a survey of the rows, then their moments.

    The survey counts the rows and samples them by a public hash of the features; the sample gives
    the head's mean and directions. The second pass is ``PrivateMoments``, which draws its noise
    once, after the pipeline. The rest of the fit is as on one machine.

    Guarantee:
        The fitted head is (epsilon, delta)-DP for the replacement of one label, by the one release
        of ``LabelMomentMechanism``, as for ``heads.PrivateRidge`` and ``PrivateMoments``. The
        features, the number of rows and the survey are public. The survey stays in ``folder`` (by
        default the folder of the key file).

    Args:
        head: a ``PrivateRidge`` or ``PrivateLogisticRegression`` without encoder; encode in the
            pipeline. The release has the head's ``epsilon`` and ``delta``.
        key, release: as for ``PrivateHistogram``.
        folder: likewise, for exact sums and the survey. An interrupted fit of the same release
            resumes from the folder, and reads no rows twice.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp.heads import PrivateRidge
        >>> key = ReleaseKey.create(os.path.join(tempfile.mkdtemp(), "labels.key"))
        >>> rows = np.random.default_rng(0).normal(size=(4000, 5))
        >>> pairs = [(rows, (rows[:, 0] > 0).astype(int))]
        >>> fit = FitPrivateHead(PrivateRidge(1.0, 1e-5, num_classes=2), key, "head")
        >>> head = fit.fit(lambda pipeline: pipeline | beam.Create(pairs), runner="FnApiRunner")
        >>> head.score(rows, pairs[0][1]) > 0.9
        True
    """

    def __init__(
        self,
        head: Setting[OneReleaseHead],
        key: ReleaseKey,
        release: str,
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(head, OneReleaseHead) or head.encoder is not None:
            raise TypeError(
                "expected a PrivateRidge or another head with one release, without encoder, got "
                f"{head!r}. Encode the features in the pipeline."
            )
        self._head, self._key, self._release = head, key, release
        self._folder = folder

    def fit(self, read: Private[Callable[[Any], Any]], **pipeline: Setting[Any]) -> OneReleaseHead:
        """Runs both passes, and returns the fitted head.

        Args:
            read: takes a pipeline and returns a PCollection of pairs: a row of features (d,) and
                its label, or rows (m, d) and their labels (m,). Called twice; must read the same
                rows both times.
            **pipeline: arguments of ``beam.Pipeline``: ``runner``, ``options``.

        Raises:
            ValueError: no rows, features not finite, labels out of range, or another number of rows
                in the second pass; nothing was released.
        """
        head, folder = self._head, self._key.path.parent if self._folder is None else self._folder
        path = FileSystems.join(os.fspath(folder), f"{self._release}.survey.npz")
        terms = HeadTerms.of(head, LabelSource.kind_of(head))
        if not self._key.is_drawn(self._release):
            self._key.check(self._release, terms.mechanism)
        design = f"center={head.center} intercept={head.intercept} spread={head.spread}"
        # The survey depends on the features alone, so an earlier one of the same design will do.
        if not FileSystems.exists(path):
            with beam.Pipeline(**pipeline) as first:
                _ = (
                    read(first)
                    | "Survey" >> beam.ParDo(_Survey())
                    | "Merge" >> beam.CombineGlobally(_merged)
                    | "Keep" >> beam.Map(_keep, path, design)
                )
        num_rows, sample = _surveyed(path, design)
        rows, found = PublicRows.survey(FeatureRows(sample), head.max_bytes)
        # The sample alone is at hand, and stands for all rows.
        rows = dataclasses.replace(rows, num_rows=num_rows)
        scaling = terms.scaling(rows, found)
        terms = terms.for_width(scaling.width)
        moments = PrivateMoments(
            terms.mechanism, self._key, self._release, num_rows, folder=self._folder
        )
        if not moments.is_released:
            with beam.Pipeline(**pipeline) as second:
                scaled = read(second) | "Scale" >> beam.Map(_scaled, scaling, terms.kind)
                _ = scaled | moments
        noisy = moments.result()
        of_sample = terms.design(rows.scaled(scaling).scan(terms.solver.sample_rows))
        of_all = dataclasses.replace(of_sample, gram=np.asfortranarray(moments.gram()))
        receipts = Receipts.merged(public_input(head.class_weight).receipts, noisy.receipts)
        of_all.fit(noisy.values).keep_in(head, receipts)
        return head


class _Survey(beam.DoFn):
    """Counts rows, and samples the rows with the smallest hashes of features."""

    def start_bundle(self) -> None:
        self._found: list[Survey] = []

    def process(self, pair: Any) -> Iterable[Any]:
        rows = np.atleast_2d(np.asarray(pair[0], dtype=np.float64))
        PublicRows.check_norms(rows, 0)
        self._found.append((len(rows), _hashes(rows), rows.astype(np.float32)))
        if len(self._found) >= _BATCH_ROWS:
            self._found = [_merged(self._found)]
        return ()

    def finish_bundle(self) -> Iterator[Any]:
        yield GlobalWindows.windowed_value(_merged(self._found))


def _merged(found: Iterable[Survey]) -> Survey:
    parts = [part for part in found if part[0]]
    if not parts:
        return 0, np.zeros(0, np.uint64), np.zeros((0, 1), np.float32)
    counts, hashes, rows = zip(*parts, strict=True)
    widths = {part.shape[1] for part in rows}
    if len(widths) > 1:
        raise ValueError(
            f"expected rows with one number of features, got {sorted(widths)}. Repair the rows."
        )
    hashed, width = np.concatenate(hashes), rows[0].shape[1]
    kept = np.argsort(hashed, kind="stable")[: max(_LEAST_SAMPLE, _SAMPLE_BYTES // (4 * width))]
    return sum(counts), hashed[kept], np.concatenate(rows)[kept]


def _hashes(rows: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(rows, dtype=np.float32).view(np.uint32).astype(np.uint64)
    factors = np.random.default_rng(0).integers(1 << 63, size=bits.shape[1], dtype=np.uint64)
    mixed = (bits * (2 * factors + np.uint64(1))).sum(axis=1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(29))


def _keep(survey: Survey, path: str, design: str) -> None:
    if not survey[0]:
        raise ValueError("the pipeline has no rows of features. Check the input of `read`.")
    arrays = {"num_rows": np.array(survey[0]), "sample": survey[2], "design": np.array(design)}
    write_whole(path, Arrays(arrays).to_bytes())


def _surveyed(path: str, design: str) -> tuple[int, np.ndarray]:
    """Returns the number of rows, and the sample."""
    with FileSystems.open(path) as file, np.load(io.BytesIO(file.read())) as survey:
        num_rows, sample = int(survey["num_rows"]), survey["sample"]
        surveyed = str(survey["design"])
    if surveyed != design:
        raise ValueError(
            f"{path} is for a head with {surveyed}, got a head with {design}. Name another release."
        )
    return num_rows, sample


def _scaled(pair: Any, scaling: Scaling, kind: LabelKind) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows scaled to unit norm, and encoded labels."""
    rows = np.asarray(pair[0], dtype=np.float64)
    labels = pair[1] if rows.ndim == 2 else [pair[1]]
    return scaling.rows(np.atleast_2d(rows)), kind.encode(labels)
