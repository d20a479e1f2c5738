"""Damaged and incomplete stores, and other folders, are refused with a clear error."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil

import numpy as np
import pytest

from tf_labeldp.accounting import Receipt
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.vault import LabelStoreError, PrivateLabels


def edit(path):
    """Writes other noisy labels into a draw, in a valid file."""
    line, _, content = path.read_bytes().partition(b"\n")
    with np.load(io.BytesIO(content)) as kept:
        arrays = dict(kept)
    arrays["values"] = arrays["values"][::-1]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.write_bytes(line + b"\n" + buffer.getvalue())


def rewrite(path, change, before=None):
    """Changes the fields of a record; ``before`` is the digest that its new digest covers."""
    line, _, arrays = path.read_bytes().partition(b"\n")
    digest, _, text = line.partition(b" ")
    fields = json.loads(text)
    change(fields)
    text = json.dumps(fields).encode()
    if before is not None:
        digest = hashlib.sha256(before + text).hexdigest().encode()
    path.write_bytes(digest + b" " + text + b"\n" + arrays)


def test_a_damaged_draw_is_refused_byte_by_byte(make, store, filled, three_draws):
    """A flipped byte is detected, or it changes no draw and no charge."""
    path = store / "records" / "000001"
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
        np.testing.assert_array_equal(found.values, filled[1][1].values)
        np.testing.assert_array_equal(found.indices, filled[1][1].indices)
        np.testing.assert_array_equal(found.priors, filled[1][1].priors)
    assert refused > 0.7 * len(places)


def header_with(store, **fields):
    """Changes a header, with the seal that fits."""
    path = store / "header.json"
    content = {**json.loads(path.read_text()), **fields}
    del content["digest"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "digest": digest}))


DAMAGE = {
    "cut": lambda s: (s / "records/000002").write_bytes((s / "records/000002").read_bytes()[:-9]),
    "empty": lambda s: (s / "records/000000").write_bytes(b""),
    "edited": lambda s: edit(s / "records/000001"),
    "no arrays": lambda s: (s / "records/000001").write_bytes(
        (s / "records/000001").read_bytes().partition(b"\n")[0] + b"\n"
    ),
    "swapped": lambda s: shutil.copy(s / "records/000001", s / "records/000002"),
    "last": lambda s: (s / "last-record").write_text(f"{2:010d} {'0' * 64}\n"),
    "last binary": lambda s: (s / "last-record").write_bytes(b"\xff\xfe" * 38),
    "no last": lambda s: (s / "last-record").unlink(),
    "header": lambda s: (s / "header.json").write_text('{"format": 3, '),
    "header size": lambda s: header_with(s, num_labels=1 << 48),
    "header list": lambda s: (s / "header.json").write_text("[]"),
    "fingerprint": lambda s: (s / "PRIVATE-fingerprint").write_bytes(b"\xff\xfe"),
    "salt": lambda s: (s / "PRIVATE-fingerprint").write_text('{"salt": "zz", "digest": "a"}'),
    "digest": lambda s: (s / "PRIVATE-fingerprint").write_text(
        json.dumps({"salt": "0" * 64, "digest": "a"})
    ),
    "no salt": lambda s: (s / "PRIVATE-fingerprint").write_text("{}"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused(make, store, filled, case):
    DAMAGE[case](store)
    with pytest.raises(LabelStoreError, match=r"is damaged\..*Restore this file alone from a copy"):
        make(epsilon=2.0, store=store)


def test_a_file_of_another_size_is_not_read_into_memory(make, store, filled):
    os.truncate(store / "header.json", (1 << 28) + 1)  # It takes no space on the disk.
    with pytest.raises(LabelStoreError, match=r"expected at most 268,435,456 bytes in .*header"):
        make(epsilon=2.0, store=store)


def test_missing_files_are_refused(make, store, filled):
    copies = {name: store.with_name(name) for name in ("draw", "fingerprint", "header", "format")}
    for copy in copies.values():
        shutil.copytree(store, copy)
    (copies["draw"] / "records" / "000001").unlink()
    with pytest.raises(LabelStoreError, match=r"lacks record 1, of 3, and with it a charge"):
        make(epsilon=2.0, store=copies["draw"])
    (copies["fingerprint"] / "PRIVATE-fingerprint").unlink()
    with pytest.raises(LabelStoreError, match="PRIVATE-fingerprint is missing"):
        make(epsilon=2.0, store=copies["fingerprint"])
    (copies["header"] / "header.json").unlink()
    with pytest.raises(LabelStoreError, match=r"is not a label store \(no header.json\)"):
        make(epsilon=2.0, store=copies["header"])
    header = json.loads((copies["format"] / "header.json").read_text())
    (copies["format"] / "header.json").write_text(json.dumps({**header, "format": 5}))
    with pytest.raises(LabelStoreError, match=r"has format 5, and tf-labeldp .* reads formats 3"):
        make(epsilon=2.0, store=copies["format"])


def test_a_record_of_a_newer_version_is_refused(make, store, filled):
    change = {"format": 5, "version": "9.1"}
    rewrite(store / "records" / "000001", lambda meta: meta.update(change))
    message = r"000001 has format 5, .*A newer version of tf-labeldp wrote it: update"
    with pytest.raises(LabelStoreError, match=message):
        make(epsilon=2.0, store=store)


def test_a_record_with_an_unknown_field_is_of_a_newer_version(make, store, filled):
    """A digest that fits the record shows that the field was written, not added."""
    first, second = (store / "records" / name for name in ("000000", "000001"))
    change = {"weather": "fair", "version": "9.1"}
    rewrite(second, lambda meta: meta.update(change), before=first.read_bytes().split(b" ")[0])
    message = r"000001: this record was written by a newer version of tf-labeldp \(9\.1\), with .*"
    with pytest.raises(LabelStoreError, match=message + "Update tf-labeldp"):
        make(epsilon=2.0, store=store)
    rewrite(second, lambda meta: meta.update(weather="foul"))
    with pytest.raises(LabelStoreError, match="is damaged"):
        make(epsilon=2.0, store=store)


@pytest.mark.parametrize("lost", ["records/000002", "records"])
def test_a_missing_last_charge_is_detected(make, store, filled, lost):
    path = store / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(LabelStoreError, match=r"lacks record .*with it a charge"):
        make(epsilon=2.0, store=store)


def test_charges_that_were_read_before_a_missing_one_count(make, store):
    labels, other = make(epsilon=3.0, store=store), make(epsilon=3.0, store=store)
    for name in "ab":
        other.randomize(RandomizedResponse(1.0, 5), key=name)
    last = store / "records" / "000001"
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(LabelStoreError, match="lacks record 1"):
        labels.remaining()
    last.write_bytes(content)
    assert labels.remaining() == 1.0 and labels.guarantee().epsilon == 2.0


def test_a_stored_draw_that_was_not_returned_counts(make, store, filled):
    last = store / "last-record"
    content = last.read_bytes()
    digest = (store / "records" / "000001").read_text("latin-1").split(" ")[0]
    last.write_text(f"{2:010d} {digest}\n")  # A kill right after the link leaves this.
    assert make(epsilon=2.0, store=store).guarantee().epsilon == 1.5
    assert last.read_bytes()[:75] == content[:75]  # The rest is the place of the file.


def cheaper_mechanism(meta):
    meta["mechanism"]["config"]["epsilon"] /= 10


def cheaper_receipt(meta):
    receipt = Receipt.from_json(meta["receipt"])
    charge = dataclasses.replace(receipt.charge, epsilon=receipt.charge.epsilon / 10)
    meta["receipt"] = dataclasses.replace(receipt, charge=charge).to_json()  # a new digest


def fewer_examples(meta):
    receipt = Receipt.from_json(meta["receipt"])
    meta["receipt"] = dataclasses.replace(receipt, examples=np.array([80])).to_json()


def no_receipt(meta):
    meta["receipt"] = None


@pytest.mark.parametrize("cheat", [cheaper_mechanism, cheaper_receipt, fewer_examples, no_receipt])
def test_a_draw_with_a_lowered_cost_is_refused(make, store, filled, cheat):
    path = store / "records" / "000001"
    rewrite(path, cheat)
    with pytest.raises(LabelStoreError, match="000001 is damaged"):
        make(epsilon=2.0, store=store)


def test_the_next_record_detects_a_record_with_a_new_digest(make, store, filled):
    before = (store / "records" / "000000").read_bytes().split(b" ")[0]
    rewrite(store / "records" / "000001", cheaper_receipt, before)
    with pytest.raises(LabelStoreError, match="000002 is damaged"):
        make(epsilon=2.0, store=store)
    shutil.copytree(store, store.with_name("cut"))
    (store.with_name("cut") / "records" / "000002").unlink()
    with pytest.raises(LabelStoreError, match="lacks record 2"):
        make(epsilon=2.0, store=store.with_name("cut"))


@pytest.mark.parametrize(
    "change",
    [{"budget": [9.0, 0.0]}, {"people": "others"}, {"label_set": "0" * 32}, {"digest": None}],
    ids=lambda change: next(iter(change)),
)
def test_a_header_that_was_edited_is_refused(make, labels, store, filled, change):
    path = store / "header.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(LabelStoreError, match=r"header\.json was edited or is damaged"):
        PrivateLabels(labels, 5, store=store)


@pytest.mark.parametrize("how", ["removed", "moved", "made again"])
def test_a_store_that_vanished_while_open_is_not_written_to(make, response, store, how):
    vault = make(epsilon=2.0, store=store)
    vault.randomize(response(0.5))
    if how == "moved":
        store.rename(store.with_name("elsewhere"))
    else:
        shutil.rmtree(store)
    if how == "made again":
        make(epsilon=2.0, store=store)
    with pytest.raises(LabelStoreError, match="moved, removed or replaced"):
        vault.randomize(response(0.5))
    if how == "made again":
        assert make(epsilon=2.0, store=store).guarantee().epsilon == 0.0
    else:
        assert not store.exists()


def test_damage_to_an_open_store_is_detected(make, response, store, filled):
    vault, last = filled[0], store / "records" / "000003"
    make(epsilon=2.0, store=store).randomize(response(0.5), np.arange(80), key="another's")
    whole = last.read_bytes()
    edit(last)
    for use in (vault.guarantee, vault.remaining, lambda: vault.randomize(response(0.1), [90])):
        with pytest.raises(LabelStoreError, match="000003 is damaged"):
            use()
    assert len(list((store / "records").iterdir())) == 4
    last.write_bytes(whole)
    assert vault.guarantee().epsilon == 2.0


def test_a_folder_that_is_no_store(make, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(LabelStoreError, match=r"is not a label store.*new or empty folder"):
        make(store=tmp_path)
    with pytest.raises(LabelStoreError, match="is not a label store"):
        make(store=tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_full_disk_returns_and_charges_nothing(make, response, store, monkeypatch):
    vault = make(epsilon=1.0, store=store)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LabelStoreError, match=r"No space.*Nothing was returned or charged"):
            vault.randomize(response(1.0))
    assert vault.guarantee().epsilon == 0.0
    assert list((store / "records").iterdir()) == []
    drawn = vault.randomize(response(1.0))
    again = make(epsilon=1.0, store=store).randomize(response(1.0))
    np.testing.assert_array_equal(again.values, drawn.values)
