"""Stores that are damaged, incomplete or no stores at all are refused with a clear error."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from tf_labeldp.private_labels import LabelStoreError


def edit(path):
    """Writes other noisy labels into a draw, in a file that is whole."""
    with np.load(path) as content:
        arrays = dict(content)
    arrays["noisy_labels"] = arrays["noisy_labels"][::-1]
    np.savez(path, **arrays)


def test_a_damaged_draw_is_refused_byte_by_byte(make, store, filled, three_draws):
    """Any flipped byte is found, or it changes nothing that was drawn or charged."""
    path = store / "draws" / "000001.npz"
    whole, refused = path.read_bytes(), 0
    stated = filled[0].guarantee()
    places = np.random.default_rng(52).choice(len(whole), 150, replace=False)
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            opened = make(epsilon=2.0, store=store)
        except LabelStoreError as error:
            refused += "is damaged. A draw that cannot be read is still a charge" in str(error)
            continue
        assert opened.guarantee() == stated
        found = three_draws(opened)[1]
        np.testing.assert_array_equal(found, filled[1][1])
    assert refused > 0.7 * len(places)


DAMAGE = {
    "cut": lambda s: (s / "draws/000002.npz").write_bytes(
        (s / "draws/000002.npz").read_bytes()[:-9]
    ),
    "empty": lambda s: (s / "draws/000000.npz").write_bytes(b""),
    "edited": lambda s: edit(s / "draws/000001.npz"),
    "renamed": lambda s: (s / "draws/000002.npz").rename(s / "draws/000003.npz"),
    "swapped": lambda s: shutil.copy(s / "draws/000001.npz", s / "draws/000002.npz"),
    "header": lambda s: (s / "header.json").write_text('{"format": 1, '),
    "header list": lambda s: (s / "header.json").write_text("[]"),
    "fingerprint": lambda s: (s / "PRIVATE-fingerprint").write_bytes(b"\xff\xfe"),
    "salt": lambda s: (s / "PRIVATE-fingerprint").write_text('{"salt": "zz", "digest": "a"}'),
    "no salt": lambda s: (s / "PRIVATE-fingerprint").write_text("{}"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused(make, store, filled, case):
    DAMAGE[case](store)
    with pytest.raises(LabelStoreError, match=r"is damaged\..*Restore the folder from a backup"):
        make(epsilon=2.0, store=store)


def test_missing_files_are_refused(make, store, filled):
    copies = {name: store.with_name(name) for name in ("draw", "fingerprint", "header", "format")}
    for copy in copies.values():
        shutil.copytree(store, copy)
    (copies["draw"] / "draws" / "000001.npz").unlink()
    with pytest.raises(LabelStoreError, match=r"lacks a draw: found draws \[0, 2\].*forgotten"):
        make(store=copies["draw"])
    (copies["fingerprint"] / "PRIVATE-fingerprint").unlink()
    with pytest.raises(LabelStoreError, match="PRIVATE-fingerprint is missing"):
        make(store=copies["fingerprint"])
    (copies["header"] / "header.json").unlink()
    with pytest.raises(LabelStoreError, match=r"is not a label store \(no header.json\)"):
        make(store=copies["header"])
    header = json.loads((copies["format"] / "header.json").read_text())
    (copies["format"] / "header.json").write_text(json.dumps({**header, "format": 2}))
    with pytest.raises(LabelStoreError, match="other settings: format differ"):
        make(store=copies["format"])


@pytest.mark.parametrize("lost", ["draws/000002.npz", "draws", "charges/000000"])
def test_what_was_charged_last_is_missed_too(make, store, filled, lost):
    path = store / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(LabelStoreError, match=r"lacks a draw: .*is a charge forgotten"):
        make(epsilon=2.0, store=store)


def test_a_draw_that_was_not_yet_handed_out_is_taken_up(make, store, filled):
    charge = store / "charges" / "000002"
    content = charge.read_bytes()
    charge.unlink()  # as a kill right after the draw's file leaves it
    assert make(epsilon=2.0, store=store).guarantee().epsilon == 1.5
    assert charge.read_bytes() == content


def test_a_draw_that_claims_to_have_cost_less_is_refused(make, store, filled):
    path = store / "draws" / "000001.npz"
    with np.load(path) as draw:
        arrays = dict(draw)
    meta = json.loads(arrays["meta"].tobytes())
    meta["mechanism"]["config"]["epsilon"] /= 10
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(LabelStoreError, match=r"000001\.npz is damaged"):
        make(epsilon=2.0, store=store)


def test_a_folder_that_is_no_store(make, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(LabelStoreError, match=r"is not a label store.*new or empty folder"):
        make(store=tmp_path)
    with pytest.raises(LabelStoreError, match="is not a label store"):
        make(store=tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_full_disk_hands_out_and_charges_nothing(make, response, store, monkeypatch):
    vault = make(epsilon=1.0, store=store)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            vault.randomize(response(1.0))
    assert vault.guarantee().epsilon == 0.0
    assert list((store / "draws").iterdir()) == []
    drawn = vault.randomize(response(1.0))
    np.testing.assert_array_equal(make(epsilon=1.0, store=store).randomize(response(1.0)), drawn)
