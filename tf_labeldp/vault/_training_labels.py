"""The one door of the vault: true labels for a training step that has been charged."""

from __future__ import annotations

import numpy as np

from tf_labeldp.vault._private_labels import PrivateLabels


def labels_for_training(vault: PrivateLabels) -> np.ndarray:
    """Returns the true labels for a training step that has charged the vault; not for users.

    ``LabelDPModel.fit`` calls it after the charge for its noisy gradients, through the batches of
    ``data.poisson_batches``; nothing else may.

    Returns:
        The codes (n,) ``int64``, numbers (n,) ``float64`` or rows (n, L) ``int64``: the vault's own
        array, read-only.

    Raises:
        RuntimeError: this process was forked, and the vault has no store.
    """
    with vault._in_turn():
        pass
    labels = vault._sealed.open().view()
    labels.flags.writeable = False
    return labels
