"""Keras models trained on private labels: label differential privacy for TensorFlow.

The submodules and the names below are loaded on first use (PEP 562), so that importing the package
loads neither TensorFlow nor Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tf_labeldp import _optimizers as _optimizers  # which watches Keras from its import on
from tf_labeldp._version import __version__

if TYPE_CHECKING:
    from tf_labeldp import (
        accounting,
        cli,
        data,
        estimation,
        features,
        gradients,
        heads,
        keras_layers,
        mechanisms,
        tf_privacy,
        training,
        vault,
    )
    from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget, PrivacyGuarantee
    from tf_labeldp.heads import PrivateRidge
    from tf_labeldp.mechanisms import (
        ALIBI,
        RandomizedResponse,
        RROnBins,
        RRTopK,
        RRWithPrior,
        optimal_bins,
    )
    from tf_labeldp.training import AltConv, LabelDPModel, LabelDPOptimizer, MultiStageTraining
    from tf_labeldp.vault import (
        ClusterRandomizedResponse,
        LabelRandomizer,
        LabelStoreError,
        NoisyLabels,
        PrivateLabels,
        declare,
        guarantee,
    )

_SUBMODULES = (
    "accounting",
    "cli",
    "data",
    "estimation",
    "features",
    "gradients",
    "heads",
    "keras_layers",
    "mechanisms",
    "tf_privacy",
    "training",
    "vault",
)
_HOME_OF = {
    "ALIBI": "mechanisms",
    "AltConv": "training",
    "BudgetExceededError": "accounting",
    "ClusterRandomizedResponse": "vault",
    "LabelDPModel": "training",
    "LabelDPOptimizer": "training",
    "LabelRandomizer": "vault",
    "LabelStoreError": "vault",
    "MultiStageTraining": "training",
    "NoisyLabels": "vault",
    "PrivacyBudget": "accounting",
    "PrivacyGuarantee": "accounting",
    "PrivateLabels": "vault",
    "PrivateRidge": "heads",
    "RROnBins": "mechanisms",
    "RRTopK": "mechanisms",
    "RRWithPrior": "mechanisms",
    "RandomizedResponse": "mechanisms",
    "declare": "vault",
    "guarantee": "vault",
    "optimal_bins": "mechanisms",
}

__all__ = [
    "ALIBI",
    "AltConv",
    "BudgetExceededError",
    "ClusterRandomizedResponse",
    "LabelDPModel",
    "LabelDPOptimizer",
    "LabelRandomizer",
    "LabelStoreError",
    "MultiStageTraining",
    "NoisyLabels",
    "PrivacyBudget",
    "PrivacyGuarantee",
    "PrivateLabels",
    "PrivateRidge",
    "RROnBins",
    "RRTopK",
    "RRWithPrior",
    "RandomizedResponse",
    "__version__",
    "accounting",
    "cli",
    "data",
    "declare",
    "estimation",
    "features",
    "gradients",
    "guarantee",
    "heads",
    "keras_layers",
    "mechanisms",
    "optimal_bins",
    "tf_privacy",
    "training",
    "vault",
]


def __getattr__(name: str) -> Any:
    """Loads a submodule or a headline name on first use."""
    if name in _SUBMODULES:
        return importlib.import_module(f"tf_labeldp.{name}")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"tf_labeldp.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'tf_labeldp' has no attribute {name!r}.")


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted(__all__)
