"""Readers of files of others refuse what was changed, within a size and in words of the library."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.accounting import Receipt, ReceiptError, Receipts

MOST_MB = 500


@pytest.mark.slow
def test_changed_files_are_read_as_they_were_or_refused(tmp_path):
    """A sample; ``python tests/readers/fuzz_readers.py FOLDER 10000 SEED`` is the whole."""
    script = pathlib.Path(__file__).with_name("fuzz_readers.py")
    done = subprocess.run(
        [sys.executable, os.fspath(script), os.fspath(tmp_path), "300", "7"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    problems, results, megabytes = json.loads(done.stdout.splitlines()[-1])
    assert problems == []
    assert sum(results.values()) == 300 and megabytes <= MOST_MB
    assert {name.split()[0] for name in results} == {
        *("store", "draw", "draw-part", "table", "card", "model", "key", "report")
    }


@pytest.fixture
def peak():
    """Returns the largest memory that a call takes, in MB."""

    def measured(call):
        tracemalloc.start()
        try:
            call()
        finally:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return most / 1e6

    return measured


@pytest.fixture
def noisy(tmp_path):
    labels = ldp.PrivateLabels([0, 1] * 40, 2, budget=ldp.PrivacyBudget(1.0))
    labels.randomize(ldp.RandomizedResponse(1.0, 2)).save(tmp_path / "n")
    return tmp_path / "n"


def packed(size):
    """Returns ``size`` zeros in a zlib stream, made in small parts."""
    stream = zlib.compressobj(9)
    parts = [stream.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join(parts) + stream.flush()


@pytest.mark.parametrize("how", ["zeros", "a header", "objects"])
def test_arrays_larger_than_their_file_are_refused(how, noisy, peak):
    header = {"zeros": 320_000_000, "a header": 10**12, "objects": 80}[how]
    kind = "|O" if how == "objects" else "<i8"
    file = io.BytesIO()
    fields = {"descr": kind, "fortran_order": False, "shape": (header,)}
    np.lib.format.write_array_header_1_0(file, fields)
    with zipfile.ZipFile(noisy / "noisy_labels.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("values.npy", "w", force_zip64=True) as member:
            member.write(file.getvalue())
            for _ in range(320 if how == "zeros" else 0):
                member.write(bytes(1_000_000))

    def load():
        with pytest.raises(ReceiptError, match="were damaged or edited"):
            ldp.NoisyLabels.load(noisy)

    assert (noisy / "noisy_labels.npz").stat().st_size < 400_000
    assert peak(load) < 20


def test_receipts_that_unpack_to_far_more_are_refused(peak):
    content = packed(200_000_000)
    assert len(content) < 300_000

    def read():
        with pytest.raises(ReceiptError, match="at most"):
            Receipts.from_bytes(content)

    assert peak(read) < 100


def receipt_of(size, bits=None):
    labels = ldp.PrivateLabels([0, 1], 2, budget=ldp.PrivacyBudget(1.0))
    [receipt] = labels.randomize(ldp.RandomizedResponse(1.0, 2)).receipts
    fields = receipt.to_json()
    fields["labels"]["size"] = size
    fields["examples"] = None if bits is None else base64.b64encode(bits).decode()
    del fields["digest"]
    fields["digest"] = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return fields


def test_a_statement_on_very_many_labels_takes_no_memory(peak):
    receipt = Receipt.from_json(receipt_of(10**9))
    assert peak(lambda: ldp.guarantee([receipt])) < 5
    assert ldp.guarantee([receipt]).epsilon == 1.0
    assert receipt.num_examples == 10**9


def test_a_part_of_very_many_labels_is_refused(peak):
    bits = packed(2 << 20)

    def read():
        with pytest.raises(ReceiptError, match="a part of 1,000,000,000 examples"):
            Receipt.from_json(receipt_of(10**9, bits))
        with pytest.raises(ReceiptError, match="not among 1000"):
            Receipt.from_json(receipt_of(1000, bits))

    assert peak(read) < 5
    assert len(bits) < 3000


def test_a_part_of_many_labels_is_counted_in_blocks(peak):
    """A byte for each example; the part is the first 10 of 2^26."""
    size = 1 << 26
    stream = zlib.compressobj(9)
    bits = stream.compress(b"\xff\xc0" + bytes((size >> 3) - 2)) + stream.flush()
    receipt = Receipt.from_json(receipt_of(size, bits))
    assert receipt.num_examples == 10

    def compose():
        assert ldp.guarantee([receipt]).epsilon == 1.0

    assert peak(compose) < 1.3 * size / 1e6


def test_blocks_and_indices_give_the_same_histories():
    from tf_labeldp.accounting.charges_by_example import ChargesByExample
    from tf_labeldp.accounting.receipt import Examples

    rng = np.random.default_rng(3)
    size = (1 << 20) + 777
    charges = [ldp.accounting.Charge.of(ldp.RandomizedResponse(0.5 + k, 2)) for k in range(4)]
    blocks, indices = ChargesByExample(size), ChargesByExample(size)
    for charge in charges:
        chosen = np.flatnonzero(rng.random(size) < 0.4)
        blocks.add(charge, Examples.of(chosen, size))
        indices.add(charge, chosen)
    assert sorted(map(str, blocks.spread())) == sorted(map(str, indices.spread()))
    assert len(blocks.spread()) == 16
