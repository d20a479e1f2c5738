"""What has another name now: public names, and the modules that files name; in two tables."""

from __future__ import annotations

import functools
import sys
from typing import NoReturn

_NOISY = "tf_labeldp.NoisyLabels, which PrivateLabels.randomize returns"
_EVENT = "the events of dp_accounting, or PrivateLabels.charge(dp_sgd_charge(...))"
_SUM = "guarantee() of the vault, the model or the noisy labels, which adds up what was spent"
_MADE = "to_keras() of the fitted map or head, which makes the layer"
_PRIORS = "PrivateLabels.release(HistogramMechanism(...)).priors()"

# 2026-11-22, in place until 0.3: names of 0.1 and of the development of 0.2, by part.
_INSTEAD = {
    "tf_labeldp": {"private_labels": "tf_labeldp.vault"},
    "tf_labeldp.accounting": {
        "LabelSet": "PrivateLabels.history(), whose receipts name their label set",
        "approximate_dp_event": _EVENT,
        "compose_charges": _SUM,
        "compose_events": _SUM,
        "compose_receipts": "tf_labeldp.guarantee, for anything that carries receipts",
        "composed_epsilon": "an accountant of dp_accounting",
        "dp_sgd_assumptions": "dp_sgd_guarantee(...).assumptions",
        "dp_sgd_event": "dp_sgd_charge(...).event",
        "gaussian_delta": "HistogramMechanism or another mechanism with Gaussian noise",
        "gaussian_epsilon": "HistogramMechanism or another mechanism with Gaussian noise",
        "gaussian_event": "dp_accounting.GaussianDpEvent with twice the noise ratio",
        "gaussian_sigma": "HistogramMechanism or another mechanism with Gaussian noise",
        "peer_to_peer_assumptions": "peer_to_peer_guarantee(...).assumptions",
        "peer_to_peer_bound": "peer_to_peer_guarantee, which is tighter",
        "peer_to_peer_delta": "peer_to_peer_guarantee at the delta that is wanted",
        "pure_dp_event": "RandomizedResponse(epsilon, 2).dp_event()",
        "randomized_response_event": "RandomizedResponse(epsilon, num_classes).dp_event()",
    },
    "tf_labeldp.data": {
        "LabelRandomization": "randomize_labels, which returns it",
        "PoissonBatches": "poisson_batches, which returns it",
    },
    "tf_labeldp.estimation": {
        "Clusters": "tf_labeldp.features.find_clusters, which returns it",
        "DenoisedLabels": "tf_labeldp.features.denoise_labels, which returns it",
        "HistogramMechanism": "tf_labeldp.mechanisms.HistogramMechanism",
        "LabelMomentMechanism": "tf_labeldp.mechanisms.LabelMomentMechanism",
        "RoundingGrid": "LabelRandomizer, which rounds labels",
        "alibi_posterior": "NoisyLabels.posterior, or posterior",
        "channel_inverse": "numpy.linalg.inv(mechanism.transition_matrix()), or debiased",
        "cluster_priors": _PRIORS,
        "debiased_labels": "NoisyLabels.debiased, or debiased",
        "debiased_targets": "NoisyLabels.debiased, or debiased",
        "denoise_labels": "tf_labeldp.features.denoise_labels",
        "find_clusters": "tf_labeldp.features.find_clusters",
        "histogram_prior": _PRIORS,
        "posterior_mean": "NoisyLabels.posterior, or posterior",
        "posterior_probabilities": "NoisyLabels.posterior, or posterior",
        "private_histogram": _PRIORS,
        "project_onto_simplex": _PRIORS,
        "rounding_grid": "LabelRandomizer, which rounds labels",
    },
    "tf_labeldp.features": {
        "Clusters": "find_clusters, which returns it, or an array of cluster numbers",
        "DenoisedLabels": "denoise_labels, which returns it",
    },
    "tf_labeldp.gradients": {
        "HullProjection": "project_onto_hull, which returns it",
        "SpanProjection": "project_onto_span, which returns it",
        "estimate_column_norms": "tests/benchmarks, where it is used alone",
        "project_onto_simplex": "project_onto_hull, which calls it",
        "smooth_coefficients": "AltConv(smoothing=...), which calls it",
        "squared_error_vertices": "tf_labeldp.training.VertexLosses",
    },
    "tf_labeldp.heads": {
        "HeadRandomizedLabels": _NOISY,
        "NeighbourSmoothing": "tf_labeldp.features.NeighbourSmoothing",
        "PatchDictionary": "tf_labeldp.features.PatchDictionary",
        "RandomFourierFeatures": "tf_labeldp.features.RandomFourierFeatures",
        "TeacherLabels": "teacher_labels, which returns it",
    },
    "tf_labeldp.keras_layers": {
        "FourierFeatures": _MADE,
        "NearestCentre": _MADE,
        "NeighbourFeatures": _MADE,
        "PatchFeatures": _MADE,
        "ReleasedDense": _MADE,
        "lipschitz_factor": "LabelWeightedLoss, whose docstring has the formula",
        "mixup": "Mixup",
        "symmetric_beta": "Mixup",
    },
    "tf_labeldp.mechanisms": {
        "ClusterRandomizedLabels": _NOISY,
        "ClusterRandomizedResponse": "tf_labeldp.ClusterRandomizedResponse",
        "DPSGDSteps": "tf_labeldp.accounting.dp_sgd_charge",
        "LabelMechanism": "ClassificationMechanism or RegressionMechanism",
        "Mechanism": "ClassificationMechanism, RegressionMechanism or AggregateMechanism",
        "PriorResampling": "tf_labeldp.ClusterRandomizedResponse",
        "checked_mechanism": "isinstance with ClassificationMechanism or RegressionMechanism",
        "cluster_distributions": _PRIORS,
        "deserialize": "NoisyLabels.load, which makes the mechanism again",
        "serialize": "NoisyLabels.save, which writes the mechanism down",
        "top_k_members": "RRTopK(...).transition_matrix()",
    },
    "tf_labeldp.training": {
        "Preconditioner": "GaussNewton, or preconditioner='gauss_newton'",
        "StageReport": "MultiStageTraining.reports, which lists them",
    },
    "tf_labeldp.vault": {
        "History": "PrivateLabels.history",
        "NoisyStatistic": "PrivateLabels.release, which returns it",
        "Randomizer": "LabelRandomizer or ClusterRandomizedResponse",
        "Use": "PrivateLabels.history",
    },
}


