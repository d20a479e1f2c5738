"""Annotations of arguments: what is public, what has labels, and what no statement looks at."""

from __future__ import annotations

from typing import Annotated, TypeVar

_Value = TypeVar("_Value")
Public = Annotated[_Value, "public"]
"""Annotates an argument that enters a computation next to the labels: ``Public[np.ndarray]``."""
Private = Annotated[_Value, "private"]
"""Annotates an argument that has labels."""
Setting = Annotated[_Value, "setting"]
"""Annotates an argument of a wide type that no statement needs receipts of: a callback, a loss, a
seed, tensors of a step, a mechanism that is only checked, a field of a result that comes with its
receipts."""
