"""Products with the gradients of all labels, and projections onto their span and hulls."""

from tf_labeldp.gradients._operator import GradientOperator
from tf_labeldp.gradients._span import project_onto_span
from tf_labeldp.gradients.hull import project_onto_hull

__all__ = [
    "GradientOperator",
    "project_onto_hull",
    "project_onto_span",
]
