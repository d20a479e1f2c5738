"""tf.data transforms for private labels, which need TensorFlow."""

from tf_labeldp.data._randomize_labels import randomize_labels
from tf_labeldp.data.batches import poisson_batches

__all__ = [
    "poisson_batches",
    "randomize_labels",
]
