"""Links, folders and records of others: nothing is written through a link or outside a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import stat
import sys
from os import _exit

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.cli import main
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import Keyed, LabelStoreError, PrivateLabels, Store, forget

pytestmark = pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="needs links without rights")
Y = np.array([0, 1] * 50)


def fill_store(folder):
    labels = PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(6.0), store=Store(folder, project=True))
    labels.randomize(ldp.RandomizedResponse(1.0, 2), key="a")
    labels.extend([0, 1])
    with labels.reserve({"b": ldp.RandomizedResponse(1.0, 2)}):
        labels.randomize(ldp.RandomizedResponse(1.0, 2), key="b")


def keyed_store(folder):
    ids = np.arange(Y.size)
    budget = ldp.PrivacyBudget(6.0)
    labels = PrivateLabels(Y, 2, budget=budget, store=folder, draws=Keyed(ids))
    labels.randomize(ldp.RandomizedResponse(1.0, 2), key="a")
    ReleaseKey(folder / "labels.key").sums_of("r", None)


def a_key(folder):
    ReleaseKey.create(folder / "k").register("a", ldp.RandomizedResponse(1.0, 2))


def noisy_files(folder):
    labels = PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0))
    labels.randomize(ldp.RandomizedResponse(1.0, 2)).save(folder)


def a_report(folder):
    PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=folder.with_name("reported"))
    ldp.dossier.report(folder.with_name("reported")).save(folder)


def a_card(folder):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ldp.dossier.save(model, folder)


def a_table(folder):
    table = folder.with_name("table.csv")
    table.write_text("id,label\n" + "".join(f"{i},{i % 2}\n" for i in range(50)))
    words = ["randomize", table, "--column", "label", "--task", "classification", "--quiet"]
    words += ["--num-classes", 2, "--epsilon", 1, "--output", folder / "n.csv", "--overwrite"]
    main(list(map(str, words)))


def predictions(folder):
    table, model = folder.with_name("table.csv"), folder.with_name("model.keras")
    table.write_text("a,b\n1,2\n")
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(model)
    main(["predict", str(model), str(table), "--output", str(folder / "p.csv")])


WRITERS = [
    fill_store, keyed_store, a_key, noisy_files, a_report, a_card, a_table, predictions
]  # fmt: skip


class Watched:
    """The paths that a process opens for writing, makes, links or renames, by an audit hook."""

    folder = None
    names = frozenset()

    @classmethod
    def hook(cls, event, arguments):
        if cls.folder is None or event not in ("open", "os.mkdir", "os.link", "os.rename"):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        for path in arguments[:2] if event in ("os.link", "os.rename") else arguments[:1]:
            with contextlib.suppress(TypeError, ValueError):
                name = os.path.relpath(os.path.abspath(os.fsdecode(path)), cls.folder)
                if not name.startswith("..") and name != ".":
                    cls.names |= {name}


sys.addaudithook(Watched.hook)


def names_of(write, folder):
    """Returns the names that a run writes under a folder; random ones differ between two runs."""
    found = []
    for number in "12":
        place = folder / f"listed-{number}" / "out"
        place.mkdir(parents=True, mode=0o700)
        Watched.folder, Watched.names = place, frozenset()
        try:
            write(place)
        finally:
            Watched.folder = None
        there = {path.relative_to(place).as_posix() for path in place.rglob("*")}
        found.append(Watched.names | there)
    return sorted(found[0] & found[1])


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", ["link", "second name", "link to a folder"])
def test_nothing_is_written_through_a_planted_name(write, kind, tmp_path):
    """Each name that a run writes is planted once; the file of the victim stays as it was."""
    names = names_of(write, tmp_path)
    assert names, write
    for number, name in enumerate(names):
        place = tmp_path / f"{number}" / "out"
        (place / name).parent.mkdir(parents=True, mode=0o700)
        victim = tmp_path / f"victim-{number}"
        if kind == "link to a folder":
            victim.mkdir()
            (place / name).symlink_to(victim)
        else:
            victim.write_text("precious")
            victim.chmod(0o640)
            (os.symlink if kind == "link" else os.link)(victim, place / name)
        # A run may go on without the planted file, replace it, or refuse it.
        with contextlib.suppress(LabelStoreError, OSError, ValueError):
            write(place)
        if kind == "link to a folder":
            assert list(victim.iterdir()) == [], name
        else:
            assert victim.read_text() == "precious", name
            assert stat.S_IMODE(victim.stat().st_mode) == 0o640, name


@pytest.mark.parametrize("name", ["records", "private-sums", "last-record", ".lock", "header.json"])
def test_a_link_in_a_store_is_refused(name, tmp_path):
    store = tmp_path / "s"
    fill = PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(6.0), store=store)
    fill.randomize(ldp.RandomizedResponse(1.0, 2))
    (store / "private-sums").mkdir()
    (store / name).rename(tmp_path / "elsewhere")
    (store / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LabelStoreError, match=r"expected a .*got a link"):
        PrivateLabels(Y, 2, store=store)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o703, 0o757])
@pytest.mark.parametrize("where", ["store", "project", "key"])
def test_a_folder_that_others_may_write_into_is_refused(mode, where, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(LabelStoreError, match=rf"mode {mode:o}\. Run chmod go-w"):
        if where == "key":
            (tmp_path / "k.ledger").mkdir()
            (tmp_path / "k.ledger").chmod(mode)
            ReleaseKey.create(tmp_path / "k")
        is_project = where == "project"
        store = folder / "s" if is_project else folder
        PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=Store(store, project=is_project))
    folder.chmod(0o700)
    PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=Store(folder / "s", project=True))


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_folders_and_files_are_private_from_the_start(mask, tmp_path, monkeypatch):
    """Each is made with its mode: there is no moment at which others can open it."""
    made = []
    for name in ("mkdir", "open"):
        call = getattr(os, name)

        def watched(path, *arguments, call=call, **keywords):
            result = call(path, *arguments, **keywords)
            if isinstance(path, (str, os.PathLike)) and os.path.exists(path):
                made.append((os.fspath(path), stat.S_IMODE(os.lstat(path).st_mode)))
            return result

        monkeypatch.setattr(os, name, watched)
    old = os.umask(mask)
    try:
        keyed_store(tmp_path / "s")
    finally:
        os.umask(old)
    inside = [(path, mode) for path, mode in made if path.startswith(str(tmp_path / "s"))]
    assert len(inside) > 8
    assert all(mode & 0o077 == 0 for _, mode in inside), inside


def test_a_subfolder_of_an_earlier_version_is_closed(tmp_path):
    """0.3 made ``records`` with the mode of the umask."""
    PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=tmp_path / "s")
    (tmp_path / "s" / "records").chmod(0o775)
    PrivateLabels(Y, 2, store=tmp_path / "s")
    assert stat.S_IMODE((tmp_path / "s" / "records").stat().st_mode) == 0o700


def test_a_linked_parent_is_allowed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    labels = PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(2.0), store=tmp_path / "link" / "s")
    noisy = labels.randomize(ldp.RandomizedResponse(1.0, 2), key="a")
    same = PrivateLabels(Y, 2, store=tmp_path / "real" / "s")
    again = same.randomize(ldp.RandomizedResponse(1.0, 2), key="a")
    np.testing.assert_array_equal(again.values, noisy.values)
    (tmp_path / "short").symlink_to(tmp_path / "real" / "s")
    assert PrivateLabels(Y, 2, store=tmp_path / "short").guarantee().epsilon == 1.0


def write_record(store, **fields):
    """Writes a first record as the author of a store can, with a digest that fits."""
    text = json.dumps({"format": 4, "version": "0.4", "number": 0, **fields})
    before = json.loads((store / "header.json").read_text())["label_set"]
    digest = hashlib.sha256((before + text).encode()).hexdigest()
    (store / "records" / "000000").write_text(f"{digest} {text}\n")


@pytest.mark.parametrize("place", ["victim", "link", "own"])
def test_forget_deletes_no_other_file(place, tmp_path):
    """A record names the file of exact sums, and may come from someone else."""
    store = tmp_path / "s"
    PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=store)
    victim = tmp_path / ("victim" if place == "victim" else "q.private-sums.npz")
    target = tmp_path / "target"
    target.write_text("precious")
    if place == "link":
        victim.symlink_to(target)
    else:
        victim.write_text("precious")
    write_record(store, release={"name": "q", "sums": str(victim)})
    left = forget(store)
    assert target.read_text() == "precious"
    if place == "own":  # The name that the library gives to the sums of this release.
        assert not victim.exists() and left == []
    else:
        assert victim.exists() and left == [str(victim)]


def test_a_holder_in_a_record_names_no_other_file(tmp_path):
    store = tmp_path / "s"
    PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=store)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    write_record(store, reservation={"plan": "0" * 32, "holder": "/../../victim"})
    with pytest.raises(LabelStoreError, match="000000 is damaged"):
        PrivateLabels(Y, 2, store=store)
    (store / ".reserved-").mkdir()
    with pytest.raises(LabelStoreError):
        PrivateLabels(Y, 2, store=store)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["records/000000", "header.json", "last-record"])
def test_a_pipe_in_place_of_a_file_does_not_block(name, tmp_path):
    store = tmp_path / "s"
    labels = PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=store)
    labels.randomize(ldp.RandomizedResponse(1.0, 2))
    (store / name).unlink()
    os.mkfifo(store / name)
    with pytest.raises(LabelStoreError):
        PrivateLabels(Y, 2, store=store)


def as_user(number, work):
    """Runs a function as another user in a child process; returns its text or error."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(number)
            os.setuid(number)
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        _exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def open_root(tmp_path):
    """The folder of the test, which other users may enter."""
    folder = tmp_path
    while folder != pathlib.Path("/") and not folder.stat().st_mode & stat.S_IXOTH:
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
        folder = folder.parent
    return tmp_path


