"""Priors, posteriors, and debiased targets, from noisy values; loads no TensorFlow."""

from tf_labeldp.estimation._debiased import channel_inverse, debiased
from tf_labeldp.estimation._histogram import histogram_prior
from tf_labeldp.estimation._posterior import posterior, project_onto_simplex
from tf_labeldp.estimation._priors import prior_from_logits, sharpen_prior
from tf_labeldp.estimation._rounding import RoundingGrid, rounding_grid

__all__ = [
    "RoundingGrid",
    "channel_inverse",
    "debiased",
    "histogram_prior",
    "posterior",
    "prior_from_logits",
    "project_onto_simplex",
    "rounding_grid",
    "sharpen_prior",
]
