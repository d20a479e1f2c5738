"""Annotations of arguments: public inputs, private labels, and settings without receipts."""

from __future__ import annotations

from typing import Annotated, TypeVar

_Value = TypeVar("_Value")
Public = Annotated[_Value, "public"]
"""Annotates an argument that enters a computation next to the labels: ``Public[np.ndarray]``."""
Private = Annotated[_Value, "private"]
"""Annotates an argument that contains labels."""
Setting = Annotated[_Value, "setting"]
"""Annotates an argument of a wide type whose receipts no statement needs: a callback, a loss, a
seed, the tensors of a step, a mechanism that is only checked, a field of a result that carries its
own receipts."""
