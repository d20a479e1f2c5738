"""Keras building blocks for training on private labels: losses and layers.

They know Keras and NumPy alone, so they also work without the rest of the library. Importing
this package registers every class with Keras: a saved `.keras` file then loads without
`custom_objects`.

- `LabelWeightedLoss`: the unbiased loss of every linear correction of noisy labels, from the
  signed weights `(batch, num_classes)` of a channel's inverse.
- `lipschitz_factor`: by how much debiasing RRTop-k enlarges a loss's Lipschitz constant.
- `ForwardCorrectedLoss`: cross-entropy of the model's distribution passed through the channel.
- `ALIBILoss`: cross-entropy to the posterior of the true class given a noisy one-hot label, with
  the model's own prediction as the prior.
- `Mixup`, and its stateless parts `mixup` and `symmetric_beta`.
- `NearestCentre`: the outputs of the centre that is nearest, for clusters with classes.
- `ReleasedDense`: the dense layer of a released head, with its receipts.
- `PatchFeatures`, `FourierFeatures` and `NeighbourFeatures`: fixed, label-free features of images,
  of numbers and of other features, as `tf_labeldp.heads` fits them.

All of them work on labels that are already private (or need no protection): what they compute is
post-processing and spends no privacy budget. None of them makes a label private.
"""

from ._alibi_loss import ALIBILoss
from ._forward_corrected_loss import ForwardCorrectedLoss
from ._fourier_features import FourierFeatures
from ._label_weighted_loss import LabelWeightedLoss, lipschitz_factor
from ._mixup import Mixup, mixup, symmetric_beta
from ._nearest_centre import NearestCentre
from ._neighbour_features import NeighbourFeatures
from ._patch_features import PatchFeatures
from ._released_dense import ReleasedDense

__all__ = [
    "ALIBILoss",
    "ForwardCorrectedLoss",
    "FourierFeatures",
    "LabelWeightedLoss",
    "Mixup",
    "NearestCentre",
    "NeighbourFeatures",
    "PatchFeatures",
    "ReleasedDense",
    "lipschitz_factor",
    "mixup",
    "symmetric_beta",
]
