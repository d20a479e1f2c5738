"""Models from one private release of the labels; loads neither TensorFlow nor Keras.

Privacy rests on two places: ``OneReleaseHead.fit`` (linear heads) and ``NoiseCluster.fit`` set the
sensitivity and make the only release; ``LabelMomentMechanism.release`` or
``HistogramMechanism.release`` adds the noise.
"""

from tf_labeldp.heads._bootstrapped_head import BootstrappedHead
from tf_labeldp.heads._logistic import PrivateLogisticRegression
from tf_labeldp.heads._noise_cluster import NoiseCluster
from tf_labeldp.heads._poisson import PrivatePoissonRegression
from tf_labeldp.heads._prior_randomizer import (
    HeadPriorRandomizer,
    HeadResidualRandomizer,
    teacher_labels,
)
from tf_labeldp.heads.one_release_head import PrivateRidge

__all__ = [
    "BootstrappedHead",
    "HeadPriorRandomizer",
    "HeadResidualRandomizer",
    "NoiseCluster",
    "PrivateLogisticRegression",
    "PrivatePoissonRegression",
    "PrivateRidge",
    "teacher_labels",
]
