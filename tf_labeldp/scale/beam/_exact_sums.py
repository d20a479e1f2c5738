"""A noisy statistic of distributed labels: exact sums in the pipeline, noise once after it.

An engine may repeat any step, and repeated noise is a second release. So the pipeline adds up whole
numbers, which are the same in any order and after any retry, and writes them to a private file.
``result`` draws the noise in the process that started the pipeline, writes the noisy statistic to
the ledger together with its charge, and deletes the file.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import filelock
import numpy as np
from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.window import GlobalWindows

from tf_labeldp import _validate
from tf_labeldp.accounting import BudgetExceededError, Private, Public, PublicInput, public_input
from tf_labeldp.mechanisms import AggregateMechanism, HistogramMechanism, LabelMomentMechanism
from tf_labeldp.scale.beam._files import write_whole
from tf_labeldp.vault.keyed_draws import ReleaseKey
from tf_labeldp.vault.noisy_labels import NoisyStatistic
from tf_labeldp.vault.records import Arrays, DrawSettingsError

Sums = dict[str, Any]
"""Exact sums by name, one of which is the number of rows, ``rows``."""

_RUNNING: dict[str, Any] = {}
"""Locks of the releases whose pipelines this process runs, by their file of sums."""
_BATCH_ROWS, _GRAM_BITS = 1 << 12, 20
"""Rows per batch, and the bits of a row's largest entry on the grid of ``max_norm / 2^20``: the sum
of 2^12 products of two entries is at most 2^52, and doubles are exact up to 2^53."""


class ExactSums(beam.PTransform, abc.ABC):
    """Sums of private labels that a pipeline releases only with noise."""

    def __init__(
        self, mechanism: Public[AggregateMechanism], key: ReleaseKey, release: str, folder: Any
    ) -> None:
        super().__init__()
        made_by: Any = public_input(mechanism)
        self._made_by, self.mechanism = made_by, made_by.value
        self._key, self._release = key, release
        key.check(release, self._made_by)
        self._sums = key.sums_of(release, None if folder is None else os.fspath(folder))

    @abc.abstractmethod
    def _summed(self, rows: list[Any]) -> Sums:
        """Returns the exact sums of some elements."""

    @abc.abstractmethod
    def _with_noise(self, sums: Sums) -> tuple[np.ndarray, Sums]:
        """Returns the release, and public sums to store with it; called once."""

    def expand(self, rows: Private[Any]) -> Any:
        """Writes the sums of the rows to the private file; the output is empty."""
        if self.is_released:
            raise ValueError(
                f"release {self._release!r} was drawn already, and a second draw is another charge."
                " Call result(), or name another release."
            )
        self._key.check(self._release, self._made_by)
        if self._sums not in _RUNNING:
            # Another process may be running a pipeline of this release.
            with contextlib.suppress(filelock.Timeout):
                lock = self._key.lock_of(self._release)
                lock.acquire()
                _RUNNING[self._sums] = lock
                # A killed process may have left its sums.
                _delete(self._sums)
        return (
            rows
            | "Sum" >> beam.ParDo(_Sum(self._summed))
            | "AddUp" >> beam.CombineGlobally(_added_up)
            | "Keep" >> beam.FlatMap(_keep, self._key.place, self._release, self._sums)
        )

    def result(self) -> NoisyStatistic:
        """Returns the noisy statistic. The first call, after the pipeline ended, draws its noise.

        The ledger stores it: later calls, also in other processes, return the same values.

        Raises:
            BudgetExceededError: the vault of the key can't afford the release any more. The exact
                sums are deleted, as after every refusal.
            FileNotFoundError: the pipeline has not ended, or found no rows.
            LabelStoreError: version 0.2 drew the statistic, and 0.3 did not ask for it.
        """
        values, receipts = self._release_once()["values"], self._key.receipts(self._release)
        return NoisyStatistic(values, self.mechanism, receipts=receipts)

    @property
    def is_released(self) -> bool:
        """Whether this or another process has drawn the noise."""
        return self._key.is_drawn(self._release)

    def _release_once(self) -> Sums:
        def draw() -> tuple[int, Sums]:
            sums = _read(self._sums)
            values, public = self._with_noise(sums)
            return int(sums["rows"]), {"values": values, **public}

        try:
            kept = self._key.draw_once(self._release, self._made_by, draw)
        except (BudgetExceededError, DrawSettingsError, ValueError):
            # What is refused now needs a pipeline of its own later: exact sums don't wait for it.
            lock = _RUNNING.pop(self._sums, None) or self._key.lock_of(self._release)
            # Another process may be running a pipeline of this release.
            with contextlib.suppress(filelock.Timeout), lock:
                _delete(self._sums)
            lock.release(force=True)
            raise
        _delete(self._sums)
        if (lock := _RUNNING.pop(self._sums, None)) is not None:
            lock.release()
        return kept


class PrivateHistogram(ExactSums):
    """Counts private labels in a pipeline, and releases the counts with noise, once.

    Guarantee:
        ``result()`` is (epsilon, delta)-DP for the replacement of one label, by ``mechanism``: the
        counts are exact for any order, splits and retries. The noise is drawn once, after the
        pipeline, from the operating system's random bits, and recorded before it is returned. Then
        the exact counts are deleted; the next pipeline of the release, and ``tf-labeldp forget``,
        delete those of a killed process. Assumes that the engine counts each label exactly once.

    Args:
        mechanism: a ``HistogramMechanism``.
        key: a key whose ledger records the release and its charge.
        release: the name of the release in the ledger.
        folder: a private folder for the exact counts, which the workers write and this process
            reads, on any file system that Beam knows. None for ``private-sums`` in the ledger.
        num_groups: G, if the elements are pairs (group, label) with public groups 0..G-1.

    The elements are labels, or arrays (m,) of labels, which are faster; with groups, pairs of them.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp.mechanisms import HistogramMechanism
        >>> key = ReleaseKey.create(os.path.join(tempfile.mkdtemp(), "labels.key"))
        >>> counts = PrivateHistogram(HistogramMechanism(1.0, num_classes=3), key, "counts")
        >>> with beam.Pipeline("FnApiRunner") as pipeline:
        ...     _ = pipeline | beam.Create([0, 1, 1, 2] * 9) | counts
        >>> counts.result().values.shape, counts.result().guarantee().epsilon
        ((3,), 1.0)
    """

    def __init__(
        self,
        mechanism: Public[HistogramMechanism],
        key: ReleaseKey,
        release: str,
        *,
        folder: str | os.PathLike[str] | None = None,
        num_groups: int | None = None,
    ) -> None:
        HistogramMechanism.checked(PublicInput.bare(mechanism))
        super().__init__(mechanism, key, release, folder)
        if num_groups is not None:
            num_groups = _validate.integer_at_least("num_groups", num_groups, 1)
        self._num_groups = num_groups

    def _summed(self, rows: list[Any]) -> Sums:
        count = self.mechanism.exact_counts
        if self._num_groups is None:
            labels = _joined(rows)
            return {"counts": count(labels), "rows": np.int64(len(labels))}
        groups, labels = (_joined(column) for column in zip(*rows, strict=True))
        found = count(labels, groups)
        if len(found) > self._num_groups:
            raise ValueError(
                f"groups must be in 0..{self._num_groups - 1}, got {len(found) - 1}. Groups and "
                "their number are public."
            )
        counts = np.zeros((self._num_groups, found.shape[1]), np.int64)
        counts[: len(found)] = found
        return {"counts": counts, "rows": np.int64(len(labels))}

    def _with_noise(self, sums: Sums) -> tuple[np.ndarray, Sums]:
        return self.mechanism.add_noise(sums["counts"]), {}


class PrivateMoments(ExactSums):
    """Releases the moments ``X^T Y`` of rows and labels with noise, once, for a linear head.

    Also computes the public Gram matrix ``X^T X``. Both are sums of whole steps of a grid, and so
    exact in any order.

    Guarantee:
        ``result()`` is (epsilon, delta)-DP for the replacement of one label, by
        ``LabelMomentMechanism``, as for ``PrivateHistogram``: exact sums, noise once after the
        pipeline. The features, the number of rows and the Gram matrix are public; any number of
        rows except for ``num_rows`` is refused.

    Args:
        mechanism: a ``LabelMomentMechanism``; its ``max_norm`` bounds the rows.
        key, release, folder: as for ``PrivateHistogram``.
        num_rows: n, public; sets the grid.

    The elements are pairs of a row of features (d,) and its label, or pairs of rows (m, d) and
    their labels (m,), which are faster.

    Example:
        >>> import os, tempfile
        >>> key = ReleaseKey.create(os.path.join(tempfile.mkdtemp(), "labels.key"))
        >>> mechanism = LabelMomentMechanism(1.0, 1e-6, num_classes=2)
        >>> moments = PrivateMoments(mechanism, key, "moments", num_rows=200)
        >>> with beam.Pipeline("FnApiRunner") as pipeline:
        ...     _ = pipeline | beam.Create([([0.6, 0.8], 1), ([1.0, 0.0], 0)] * 100) | moments
        >>> moments.result().values.shape, moments.gram().round().tolist()
        ((2, 1), [[136.0, 48.0], [48.0, 64.0]])
    """

    def __init__(
        self,
        mechanism: Public[LabelMomentMechanism],
        key: ReleaseKey,
        release: str,
        num_rows: int,
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        LabelMomentMechanism.checked(PublicInput.bare(mechanism))
        super().__init__(mechanism, key, release, folder)
        self._num_rows = _validate.integer_at_least("num_rows", num_rows, 1)
        bits = min(_GRAM_BITS, (62 - self._num_rows.bit_length()) // 2)
        self._steps = 2.0**bits / self.mechanism.max_norm

    def gram(self) -> np.ndarray:
        """Returns the public ``X^T X`` of all rows, ``float64`` (d, d); draws like ``result``."""
        return self._release_once()["gram"] / self._steps**2

    def _summed(self, rows: list[Any]) -> Sums:
        features = np.concatenate([np.atleast_2d(row) for row, _ in rows])
        blocks = (np.asarray(y) if np.ndim(x) == 2 else np.asarray(y)[np.newaxis] for x, y in rows)
        labels = np.concatenate(list(blocks))
        total: Sums = {}
        for start in range(0, len(features), _BATCH_ROWS):
            part = slice(start, start + _BATCH_ROWS)
            mechanism, n = self.mechanism, self._num_rows
            moments, totals = mechanism.exact_sums(labels[part], features[part], n)
            steps = np.rint(features[part].astype(np.float64) * self._steps)
            gram = (steps.T @ steps).astype(np.int64)
            sums = {"moments": moments, "totals": totals, "gram": gram}
            total = _added(total, {**sums, "rows": np.int64(len(steps))})
        return total

    def _with_noise(self, sums: Sums) -> tuple[np.ndarray, Sums]:
        if (found := int(sums["rows"])) != self._num_rows:
            raise ValueError(
                f"expected num_rows={self._num_rows} rows in the pipeline, found {found}. Nothing "
                "was released. Count the rows first: their number sets the grid."
            )
        noisy = self.mechanism.add_noise(sums["moments"], sums["totals"], self._num_rows)
        return noisy, {"gram": sums["gram"]}


class _Sum(beam.DoFn):
    """Adds up batches of elements, and yields one sum for each bundle."""

    def __init__(self, summed: Any) -> None:
        self._summed = summed

    def start_bundle(self) -> None:
        self._waiting: list[Any] = []
        self._total: Sums = {}

    def process(self, element: Any) -> Iterable[Any]:
        self._waiting.append(element)
        labels = element[-1] if isinstance(element, tuple) else element
        if len(self._waiting) >= _BATCH_ROWS or np.ndim(labels) == 1:
            self._add_up()
        return ()

    def finish_bundle(self) -> Iterator[Any]:
        self._add_up()
        if self._total:
            yield GlobalWindows.windowed_value(self._total)

    def _add_up(self) -> None:
        if self._waiting:
            self._total = _added(self._total, self._summed(self._waiting))
            self._waiting = []


def _keep(sums: Sums, key: tuple[str, str], release: str, path: str) -> Iterable[Any]:
    """Writes the sums to the private file, unless their noise was drawn.

    A worker without access to the ledger always writes them, and ``result`` deletes the file.
    """
    if sums:
        write = functools.partial(write_whole, path, Arrays(sums).to_bytes(), private=True)
        if os.path.exists(key[0]):
            ReleaseKey.at(*key).unless_drawn(release, write)
        else:
            write()
    return ()


def _delete(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, BeamIOError):
        FileSystems.delete([path])


def _read(path: str) -> Sums:
    if not FileSystems.exists(path):
        raise FileNotFoundError(
            f"there are no sums in {path}: the pipeline has not ended, or it found no rows. Call "
            "result() after the pipeline has finished."
        )
    with FileSystems.open(path) as file:
        return Arrays.from_bytes(file.read())


def _added_up(sums: Iterable[Sums]) -> Sums:
    return functools.reduce(_added, sums, {})


def _added(total: Sums, more: Sums) -> Sums:
    if not total or not more:
        return dict(total or more)
    return {name: total[name] + more[name] for name in total}


def _joined(parts: Any) -> np.ndarray:
    return np.concatenate([np.atleast_1d(part) for part in parts])
