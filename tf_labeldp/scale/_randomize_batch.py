"""``randomize_batch``: keyed draws of some rows, for any engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, public_input
from tf_labeldp.mechanisms import LabelMechanism
from tf_labeldp.vault.keyed_draws import KeyedRows
from tf_labeldp.vault.row_ids import RowIds


@_validate.clears_frames
def randomize_batch(
    ids: Public[Any],
    labels: Private[Any],
    mechanism: Public[LabelMechanism],
    key: bytes,
    release: str,
    priors: Public[Any] = None,
) -> np.ndarray:
    """Returns noisy labels of some rows; a row has the same noisy label in any batch.

    Guarantee:
        As ``mechanism.randomize``, with the bits of a pseudorandom function: AES-256 in a CBC-MAC
        over the id, the label and the prior of a row, under a key that BLAKE2b derives from
        ``key``, release, mechanism and common prior. Assumes that ids are unique in all batches of
        a release, and that a release name stands for one mechanism and prior; ``ReleaseKey`` and
        the engines check both.

    Args:
        ids: whole numbers or texts (n,), as an Arrow or NumPy array or a list, none missing.
        labels: labels (n,) of the mechanism.
        mechanism: one with ``has_keyed_draws``, such as ``RandomizedResponse``, ``RRTopK``,
            ``RRWithPrior``, ``RROnBins`` or a ``ClassChannel`` of a plug-in.
        key: the secret of 32 bytes, ``ReleaseKey.secret``.
        release: the name of the release.
        priors: public probabilities for mechanisms that use priors: (K,) for all rows, (n, K), or
            ``mechanisms.Priors``.

    Raises:
        ValueError: an id twice, whose rows would share their noise.

    Example:
        >>> from tf_labeldp import RandomizedResponse
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> key = bytes(32)  # for this example; a real key is secret and random
        >>> randomize_batch([5, 8, 2], [0, 1, 2], mechanism, key, "first").tolist()
        [0, 1, 0]
        >>> randomize_batch([2, 5], [2, 0], mechanism, key, "first").tolist()
        [0, 0]
    """
    ids, mechanism, priors = public_input(ids, mechanism, priors).value
    RowIds.of(ids).check_distinct()
    return KeyedRows(ids, labels, mechanism, key, release, priors).randomize()
