"""tf.data transforms for private labels; needs TensorFlow and NumPy alone."""

from tf_labeldp.data._randomize_labels import LabelRandomization, randomize_labels

__all__ = ["LabelRandomization", "randomize_labels"]
