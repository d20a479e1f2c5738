"""Apache Spark: recomputed partitions have the draws of the stateless core."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="no pyspark; `make test-spark` installs it")
if shutil.which("java") is None:
    pytest.skip("no Java runtime, which Spark needs", allow_module_level=True)

from pyspark.sql import SparkSession

from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.scale import ReleaseKey, randomize_batch
from tf_labeldp.scale.spark import randomize

MECHANISM = RandomizedResponse(epsilon=1.0, num_classes=3)
PAIRS = [(i, i % 3) for i in range(2000)]


@pytest.fixture(scope="module")
def spark():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.master("local[2, 3]")  # three attempts at each task
        settings = {
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.host": "127.0.0.1",
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        yield session
        session.stop()


@pytest.fixture
def key(tmp_path):
    return ReleaseKey.create(tmp_path / "labels.key")


def expected(key, pairs):
    ids, labels = zip(*pairs, strict=True)
    drawn = randomize_batch(pa.array(ids), np.array(labels), MECHANISM, key.secret, "a")
    return dict(zip(ids, drawn.tolist(), strict=True))


@pytest.mark.parametrize("partitions", [1, 5])
def test_partitions_change_nothing(spark, key, partitions):
    df = spark.createDataFrame([(i, 0.5, y) for i, y in PAIRS], ["id", "x", "label"])
    noisy = randomize(df.repartition(partitions), MECHANISM, key, "a")
    assert noisy.columns == ["id", "x", "label"]
    first, second = ({row.id: row.label for row in noisy.collect()} for _ in range(2))
    assert first == second == expected(key, PAIRS)


@pytest.mark.holds("scale.randomize")
def test_a_task_that_is_tried_again_draws_the_same(spark, key, tmp_path):
    pairs = [(f"row {i}", y) for i, y in PAIRS]
    df = spark.createDataFrame(pairs, ["name", "y"]).repartition(4)
    noisy = randomize(df, MECHANISM, key, "a", id="name", label="y")
    log, folder = tmp_path / "log", str(tmp_path)

    def lose(batches):
        import pathlib

        from pyspark import TaskContext

        context = TaskContext.get()
        for batch in batches:
            with (pathlib.Path(folder) / "log").open("a") as file:
                rows = zip(batch["name"].to_pylist(), batch["y"].to_pylist(), strict=True)
                file.writelines(f"{name};{label}\n" for name, label in rows)
            if context.attemptNumber() == 0 and context.partitionId() % 2:
                raise OSError("this worker is lost")
            yield batch

    found = {row.name: row.y for row in noisy.mapInArrow(lose, noisy.schema).collect()}
    lines = log.read_text().splitlines()
    assert len(lines) > len(pairs) and len(set(lines)) == len(pairs)
    assert found == expected(key, pairs)


def replaced(spark, table, pairs):
    """Writes other rows into the one file of a table, as a job that overwrites it does."""
    other = table.with_name("other")
    spark.createDataFrame(pairs, "id long, label long").coalesce(1).write.parquet(str(other))
    [old], [new] = (list(folder.glob("*.parquet")) for folder in (table, other))
    old.with_name(f".{old.name}.crc").unlink(missing_ok=True)
    shutil.copy(new, old)
    shutil.rmtree(other)


# A session keeps its folder of checkpoints, so the case without one comes first.
@pytest.mark.parametrize("folder", [False, True])
def test_rows_that_change_later_are_not_drawn(spark, key, tmp_path, folder):
    """A frame is computed whenever it is used: a table that changed would be drawn uncharged."""
    if folder:
        spark.sparkContext.setCheckpointDir(str(tmp_path / "checkpoints"))
    table = tmp_path / "table"
    schema = "id long, label long"
    spark.createDataFrame(PAIRS, schema).coalesce(1).write.parquet(str(table))
    noisy = randomize(spark.read.parquet(str(table)), MECHANISM, key, "a")
    corrected = [(i, (y + 1) % 3) for i, y in PAIRS]
    replaced(spark, table, corrected)
    assert {row.id: row.label for row in noisy.collect()} == expected(key, PAIRS)
    spark.catalog.clearCache()
    with pytest.raises(ValueError, match="or some have another label"):
        randomize(spark.read.parquet(str(table)), MECHANISM, key, "a")
    replaced(spark, table, PAIRS)
    again = randomize(spark.read.parquet(str(table)), MECHANISM, key, "a")
    assert {row.id: row.label for row in again.collect()} == expected(key, PAIRS)
    assert [receipt.charge.epsilon for receipt in key.receipts("a")] == [1.0]


def test_rows_that_change_between_the_reading_and_the_check_are_refused(
    spark, key, tmp_path, monkeypatch
):
    """What Spark keeps is checked, and refused if its rows are not those of the first run."""
    table = tmp_path / "table"
    spark.createDataFrame(PAIRS, "id long, label long").coalesce(1).write.parquet(str(table))
    df = spark.read.parquet(str(table))
    randomize(df, MECHANISM, key, "a")
    frame = type(df)
    checkpoints = {name: getattr(frame, name) for name in ("checkpoint", "localCheckpoint")}
    for name, stored in checkpoints.items():

        def late(self, *args, stored=stored, **settings):
            replaced(spark, table, [(i, (y + 2) % 3) for i, y in PAIRS])
            return stored(self, *args, **settings)

        monkeypatch.setattr(frame, name, late)
    with pytest.raises(ValueError, match="or some have another label"):
        randomize(df, MECHANISM, key, "a")


def test_a_table_may_have_a_column_of_the_name_of_the_mark(spark, key):
    rows = [(i, y, "mine") for i, y in PAIRS]
    df = spark.createDataFrame(rows, ["id", "label", "fingerprint"])
    noisy = randomize(df, MECHANISM, key, "a")
    assert noisy.columns == ["id", "label", "fingerprint"]
    assert {row.fingerprint for row in noisy.collect()} == {"mine"}


def test_a_worker_with_another_key_file_is_refused(spark, key, monkeypatch):
    """Spark's workers read the file under the path of the key."""
    kept, draws = key.path.read_bytes(), type(key).register

    def registers(*arguments, **options):
        draws(*arguments, **options)
        other = ReleaseKey.create(key.path.with_name("other.key"))
        key.path.write_bytes(other.path.read_bytes())

    monkeypatch.setattr(type(key), "register", registers)
    df = spark.createDataFrame(PAIRS, ["id", "label"])
    with pytest.raises(Exception, match="another key"):
        randomize(df, MECHANISM, key, "a")
    key.path.write_bytes(kept)


def test_repeated_ids_are_refused_with_their_number(spark, key):
    df = spark.createDataFrame([*PAIRS, (7, 2), (7, 0), (900, 1)], ["id", "label"]).repartition(4)
    with pytest.raises(ValueError, match=r"2 ids name more than one row \(3 rows too many of 2003"):
        randomize(df, MECHANISM, key, "a")


def test_one_label_out_of_range_stops_all(spark, key):
    df = spark.createDataFrame([*PAIRS, (-1, 8)], ["id", "label"])
    with pytest.raises(Exception, match="label"):
        randomize(df, MECHANISM, key, "a")


def test_a_missing_column_is_named(spark, key):
    df = spark.createDataFrame(PAIRS, ["id", "y"])
    with pytest.raises(ValueError, match="no column 'label'"):
        randomize(df, MECHANISM, key, "a")
