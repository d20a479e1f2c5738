"""Every guarantee of a docstring, and every sentence of a page that promises, has a test."""

from __future__ import annotations

import guarantees
import pytest


@pytest.mark.slow
def test_every_guarantee_has_a_test():
    promised, tested = guarantees.promises(), guarantees.tests()
    assert len(promised) > 100
    assert set(promised) - set(tested) == set()
    assert set(tested) - set(promised) == set()
    # `make docs` writes this page.
    assert guarantees.page().count("\n| `") == len(promised)


@pytest.mark.parametrize("page", guarantees.PAGES)
def test_every_promise_of_a_page_has_a_test(page):
    """Or a reason why it promises nothing about the code, in ``tests/promises.json``."""
    sentences, listed = guarantees.sentences(page), guarantees.listed()[page]
    new = [sentence for sentence in sentences if sentence not in listed]
    old = [sentence for sentence in listed if sentence not in sentences]
    assert not new, (
        f"add to {page!r} in tests/promises.json, each with its tests or one of the reasons "
        f"{list(guarantees.REASONS)}, or promise no more than is tested:\n"
        + "\n".join(f'  "{sentence}": ["file::test"]' for sentence in new)
    )
    assert not old, "remove from tests/promises.json, no longer in {}:\n{}".format(
        page, "\n".join(old)
    )
    assert list(listed) == sentences, "list the sentences in the order of the page"


def test_the_tests_of_promises_exist():
    known, reasons = guarantees.all_tests(), set()
    assert list(guarantees.listed()) == list(guarantees.PAGES)
    for sentences in guarantees.listed().values():
        for sentence, tests in sentences.items():
            if isinstance(tests, str):
                assert tests in guarantees.REASONS, sentence
                reasons.add(tests)
            else:
                assert tests and set(tests) <= known, (sentence, set(tests) - known)
    assert reasons == set(guarantees.REASONS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A label is never shown. It is drawn.", ["A label is never shown."]),
        ("- **Each** use\n  counts;\n- a list", ["Each use counts;"]),
        ("| a | b |\n|---|---|\n| only | [refused](x.md) |\n", ["only | refused"]),
        ("```\nnever\n```\n# Nothing\n<!-- once -->\nfoundation", []),
        ("## What counts as a leak\n\n- noise\n\n## More\n\n- a label\n", ["noise"]),
    ],
)
def test_sentences_that_promise_are_found(text, found, tmp_path, monkeypatch):
    monkeypatch.setattr(guarantees, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert guarantees.sentences("page.md") == found
