"""Keras models trained on private labels: label differential privacy for TensorFlow.

The parts and the names below are loaded on first use (PEP 562), so that importing the package
loads neither TensorFlow nor Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tf_labeldp import _renamed as _renamed
from tf_labeldp._version import __version__

if TYPE_CHECKING:
    import tf_labeldp.keras_layers as keras_layers
    from tf_labeldp import (
        accounting,
        audit,
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
        scale,
        self_supervised,
        semi_supervised,
        tf_privacy,
        training,
        vault,
    )
    from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget, PrivacyGuarantee
    from tf_labeldp.dossier import report
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
        declare,
        guarantee,
        load_model,
        select,
    )

# In the order of the README: the front door, the vault, what leaves it, and what is made of that.
_HOME_OF = {
    "PrivateClassifier": "front_door",
    "PrivateRegressor": "front_door",
    "PrivateSearchCV": "front_door",
    "recommend": "front_door",
    "PrivateLabels": "vault",
    "PrivacyBudget": "accounting",
    "PrivacyGuarantee": "accounting",
    "NoisyLabels": "vault",
    "guarantee": "vault",
    "fit": "training",
    "RecordReceipts": "training",
    "load_model": "vault",
    "select": "vault",
    "declare": "vault",
    "report": "dossier",
    "BudgetExceededError": "accounting",
    "LabelStoreError": "vault",
    "MultiStageTraining": "training",
    "RandomizedResponse": "mechanisms",
    "RRTopK": "mechanisms",
    "RRWithPrior": "mechanisms",
    "ALIBI": "mechanisms",
    "LabelRandomizer": "vault",
    "optimal_bins": "mechanisms",
    "RROnBins": "mechanisms",
    "PrivateLogisticRegression": "heads",
    "PrivateRidge": "heads",
    "ClusterRandomizedResponse": "vault",
    "LabelDPModel": "training",
    "LabelDPOptimizer": "training",
    "AltConv": "training",
    "make_private": "training",
}
_PARTS = (
    "accounting",
    "mechanisms",
    "estimation",
    "vault",
    "features",
    "heads",
    "data",
    "gradients",
    "training",
    "self_supervised",
    "semi_supervised",
    "pate",
    "front_door",
    "audit",
    "dossier",
    "tf_privacy",
    "scale",
    "keras_layers",
)

__all__ = ["__version__", *_HOME_OF, *_PARTS]


def __getattr__(name: str) -> Any:
    """Loads a part or a headline name on first use."""
    if name in _PARTS or name == "cli":
        return importlib.import_module(f"tf_labeldp.{name}")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"tf_labeldp.{_HOME_OF[name]}"), name)
    _renamed.refuse(__name__, name)


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted(__all__)
