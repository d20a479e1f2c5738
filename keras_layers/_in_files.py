"""How Keras finds the classes of this library in files of models."""

import importlib
from typing import Any

import keras

# The registered classes of each part outside this package, which may load TensorFlow.
OF_OTHER_PARTS = {
    "training": (
        "LabelDPModel",
        "LabelDPOptimizer",
        "GaussianNoise",
        "GaussNewton",
        "NoOp",
        "AltConv",
        "SelfConv",
        "SelfSpan",
        "PrivacySpent",
    ),
    "self_supervised": (
        "SCAN",
        "SimCLR",
        "ColorJitter",
        "Cutout",
        "RandAugment",
        "RandomBlur",
        "RandomResizedCrop",
        "RandomWarp",
    ),
    "semi_supervised": ("DivideMix", "FixMatch"),
    "tf_privacy": ("QueryNoise",),
}


class NamesItsImport:
    """Writes into the file of a layer what to import; Keras quotes it if it lacks the class."""

    def get_build_config(self) -> dict[str, Any]:
        first = "import tf_labeldp.keras_layers, or use tf_labeldp.load_model"
        return {**(super().get_build_config() or {}), "to_load": first}  # type: ignore[misc]


class ImportedOnUse:
    """Stands for a class of another part among Keras's custom objects.

    Keras asks it for an object of a file. It then imports the part, which registers the class in
    its place.
    """

    def __init__(self, part: str, name: str) -> None:
        self._part, self._name = part, name

    def from_config(self, config: dict[str, Any]) -> Any:
        importlib.import_module(f"tf_labeldp.{self._part}")
        # Keras may search a scope that was copied before the import.
        return keras.saving.get_custom_objects()[f"tf_labeldp>{self._name}"].from_config(config)


def register_other_parts() -> None:
    """Registers every class of ``OF_OTHER_PARTS`` that is not registered yet."""
    registered = keras.saving.get_custom_objects()
    for part, names in OF_OTHER_PARTS.items():
        for name in names:
            registered.setdefault(f"tf_labeldp>{name}", ImportedOnUse(part, name))
