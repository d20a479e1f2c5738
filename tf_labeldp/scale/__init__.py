"""More than one machine: noisy labels by keyed draws on distributed engines.

A draw is a function of a secret key and the row, so engines may recompute it.
``tf_labeldp.scale.beam``, ``.tfx`` and ``.spark`` are optional extras; ``docs/scale.md`` compares
them.
"""

from tf_labeldp.scale._randomize_batch import randomize_batch
from tf_labeldp.vault.keyed_draws import ReleaseKey

__all__ = ["ReleaseKey", "randomize_batch"]
