"""All code that reads labels: one contract, one file per kind of output; loads no TensorFlow.

``classes`` flips labels by randomized response, with bits from ``random_bits``. ``integer_noise``
draws exact noise for labels and statistics, and ``step_noise`` the noise of training steps.
"""

from tf_labeldp.mechanisms._alibi import ALIBI
from tf_labeldp.mechanisms._bins import ChannelMechanism, RROnBins
from tf_labeldp.mechanisms._check import check_mechanism
from tf_labeldp.mechanisms._histogram import HistogramMechanism
from tf_labeldp.mechanisms._label_moments import LabelMomentMechanism
from tf_labeldp.mechanisms._optimal_bins import optimal_bins
from tf_labeldp.mechanisms._optimal_unbiased import optimal_unbiased
from tf_labeldp.mechanisms._projective_geometry import ProjectiveGeometryResponse
from tf_labeldp.mechanisms._survey import SurveyChannel
from tf_labeldp.mechanisms.base import (
    AggregateMechanism,
    ClassificationMechanism,
    LabelMechanism,
    Mechanism,
    RegressionMechanism,
)
from tf_labeldp.mechanisms.channels import ClassChannel
from tf_labeldp.mechanisms.classes import (
    InformativeRR,
    PriorMechanism,
    RandomizedResponse,
    RRTopK,
    RRWithPrior,
)
from tf_labeldp.mechanisms.clusters import PeerToPeerRandomizedResponse
from tf_labeldp.mechanisms.metrics import (
    LinearBinningMechanism,
    MetricMechanism,
    SelectionMechanism,
)
from tf_labeldp.mechanisms.numbers import (
    DiscreteLaplaceMechanism,
    DiscreteStaircaseMechanism,
    ExponentialMechanism,
    LaplaceMechanism,
    StaircaseMechanism,
)
from tf_labeldp.mechanisms.priors import Priors
from tf_labeldp.mechanisms.quantile import QuantileMechanism

__all__ = [
    "ALIBI",
    "AggregateMechanism",
    "ChannelMechanism",
    "ClassChannel",
    "ClassificationMechanism",
    "DiscreteLaplaceMechanism",
    "DiscreteStaircaseMechanism",
    "ExponentialMechanism",
    "HistogramMechanism",
    "InformativeRR",
    "LabelMechanism",
    "LabelMomentMechanism",
    "LaplaceMechanism",
    "LinearBinningMechanism",
    "Mechanism",
    "MetricMechanism",
    "PeerToPeerRandomizedResponse",
    "PriorMechanism",
    "Priors",
    "ProjectiveGeometryResponse",
    "QuantileMechanism",
    "RROnBins",
    "RRTopK",
    "RRWithPrior",
    "RandomizedResponse",
    "RegressionMechanism",
    "SelectionMechanism",
    "StaircaseMechanism",
    "SurveyChannel",
    "check_mechanism",
    "optimal_bins",
    "optimal_unbiased",
]
