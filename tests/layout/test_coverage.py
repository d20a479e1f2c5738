"""Every guarantee of a docstring has a test."""

from __future__ import annotations

import guarantees


def test_every_guarantee_has_a_test():
    promised, tested = guarantees.promises(), guarantees.tests()
    assert len(promised) > 100
    assert set(promised) - set(tested) == set()
    assert set(tested) - set(promised) == set()
    # `make docs` writes this page.
    assert guarantees.page().count("\n| `") == len(promised)
