"""Apache Spark: noisy labels in a data frame, by keyed draws.

Install it with ``pip install 'tf-labeldp[spark]'`` and a Java runtime (17 or newer).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from tf_labeldp.accounting import Private, Public, public_input
from tf_labeldp.mechanisms import ClassificationMechanism, LabelMechanism
from tf_labeldp.scale._engines import needs
from tf_labeldp.vault.keyed_draws import KeyedRows, ReleaseKey
from tf_labeldp.vault.row_ids import RowIds

needs("pyspark", "spark")

from pyspark.sql import functions as sql  # noqa: E402
from pyspark.sql.types import (  # noqa: E402
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

__all__ = ["randomize"]


def randomize(
    df: Private[Any],
    mechanism: Public[LabelMechanism],
    key: ReleaseKey,
    release: str,
    *,
    id: str = "id",
    label: str = "label",
    priors: Public[Any] = None,
) -> Any:
    """Returns a data frame with noisy labels in place of the labels, by ``mapInArrow``.

    The rows are read once, here. Spark keeps the noisy rows as a checkpoint, in the folder of
    ``SparkContext.setCheckpointDir`` if there is one, otherwise on its executors, and the returned
    frame reads these: rows that change later are not drawn. Executors that are lost with their rows
    end in an error of Spark; call ``randomize`` again, which repeats the draws.

    Guarantee:
        The noisy labels are (epsilon, delta)-DP for the replacement of one label, by ``mechanism``,
        also when Spark repeats a task: a draw is a pseudorandom function of key, release,
        mechanism, prior, id and label, and the rows that are returned are those whose ids and
        fingerprint were checked. It rests on AES-256 and BLAKE2b, on a secret key,
        and on unique ids that are stored in the table: a row with a new id
        (``monotonically_increasing_id``) gets a new draw. ``key.statement(release)`` has the
        statement.

    Args:
        df: a ``pyspark.sql.DataFrame``.
        mechanism, release, priors: as for ``beam.RandomizeLabels``.
        key: likewise, but this process writes to the ledger.
        id: the column that identifies a row: whole numbers or text.
        label: the column with the label.

    Raises:
        ValueError: a column is missing, ids are missing or repeated, or the rows differ from those
            of an earlier run; nothing is returned.
        pyspark.errors.PythonException: labels out of range.

    Example:
        >>> import os, tempfile
        >>> from pyspark.sql import SparkSession
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> key = ReleaseKey.create(os.path.join(tempfile.mkdtemp(), "labels.key"))
        >>> spark = SparkSession.builder.master("local[1]").getOrCreate()
        >>> df = spark.createDataFrame([("anna", 0), ("bert", 2)], ["id", "label"])
        >>> noisy = randomize(df, RandomizedResponse(1.0, num_classes=3), key, "first")
        >>> noisy.columns, noisy.count()
        (['id', 'label'], 2)
    """
    public = public_input(mechanism, priors)
    mechanism, priors = public.value
    LabelMechanism.checked(mechanism)
    if missing := [name for name in (id, label) if name not in df.columns]:
        raise ValueError(
            f"the data frame has no column {' and no '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, df.columns))}. Name the columns with id= and label=."
        )
    made_by: Any = public.with_value(mechanism)
    key.register(release, made_by, priors)
    # Spark reads a source again whenever it computes a frame, and the source may have changed by
    # then. So each batch takes its fingerprint along to the checkpoint, which is what is checked.
    mark = "fingerprint"
    while mark in df.columns:
        mark += "_"

    def draw(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            labels = batch.column(label).to_numpy(zero_copy_only=False)
            rows = KeyedRows(batch.column(id), labels, mechanism, key.secret, release, priors)
            columns = list(batch.columns)
            columns[batch.schema.get_field_index(label)] = pa.array(rows.randomize())
            marks = [str(rows.fingerprint())] * bool(len(labels)) + [None] * (len(labels) - 1)
            columns.append(pa.array(marks, pa.string()))
            yield pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, mark])

    kind = LongType() if isinstance(mechanism, ClassificationMechanism) else DoubleType()
    fields = [StructField(label, kind) if f.name == label else f for f in df.schema.fields]
    drawn = df.mapInArrow(draw, StructType([*fields, StructField(mark, StringType())]))
    has_folder = df.sparkSession.sparkContext.getCheckpointDir() is not None
    drawn = drawn.checkpoint() if has_folder else drawn.localCheckpoint()
    fingerprints = drawn.where(sql.col(mark).isNotNull()).select(mark).collect()
    rows = drawn.count()
    ids = drawn.groupBy(sql.col(id)).count().where("count > 1")
    repeated, too_many = ids.agg(sql.count("*"), sql.sum(sql.col("count") - 1)).first()
    RowIds.refuse_repeats(repeated, too_many, rows)
    key.bind_rows(release, rows, sum(int(row[mark]) for row in fingerprints))
    return drawn.drop(mark)
