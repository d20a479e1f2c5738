"""Containers and models of other libraries, by the attributes that are read of them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Frame(Protocol):
    """A data frame of pandas or Polars, or a table of Arrow."""

    columns: Any
    shape: Any

    def __getitem__(self, name: Any) -> Any: ...


@runtime_checkable
class ArrowTable(Protocol):
    """A table of Arrow."""

    column_names: Any

    def take(self, rows: Any) -> Any: ...


@runtime_checkable
class Series(Protocol):
    """A column of pandas, Polars or Arrow."""

    def to_numpy(self) -> Any: ...


@runtime_checkable
class Typed(Protocol):
    """An array, or another object with a type of its entries."""

    dtype: Any


@runtime_checkable
class Shaped(Protocol):
    """An array, or another object with a shape."""

    shape: Any


@runtime_checkable
class ArrayConvertible(Protocol):
    """An object that NumPy turns into an array."""

    def __array__(self) -> Any: ...


@runtime_checkable
class Tensor(Protocol):
    """A tensor of a deep-learning library."""

    def numpy(self) -> Any: ...


@runtime_checkable
class Indexed(Protocol):
    """An object whose rows have numbers."""

    def __getitem__(self, rows: Any) -> Any: ...


@runtime_checkable
class IndexedSource(Indexed, Protocol):
    """An object whose rows have numbers, from 0 to its length."""

    def __len__(self) -> int: ...


@runtime_checkable
class Dataset(Protocol):
    """A ``tf.data.Dataset``."""

    element_spec: Any

    def as_numpy_iterator(self) -> Any: ...

    def cardinality(self) -> Any: ...


@runtime_checkable
class KerasModel(Protocol):
    """A Keras model, of any version."""

    name: Any

    def predict(self, x: Any, **settings: Any) -> Any: ...

    def predict_on_batch(self, x: Any) -> Any: ...


@runtime_checkable
class KerasExport(Protocol):
    """A fitted object that gives a Keras model."""

    def to_keras(self) -> Any: ...
