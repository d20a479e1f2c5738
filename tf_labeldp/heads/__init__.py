"""Models from one private release of the labels; loads neither TensorFlow nor Keras.

Where privacy is decided: ``OneReleaseHead.fit`` (linear heads) and ``NoiseCluster.fit`` set the
sensitivity and make the one release. Its mechanism adds the noise: ``LabelMomentMechanism.release``
or ``HistogramMechanism.release``.
"""

import sys

from tf_labeldp._renamed import refuse_old_names
from tf_labeldp.features import _estimator, _neighbour_smoothing, _patch_dictionary, _random_fourier
from tf_labeldp.heads import _logistic, _one_release_head, _prior_randomizer
from tf_labeldp.heads._logistic import PrivateLogisticRegression
from tf_labeldp.heads._noise_cluster import NoiseCluster
from tf_labeldp.heads._one_release_head import PrivateRidge
from tf_labeldp.heads._prior_randomizer import HeadPriorRandomizer, teacher_labels

__all__ = [
    "HeadPriorRandomizer",
    "NoiseCluster",
    "PrivateLogisticRegression",
    "PrivateRidge",
    "teacher_labels",
]

# Pickles of earlier versions name the modules that these classes were in.
sys.modules |= {
    f"{__name__}._estimator": _estimator,
    f"{__name__}._neighbour_smoothing": _neighbour_smoothing,
    f"{__name__}._patch_dictionary": _patch_dictionary,
    f"{__name__}._patch_responses": _patch_dictionary,
    f"{__name__}._private_logistic_regression": _logistic,
    f"{__name__}._private_ridge": _one_release_head,
    f"{__name__}._random_fourier": _random_fourier,
    f"{__name__}._table_encoding": _random_fourier,
    f"{__name__}._teacher": _prior_randomizer,
}

refuse_old_names(__name__)
