"""Priors, posteriors and debiased targets, from noisy values; loads no TensorFlow."""

from tf_labeldp.estimation._debiased import channel_inverse, debiased
from tf_labeldp.estimation._posterior import posterior
from tf_labeldp.estimation._priors import histogram_prior, prior_from_logits, sharpen_prior

__all__ = [
    "channel_inverse",
    "debiased",
    "histogram_prior",
    "posterior",
    "prior_from_logits",
    "sharpen_prior",
]
