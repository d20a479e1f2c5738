"""Private histograms, priors, channel inverses and debiased targets; loads no TensorFlow."""

from tf_labeldp.estimation._alibi_posterior import alibi_posterior, project_onto_simplex
from tf_labeldp.estimation._cluster_priors import cluster_priors
from tf_labeldp.estimation._clusters import Clusters, find_clusters
from tf_labeldp.estimation._debiased_labels import debiased_labels
from tf_labeldp.estimation._debiased_targets import channel_inverse, debiased_targets
from tf_labeldp.estimation._denoise_labels import DenoisedLabels, denoise_labels
from tf_labeldp.estimation._histogram import histogram_prior, private_histogram
from tf_labeldp.estimation._label_moments import LabelMomentMechanism
from tf_labeldp.estimation._posterior_mean import posterior_mean
from tf_labeldp.estimation._posterior_probabilities import posterior_probabilities
from tf_labeldp.estimation._priors import prior_from_logits, sharpen_prior
from tf_labeldp.estimation._rounding import RoundingGrid, rounding_grid
from tf_labeldp.mechanisms import HistogramMechanism

__all__ = [
    "Clusters",
    "DenoisedLabels",
    "HistogramMechanism",
    "LabelMomentMechanism",
    "RoundingGrid",
    "alibi_posterior",
    "channel_inverse",
    "cluster_priors",
    "debiased_labels",
    "debiased_targets",
    "denoise_labels",
    "find_clusters",
    "histogram_prior",
    "posterior_mean",
    "posterior_probabilities",
    "prior_from_logits",
    "private_histogram",
    "project_onto_simplex",
    "rounding_grid",
    "sharpen_prior",
]
