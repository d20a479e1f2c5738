"""What may see a label: one contract, one file per kind of output; loads no TensorFlow.

=================== ====================================================================
``_base``           the contracts, and how mechanisms are written down
``_classes``        classes: randomized response, RRTop-k, RRWithPrior
``_alibi``          noisy one-hot rows of classes
``_numbers``        numbers in a range: Laplace, staircase, exponential
``_bins``           numbers of a finite set: RR-on-Bins, any table of probabilities
``_optimal_bins``   the best bins, by the costs in ``_losses``
``_clusters``       classes by cluster: resampling from a prior, exchange between peers
``_histogram``      noisy counts
``_label_moments``  noisy sums of features and labels
``_random``         random bits, and where randomized response flips
``_integer_noise``  exact noise of single labels
``_grid_noise``     exact noise of statistics, and its calibration
``_check``          whether a mechanism does what it claims
=================== ====================================================================
"""

from tf_labeldp._renamed import keep_old_names
from tf_labeldp.mechanisms._alibi import ALIBI
from tf_labeldp.mechanisms._base import (
    AggregateMechanism,
    ClassificationMechanism,
    RegressionMechanism,
)
from tf_labeldp.mechanisms._bins import ChannelMechanism, RROnBins
from tf_labeldp.mechanisms._check import check_mechanism
from tf_labeldp.mechanisms._classes import PriorMechanism, RandomizedResponse, RRTopK, RRWithPrior
from tf_labeldp.mechanisms._clusters import PeerToPeerRandomizedResponse
from tf_labeldp.mechanisms._histogram import HistogramMechanism
from tf_labeldp.mechanisms._label_moments import LabelMomentMechanism
from tf_labeldp.mechanisms._numbers import (
    DiscreteLaplaceMechanism,
    DiscreteStaircaseMechanism,
    ExponentialMechanism,
    LaplaceMechanism,
    StaircaseMechanism,
)
from tf_labeldp.mechanisms._optimal_bins import optimal_bins
from tf_labeldp.mechanisms._priors import Priors

__all__ = [
    "ALIBI",
    "AggregateMechanism",
    "ChannelMechanism",
    "ClassificationMechanism",
    "DiscreteLaplaceMechanism",
    "DiscreteStaircaseMechanism",
    "ExponentialMechanism",
    "HistogramMechanism",
    "LabelMomentMechanism",
    "LaplaceMechanism",
    "PeerToPeerRandomizedResponse",
    "PriorMechanism",
    "Priors",
    "RROnBins",
    "RRTopK",
    "RRWithPrior",
    "RandomizedResponse",
    "RegressionMechanism",
    "StaircaseMechanism",
    "check_mechanism",
    "optimal_bins",
]

keep_old_names(__name__)
