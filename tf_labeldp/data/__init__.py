"""tf.data transforms for private labels; needs TensorFlow and NumPy alone."""

from tf_labeldp.data._poisson_batches import poisson_batches
from tf_labeldp.data._randomize_labels import randomize_labels

__all__ = [
    "poisson_batches",
    "randomize_labels",
]
