"""Apache Beam: noisy labels, histograms, moments and heads from distributed rows.

Install it with ``pip install 'tf-labeldp[beam]'``. ``docs/scale.md`` has the protection that a
pipeline needs.
"""

from tf_labeldp.scale._engines import needs

needs("apache_beam", "beam")

from tf_labeldp.scale.beam._exact_sums import PrivateHistogram, PrivateMoments  # noqa: E402
from tf_labeldp.scale.beam._fit_head import FitPrivateHead  # noqa: E402
from tf_labeldp.scale.beam._randomize_labels import RandomizeLabels  # noqa: E402

__all__ = ["FitPrivateHead", "PrivateHistogram", "PrivateMoments", "RandomizeLabels"]