def test_a_store_of_another_user_has_words_of_its_own(open_root):
    store = open_root / "s"
    PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=store)
    text = as_user(65534, lambda: PrivateLabels(Y, 2, store=store))
    assert text.startswith("LabelStoreError: expected access to") and "user 0" not in text[:20]
    store.chmod(0o755)
    text = as_user(65534, lambda: PrivateLabels(Y, 2, store=store))
    assert text.startswith("LabelStoreError: expected access to"), text
    assert "It belongs to user 0. Run as the owner" in text and "damaged" not in text


def test_a_project_with_a_member_of_another_user(open_root):
    """The spending of the member can't be read, so nothing is drawn."""
    project = open_root / "p"
    PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), store=Store(project / "a", project=True))
    PrivateLabels(Y, 2, store=Store(project / "b", project=True))
    for path in (project, project / "a", *(project / "a").rglob("*"), project / "project.json"):
        os.chown(path, 65534, 65534)
    with contextlib.suppress(FileNotFoundError):
        os.chown(project / ".lock", 65534, 65534)
    text = as_user(65534, lambda: PrivateLabels(Y, 2, store=project / "a"))
    assert text.startswith("LabelStoreError: expected access to") and "/p/b/" in text
    assert PrivateLabels(Y, 2, store=project / "a").guarantee().epsilon == 0.0


def test_a_read_only_folder(open_root):
    """What was drawn is read; what was not is refused, and charged to nobody."""
    store = open_root / "s"
    labels = PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(2.0), store=store)
    drawn = labels.randomize(ldp.RandomizedResponse(1.0, 2), key="a").values
    for path in (store, *store.rglob("*")):
        os.chown(path, 65534, 65534)
        path.chmod(0o500 if path.is_dir() else 0o400)

    def work():
        again = PrivateLabels(Y, 2, store=store)
        same = again.randomize(ldp.RandomizedResponse(1.0, 2), key="a").values
        assert np.array_equal(same, drawn) and again.guarantee().epsilon == 1.0
        return again.randomize(ldp.RandomizedResponse(1.0, 2), key="b")

    text = as_user(65534, work)
    assert text.startswith("LabelStoreError: expected to write"), text
    assert "Nothing was returned or charged" in text
    assert ldp.dossier.report(store).statement.epsilon == 1.0
