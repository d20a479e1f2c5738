"""`NoisyLabels.save` and `load`: nothing is lost in the folder, and any edit of it is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tf_labeldp.accounting import PrivacyBudget, PrivacyGuarantee, ReceiptError
from tf_labeldp.mechanisms import (
    ALIBI,
    HistogramMechanism,
    InformativeRR,
    LaplaceMechanism,
    PeerToPeerRandomizedResponse,
    RandomizedResponse,
    RRWithPrior,
)
from tf_labeldp.vault import (
    Classes,
    ClusterRandomizedResponse,
    LabelRandomizer,
    NoisyLabels,
    Numbers,
    PrivateLabels,
    Rows,
)

N = 300
NAMES = ("no", "yes, gladly", "naïve\nline", "")
CODES = np.arange(N) % 4
CLUSTERS = np.arange(N) // 100
AMOUNTS = np.round(np.linspace(0.0, 40.0, N))
EVEN = np.arange(0, N, 2)[::-1]
JSON, ARRAYS = "noisy_labels.json", "noisy_labels.npz"


def vault(kind="codes", **options):
    budget = PrivacyBudget(20.0, 1e-4)
    if kind == "numbers":
        return PrivateLabels(AMOUNTS, Numbers(0, 40), budget=budget, **options)
    if kind == "rows":
        rows = np.stack([CODES % 2, CODES // 2, CODES == 3], axis=1)
        return PrivateLabels(rows, Rows(3), budget=budget, **options)
    if kind == "names":
        labels = [NAMES[code] for code in CODES]
        return PrivateLabels(labels, Classes(NAMES), budget=budget, **options)
    return PrivateLabels(CODES, num_classes=4, budget=budget, **options)


def with_private_priors():
    """Draws with a prior per cluster, from a histogram of the same labels."""
    labels = vault(people="the first hundreds")
    counts = labels.release(HistogramMechanism(0.5, 4), public_input=CLUSTERS)
    return labels.randomize(RRWithPrior(1.0, 4), priors=counts.priors())


def with_own_priors():
    shares = np.full((N, 4), 0.1) + 0.6 * np.eye(4)[CODES]
    return vault().randomize(RRWithPrior(1.0, 4), priors=shares)


def resampled():
    mechanism = ClusterRandomizedResponse(
        4, threshold=0.1, noise_scale=2.0, resampling_probability=0.5, bias_correction=0.25
    )
    return vault().randomize(mechanism, clusters=CLUSTERS)


def of_peers():
    labels = PrivateLabels(CODES % 2, num_classes=2, budget=PrivacyBudget(20.0, 1e-4))
    mechanism = PeerToPeerRandomizedResponse(3.0, 0.1, 0.5, 100)
    return labels.randomize(mechanism, clusters=CLUSTERS)


KINDS: dict[str, Callable[[], NoisyLabels]] = {
    "codes": lambda: vault().randomize(RandomizedResponse(1.0, 4)),
    "names": lambda: vault("names").randomize(RandomizedResponse(1.0, 4)),
    "some": lambda: vault("names").randomize(RandomizedResponse(1.0, 4), indices=EVEN),
    "none": lambda: vault().randomize(RandomizedResponse(1.0, 4), indices=[]),
    "seeded": lambda: vault(insecure_seed=3).randomize(RandomizedResponse(1.0, 4)),
    "public prior": lambda: vault().randomize(RRWithPrior(1.0, 4), priors=[0.4, 0.3, 0.2, 0.1]),
    "own priors": with_own_priors,
    "informative": lambda: vault().randomize(InformativeRR(1.0, 4), priors=[0.4, 0.3, 0.2, 0.1]),
    "private priors": with_private_priors,
    "clusters": resampled,
    "numbers": lambda: vault("numbers").randomize(LabelRandomizer(1.0)),
    "laplace": lambda: vault("numbers").randomize(LaplaceMechanism(1.0, 0.0, 40.0)),
    "rows": lambda: vault("rows").randomize(RandomizedResponse(1.0, 2)),
    "ALIBI": lambda: vault("names").randomize(ALIBI(1.0, 4)),
    "peers": of_peers,
}
# One kind of each form of saved labels.
FORMS = ("names", "private priors", "clusters", "numbers", "rows", "ALIBI", "seeded")


class Saved:
    """Noisy labels of each kind in their own folder, drawn at their first use."""

    def __init__(self, folder):
        self.folder = folder
        self._drawn: dict[str, NoisyLabels] = {}

    def __call__(self, kind):
        """Returns noisy labels and their folder, which no test may change."""
        folder = self.folder / kind
        if kind not in self._drawn:
            self._drawn[kind] = KINDS[kind]()
            self._drawn[kind].save(folder)
        return self._drawn[kind], folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("saved"))


def copied(folder, to):
    return Path(shutil.copytree(folder, to / "copy"))


def arrays_of(folder):
    with np.load(folder / ARRAYS, allow_pickle=False) as content:
        return dict(content)


def same(first, second):
    """Returns whether two arrays, or two Nones, have the same bits."""
    if first is None or second is None:
        return first is second
    a, b = np.asarray(first), np.asarray(second)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


UNKNOWN = {
    ("laplace", "posterior"): "need priors with values",
    ("laplace", "debiased"): "a bias that cannot be undone",
    ("peers", "posterior"): "is unknown",
    ("ALIBI", "decode"): "that are classes, got those of ALIBI",
}
"""What a mechanism lacks, and a part of the error."""


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost(saved, tmp_path, kind):
    drawn, folder = saved(kind)
    loaded = NoisyLabels.load(folder)
    assert same(loaded.values, drawn.values) and same(loaded.indices, drawn.indices)
    assert not loaded.values.flags.writeable and not loaded.indices.flags.writeable
    assert loaded.mechanism == drawn.mechanism and type(loaded.mechanism) is type(drawn.mechanism)
    assert (loaded.priors is None) == (drawn.priors is None)
    if drawn.priors is not None and loaded.priors is not None:
        for name in ("probabilities", "groups", "values"):
            assert same(getattr(loaded.priors, name), getattr(drawn.priors, name))
        priced = [receipt.id for receipt in drawn.priors.receipts]
        assert [receipt.id for receipt in loaded.priors.receipts] == priced
        assert bool(priced) == (kind in ("private priors", "clusters", "numbers"))
    assert [receipt.to_json() for receipt in loaded.receipts] == [
        receipt.to_json() for receipt in drawn.receipts
    ]
    for name in ("bias_correction", "remarks", "assumptions", "classes"):
        assert getattr(loaded, name) == getattr(drawn, name)
    assert loaded.guarantee() == drawn.guarantee()
    assert loaded.statement() == drawn.statement()
    for target in ("posterior", "debiased", "decode"):
        first, second = getattr(drawn, target), getattr(loaded, target)
        if (kind, target) in UNKNOWN:
            for call in (first, second):
                with pytest.raises((TypeError, ValueError), match=UNKNOWN[kind, target]):
                    call()
        else:
            assert same(first(), second())

    # The file has the statement of the labels, and is written again as it was.
    assert sorted(path.name for path in folder.iterdir()) == [JSON, ARRAYS]
    content = json.loads((folder / JSON).read_text(encoding="utf-8"))
    classes = None if drawn.classes is None else list(drawn.classes)
    assert content.pop("digest") and content == {**drawn.statement(), "classes": classes}
    assert PrivacyGuarantee.from_json(json.dumps(content["guarantee"])) == drawn.guarantee()
    assert content["statement"] == str(drawn.guarantee()).splitlines()
    assert len(content["receipts"]) == len(drawn.receipts)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / JSON).read_bytes() == (folder / JSON).read_bytes()
    first, second = arrays_of(folder), arrays_of(tmp_path / "again")
    assert list(first) == list(second) and all(same(first[part], second[part]) for part in first)


def test_the_kinds_cover_what_is_saved(saved):
    """The edited forms have every array and every field, filled and empty."""
    drawn = {kind: saved(kind)[0] for kind in FORMS}
    arrays = {name for kind in FORMS for name in arrays_of(saved(kind)[1])}
    assert arrays == {"values", "indices", "probabilities", "prior_groups", "prior_values"}
    assert any(noisy.remarks for noisy in drawn.values())
    assert any(noisy.bias_correction is not None for noisy in drawn.values())
    assert any(noisy.classes for noisy in drawn.values())
    assert any(len(noisy.receipts) > 1 for noisy in drawn.values())
    assert any(noisy.guarantee().seeded for noisy in drawn.values())


@pytest.mark.parametrize("kind", FORMS)
def test_an_edit_of_any_field_is_refused(saved, tmp_path, kind, unnoticed_edits):
    """The smallest change of each number, text, list and entry, at any depth."""
    folder = copied(saved(kind)[1], tmp_path)
    assert unnoticed_edits(folder / JSON, lambda: NoisyLabels.load(folder), 100) == []


def other_arrays(arrays):
    """Yields each small edit of arrays: its name, and all arrays."""
    for name, array in arrays.items():
        flat = array.reshape(-1)
        for place in {0, flat.size - 1}:
            changed = array.copy()
            if array.dtype.kind == "i":
                changed.reshape(-1)[place] += 1
            else:
                changed.reshape(-1)[place] = np.nextafter(flat[place], array.dtype.type(9e9))
            yield f"{name}[{place}]", {**arrays, name: changed}
        other = next(i for i in range(flat.size) if flat[i] != flat[0])
        swapped = array.copy()
        swapped.reshape(-1)[[0, other]] = flat[[other, 0]]
        for edit, edited in {
            "swapped": swapped,
            "cut short": array[:-1],
            "of another shape": array[np.newaxis],
            "of another type": array.astype(np.float16),
            "of the other bytes": array.astype(array.dtype.newbyteorder()),
        }.items():
            yield f"{name} {edit}", {**arrays, name: edited}
        yield f"{name} left out", {key: kept for key, kept in arrays.items() if key != name}
        renamed = {("other" if key == name else key): kept for key, kept in arrays.items()}
        yield f"{name} renamed", renamed
    yield "arrays swapped", dict(zip(arrays, reversed(arrays.values()), strict=True))
    for name in {"probabilities", "prior_groups", "prior_values", "other"} - set(arrays):
        yield f"{name} added", {**arrays, name: np.full(4, 0.25)}


@pytest.mark.parametrize("kind", FORMS)
def test_an_edit_of_any_array_is_refused(saved, tmp_path, kind):
    folder = copied(saved(kind)[1], tmp_path)
    arrays = arrays_of(folder)
    np.savez_compressed(folder / ARRAYS, **arrays)
    assert same(NoisyLabels.load(folder).values, saved(kind)[0].values)  # as good as written
    edits = dict(other_arrays(arrays))
    assert len(edits) >= 20
    for edit, edited in edits.items():
        np.savez(folder / ARRAYS, **edited)
        with pytest.raises(ReceiptError):
            pytest.fail(f"{edit}: {NoisyLabels.load(folder)}")


@pytest.mark.parametrize("name", [JSON, ARRAYS])
def test_a_damaged_file_or_one_of_another_draw_is_refused(saved, tmp_path, name):
    folder = copied(saved("private priors")[1], tmp_path)
    with_private_priors().save(tmp_path / "another")
    content = (folder / name).read_bytes()
    short = content[:-3] if name == JSON else content[:-1]
    half, zeros = content[: len(content) // 2], bytes(len(content))
    another = (tmp_path / "another" / name).read_bytes()
    for damaged in (b"", short, half, zeros, b"\xff\xfe" + content, b"[]", b"null", another):
        (folder / name).write_bytes(damaged)
        with pytest.raises(ReceiptError, match="damaged or edited"):
            NoisyLabels.load(folder)


class Planted:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def padded(member):
    """Returns an array of objects whose size fits its header: a pickle ends before its padding."""
    pickled = pickle.dumps([member], protocol=2)
    pickled += bytes(-len(pickled) % 8)
    file = io.BytesIO()
    fields = {"descr": "|O", "fortran_order": False, "shape": (len(pickled) // 8,)}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue() + pickled


@pytest.mark.parametrize("how", ["written", "padded"])
def test_a_file_cannot_run_code(saved, tmp_path, how):
    folder = copied(saved("codes")[1], tmp_path)
    arrays = arrays_of(folder)
    for name in ("values", "other"):
        planted = Planted(tmp_path / "ran")
        if how == "written":
            np.savez(folder / ARRAYS, **{**arrays, name: np.array([planted], dtype=object)})
        else:
            np.savez(folder / ARRAYS, **{key: part for key, part in arrays.items() if key != name})
            with zipfile.ZipFile(folder / ARRAYS, "a") as archive:
                archive.writestr(f"{name}.npy", padded(planted))
        with pytest.raises(ReceiptError, match="damaged or edited"):
            NoisyLabels.load(folder)
        assert not (tmp_path / "ran").exists()


def test_a_newer_format_is_no_damage(saved, tmp_path):
    folder = copied(saved("codes")[1], tmp_path)
    statement = json.loads((folder / JSON).read_text(encoding="utf-8"))
    statement.update(format=2, made_by="tf-labeldp 9.9")
    (folder / JSON).write_text(json.dumps(statement))
    with pytest.raises(ReceiptError, match=r"\(tf-labeldp 9\.9\), with format 2, which"):
        NoisyLabels.load(folder)


def test_the_file_that_is_missing_is_named(saved, tmp_path):
    folder = copied(saved("codes")[1], tmp_path)
    for name in (JSON, ARRAYS):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"there is no .*{name}"):
            NoisyLabels.load(folder)
        (folder / name).write_bytes(content)
    with pytest.raises(FileNotFoundError, match="copy"):
        NoisyLabels.load(folder / "nowhere")


def test_noisy_labels_are_not_written_over_and_other_files_are_left_alone(saved, tmp_path):
    drawn, _ = saved("codes")
    for name in (JSON, ARRAYS):
        (tmp_path / name).write_text("years of work")
        with pytest.raises(FileExistsError, match="already has noisy labels"):
            drawn.save(tmp_path)
        [path] = tmp_path.iterdir()
        assert path.name == name and path.read_text() == "years of work"
        path.unlink()
    (tmp_path / "notes.txt").write_text("years of work")
    drawn.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [JSON, ARRAYS, "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "years of work"
    assert same(NoisyLabels.load(tmp_path).values, drawn.values)


def test_labels_drawn_with_priors_that_were_loaded_cost_both(saved):
    """Those of another vault of the same people: 0.5 for the histogram, and 1 for the draw."""
    drawn, folder = saved("private priors")
    loaded = NoisyLabels.load(folder)
    spent = []
    for priors in (drawn.priors, loaded.priors):
        noisy = vault(people="the first hundreds").randomize(RRWithPrior(1.0, 4), priors=priors)
        spent.append(noisy.guarantee().epsilon)
    assert spent == pytest.approx([1.5, 1.5], rel=1e-12)


@pytest.mark.parametrize("kind", ["names", "some", "none", "codes", "rows"])
def test_names_are_decoded(saved, kind):
    drawn, folder = saved(kind)
    named = kind in ("names", "some")
    wanted = [NAMES[code] for code in drawn.values] if named else drawn.values.tolist()
    assert not named or len(set(wanted)) == 4
    for noisy in (drawn, NoisyLabels.load(folder)):
        assert noisy.classes == (NAMES if named else None)
        assert noisy.decode().shape == drawn.values.shape and noisy.decode().tolist() == wanted
        assert not named or vault("names").decode(noisy).tolist() == wanted
    empty = vault("names").randomize(RandomizedResponse(1.0, 4), indices=[])
    assert empty.decode().shape == (0,) and empty.classes == NAMES
    with pytest.raises((TypeError, ValueError), match=r"one-hot|rows"):
        vault("names").decode(saved("ALIBI")[0])


CLASSES: dict[str, tuple[Any, ...]] = {
    "texts": ("b", "a", ""),
    "texts like numbers": ("10", "9", "010"),
    "texts with zeros": ("a\0", "a"),
    "numbers": (30, -10, 7),
    "large numbers": (2**63, -1),
    "huge numbers": (10**30, -1),
    "fractions": (0.5, -1.5, float("inf")),
    "truths": (False, True),
    "of several types": ("1", 1, 2.5),
    "pairs": ((1, 2), (1, 3)),
    "tuples": ((1, 2), (1, "2", None), ()),
    "bytes": (b"a", b"b"),
    "with none": (None, "none"),
}
TEXTS_ONCE_LOADED = ("pairs", "tuples", "bytes", "with none")
"""JSON cannot store these, so the file has all classes as text."""


def typed(values):
    return [(type(value), value) for value in values]


@pytest.mark.parametrize("kind", CLASSES)
def test_classes_of_any_type_are_decoded(tmp_path, kind):
    classes = CLASSES[kind]
    labels = [classes[i % len(classes)] for i in range(60)]
    kept = PrivateLabels(labels, Classes(classes), budget=PrivacyBudget(1e3))
    noisy = kept.randomize(RandomizedResponse(40.0, len(classes)))  # changes no label
    assert noisy.decode().shape == (60,)
    assert typed(noisy.decode().tolist()) == typed(kept.decode(noisy).tolist()) == typed(labels)

    noisy.save(tmp_path / "saved")
    loaded = NoisyLabels.load(tmp_path / "saved")
    known = tuple(map(str, classes)) if kind in TEXTS_ONCE_LOADED else classes
    assert loaded.classes is not None and typed(loaded.classes) == typed(known)
    wanted = [known[classes.index(label)] for label in labels]
    assert typed(loaded.decode().tolist()) == typed(wanted)
    assert same(loaded.values, noisy.values)


class TestSeveralFolders:
    """Draws of a vault by file, such as a day's: together they cost what one of them costs."""

    @staticmethod
    def saved(folder, *parts):
        for number, part in enumerate(parts):
            part.save(folder / f"day {number}")
        return folder

    def test_they_are_joined_in_the_order_of_their_examples(self, tmp_path):
        labels, mechanism = vault("names"), RRWithPrior(1.0, 4)
        shares = np.full((N, 4), 0.1) + 0.6 * np.eye(4)[CODES]
        days = [EVEN, np.arange(101, N, 2), np.arange(1, 101, 2)]
        parts = [labels.randomize(mechanism, day, priors=shares[day]) for day in days]
        whole = NoisyLabels.load(self.saved(tmp_path, *parts))
        np.testing.assert_array_equal(whole.indices, np.arange(N))
        np.testing.assert_array_equal(np.asarray(whole.priors), shares)
        for part in parts:
            np.testing.assert_array_equal(whole.values[part.indices], part.values)
            np.testing.assert_array_equal(whole.posterior()[part.indices], part.posterior())
        assert whole.classes == NAMES and len(whole.receipts) == 3
        assert whole.guarantee().epsilon == 1.0
        assert set(whole.guarantee().assumptions) == set(parts[0].guarantee().assumptions)

    def test_draws_that_do_not_belong_together_are_refused(self, tmp_path):
        labels, mechanism = vault(), RandomizedResponse(1.0, 4)
        first, rest = labels.randomize(mechanism, EVEN), np.arange(1, N, 2)
        others = {
            "the same examples": labels.randomize(mechanism, EVEN),
            "another vault": vault().randomize(mechanism, rest),
            "another mechanism": labels.randomize(RandomizedResponse(2.0, 4), rest),
            "no receipts": NoisyLabels(CODES[rest], rest, mechanism),
        }
        for name, other in others.items():
            with pytest.raises(ReceiptError, match=r"got 2 folders of other draws\. Load each"):
                NoisyLabels.load(self.saved(tmp_path / name, first, other))
