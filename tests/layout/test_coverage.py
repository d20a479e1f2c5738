"""Every guarantee of a docstring has a test that holds it, and the page says which."""

from __future__ import annotations

import guarantees


def test_every_guarantee_is_held_by_a_test() -> None:
    promised, held = guarantees.promises(), guarantees.held()
    assert len(promised) > 100
    assert set(promised) - set(held) == set()
    assert set(held) - set(promised) == set()


def test_the_page_is_as_the_markers_say() -> None:
    # python tests/guarantees.py writes it
    assert guarantees.PAGE.read_text(encoding="utf-8") == guarantees.page()
