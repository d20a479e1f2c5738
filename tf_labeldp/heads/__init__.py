"""One-release heads, and feature maps without labels; loads neither TensorFlow nor Keras."""

from tf_labeldp.heads._decorrelation import decorrelation_floor
from tf_labeldp.heads._patch_dictionary import PatchDictionary
from tf_labeldp.heads._private_ridge import PrivateRidge
from tf_labeldp.heads._random_fourier import RandomFourierFeatures

__all__ = ["PatchDictionary", "PrivateRidge", "RandomFourierFeatures", "decorrelation_floor"]
