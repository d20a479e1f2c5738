"""PATE: answers of teachers on shards of the private labels.

Where privacy is decided: ``ConfidentGNMax`` sets the sensitivity and adds the noise;
``PATE.answer`` makes one release from the vault.
"""

from tf_labeldp.pate._confident_gnmax import ConfidentGNMax
from tf_labeldp.pate._pate import PATE, fix_match_teacher

__all__ = ["PATE", "ConfidentGNMax", "fix_match_teacher"]
