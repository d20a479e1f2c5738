"""PATE: noisy votes of teachers that are trained on shards of the private labels.

``ConfidentGNMax`` sets the sensitivity and adds the noise; ``PATE.answer`` makes one release.
"""

from tf_labeldp.pate._confident_gnmax import ConfidentGNMax
from tf_labeldp.pate._pate import PATE, fix_match_teacher

__all__ = ["PATE", "ConfidentGNMax", "fix_match_teacher"]
