"""Products with the gradients of all labels, and projections onto their span and hulls."""

from tf_labeldp.gradients._coefficients import smooth_coefficients
from tf_labeldp.gradients._column_norms import estimate_column_norms
from tf_labeldp.gradients._hull import HullProjection, project_onto_hull
from tf_labeldp.gradients._operator import GradientOperator
from tf_labeldp.gradients._simplex import project_onto_simplex
from tf_labeldp.gradients._span import SpanProjection, project_onto_span
from tf_labeldp.gradients._squared_error import squared_error_vertices

__all__ = [
    "GradientOperator",
    "HullProjection",
    "SpanProjection",
    "estimate_column_norms",
    "project_onto_hull",
    "project_onto_simplex",
    "project_onto_span",
    "smooth_coefficients",
    "squared_error_vertices",
]
