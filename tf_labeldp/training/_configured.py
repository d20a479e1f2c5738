"""The configuration and the state of the parts of a private step."""

from __future__ import annotations

import inspect
from typing import Any

from tf_labeldp.accounting import Setting


class Configured:
    """Gives Keras the configuration of an object, so that it is saved with a model.

    The attributes are named as the constructor's arguments.
    """

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument, from the attribute with its name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> Any:
        """Returns the object of a configuration."""
        return cls(**config)


class Stateful(Configured):
    """A part of a private step that carries a state from step to step, and never changes itself.

    ``initial_state`` returns the state of the first step. The method of a step takes a state, and
    returns its result, the next state and what else it reports. The optimizer keeps the state in
    its variables: it is saved with the model, and a compiled step that a check stops leaves it.
    """

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns the state of the first step: a nest of tensors, ``()`` for none.

        ``shapes`` are those of the variables.
        """
        return ()
