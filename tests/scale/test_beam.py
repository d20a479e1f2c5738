"""Apache Beam: retries never draw a row twice, and bad rows are refused before any output."""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import shutil
import stat
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

beam = pytest.importorskip("apache_beam", reason="no apache-beam; `make test-beam` installs it")

from apache_beam.options.pipeline_options import PipelineOptions  # noqa: E402
from apache_beam.runners.portability.fn_api_runner import FnApiRunner  # noqa: E402

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget  # noqa: E402
from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge  # noqa: E402
from tf_labeldp.mechanisms import (  # noqa: E402
    HistogramMechanism,
    LabelMomentMechanism,
    RandomizedResponse,
)
from tf_labeldp.plugins import KeyedRows  # noqa: E402
from tf_labeldp.scale import ReleaseKey, randomize_batch  # noqa: E402
from tf_labeldp.scale.beam import (  # noqa: E402
    FitPrivateHead,
    PrivateHistogram,
    PrivateMoments,
    RandomizeLabels,
    _randomize_labels,
)
from tf_labeldp.vault import LabelStoreError, PrivateLabels, forget  # noqa: E402

MECHANISM = RandomizedResponse(epsilon=1.0, num_classes=3)
PAIRS = [(i, i % 3) for i in range(3000)]


@pytest.fixture
def key(tmp_path):
    return ReleaseKey.create(tmp_path / "labels.key")


def collected(rows, folder, runner=None, transform=None, **options):
    """Runs a transform on elements, and returns its output."""
    out = folder / "out"
    pipeline = beam.Pipeline(runner or FnApiRunner(), options=PipelineOptions(**options))
    with pipeline:
        released = pipeline | beam.Create(rows) | transform
        _ = released | beam.Map(repr) | beam.io.WriteToText(str(out))
    texts = [text for path in folder.glob("out*") for text in path.read_text().splitlines()]
    return [eval(text, {"array": np.array}) for text in texts]


def expected(key, pairs, release="a"):
    """Returns the draws of the stateless core."""
    ids, labels = zip(*pairs, strict=True)
    drawn = randomize_batch(pa.array(ids), np.array(labels), MECHANISM, key.secret, release)
    return dict(zip(ids, drawn.tolist(), strict=True))


@pytest.fixture
def spied(monkeypatch, tmp_path):
    """Logs every draw; returns a reader of (id, value) pairs.

    A worker is lost at the call after each file `lose-N` that it finds, after its draws.
    """
    log = tmp_path / "draws"

    class Spy(KeyedRows):
        def __init__(self, ids, *rest):
            super().__init__(ids, *rest)
            self._spied = ids.array.tolist()

        def randomize(self):
            noisy = super().randomize()
            with log.open("a") as file:
                file.writelines(f"{i} {v}\n" for i, v in zip(self._spied, noisy, strict=True))
            for lose in tmp_path.glob("lose-*"):
                lose.unlink()
                raise OSError("this worker is lost")
            return noisy

    monkeypatch.setattr(_randomize_labels, "KeyedRows", Spy)
    return lambda: [tuple(map(int, line.split())) for line in log.read_text().splitlines()]


@pytest.mark.holds("scale.RandomizeLabels")
def test_bundles_that_run_three_times_draw_each_row_once(key, tmp_path, spied, monkeypatch):
    monkeypatch.setattr(_randomize_labels, "_BATCH_ROWS", 97)
    transform = RandomizeLabels(MECHANISM, key, "a")
    released = collected(PAIRS, tmp_path, FnApiRunner(bundle_repeat=2), transform)
    draws = spied()
    assert len(draws) >= 3 * len(PAIRS)
    assert len(set(draws)) == len(PAIRS)  # one value for each row
    assert set(draws) == set(expected(key, PAIRS).items())
    assert len(released) == len(PAIRS) and dict(released) == expected(key, PAIRS)