# By part: modules that saved models and pickles of earlier versions name, and what they are in now.
_MODULES = {
    "tf_labeldp.estimation": {
        "_histogram": "tf_labeldp.mechanisms._histogram",
        "_label_moments": "tf_labeldp.mechanisms._label_moments",
    },
    "tf_labeldp.heads": {
        "_estimator": "tf_labeldp.features._estimator",
        "_neighbour_smoothing": "tf_labeldp.features._neighbour_smoothing",
        "_patch_dictionary": "tf_labeldp.features._patch_dictionary",
        "_patch_responses": "tf_labeldp.features._patch_dictionary",
        "_private_logistic_regression": "tf_labeldp.heads._logistic",
        "_private_ridge": "tf_labeldp.heads._one_release_head",
        "_random_fourier": "tf_labeldp.features._random_fourier",
        "_table_encoding": "tf_labeldp.features._random_fourier",
        "_teacher": "tf_labeldp.heads._prior_randomizer",
    },
    "tf_labeldp.keras_layers": {
        "_fourier_features": "tf_labeldp.keras_layers._fixed_features",
        "_nearest_centre": "tf_labeldp.keras_layers._fixed_features",
        "_neighbour_features": "tf_labeldp.keras_layers._fixed_features",
        "_patch_features": "tf_labeldp.keras_layers._fixed_features",
    },
    "tf_labeldp.mechanisms": {
        "_channel_mechanism": "tf_labeldp.mechanisms._bins",
        "_exponential": "tf_labeldp.mechanisms._numbers",
        "_laplace": "tf_labeldp.mechanisms._numbers",
        "_peer_to_peer": "tf_labeldp.mechanisms._clusters",
        "_prior_resampling": "tf_labeldp.mechanisms._clusters",
        "_randomized_response": "tf_labeldp.mechanisms._classes",
        "_rr_on_bins": "tf_labeldp.mechanisms._bins",
        "_rr_top_k": "tf_labeldp.mechanisms._classes",
        "_rr_with_prior": "tf_labeldp.mechanisms._classes",
        "_staircase": "tf_labeldp.mechanisms._numbers",
    },
    "tf_labeldp.training": {
        "_noise": "tf_labeldp.training._label_dp_optimizer",
        "_privacy_spent": "tf_labeldp.training._label_dp_model",
    },
}


def keep_old_names(part: str) -> None:
    """Makes old modules of a part importable, and errors for old names say what to use.

    To be called in the part itself, once its modules are loaded. Type checkers do not see this, and
    still find names that are missing.
    """
    for old, new in _MODULES.get(part, {}).items():
        sys.modules[f"{part}.{old}"] = sys.modules[new]
    vars(sys.modules[part])["__getattr__"] = functools.partial(refuse, part)


def refuse(part: str, name: str) -> NoReturn:
    """Raises for a name that a part does not have."""
    instead = _INSTEAD.get(part, {}).get(name)
    hint = "." if instead is None else f" any more. Use {instead}."
    raise AttributeError(f"module {part!r} has no attribute {name!r}{hint}")
