"""Keras losses and layers for training on noisy labels.

They depend on Keras and NumPy alone. Import this package before ``keras.models.load_model``: it
registers every class of the library, so that a ``.keras`` file loads without ``custom_objects``. A
``LabelDPModel``, and any other class of another part, is imported when a file has one.

- Losses on noisy labels: ``LabelWeightedLoss`` (unbiased, from the signed weights of a channel's
  inverse), ``ForwardCorrectedLoss`` (the prediction passed through the channel) and ``ALIBILoss``
  (the posterior given a noisy one-hot row).
- ``Mixup``, for batches of features and noisy labels; ``PreferenceLogits``, for pairs of answers.
- The layers in ``to_keras()`` of feature maps, heads and boosted trees: fixed, label-free features
  (``FourierFeatures``, ``PatchFeatures``, ``NeighbourFeatures``), and released models on them
  (``TreeEnsemble``).

They post-process labels that are already private, and spend no privacy budget. None of them makes a
label private.
"""

from . import _in_files as _in_files
from ._alibi_loss import ALIBILoss
from ._fixed_features import FourierFeatures, NeighbourFeatures, PatchFeatures
from ._forward_corrected_loss import ForwardCorrectedLoss
from ._label_weighted_loss import LabelWeightedLoss
from ._mixup import Mixup
from ._preference_logits import PreferenceLogits
from .tree_ensemble import TreeEnsemble

_in_files.register_other_parts()

__all__ = [
    "ALIBILoss",
    "ForwardCorrectedLoss",
    "FourierFeatures",
    "LabelWeightedLoss",
    "Mixup",
    "NeighbourFeatures",
    "PatchFeatures",
    "PreferenceLogits",
    "TreeEnsemble",
]