def test_lost_workers_and_retries_draw_each_row_once(key, tmp_path, spied):
    for attempt in range(3):  # the runner gives up after the fourth
        (tmp_path / f"lose-{attempt}").touch()
    transform = RandomizeLabels(MECHANISM, key, "a")
    found = collected(
        PAIRS, tmp_path, "BundleBasedDirectRunner", transform, direct_runner_bundle_retry=True
    )
    draws = spied()
    assert not list(tmp_path.glob("lose-*"))
    assert len(draws) >= 2 * len(PAIRS)
    assert set(draws) == set(expected(key, PAIRS).items())
    assert dict(found) == expected(key, PAIRS)


@pytest.mark.parametrize("batch_rows", [1, 250, 10_000])
def test_splits_of_bundles_change_nothing(key, tmp_path, monkeypatch, batch_rows):
    monkeypatch.setattr(_randomize_labels, "_BATCH_ROWS", batch_rows)
    pairs = [(f"row {i}", i % 3) for i in range(600)]
    found = collected(pairs, tmp_path, transform=RandomizeLabels(MECHANISM, key, "a"))
    assert dict(found) == expected(key, pairs)


def test_rows_that_changed_between_two_runs_are_refused(key, tmp_path):
    collected(PAIRS, tmp_path, transform=RandomizeLabels(MECHANISM, key, "a"))
    found = collected(PAIRS[::-1], tmp_path, transform=RandomizeLabels(MECHANISM, key, "a"))
    assert dict(found) == expected(key, PAIRS)
    corrected = [(PAIRS[0][0], (PAIRS[0][1] + 1) % 3), *PAIRS[1:]]
    for rows in (corrected, PAIRS[1:], [*PAIRS, (10**6, 0)]):
        with pytest.raises(Exception, match=f"drawn for {len(PAIRS)} rows"):
            collected(rows, tmp_path, transform=RandomizeLabels(MECHANISM, key, "a"))
    collected(corrected, tmp_path, transform=RandomizeLabels(MECHANISM, key, "corrected"))
    assert key.guarantee().epsilon == 2.0


def test_ids_of_mixed_types_in_two_shards_are_refused(key, tmp_path, monkeypatch):
    monkeypatch.setattr(_randomize_labels, "_BATCH_ROWS", 1)
    with pytest.raises(Exception, match="some are text"):
        collected([(1, 0), ("1", 0)], tmp_path, transform=RandomizeLabels(MECHANISM, key, "a"))


def test_all_kinds_of_rows_have_the_same_draws(key, tmp_path):
    tf = pytest.importorskip("tensorflow")
    pairs = [(f"row {i}", i % 3) for i in range(60)]

    def example(pair):
        feature = {
            "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[pair[0].encode()])),
            "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[pair[1]])),
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, 1.5])),
        }
        return tf.train.Example(features=tf.train.Features(feature=feature))

    names, labels = zip(*pairs, strict=True)
    columns = {"x": list(range(60)), "name": names, "y": labels}
    table = pa.table(columns)
    kinds = {
        "dicts": [{"name": i, "y": y, "x": 7} for i, y in pairs],
        "batches": table.to_batches(max_chunksize=25),
        "tables": [table],
        "bytes": [example(pair).SerializeToString() for pair in pairs],
        "examples": [example(pair) for pair in pairs],
    }

    def read(kind, row):
        if kind in ("batches", "tables"):
            assert row.column("x").to_pylist()[0] % 25 == 0
            return list(zip(row["name"].to_pylist(), row["y"].to_pylist(), strict=True))
        if kind == "dicts":
            return [(row["name"], row["y"])] if row["x"] == 7 else []
        parsed = tf.train.Example.FromString(row) if kind == "bytes" else row
        features = parsed.features.feature
        assert list(features["x"].float_list.value) == [0.5, 1.5]
        return [(features["name"].bytes_list.value[0].decode(), features["y"].int64_list.value[0])]

    for kind, rows in kinds.items():
        folder = tmp_path / kind
        folder.mkdir()

        class Both(beam.PTransform):
            def expand(self, rows, kind=kind):
                randomize = RandomizeLabels(MECHANISM, key, "a", id="name", label="y")
                return rows | randomize | beam.FlatMap(lambda row: read(kind, row))

        found = collected(rows, folder, transform=Both())
        assert dict(found) == expected(key, pairs), kind


