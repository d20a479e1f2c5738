"""A copy of a store is refused once; a store that is where it was, is not."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.cli import main
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import LabelStoreError, PrivateLabels, confirm_move, forget

Y = np.array([0, 1] * 50)
RR = ldp.RandomizedResponse(1.0, 2)


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "s"
    labels = PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(3.0), store=path)
    labels.randomize(RR, key="a")
    if (path / "last-record").read_bytes().endswith(b" -\n"):
        pytest.skip("this file system has no lasting numbers of files")
    return path


def copied(store):
    return shutil.copytree(store, store.with_name("copy"))


def with_times(store):
    subprocess.run(["cp", "-a", store, store.with_name("copy")], check=True)
    return store.with_name("copy")


def as_hard_links(store):
    subprocess.run(["cp", "-al", store, store.with_name("copy")], check=True)
    return store.with_name("copy")


def from_an_archive(store):
    with tarfile.open(store.with_name("t.tar"), "w") as archive:
        archive.add(store, "copy")
    with tarfile.open(store.with_name("t.tar")) as archive:
        archive.extractall(store.parent, filter="fully_trusted")
    return store.with_name("copy")


def restored_in_its_place(store):
    """The number of a removed folder may be given to the next one: its time of birth differs."""
    backup = shutil.copytree(store, store.with_name("backup"))
    PrivateLabels(Y, 2, store=store).randomize(RR, key="later")
    shutil.rmtree(store)
    return shutil.copytree(backup, store)


def restored_over_it(store):
    """The folder stays, and its files have the content of the backup."""
    backup = shutil.copytree(store, store.with_name("backup"))
    PrivateLabels(Y, 2, store=store).randomize(RR, key="later")
    (store / "records" / "000001").unlink()
    return shutil.copytree(backup, store, dirs_exist_ok=True)


def last_record_restored(store):
    before = (store / "last-record").read_bytes()
    PrivateLabels(Y, 2, store=store).randomize(RR, key="later")
    (store / "records" / "000001").unlink()
    (store / "last-record").unlink()
    (store / "last-record").write_bytes(before)
    return store


def on_another_disk(store):
    place = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    if place.stat().st_dev == store.stat().st_dev:
        pytest.skip("there is no second file system here")
    return pathlib.Path(shutil.move(store, place / "s"))


COPIES = [
    on_another_disk,
    copied, with_times, as_hard_links, from_an_archive,
    restored_in_its_place, restored_over_it, last_record_restored,
]  # fmt: skip


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_refused_until_it_is_confirmed(copy, store, capsys):
    place = copy(store)
    for _ in range(2):
        with pytest.raises(LabelStoreError, match=f"run once: tf-labeldp confirm-move {place}"):
            PrivateLabels(Y, 2, store=place)
    assert ldp.dossier.report(place).statement.epsilon == 1.0  # Readers spend nothing.
    assert main(["confirm-move", str(place)]) == 0
    assert "Remove other copies" in capsys.readouterr().out
    for _ in range(2):
        labels = PrivateLabels(Y, 2, store=place)
    assert labels.guarantee().epsilon == 1.0 and labels.has_draw("a")
    labels.randomize(RR, key="b")
    [move] = json.loads((place / "header.json").read_text())["moved"]
    assert move["actor"] and move["time"]


@pytest.mark.parametrize("has_vault", [True, False])
def test_the_key_of_a_copy_is_refused_until_it_is_confirmed(tmp_path, has_vault):
    place, path = tmp_path / "s", tmp_path / "s" / "labels.key"
    place.mkdir()
    if has_vault:
        PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(3.0), store=place, draws="keyed")
    key = ReleaseKey(path) if has_vault else ReleaseKey.create(path)
    key.register("a", RR)
    ledger = place if has_vault else place / "labels.key.ledger"
    if (ledger / "last-record").read_bytes().endswith(b" -\n"):
        pytest.skip("this file system has no lasting numbers of files")
    shutil.copytree(place, tmp_path / "copy")
    shutil.rmtree(place)
    shutil.move(tmp_path / "copy", place)
    key = ReleaseKey(path)
    for _ in range(2):
        with pytest.raises(LabelStoreError, match="run once: tf-labeldp confirm-move"):
            key.guarantee()
    confirm_move(ledger)
    with pytest.raises(ValueError, match="another mechanism"):
        key.register("a", ldp.RandomizedResponse(0.5, 2))
    assert key.guarantee().epsilon == 1.0


def test_the_original_goes_on(store):
    copied(store)
    assert PrivateLabels(Y, 2, store=store).randomize(RR, key="b").receipts


def test_a_confirmed_copy_does_not_confirm_its_own_copies(store):
    first = copied(store)
    confirm_move(first)
    second = shutil.copytree(first, store.with_name("second"))
    with pytest.raises(LabelStoreError, match="confirm-move"):
        PrivateLabels(Y, 2, store=second)


def renamed(store):
    return store.rename(store.with_name("other name"))


def in_another_folder(store):
    store.with_name("deep").mkdir()
    return store.rename(store.with_name("deep") / "s")


def by_a_link(store):
    store.with_name("link").symlink_to(store)
    return store.with_name("link")


def touched(store):
    for path in (store, *store.rglob("*")):
        os.utime(path, (0, 0))
        os.chown(path, os.geteuid(), os.getegid())
    return store


def killed_before_the_last_line(store):
    before = store / "last-record"
    before.rename(store.with_name("kept"))
    PrivateLabels(Y[:2], 2, budget=ldp.PrivacyBudget(1.0), store=store.with_name("unused"))
    store.with_name("kept").rename(before)
    return store


@pytest.mark.parametrize(
    "use", [renamed, in_another_folder, by_a_link, touched, killed_before_the_last_line]
)
def test_a_store_that_is_not_copied_is_not_asked_about(use, store):
    place = use(store)
    assert PrivateLabels(Y, 2, store=place).randomize(RR, key="b").receipts
    assert PrivateLabels(Y, 2, store=place).guarantee().epsilon == 2.0


@pytest.mark.slow
def test_another_machine_with_the_same_disk_is_not_asked(store):
    """Two machines with one home folder, and a container that starts again, have other names."""
    script = textwrap.dedent("""
        import sys, socket, platform, os, uuid
        socket.gethostname = platform.node = lambda: "another"
        uuid.getnode = lambda: 1
        import numpy as np, tf_labeldp as ldp
        labels = ldp.PrivateLabels(np.array([0, 1] * 50), 2, store=sys.argv[1])
        labels.randomize(ldp.RandomizedResponse(1.0, 2), key=sys.argv[2])
        print(labels.guarantee().epsilon)
    """)
    words = [sys.executable, "-c", script, os.fspath(store)]
    if shutil.which("unshare") and os.geteuid() == 0:
        named = ["unshare", "--uts", "sh", "-c", 'hostname another; exec "$@"', "sh"]
        if subprocess.run([*named, "true"], capture_output=True).returncode == 0:
            words = [*named, *words]
    for number, epsilon in enumerate(("2.0", "3.0")):
        done = subprocess.run([*words, f"k{number}"], capture_output=True, text=True)
        assert done.stdout.strip() == epsilon, done.stderr
    assert PrivateLabels(Y, 2, store=store).guarantee().epsilon == 3.0


def as_0_3_wrote_it(store):
    header = json.loads((store / "header.json").read_text())
    header.pop("digest")
    header["format"] = 3
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    (store / "header.json").write_text(json.dumps({**header, "digest": digest}))
    last = store / "last-record"
    last.write_bytes(last.read_bytes()[:75] + b"\n")


def test_a_store_of_0_3_opens_without_asking_and_has_a_place_then(store):
    as_0_3_wrote_it(store)
    moved = copied(store)
    for place in (store, moved):
        assert PrivateLabels(Y, 2, store=place).guarantee().epsilon == 1.0
        assert json.loads((place / "header.json").read_text())["format"] == 4
    later = shutil.copytree(moved, store.with_name("later"))
    with pytest.raises(LabelStoreError, match="confirm-move"):
        PrivateLabels(Y, 2, store=later)


def test_a_key_without_a_vault_is_asked_about_too(tmp_path):
    key = ReleaseKey.create(tmp_path / "a" / "k")
    key.register("r", RR)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(LabelStoreError, match="confirm-move"):
        ReleaseKey(tmp_path / "b" / "k").register("s", RR)
    confirm_move(tmp_path / "b" / "k.ledger")
    ReleaseKey(tmp_path / "b" / "k").register("s", RR)


def test_a_copy_can_be_forgotten(store):
    assert forget(copied(store)) == []


def test_a_file_system_whose_numbers_change_is_not_asked(store, monkeypatch):
    """A store on such a disk records no place; one that comes from another disk is a copy."""
    monkeypatch.setattr("tf_labeldp.vault._record_files.identity_of", lambda file: None)
    with pytest.raises(LabelStoreError, match="confirm-move"):
        PrivateLabels(Y, 2, store=store)
    confirm_move(store)
    assert PrivateLabels(Y, 2, store=copied(store)).guarantee().epsilon == 1.0


MOUNTED = """
import os, pathlib, shutil, sys
import tf_labeldp as ldp

