"""Learners for noisy labels and all images; any Keras backend."""

from tf_labeldp.semi_supervised._divide_mix import DivideMix
from tf_labeldp.semi_supervised._fix_match import FixMatch

__all__ = ["DivideMix", "FixMatch"]
