"""Past one machine: noisy labels by keyed draws, and the engines that draw them.

A row's draw is a function of a secret key and the row, so that engines may recompute at will.
``tf_labeldp.scale.beam``, ``.tfx`` and ``.spark`` are optional extras; ``docs/scale.md`` compares
them.
"""

from tf_labeldp.vault.keyed_draws import ReleaseKey, randomize_batch

__all__ = ["ReleaseKey", "randomize_batch"]
