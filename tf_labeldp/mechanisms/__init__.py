"""How a label becomes a noisy label: one small file a mechanism, one contract; no TensorFlow."""

from tf_labeldp.mechanisms._alibi import ALIBI
from tf_labeldp.mechanisms._base import (
    AggregateMechanism,
    ClassificationMechanism,
    LabelMechanism,
    Mechanism,
    RegressionMechanism,
    checked_mechanism,
    deserialize,
    serialize,
)
from tf_labeldp.mechanisms._channel_mechanism import ChannelMechanism
from tf_labeldp.mechanisms._check import check_mechanism
from tf_labeldp.mechanisms._cluster_distributions import cluster_distributions
from tf_labeldp.mechanisms._exponential import ExponentialMechanism
from tf_labeldp.mechanisms._histogram import HistogramMechanism
from tf_labeldp.mechanisms._label_moments import LabelMomentMechanism
from tf_labeldp.mechanisms._laplace import DiscreteLaplaceMechanism, LaplaceMechanism
from tf_labeldp.mechanisms._optimal_bins import optimal_bins
from tf_labeldp.mechanisms._peer_to_peer import PeerToPeerRandomizedResponse
from tf_labeldp.mechanisms._prior_mechanism import PriorMechanism
from tf_labeldp.mechanisms._prior_resampling import PriorResampling
from tf_labeldp.mechanisms._priors import Priors
from tf_labeldp.mechanisms._randomized_response import RandomizedResponse
from tf_labeldp.mechanisms._rr_on_bins import RROnBins
from tf_labeldp.mechanisms._rr_top_k import RRTopK
from tf_labeldp.mechanisms._rr_with_prior import RRWithPrior
from tf_labeldp.mechanisms._staircase import DiscreteStaircaseMechanism, StaircaseMechanism
from tf_labeldp.mechanisms._top_k import top_k_members

__all__ = [
    "ALIBI",
    "AggregateMechanism",
    "ChannelMechanism",
    "ClassificationMechanism",
    "DiscreteLaplaceMechanism",
    "DiscreteStaircaseMechanism",
    "ExponentialMechanism",
    "HistogramMechanism",
    "LabelMechanism",
    "LabelMomentMechanism",
    "LaplaceMechanism",
    "Mechanism",
    "PeerToPeerRandomizedResponse",
    "PriorMechanism",
    "PriorResampling",
    "Priors",
    "RROnBins",
    "RRTopK",
    "RRWithPrior",
    "RandomizedResponse",
    "RegressionMechanism",
    "StaircaseMechanism",
    "check_mechanism",
    "checked_mechanism",
    "cluster_distributions",
    "deserialize",
    "optimal_bins",
    "serialize",
    "top_k_members",
]