folder, kind, other = pathlib.Path(sys.argv[1]), *sys.argv[2:]
device, read = os.stat(folder).st_dev, pathlib.Path.read_text
mounts = f"1 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} none rw\\n"
mounts += f"2 1 255:255 / / rw shared:1 - {other} none rw\\n"
pathlib.Path.read_text = lambda path, *words, **settings: (
    mounts if str(path) == "/proc/self/mountinfo" else read(path, *words, **settings)
)
ldp.PrivateLabels([0, 1], 2, budget=ldp.PrivacyBudget(2.0), store=folder / "s")
shutil.copytree(folder / "s", folder / "copy")
try:
    ldp.PrivateLabels([0, 1], 2, store=folder / "copy")
except ldp.vault.LabelStoreError as error:
    print(error)
"""


@pytest.mark.parametrize(("kind", "asks"), [("ext4", True), ("fuse.sshfs", False)])
def test_the_kind_of_a_file_system_decides_about_its_numbers(kind, asks, tmp_path):
    other = "fuse" if asks else "ext4"
    words = [sys.executable, "-c", MOUNTED, os.fspath(tmp_path), kind, other]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ("run once: tf-labeldp confirm-move" in done.stdout) == asks
    assert asks or not done.stdout


def test_a_clock_that_is_set_back_changes_no_charge(store, monkeypatch):
    monkeypatch.setattr(ldp.accounting.Receipt, "timestamp", lambda: "1970-01-01T00:00:00+00:00")
    labels = PrivateLabels(Y, 2, store=store)
    labels.raise_budget(ldp.PrivacyBudget(4.0), reason="a test")
    labels.randomize(RR, key="b")
    with pytest.raises(ldp.accounting.BudgetExceededError):
        labels.randomize(ldp.RandomizedResponse(3.0, 2), key="c")
    again = PrivateLabels(Y, 2, store=store)
    assert again.guarantee().epsilon == 2.0
    assert [use.key for use in again.history() if use.examples and use.epsilon][-1] == "b"


def test_the_command_names_a_folder_without_a_store(tmp_path, capsys):
    assert main(["confirm-move", str(tmp_path)]) == 2
    assert "There is no label store" in capsys.readouterr().err
