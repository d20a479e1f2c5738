"""Private histograms, priors, channel inverses and debiased targets; loads no TensorFlow."""

from tf_labeldp.estimation._debiased_labels import debiased_labels
from tf_labeldp.estimation._debiased_targets import channel_inverse, debiased_targets
from tf_labeldp.estimation._histogram import histogram_prior, private_histogram
from tf_labeldp.estimation._label_moments import LabelMomentMechanism
from tf_labeldp.estimation._posterior_mean import posterior_mean
from tf_labeldp.estimation._posterior_probabilities import posterior_probabilities
from tf_labeldp.estimation._priors import prior_from_logits, sharpen_prior
from tf_labeldp.estimation._rounding import RoundingGrid, rounding_grid
from tf_labeldp.mechanisms import HistogramMechanism

__all__ = [
    "HistogramMechanism",
    "LabelMomentMechanism",
    "RoundingGrid",
    "channel_inverse",
    "debiased_labels",
    "debiased_targets",
    "histogram_prior",
    "posterior_mean",
    "posterior_probabilities",
    "prior_from_logits",
    "private_histogram",
    "rounding_grid",
    "sharpen_prior",
]
