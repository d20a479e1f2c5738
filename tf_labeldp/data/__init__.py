"""tf.data transforms for private labels; needs TensorFlow and NumPy alone."""

from tf_labeldp.data._poisson_batches import PoissonBatches, poisson_batches
from tf_labeldp.data._randomize_labels import LabelRandomization, randomize_labels

__all__ = ["LabelRandomization", "PoissonBatches", "poisson_batches", "randomize_labels"]
