"""One-release heads, and feature maps without labels; loads neither TensorFlow nor Keras."""

from tf_labeldp.heads._neighbour_smoothing import NeighbourSmoothing
from tf_labeldp.heads._noise_cluster import NoiseCluster
from tf_labeldp.heads._patch_dictionary import PatchDictionary
from tf_labeldp.heads._prior_randomizer import HeadPriorRandomizer
from tf_labeldp.heads._private_logistic_regression import PrivateLogisticRegression
from tf_labeldp.heads._private_ridge import PrivateRidge
from tf_labeldp.heads._random_fourier import RandomFourierFeatures
from tf_labeldp.heads._teacher import TeacherLabels, teacher_labels

__all__ = [
    "HeadPriorRandomizer",
    "NeighbourSmoothing",
    "NoiseCluster",
    "PatchDictionary",
    "PrivateLogisticRegression",
    "PrivateRidge",
    "RandomFourierFeatures",
    "TeacherLabels",
    "teacher_labels",
]
