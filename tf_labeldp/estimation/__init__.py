"""Priors, posteriors and debiased targets from noisy values; loads no TensorFlow."""

from tf_labeldp.estimation._debiased import debiased
from tf_labeldp.estimation._posterior import likelihoods, posterior
from tf_labeldp.estimation.priors import prior_from_logits, sharpen_prior

__all__ = ["debiased", "likelihoods", "posterior", "prior_from_logits", "sharpen_prior"]
