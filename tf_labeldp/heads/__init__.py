"""One-release heads; loads neither TensorFlow nor Keras."""

from tf_labeldp.heads._noise_cluster import NoiseCluster
from tf_labeldp.heads._prior_randomizer import HeadPriorRandomizer
from tf_labeldp.heads._private_logistic_regression import PrivateLogisticRegression
from tf_labeldp.heads._private_ridge import PrivateRidge
from tf_labeldp.heads._teacher import TeacherLabels, teacher_labels

__all__ = [
    "HeadPriorRandomizer",
    "NoiseCluster",
    "PrivateLogisticRegression",
    "PrivateRidge",
    "TeacherLabels",
    "teacher_labels",
]