def test_the_statement_is_next_to_the_output(key, tmp_path):
    path = tmp_path / "noisy.privacy.json"
    transform = RandomizeLabels(MECHANISM, key, "a", statement=str(path))
    collected(PAIRS, tmp_path, transform=transform)
    stated = json.loads(path.read_text())
    assert stated["guarantee"]["epsilon"] == 1.0
    assert len(stated["receipts"]) == 1
    assert key.secret.hex() not in path.read_text()


class OfTwoSplits(beam.PTransform):
    def __init__(self, transform):
        super().__init__()
        self._transform = transform

    def expand(self, rows):
        halves = rows | beam.Partition(lambda row, n: int(row[1] == 0), 2)
        splits = {"train": halves[0], "eval": halves[1]} | self._transform
        return [splits["train"], splits["eval"]] | beam.Flatten()


def test_splits_are_one_release(key, tmp_path):
    transform = OfTwoSplits(RandomizeLabels(MECHANISM, key, "a"))
    found = collected(PAIRS, tmp_path, transform=transform)
    assert dict(found) == expected(key, PAIRS)


@pytest.mark.parametrize("within", [True, False])
def test_repeated_ids_are_refused_with_their_number(key, tmp_path, monkeypatch, within):
    monkeypatch.setattr(_randomize_labels, "_BATCH_ROWS", 100)  # copies are in other batches
    copies = [(7, 2), (7, 0), (900, 1)]
    transform = RandomizeLabels(MECHANISM, key, "a", statement=str(tmp_path / "s.json"))
    transform = transform if within else OfTwoSplits(transform)
    with pytest.raises(Exception, match=r"2 ids name more than one row \(3 rows too many of 3003"):
        collected(PAIRS + copies, tmp_path, transform=transform)
    assert not list(tmp_path.glob("out*")) and not (tmp_path / "s.json").exists()


def test_one_label_out_of_range_stops_all(key, tmp_path, monkeypatch):
    monkeypatch.setattr(_randomize_labels, "_BATCH_ROWS", 100)
    with pytest.raises(Exception, match="labels"):
        collected([*PAIRS, (-1, 8)], tmp_path, transform=RandomizeLabels(MECHANISM, key, "a"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1, 0), ("b", 1)], "whole numbers or all text"),
        ([{"id": 1, "y": 0}], "no field 'label'"),
        ([pa.table({"id": [1], "y": [0]})], "no field 'label'"),
        ([3], "must be pairs"),
    ],
)
def test_rows_that_can_not_be_read_say_what_is_expected(key, tmp_path, rows, message):
    with pytest.raises(Exception, match=message):
        collected(rows, tmp_path, transform=RandomizeLabels(MECHANISM, key, "a"))


def test_windows_are_refused(key):
    with pytest.raises(ValueError, match="without windows"):
        windowed = (
            beam.Pipeline() | beam.Create(PAIRS) | beam.WindowInto(beam.window.FixedWindows(9))
        )
        _ = windowed | RandomizeLabels(MECHANISM, key, "a")


def summed(elements, transform, runner=None):
    with beam.Pipeline(runner or FnApiRunner()) as pipeline:
        _ = pipeline | beam.Create(elements) | beam.Reshuffle() | transform


@pytest.fixture
def no_noise(monkeypatch):
    """Releases the exact sums, for a comparison with one machine."""
    monkeypatch.setattr(HistogramMechanism, "add_noise", lambda self, counts: counts)


