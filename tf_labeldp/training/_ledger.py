"""The list of what has been spent on a model's weights, which goes where the weights go."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

HISTORY = "label_dp_history"
"""Name of the runs in checkpoints."""

_OF_LAYERS: weakref.WeakKeyDictionary[Any, list[Ledger]] = weakref.WeakKeyDictionary()
"""Ledgers of the trainings that each layer was part of."""


class Ledger:
    """Runs of ``fit`` that went into some weights, and the vaults of the labels that they used.

    A run is a dictionary with a name of its own (``run``) and a count of steps; copies of it, from
    checkpoints and configurations, are known by that name and not counted twice. Models that share
    weights share a ledger.

    Args:
        runs: to begin with.
    """

    def __init__(self, runs: Iterable[dict[str, Any]] = ()) -> None:
        self._runs: dict[Any, dict[str, Any]] = {}
        self.vaults: list[Any] = []
        self.add(runs)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Copies of all runs, in the order in which they began."""
        return [dict(run) for run in self._runs.values()]

    def add(self, runs: Iterable[dict[str, Any]]) -> None:
        """Adds runs; of one that is known already, the more of its steps."""
        for run in runs:
            known = self._runs.get(run["run"])
            if known is None or run["steps"] >= known["steps"]:
                self._runs[run["run"]] = dict(run)

    def add_vault(self, vault: Any) -> None:
        """Adds a vault, if it is another one."""
        if not any(known is vault for known in self.vaults):
            self.vaults.append(vault)

    def absorb(self, other: Ledger) -> None:
        """Adds all that another ledger knows."""
        self.add(other.runs)
        for vault in other.vaults:
            self.add_vault(vault)

    def belongs_to(self, layers: Iterable[Any]) -> None:
        """Notes that these layers are trained by runs of this ledger."""
        for layer in layers:
            known = _OF_LAYERS.setdefault(layer, [])
            if all(one is not self for one in known):
                known.append(self)

    def absorb_those_of(self, layers: Iterable[Any]) -> None:
        """Adds all runs that these layers were part of, in whichever model."""
        for layer in layers:
            for one in _OF_LAYERS.get(layer, []):
                self.absorb(one)

    def to_bytes(self) -> np.ndarray:
        """Returns the runs as JSON in ``uint8`` (length,), for a checkpoint."""
        return np.frombuffer(json.dumps(self.runs).encode(), dtype=np.uint8)

    def add_bytes(self, text: Any) -> None:
        """Adds the runs of a checkpoint."""
        self.add(json.loads(np.asarray(text, dtype=np.uint8).tobytes()))
