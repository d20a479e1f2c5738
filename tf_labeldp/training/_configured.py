"""The configuration of objects whose attributes are named as their constructor's arguments."""

from __future__ import annotations

import inspect
from typing import Any

from tf_labeldp.accounting import Setting


class Configured:
    """Gives Keras the configuration of an object, so that it is saved with a model."""

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument, from the attribute with its name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> Any:
        """Returns the object of a configuration."""
        return cls(**config)
