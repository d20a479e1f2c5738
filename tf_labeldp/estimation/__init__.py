"""Priors, channel inverses and debiased targets; loads no TensorFlow."""

from tf_labeldp.estimation._debiased_targets import channel_inverse, debiased_targets
from tf_labeldp.estimation._priors import prior_from_logits, sharpen_prior

__all__ = ["channel_inverse", "debiased_targets", "prior_from_logits", "sharpen_prior"]
