"""Boosted trees on noisy labels, with the channel in the loss."""

from tf_labeldp.boosting._boosting import PrivateBoosting

__all__ = ["PrivateBoosting"]
