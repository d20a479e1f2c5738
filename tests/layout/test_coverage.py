"""Every guarantee of a docstring has a test."""

from __future__ import annotations

import guarantees


def test_every_guarantee_has_a_test():
    promised, held = guarantees.promises(), guarantees.held()
    assert len(promised) > 100
    assert set(promised) - set(held) == set()
    assert set(held) - set(promised) == set()
