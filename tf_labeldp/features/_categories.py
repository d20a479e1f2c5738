"""Categories of a column as places in a vocabulary, or in buckets of a hash."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tf_labeldp._columns import Column
from tf_labeldp.features.tables import MISSING_INTEGER, as_categories

_Self = TypeVar("_Self", bound="Categories")


@dataclasses.dataclass(frozen=True)
class Categories:
    """The categories of a column, whose places are 1, 2, ...; place 0 is for unknown ones.

    Attributes:
        name: the column.
        vocabulary: ``int64`` or texts in the order of their places; empty if hashed.
        num_categories: their number, without the missing one.
        buckets: the number of places if hashed; None for a vocabulary.
        missing_place: the place of the missing category.
    """

    name: str | int
    vocabulary: np.ndarray
    num_categories: int
    buckets: int | None
    missing_place: int = 0

    @classmethod
    def learn(
        cls: type[_Self],
        name: str | int,
        values: np.ndarray,
        most: int | None,
        *,
        by_frequency: bool = False,
        with_missing: bool = False,
    ) -> _Self:
        """Returns the categories of a column (n,); more than ``most`` are hashed.

        Args:
            name: the column.
            values: the column, as ``columns_of`` returns it.
            most: the most categories of a vocabulary; None for any number.
            by_frequency: whether frequent categories come first; otherwise they are sorted.
            with_missing: whether missing entries have a place, if there are any.
        """
        words, missing = _words(name, values)
        counts = Counter(words)
        has_missing = counts.pop(missing, 0) > 0 and with_missing
        kind: Any = np.int64 if isinstance(missing, int) else str
        size = len(counts)
        if most is not None and size + has_missing > most:
            hashed = cls(name, np.zeros(0, kind), size, most)
            if not with_missing:
                return hashed
            place = int(hashed._hashed([missing])[0])
            return dataclasses.replace(hashed, missing_place=place)
        vocabulary = sorted(counts)
        if by_frequency:
            vocabulary.sort(key=lambda word: -counts[word])
        missing_place = size + 1 if has_missing else 0
        return cls(name, np.array(vocabulary, kind), size, None, missing_place)

    @property
    def width(self) -> int:
        """The number of places, without that of unknown categories."""
        return self.buckets or max(self.num_categories, self.missing_place)

    @property
    def input_dtype(self) -> str:
        """The type of the Keras input."""
        return "int64" if self.vocabulary.dtype.kind == "i" else "string"

    def places(self, values: np.ndarray) -> np.ndarray:
        """Returns the places of a column's entries, ``int64`` (n,)."""
        words, missing = _words(self.name, values)
        place_of = {missing: self.missing_place}
        distinct = [word for word in set(words) if word != missing]
        if distinct and isinstance(missing, int) != (self.input_dtype == "int64"):
            kinds = ("numbers", "text") if isinstance(missing, int) else ("text", "numbers")
            raise TypeError(
                f"column {self.name!r} needs categories as in fit, {kinds[1]}, got {kinds[0]}. "
                "Read both in the same way."
            )
        if self.buckets is None:
            places = {word: place for place, word in enumerate(self.vocabulary.tolist(), 1)}
            place_of |= {word: places.get(word, 0) for word in distinct}
        elif distinct:
            place_of |= dict(zip(distinct, self._hashed(distinct).tolist(), strict=True))
        return np.fromiter(map(place_of.__getitem__, words), np.int64, len(words))

    def layers(self, inputs: Any) -> Any:
        """Returns the places of a Keras tensor, as ``places`` does."""
        from keras import ops

        if self.buckets is not None:
            places = self._hashing()(inputs) + 1
        elif self.num_categories:
            places = self._lookup(self.vocabulary.tolist())(inputs)
            if not self.missing_place:
                return places
        else:  # The hash of one bucket is always zero.
            import keras

            places = keras.layers.Hashing(1)(inputs)
        is_number = self.input_dtype == "int64"
        missing = [MISSING_INTEGER] if is_number else Column.MISSING_WORDS
        is_missing = self._lookup(missing)(inputs) > 0
        return ops.where(is_missing, self.missing_place, places)

    def _lookup(self, words: Sequence[Any]) -> Any:
        import keras

        # Keras's token for unknown values must differ from every word.
        if self.input_dtype == "int64":
            return keras.layers.IntegerLookup(vocabulary=list(words), oov_token=max(words) + 1)
        unknown = max(words, key=len) + "?"
        return keras.layers.StringLookup(vocabulary=list(words), oov_token=unknown)

    def _hashing(self) -> Any:
        import keras

        return keras.layers.Hashing(self.buckets)

    def _hashed(self, words: list[Any]) -> np.ndarray:
        is_number = self.input_dtype == "int64"
        inputs = np.array(words, np.int64 if is_number else object)
        return np.asarray(self._hashing()(inputs)).ravel().astype(np.int64) + 1


def _words(name: str | int, values: np.ndarray) -> tuple[list[Any], Any]:
    """Returns categories as whole numbers or texts, and the missing one."""
    words = as_categories(name, values)
    return words.tolist(), MISSING_INTEGER if words.dtype.kind == "i" else ""
