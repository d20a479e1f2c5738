"""The public mechanisms by name, which tests of all of them find here."""

from __future__ import annotations

import inspect
from typing import Any

from tf_labeldp import mechanisms

PUBLIC: dict[str, Any] = {
    name: kind
    for name in mechanisms.__all__
    if inspect.isclass(kind := getattr(mechanisms, name))
    and issubclass(kind, (mechanisms.LabelMechanism, mechanisms.AggregateMechanism))
    and not inspect.isabstract(kind)
}


def needing(*names: str) -> dict[str, Any]:
    """Returns the public mechanisms whose only arguments without a default are these."""
    return {name: kind for name, kind in PUBLIC.items() if _needed(kind) == names}


def _needed(kind: type) -> tuple[str, ...]:
    parameters = inspect.signature(kind).parameters.values()
    return tuple(each.name for each in parameters if each.default is each.empty)
