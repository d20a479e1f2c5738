"""How a label becomes a noisy label: one small file a mechanism, one contract; no TensorFlow."""

from tf_labeldp.mechanisms._base import (
    LabelMechanism,
    checked_mechanism,
    deserialize,
    serialize,
)
from tf_labeldp.mechanisms._prior_mechanism import PriorMechanism
from tf_labeldp.mechanisms._randomized_response import RandomizedResponse
from tf_labeldp.mechanisms._rr_top_k import RRTopK
from tf_labeldp.mechanisms._rr_with_prior import RRWithPrior
from tf_labeldp.mechanisms._top_k import top_k_members

__all__ = [
    "LabelMechanism",
    "PriorMechanism",
    "RRTopK",
    "RRWithPrior",
    "RandomizedResponse",
    "checked_mechanism",
    "deserialize",
    "serialize",
    "top_k_members",
]
