"""Which rows of public arrays belong to noisy labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tf_labeldp import _checks
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Receipt


@dataclasses.dataclass(frozen=True, eq=False)
class DrawnRows:
    """The examples of noisy labels, as rows of the features of a vault or of a part of it.

    An array of features may have a row for each example of the vault, or for each noisy label, and
    shows only how many rows it has. Rows of the wrong examples would train without an error, so
    lengths that fit two readings are refused.

    Attributes:
        indices: the examples, ``int64`` (m,).
        receipts: the receipts of the labels; the last one is that of their draw.
        of_part: whether indices count the examples of a part (``PrivateLabels.split``); None if
            that is known from the receipts alone.
    """

    indices: np.ndarray
    receipts: tuple[Receipt, ...]
    of_part: bool | None

    @property
    def vault_size(self) -> int:
        """The number of examples of the vault."""
        return self.receipts[-1].labels.size

    @property
    def are_of_a_part(self) -> bool:
        """Whether indices count the examples of a part."""
        if self.of_part is not None:
            return self.of_part
        if self.receipts[-1].unit == "user":
            # All labels of a user are charged, also those not drawn.
            return self.indices.size < self.vault_size
        return not np.isin(self.indices, charged_examples(self.receipts, "draw")).all()

    def among(self, lengths: Iterable[tuple[int, ...]]) -> np.ndarray | slice:
        """Returns the rows in arrays of some length; see ``NoisyLabels.rows_among``."""
        found, size = set(lengths), self.vault_size
        if len(found) == 1 and found != {()}:
            [(number,)] = found
            if number == self.indices.size and (number != size or self.are_of_a_part):
                self._check_order()
                return slice(None)
            if number == size:
                self.check_of_vault(number)
                return self.indices
        rows = " and ".join(str(shape[0]) if shape else "no" for shape in sorted(found))
        raise ValueError(
            f"expected x (and sample_weight) with a row for each of the {size} examples of the "
            f"vault, or for each of the {self.indices.size} noisy labels, got {rows} rows. Give "
            "the rows of these labels, in their order."
        )

    def of_features(self, features: Any) -> Any:
        """Returns the rows of these labels in public features of all examples, an array or several.

        The features may also be those of all examples of a part.
        """
        import tensorflow as tf

        _checks.run("inputs", features)
        kind, features = type(features).__name__, _arrays(Column.unmasked(features))
        rows = {np.shape(leaf)[:1] for leaf in tf.nest.flatten(features)}
        needed = int(self.indices.max(initial=-1)) + 1
        if len(rows) != 1 or () in rows or next(iter(rows))[0] < needed:
            raise ValueError(
                f"features must have one row per example of the vault, at least {needed}, got "
                f"{sorted(rows)}. Pass all rows, in the order of the labels."
            )
        [(number,)] = rows
        if self.receipts and self.indices.size < self.vault_size <= number:
            self.check_of_vault(number)
        chosen = tf.nest.map_structure(lambda leaf: np.asarray(leaf)[self.indices], features)
        objects = [leaf for leaf in tf.nest.flatten(chosen) if leaf.dtype.kind == "O"]
        if any(leaf.ndim > 1 or not set(map(type, leaf)) <= {str, bytes} for leaf in objects):
            raise TypeError(
                f"expected arrays of numbers, or of texts, got a {kind} of several types. Give "
                "tf_labeldp.features.to_inputs(table, model), or the features of a map."
            )
        return chosen

    def check_of_vault(self, number: int) -> None:
        """Raises if indices do not count ``number`` examples of the whole vault."""
        if self.are_of_a_part:
            raise ValueError(
                f"expected x with a row for each of {self.indices.size} noisy labels from a part "
                f"of the vault, got {number} rows. Give x[labels.indices] of that part."
            )

    def _check_order(self) -> None:
        """Raises if rows may be in the order of a part, and that is not the order of its labels."""
        size = self.indices.size
        is_rising = bool(np.all(self.indices[1:] > self.indices[:-1]))
        if not is_rising and int(self.indices.max(initial=-1)) < size:
            raise ValueError(
                f"expected {size} noisy labels in the order of their examples, got another "
                "order, so x may have either. Draw with rising indices, or train on "
                "labels.to_dataset(x), where x has the order of the examples."
            )


def _arrays(features: Any) -> Any:
    """Returns features with an array for each list of rows and sparse matrix."""
    features = Column.as_rows(features)
    if isinstance(features, Mapping):
        return {name: _arrays(part) for name, part in features.items()}
    if isinstance(features, tuple):
        parts = map(_arrays, features)
        return tuple(parts) if type(features) is tuple else type(features)(*parts)
    if isinstance(features, list):
        return Column.stacked_rows(features)
    if type(features).__module__.startswith("scipy.sparse"):
        return features.toarray()
    if type(features).__name__ == "SparseTensor":
        import tensorflow as tf

        return tf.sparse.to_dense(features).numpy()
    return features


def charged_examples(receipts: tuple[Receipt, ...], kind: str = "") -> np.ndarray:
    """Returns the examples of uses of the last receipt's label set, maybe repeated.

    Of one kind, such as "draw", if there are any: the answers of PATE are a release.
    """
    uses = [use for use in receipts if use.labels.name == receipts[-1].labels.name]
    rows = [
        np.arange(use.labels.size) if use.examples is None else np.asarray(use.examples)
        for use in [use for use in uses if use.kind == kind] or uses
    ]
    return np.concatenate(rows)
