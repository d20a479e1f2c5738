"""Priors, posteriors, debiased targets and clusters, from noisy values; loads no TensorFlow."""

from tf_labeldp.estimation._clusters import Clusters, find_clusters
from tf_labeldp.estimation._debiased import channel_inverse, debiased
from tf_labeldp.estimation._denoise_labels import DenoisedLabels, denoise_labels
from tf_labeldp.estimation._histogram import histogram_prior
from tf_labeldp.estimation._posterior import posterior, project_onto_simplex
from tf_labeldp.estimation._priors import prior_from_logits, sharpen_prior
from tf_labeldp.estimation._rounding import RoundingGrid, rounding_grid

__all__ = [
    "Clusters",
    "DenoisedLabels",
    "RoundingGrid",
    "channel_inverse",
    "debiased",
    "denoise_labels",
    "find_clusters",
    "histogram_prior",
    "posterior",
    "prior_from_logits",
    "project_onto_simplex",
    "rounding_grid",
    "sharpen_prior",
]
