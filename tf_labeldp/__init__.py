"""Keras models trained on private labels: label differential privacy for TensorFlow.

Parts and names are loaded on first use (PEP 562), so that importing the package loads neither
TensorFlow nor Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tf_labeldp._version import __version__

if TYPE_CHECKING:
    import tf_labeldp.keras_layers as keras_layers
    from tf_labeldp import (
        accounting,
        audit,
        boosting,
        cli,
        data,
        dossier,
        estimation,
        features,
        front_door,
        gradients,
        heads,
        mechanisms,
        pate,
        plugins,
        scale,
        self_supervised,
        semi_supervised,
        tf_privacy,
        training,
        vault,
    )
    from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget, PrivacyGuarantee
    from tf_labeldp.boosting import PrivateBoosting
    from tf_labeldp.dossier import report, save
    from tf_labeldp.front_door import (
        PrivateClassifier,
        PrivateRegressor,
        PrivateSearchCV,
        recommend,
    )
    from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge
    from tf_labeldp.mechanisms import (
        ALIBI,
        RandomizedResponse,
        RROnBins,
        RRTopK,
        RRWithPrior,
        optimal_bins,
    )
    from tf_labeldp.training import (
        AltConv,
        LabelDPModel,
        LabelDPOptimizer,
        MultiStageTraining,
        RecordReceipts,
        fit,
        make_private,
    )
    from tf_labeldp.vault import (
        ClusterRandomizedResponse,
        LabelRandomizer,
        LabelStoreError,
        NoisyLabels,
        PrivateLabels,
        conformal,
        declare,
        guarantee,
        load_model,
        select,
    )

# The parts, with the names of each part that are in `tf_labeldp` itself.
_PARTS: dict[str, tuple[str, ...]] = {
    "accounting": ("BudgetExceededError", "PrivacyBudget", "PrivacyGuarantee"),
    "mechanisms": (
        "ALIBI",
        "RROnBins",
        "RRTopK",
        "RRWithPrior",
        "RandomizedResponse",
        "optimal_bins",
    ),
    "estimation": (),
    "vault": (
        "ClusterRandomizedResponse",
        "LabelRandomizer",
        "LabelStoreError",
        "NoisyLabels",
        "PrivateLabels",
        "conformal",
        "declare",
        "guarantee",
        "load_model",
        "select",
    ),
    "features": (),
    "heads": ("PrivateLogisticRegression", "PrivateRidge"),
    "data": (),
    "boosting": ("PrivateBoosting",),
    "gradients": (),
    "training": (
        "AltConv",
        "LabelDPModel",
        "LabelDPOptimizer",
        "MultiStageTraining",
        "RecordReceipts",
        "fit",
        "make_private",
    ),
    "self_supervised": (),
    "semi_supervised": (),
    "pate": (),
    "front_door": ("PrivateClassifier", "PrivateRegressor", "PrivateSearchCV", "recommend"),
    "audit": (),
    "dossier": ("report", "save"),
    "tf_privacy": (),
    "scale": (),
    "keras_layers": (),
}
_HOME_OF = {name: part for part, names in _PARTS.items() for name in names}

__all__ = ["__version__", *_HOME_OF, *_PARTS]


def __getattr__(name: str) -> Any:
    """Loads a part or a headline name on first use."""
    if name in _PARTS or name in ("cli", "plugins"):
        return importlib.import_module(f"tf_labeldp.{name}")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"tf_labeldp.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, also before they are loaded."""
    return sorted(__all__)
