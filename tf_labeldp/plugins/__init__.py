"""The surface for authors of mechanisms, feature maps, heads, clippings and engines.

The names that a plug-in needs in addition to the public names of the parts. The page
``docs/extend.md`` shows the contracts. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_labeldp.features.estimator import FeatureMap
    from tf_labeldp.gradients.clip import Batch, Clip, Coordinates, Speed
    from tf_labeldp.gradients.keras_loss import KerasLoss
    from tf_labeldp.gradients.label_distance import LabelDistanceClip
    from tf_labeldp.gradients.model_checks import InspectedModel
    from tf_labeldp.gradients.output_losses import OutputLosses
    from tf_labeldp.gradients.per_example_clipping import PerExampleClipping
    from tf_labeldp.mechanisms.base import LabelMechanism

_HOMES: dict[str, tuple[str, ...]] = {
    "mechanisms.base": ("LabelMechanism",),
    "features.estimator": ("FeatureMap",),
    "gradients.clip": ("Batch", "Clip", "Coordinates", "Speed"),
    "gradients.keras_loss": ("KerasLoss",),
    "gradients.label_distance": ("LabelDistanceClip",),
    "gradients.model_checks": ("InspectedModel",),
    "gradients.output_losses": ("OutputLosses",),
    "gradients.per_example_clipping": ("PerExampleClipping",),
}
"""The names that each file gives."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "Clip",
    "Coordinates",
    "FeatureMap",
    "InspectedModel",
    "KerasLoss",
    "LabelDistanceClip",
    "LabelMechanism",
    "OutputLosses",
    "PerExampleClipping",
    "Speed",
]


def __getattr__(name: str) -> Any:
    """Loads a name from its home on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"tf_labeldp.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    """Lists the names, also before they are loaded."""
    return __all__