@pytest.mark.parametrize("repeat", [0, 2])
@pytest.mark.holds("scale.PrivateHistogram")
def test_histograms_are_exact_before_their_noise(key, no_noise, repeat):
    groups = np.arange(2000) % 5
    labels = (np.arange(2000) // 7) % 3
    mechanism = HistogramMechanism(1.0, num_classes=3)
    plain = PrivateHistogram(mechanism, key, "plain")
    grouped = PrivateHistogram(mechanism, key, "grouped", num_groups=6)
    summed(labels.tolist(), plain, FnApiRunner(bundle_repeat=repeat))
    pairs = list(zip(groups.tolist(), labels.tolist(), strict=True))
    arrays = [(groups[i : i + 300], labels[i : i + 300]) for i in range(600, 2000, 300)]
    summed(pairs[:600] + arrays, grouped, FnApiRunner(bundle_repeat=repeat))
    np.testing.assert_array_equal(plain.result().values, mechanism.exact_counts(labels))
    np.testing.assert_array_equal(
        grouped.result().values[:5], mechanism.exact_counts(labels, groups)
    )
    assert grouped.result().values[5].tolist() == [0, 0, 0]


@pytest.mark.holds("scale.PrivateHistogram")
def test_the_noise_is_drawn_once_and_kept(key, tmp_path):
    mechanism = HistogramMechanism(0.01, num_classes=3)
    counts = PrivateHistogram(mechanism, key, "counts")
    with pytest.raises(FileNotFoundError, match="has not ended"):
        counts.result()
    summed([0, 1, 2] * 50, counts)
    (private,) = sums_in(tmp_path)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    first = counts.result()
    assert sums_in(tmp_path) == []
    again = PrivateHistogram(mechanism, ReleaseKey(key.path), "counts").result()
    np.testing.assert_array_equal(first.values, again.values)
    assert first.guarantee().epsilon == again.guarantee().epsilon == 0.01
    with pytest.raises(ValueError, match="drawn already"):
        summed([0, 1], PrivateHistogram(mechanism, key, "counts"))


MOSTLY_NOISE = HistogramMechanism(0.01, num_classes=3)


def sums_in(folder):
    """Returns the files below a folder that have exact sums, under any name."""
    found = []
    for path in folder.rglob("*.npz"):
        with np.load(path) as content:
            found += [path] * ("counts" in content.files)
    return found


def keys_release(folder):
    """Returns the released values, from the files alone."""
    counts = PrivateHistogram(MOSTLY_NOISE, ReleaseKey(folder / "labels.key"), "counts")
    if not counts.is_released:
        summed([0, 1, 2] * 50, counts)
    return counts.result().values.tolist()


def test_b6_a_release_whose_output_was_moved_is_not_drawn_again(key, tmp_path):
    """After any file was moved, the same values come out, or an error."""
    first = keys_release(tmp_path)
    for path in [file for file in tmp_path.rglob("*") if file.is_file() and file != key.path]:
        moved = path.with_name("moved")
        path.rename(moved)
        try:
            assert keys_release(tmp_path) == first
        except (LabelStoreError, FileNotFoundError):
            pass
        moved.replace(path)
    assert keys_release(tmp_path) == first and key.guarantee().epsilon == 0.01


def test_b6_a_release_of_0_2_is_never_drawn_again(tmp_path):
    """Version 0.3 has moved the key to the present format, and not the output."""
    shutil.copytree(pathlib.Path(__file__).parents[1] / "vault" / "of_0_3" / "key", tmp_path / "k")
    key, mechanism = ReleaseKey(tmp_path / "k" / "labels.key"), HistogramMechanism(0.5, 3)
    counts = PrivateHistogram(mechanism, key, "counts")
    with pytest.raises(ValueError, match="drawn already"):
        summed([0, 1, 2], counts)
    with pytest.raises(LabelStoreError, match=r"drawn by version 0\.2.*new release"):
        counts.result()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_b7_a_second_pipeline_leaves_no_exact_sums(key, tmp_path, elsewhere):
    folder = tmp_path / "sums" if elsewhere else None
    if elsewhere:
        folder.mkdir()
    first, other = (PrivateHistogram(MOSTLY_NOISE, key, "counts", folder=folder) for _ in range(2))
    late = beam.Pipeline(FnApiRunner())
    _ = late | beam.Create([0, 1, 2] * 50) | other
    summed([0, 1, 2] * 50, first)
    values = first.result().values
    late.run().wait_until_finish()
    assert sums_in(tmp_path) == []
    np.testing.assert_array_equal(other.result().values, values)


_KILLED = """
import os, pathlib, sys
import apache_beam as beam
from tf_labeldp.mechanisms import HistogramMechanism
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.scale.beam import PrivateHistogram
key = ReleaseKey(sys.argv[1])
counts = PrivateHistogram(HistogramMechanism(0.01, num_classes=3), key, "counts")
with beam.Pipeline("FnApiRunner") as pipeline:
    _ = pipeline | beam.Create([0, 1, 2] * 50) | counts
if sys.argv[2] == "wait":
    print("ready", flush=True)
    sys.stdin.readline()
os._exit(9)
"""


def test_b7_sums_of_a_killed_process_are_deleted_at_the_next_start(key, tmp_path):
    subprocess.run([sys.executable, "-c", _KILLED, str(key.path), "die"], check=False)
    assert len(sums_in(tmp_path)) == 1
    counts = PrivateHistogram(MOSTLY_NOISE, key, "counts")
    pipeline = beam.Pipeline(FnApiRunner())
    _ = pipeline | beam.Create([0, 1, 2] * 50) | counts  # not run yet
    assert sums_in(tmp_path) == []
    assert key.receipts() == ()


def vault_key(tmp_path, epsilon, **options):
    options = {"num_classes": 3, **options}
    labels = np.arange(150) % 3
    labels = np.eye(3, dtype=int)[labels] if "num_labels" in options else labels
    budget = PrivacyBudget(epsilon)
    vault = PrivateLabels(labels, budget=budget, store=tmp_path / "store", **options)
    return vault, ReleaseKey.create(tmp_path / "store" / "labels.key")


@pytest.mark.parametrize("options", [{}, {"users": np.arange(150) // 2}])
def test_a_statistic_that_is_refused_runs_no_pipeline(tmp_path, options):
    vault, key = vault_key(tmp_path, 0.5 if not options else 9.0, **options)
    read = []
    with pytest.raises((BudgetExceededError, ValueError), match=r"budget|unit is one label"):
        PrivateHistogram(HistogramMechanism(1.0, num_classes=3), key, "counts")
    head = FitPrivateHead(PrivateRidge(1.0, 1e-5, num_classes=3), key, "head")
    with pytest.raises((BudgetExceededError, ValueError), match=r"budget|unit is one label"):
        head.fit(read.append, runner="FnApiRunner")
    assert not read and sums_in(tmp_path) == [] and vault.receipts == ()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_statistic_that_is_refused_later_leaves_no_exact_sums(tmp_path, elsewhere):
    """Another use spends the budget between the pipeline and the draw."""
    vault, key = vault_key(tmp_path, 1.0)
    folder = tmp_path / "sums" if elsewhere else None
    if elsewhere:
        folder.mkdir()
    counts = PrivateHistogram(HistogramMechanism(1.0, num_classes=3), key, "counts", folder=folder)
    late = beam.Pipeline(FnApiRunner())
    summed([0, 1, 2] * 50, counts)
    assert len(sums_in(tmp_path)) == 1
    vault.randomize(RandomizedResponse(1.0, 3))
    with pytest.raises(BudgetExceededError):
        counts.result()
    assert sums_in(tmp_path) == [] and vault.guarantee().epsilon == 1.0
    with pytest.raises(BudgetExceededError):  # The next pipeline is refused before it runs.
        _ = late | beam.Create([0, 1, 2] * 50) | counts


def test_a_statistic_whose_name_is_reserved_for_another_leaves_no_exact_sums(tmp_path):
    vault, key = vault_key(tmp_path, 2.0)
    counts = PrivateHistogram(HistogramMechanism(1.0, num_classes=3), key, "counts")
    summed([0, 1, 2] * 50, counts)
    assert len(sums_in(tmp_path)) == 1
    with vault.reserve({"counts": HistogramMechanism(0.5, num_classes=3)}):
        with pytest.raises(LabelStoreError, match="as it was reserved"):
            counts.result()
    assert sums_in(tmp_path) == [] and vault.receipts == ()


@pytest.mark.parametrize("name", ["..", "q\n", "x\0y"])
def test_names_that_files_can_not_have_are_refused_before_a_pipeline_runs(key, name):
    read = []
    for make in (
        lambda: RandomizeLabels(MECHANISM, key, name),
        lambda: PrivateHistogram(MOSTLY_NOISE, key, name),
        lambda: FitPrivateHead(PrivateRidge(1.0, 1e-5, num_classes=2), key, name).fit(read.append),
    ):
        with pytest.raises(ValueError, match="release must be a name"):
            make()
    assert not read and key.receipts() == ()


@pytest.mark.parametrize("make", ["draws", "sums"])
def test_workers_with_another_key_file_are_refused(key, tmp_path, make):
    """The file under the path of the key is another one when the bundles run."""
    transform = (
        RandomizeLabels(MECHANISM, key, "a")
        if make == "draws"
        else PrivateHistogram(MOSTLY_NOISE, key, "a")
    )
    pipeline = beam.Pipeline(FnApiRunner())
    _ = pipeline | beam.Create(PAIRS if make == "draws" else [0, 1, 2] * 50) | transform
    kept = key.path.read_bytes()
    shutil.move(f"{key.path}.ledger", tmp_path / "kept.ledger")
    key.path.unlink()
    other = ReleaseKey.create(key.path)
    with pytest.raises(Exception, match=r"another key\. Mount one key file"):
        pipeline.run().wait_until_finish()
    assert other.receipts() == () and kept != key.path.read_bytes()


def test_b7_sums_of_a_process_that_goes_on_are_left_to_it(key, tmp_path):
    command = [sys.executable, "-c", _KILLED, str(key.path), "wait"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "ready\n"
        counts = PrivateHistogram(MOSTLY_NOISE, key, "counts")
        pipeline = beam.Pipeline(FnApiRunner())
        _ = pipeline | beam.Create([0, 1, 2] * 50) | counts
        assert len(sums_in(tmp_path)) == 1
        child.communicate("\n")


def test_b7_forget_erases_exact_sums(tmp_path):
    store, folder = tmp_path / "store", tmp_path / "sums"
    folder.mkdir()
    PrivateLabels([0, 1, 2] * 50, 3, budget=PrivacyBudget(1.0), store=store)
    key = ReleaseKey.create(store / "labels.key")
    for name, place in (("inside", None), ("outside", folder)):
        summed([0, 1, 2] * 50, PrivateHistogram(MOSTLY_NOISE, key, name, folder=place))
    assert len(sums_in(tmp_path)) == 2
    for name in ("networks", "stages"):
        (store / name).mkdir()
        (store / name / "a.npz").write_bytes(b"weights")
    assert forget(store) == []
    assert [path.name for path in tmp_path.rglob("*.npz")] == []
    names = {path.name for path in store.iterdir()}
    assert names <= {"header.json", "records", "last-record", ".lock"}


def test_b7_processes_that_race_for_a_result_all_return_the_same(key, tmp_path):
    counts = PrivateHistogram(MOSTLY_NOISE, key, "counts")
    summed([0, 1, 2] * 50, counts)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        found = pool.map(result_of, [key.path] * 4)
    assert all(values == found[0] for values in found)
    assert key.guarantee().epsilon == 0.01 and sums_in(tmp_path) == []


def result_of(path):
    return PrivateHistogram(MOSTLY_NOISE, ReleaseKey(path), "counts").result().values.tolist()


@pytest.mark.holds("scale.PrivateMoments")
@pytest.mark.parametrize("kind", [{"num_classes": 3}, {"num_labels": 2}])
def test_moments_are_those_of_one_machine(key, monkeypatch, kind):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(999, 4))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    labels = rng.integers(0, 3, 999) if "num_classes" in kind else rng.integers(0, 2, (999, 2))
    mechanism = LabelMomentMechanism(1.0, 1e-6, **kind)
    add_noise = LabelMomentMechanism.add_noise
    monkeypatch.setattr(
        LabelMomentMechanism,
        "add_noise",
        lambda self, *sums, rng=None: add_noise(self, *sums, rng=np.random.default_rng(5)),
    )
    single = PrivateMoments(mechanism, key, "single", 999)
    batches = PrivateMoments(mechanism, key, "batches", 999)
    summed(list(zip(rows.tolist(), labels.tolist(), strict=True)), single)
    cuts = np.array_split(np.arange(999), 7)
    summed([(rows[cut], labels[cut]) for cut in cuts], batches, FnApiRunner(bundle_repeat=1))
    alone = mechanism.release(labels, rows)
    for moments in (single, batches):
        np.testing.assert_array_equal(moments.result().values, alone)
        np.testing.assert_allclose(moments.gram(), rows.T @ rows, atol=1e-3)
    np.testing.assert_array_equal(single.gram(), batches.gram())


def test_another_number_of_rows_is_refused(key):
    moments = PrivateMoments(LabelMomentMechanism(1.0, 1e-6, num_classes=2), key, "m", 9)
    summed([([0.6, 0.8], 1)] * 8, moments)
    with pytest.raises(ValueError, match="num_rows=9 rows in the pipeline, found 8"):
        moments.result()


@pytest.mark.parametrize("kind", ["classes", "numbers"])
@pytest.mark.holds("scale.FitPrivateHead")
def test_a_head_is_as_good_as_on_one_machine(key, kind):
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(6000, 6)) @ rng.normal(size=(6, 6))
    scores = rows / np.linalg.norm(rows, axis=1, keepdims=True) @ rng.normal(size=(6, 3))
    if kind == "classes":
        head = PrivateLogisticRegression(1.0, 1e-5, classes=["a", "b", "c"])
        labels = np.array(["a", "b", "c"])[scores.argmax(axis=1)]
    else:
        head = PrivateRidge(1.0, 1e-5, low=-5.0, high=5.0)
        labels = np.clip(scores[:, 0], -5.0, 5.0)
    parts = [(rows[cut], labels[cut]) for cut in np.array_split(np.arange(6000), 5)]
    fit = FitPrivateHead(head, key, "head")
    here = type(head)(**{**head.get_params(), "insecure_seed": 0}).fit(rows, labels)
    there = fit.fit(lambda pipeline: pipeline | beam.Create(parts), runner=FnApiRunner())
    assert there.score(rows, labels) > here.score(rows, labels) - 0.03
    assert (there.guarantee().epsilon, there.guarantee().delta) == (1.0, 1e-5)
    assert there.noise_stddev_ == pytest.approx(here.noise_stddev_, rel=1e-6)
    again = FitPrivateHead(type(head)(**head.get_params()), key, "head")

    def no_rows(pipeline):
        raise AssertionError("the rows were read again")

    np.testing.assert_array_equal(again.fit(no_rows).coef_, there.coef_)


def test_heads_refuse_what_they_can_not_fit(key):
    with pytest.raises(TypeError, match="without encoder"):
        FitPrivateHead(PrivateRidge(1.0, 1e-5, num_classes=2, encoder=np.abs), key, "head")
    fit = FitPrivateHead(PrivateRidge(1.0, 1e-5, num_classes=2), key, "head")
    with pytest.raises(Exception, match="must be finite"):
        fit.fit(lambda p: p | beam.Create([([0.0, np.nan], 1)]), runner=FnApiRunner())
