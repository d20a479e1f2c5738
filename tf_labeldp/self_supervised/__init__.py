"""Encoders and clusters that need no labels; any Keras backend."""

from tf_labeldp.self_supervised._scan import SCAN
from tf_labeldp.self_supervised._simclr import SimCLR
from tf_labeldp.self_supervised._views import (
    rand_augment_views,
    sim_clr_views,
    strong_views,
    weak_views,
)

__all__ = ["SCAN", "SimCLR", "rand_augment_views", "sim_clr_views", "strong_views", "weak_views"]
