"""The surface for authors of mechanisms, feature maps, heads, clippings and engines.

The names that a plug-in needs in addition to the public names of the parts. The page
``docs/extend.md`` shows the contracts. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_labeldp.accounting.composition import Composition
    from tf_labeldp.accounting.events import EventFields
    from tf_labeldp.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
    from tf_labeldp.accounting.privacy_filter import PrivacyFilter
    from tf_labeldp.data.batches import PoissonBatches, open_for_training
    from tf_labeldp.data.poisson_sampler import PoissonSampler
    from tf_labeldp.estimation.priors import estimated_prior, histogram_prior
    from tf_labeldp.features.clusters import Clusters
    from tf_labeldp.features.estimator import FeatureMap
    from tf_labeldp.features.reader import FeatureRows
    from tf_labeldp.gradients.clip import Batch, Clip, Coordinates, Speed
    from tf_labeldp.gradients.keras_loss import KerasLoss
    from tf_labeldp.gradients.label_distance import LabelDistanceClip
    from tf_labeldp.gradients.model_checks import InspectedModel
    from tf_labeldp.gradients.output_losses import OutputLosses
    from tf_labeldp.gradients.per_example_clipping import PerExampleClipping
    from tf_labeldp.heads.one_release_head import Head, OneReleaseHead
    from tf_labeldp.heads.public_rows import PublicRows
    from tf_labeldp.mechanisms.clusters import PriorResampling
    from tf_labeldp.mechanisms.integer_noise import (
        discrete_gaussian,
        gaussian_scale,
        geometric,
        with_noise,
    )
    from tf_labeldp.mechanisms.random_bits import secure_bytes, uniform_below, uniform_integers
    from tf_labeldp.vault.counted_steps import CountedSteps
    from tf_labeldp.vault.keyed_draws import KeyedRows
    from tf_labeldp.vault.ledger import Ledger
    from tf_labeldp.vault.model_history import TrainedModel
    from tf_labeldp.vault.records import DrawSettingsError

_HOMES: dict[str, tuple[str, ...]] = {
    "accounting.events": ("EventFields",),
    "accounting.gaussian": (
        "gaussian_delta",
        "gaussian_epsilon",
        "gaussian_sigma",
    ),
    "accounting.privacy_filter": ("PrivacyFilter",),
    "accounting.composition": ("Composition",),
    "mechanisms.random_bits": (
        "secure_bytes",
        "uniform_below",
        "uniform_integers",
    ),
    "mechanisms.integer_noise": (
        "discrete_gaussian",
        "gaussian_scale",
        "geometric",
        "with_noise",
    ),
    "mechanisms.clusters": ("PriorResampling",),
    "estimation.priors": (
        "estimated_prior",
        "histogram_prior",
    ),
    "data.batches": ("PoissonBatches", "open_for_training"),
    "data.poisson_sampler": ("PoissonSampler",),
    "features.clusters": ("Clusters",),
    "features.estimator": ("FeatureMap",),
    "features.reader": ("FeatureRows",),
    "heads.one_release_head": ("Head", "OneReleaseHead"),
    "heads.public_rows": ("PublicRows",),
    "gradients.clip": ("Batch", "Clip", "Coordinates", "Speed"),
    "gradients.keras_loss": ("KerasLoss",),
    "gradients.label_distance": ("LabelDistanceClip",),
    "gradients.model_checks": ("InspectedModel",),
    "gradients.output_losses": ("OutputLosses",),
    "gradients.per_example_clipping": ("PerExampleClipping",),
    "vault.counted_steps": ("CountedSteps",),
    "vault.keyed_draws": ("KeyedRows",),
    "vault.model_history": ("TrainedModel",),
    "vault.ledger": ("Ledger",),
    "vault.records": ("DrawSettingsError",),
}
"""The names that each file gives."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "Clip",
    "Clusters",
    "Composition",
    "Coordinates",
    "CountedSteps",
    "DrawSettingsError",
    "EventFields",
    "FeatureMap",
    "FeatureRows",
    "Head",
    "InspectedModel",
    "KerasLoss",
    "KeyedRows",
    "LabelDistanceClip",
    "Ledger",
    "OneReleaseHead",
    "OutputLosses",
    "PerExampleClipping",
    "PoissonBatches",
    "PoissonSampler",
    "PriorResampling",
    "PrivacyFilter",
    "PublicRows",
    "Speed",
    "TrainedModel",
    "discrete_gaussian",
    "estimated_prior",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_scale",
    "gaussian_sigma",
    "geometric",
    "histogram_prior",
    "open_for_training",
    "secure_bytes",
    "uniform_below",
    "uniform_integers",
    "with_noise",
]


def __getattr__(name: str) -> Any:
    """Loads a name from its home on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"tf_labeldp.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    """Lists the names, also before they are loaded."""
    return __all__
