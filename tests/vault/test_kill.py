"""A process killed at any step of making a store and drawing loses nothing, and pays once."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError

PARTS = {"a": np.arange(0, 100), "b": np.arange(100, 200)}


@pytest.fixture(scope="session")
def killed(run_writers):
    """The folder with the stores of killed processes, which no test changes."""
    root, output = run_writers("killed", "draw")
    assert len(list(root.iterdir())) == int(output)
    return root


@pytest.fixture
def folders(killed, tmp_path):
    """A copy of each process's folder, in the order of the steps; the last was not killed."""
    copies = sorted(pathlib.Path(shutil.copytree(killed, tmp_path / "killed")).iterdir())
    for last in tmp_path.glob("killed/*/store/last-record"):
        last.write_bytes(last.read_bytes()[:75] + b"\n")  # A copy would be refused.
    return copies


@pytest.fixture
def open_vault(make):
    return lambda folder: make(labels=np.arange(200) % 5, epsilon=1.0, store=folder / "store")


def returned(folder, key):
    path = folder / key
    return np.frombuffer(path.read_bytes(), np.int64) if path.exists() else None


@pytest.mark.slow
def test_every_step_is_tried(folders, open_vault):
    """The kills before and after each link leave all states in between."""
    states = set()
    for folder in folders:
        store = folder / "store"
        temporary = any(path.suffix == ".tmp" for path in store.rglob("*"))
        vault = open_vault(folder)
        states.update(
            (key, vault.has_draw(key), returned(folder, key) is not None, temporary)
            for key in PARTS
        )
    for key in PARTS:
        assert (key, False, False, True) in states  # a temporary file, no draw
        assert (key, True, False, True) in states  # linked, with its temporary file
        assert (key, True, False, False) in states  # stored, not returned
        assert (key, True, True, False) in states
    assert len(folders) > 20  # Python 3.10's pathlib hides some operations.


@pytest.mark.slow
def test_no_returned_draw_is_lost(folders, open_vault, response, no_new_randomness):
    vaults = [open_vault(folder) for folder in folders]
    no_new_randomness()
    for folder, vault in zip(folders, vaults, strict=True):
        for key, part in PARTS.items():
            first = returned(folder, key)
            if first is not None:
                np.testing.assert_array_equal(vault.randomize(response(1.0), part, key=key), first)
        assert not (vault.has_draw("b") and not vault.has_draw("a"))
    assert returned(folders[-1], "b") is not None


@pytest.mark.slow
def test_stored_draws_are_charged_and_others_are_free(folders, open_vault, response):
    for folder in folders:
        vault = open_vault(folder)
        stored = {key for key in PARTS if vault.has_draw(key)}
        assert vault.guarantee().epsilon == (1.0 if stored else 0.0)
        for key, part in PARTS.items():
            if key in stored:
                with pytest.raises(BudgetExceededError):
                    vault.randomize(response(1e-3), part[:1], key="more")


@pytest.mark.slow
def test_the_run_continues_and_is_charged_once(folders, open_vault, response):
    for folder in folders:
        vault = open_vault(folder)
        drawn = {key: vault.randomize(response(1.0), part, key=key) for key, part in PARTS.items()}
        assert vault.guarantee().epsilon == 1.0
        again = open_vault(folder)
        assert again.guarantee().epsilon == 1.0
        for key, part in PARTS.items():
            np.testing.assert_array_equal(again.randomize(response(1.0), part, key=key), drawn[key])
        assert len(list((folder / "store" / "records").glob("[0-9]*"))) == 2


def test_half_written_temporary_files_break_nothing(make, response, tmp_path):
    store = tmp_path / "store"
    (store / "records").mkdir(parents=True)
    for name in (".PRIVATE-fingerprint", ".header.json", "records/.000000"):
        (store / f"{name}.0123456789abcdef.tmp").write_bytes(b"PK\x03\x04 cut")
    drawn = make(store=store).randomize(response(1.0))
    (store / "records" / ".000001.0123456789abcdef.tmp").write_bytes(b"cut")
    np.testing.assert_array_equal(make(store=store).randomize(response(1.0)), drawn)
    # Opening the store removes them, except temporary files of the command line.
    (store / ".labels.key.0123456789abcdef.tmp").write_bytes(b"cut")
    other = store / ".ids-digest.0123456789abcdef.tmp"
    other.write_bytes(b"cut")
    make(store=store)
    assert list(store.rglob("*.tmp")) == [other]
