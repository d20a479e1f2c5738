"""Fits on arrays as in processes of their own: what tests of heads and of features share."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tf_labeldp.heads import label_source
from tf_labeldp.mechanisms import LabelMomentMechanism


@pytest.fixture
def fits_apart(monkeypatch):
    """Each fit on an array as in a process of its own: for tests of numbers that take many fits."""
    monkeypatch.setattr(label_source._Fits, "with_others", lambda self, fit: fit.receipts)


def without_encoder(stated):
    """A statement without the sentence that names an encoder, which vaults do not keep."""
    notes = tuple(note for note in stated.assumptions if note.code != "public-encoder")
    return dataclasses.replace(stated, assumptions=notes)


def fixed_in_advance(stated):
    """A statement without the figure for any adaptive use, which is that of the budgets of all
    vaults behind a model, and of its own behind a vault."""
    notes = tuple("fixed" if n.code == "fixed-in-advance" else n for n in stated.assumptions)
    return dataclasses.replace(stated, adaptive=None, assumptions=notes)


class Released(Exception):
    """Ends a fit after its release: the fit of many rows takes long."""


def release_of(head, x, labels):
    """The mechanism of a head's release, its rows, what it released, and its generator.

    A vault repeats a failed release on public labels, to see whether it failed by the labels.
    """
    releases = []
    release = LabelMomentMechanism.release

    def wrapped(mechanism, labels, public_input=None, *, rng=None):
        rows = np.concatenate(list(public_input.blocks()))
        found = release(mechanism, labels, public_input, rng=rng)
        releases.append((mechanism, rows, found, rng))
        raise Released

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Released):
        patch.setattr(LabelMomentMechanism, "release", wrapped)
        head.fit(x, labels)
    return releases[0]
