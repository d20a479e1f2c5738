"""No file that is written from the returned dataset holds a true label, whatever the pipeline."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from slow_cases import with_slow

from tf_labeldp.data import randomize_labels
from tf_labeldp.mechanisms import RandomizedResponse, RROnBins

N, K = 120, 10**9
TRUE = 512_345_678 + 3_654_321 * np.random.default_rng(0).permutation(N)
NUMBERS = np.random.default_rng(1).uniform(0.0, 50.0, N)
SOURCE = tf.data.Dataset.from_tensor_slices((np.arange(N), TRUE))
# A refusal is TensorFlow's own.
REFUSALS = (
    tf.errors.FailedPreconditionError,
    tf.errors.UnimplementedError,
    tf.errors.InvalidArgumentError,
)


def varint(value: int) -> bytes:
    """Returns an integer as protocol buffers write it."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def found(folder: Path, labels: np.ndarray) -> int:
    """Returns how many of the labels are in the files of a folder, in any encoding."""
    raw = b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())

    def encodings(label: np.generic) -> list[bytes]:
        if label.dtype.kind == "f":
            return [label.tobytes()]
        return [label.tobytes(), label.astype("<i8").tobytes(), varint(int(label))]

    return sum(any(text in raw for text in encodings(label)) for label in labels)


def regrouped(dataset):
    """Elements of one group per hundred ids, by ``group_by_window``."""
    return dataset.group_by_window(
        key_func=lambda x, y: x % 3,
        reduce_func=lambda key, window: window.batch(10),
        window_size=10,
    ).unbatch()


def shards(dataset, **settings):
    return tf.data.Dataset.range(3).interleave(
        lambda i: dataset.shard(3, i), cycle_length=3, **settings
    )


# An operator of tf.data with the state that it may have, as (x, y) -> (x, y).
OPERATORS = {
    "apply": lambda d: d.apply(tf.data.experimental.copy_to_device("/cpu:0")),
    "batch": lambda d: d.batch(16, num_parallel_calls=2).prefetch(2).unbatch(),
    "bucket_by_sequence_length": lambda d: d.bucket_by_sequence_length(
        lambda x, y: tf.cast(x, tf.int32), [50], [8, 8]
    ).unbatch(),
    "cache": lambda d: d.cache(),
    "choose_from_datasets": lambda d: tf.data.Dataset.choose_from_datasets(
        [d.shard(2, 0), d.shard(2, 1).prefetch(20)], tf.data.Dataset.range(2).repeat()
    ),
    "concatenate": lambda d: d.take(N // 2).prefetch(20).concatenate(d.skip(N // 2).prefetch(20)),
    "enumerate": lambda d: d.enumerate().prefetch(20).map(lambda i, e: e),
    "filter": lambda d: d.prefetch(20).filter(lambda x, y: x % 2 == 0),
    "flat_map": lambda d: tf.data.Dataset.range(3).flat_map(lambda i: d.shard(3, i).prefetch(20)),
    "from_generator": lambda d: tf.data.Dataset.from_generator(
        d.as_numpy_iterator, output_signature=d.element_spec
    ).prefetch(20),
    "group_by_window": regrouped,
    "ignore_errors": lambda d: d.prefetch(20).ignore_errors(),
    "interleave": lambda d: shards(d, num_parallel_calls=2),
    "map": lambda d: d.map(lambda x, y: (x, y), num_parallel_calls=4),
    "padded_batch": lambda d: d.padded_batch(16).prefetch(2).unbatch(),
    "prefetch": lambda d: d.prefetch(50),
    "ragged_batch": lambda d: d.ragged_batch(16).prefetch(2).unbatch(),
    "rebatch": lambda d: d.batch(16).rebatch(7).unbatch(),
    "rejection_resample": lambda d: d.rejection_resample(
        lambda x, y: tf.cast(x % 2, tf.int32), [0.5, 0.5], seed=0
    ).map(lambda kind, e: e),
    "sample_from_datasets": lambda d: tf.data.Dataset.sample_from_datasets(
        [d.shard(2, 0).prefetch(20), d.shard(2, 1).prefetch(20)], seed=0
    ),
    "scan": lambda d: d.prefetch(20).scan(0, lambda state, e: (state + 1, e)),
    "shard": lambda d: d.prefetch(20).shard(2, 0),
    "shuffle": lambda d: d.shuffle(N, seed=0),
    "skip": lambda d: d.prefetch(20).skip(3),
    "take": lambda d: d.prefetch(20).take(N - 3),
    "take_while": lambda d: d.prefetch(20).take_while(lambda x, y: x < N),
    "unbatch": lambda d: d.batch(N).unbatch(),
    "window": lambda d: d.window(16).flat_map(lambda x, y: tf.data.Dataset.zip((x, y)).prefetch(8)),
    "with_options": lambda d: d.map(lambda x, y: (x, y)).with_options(every_option()),
    "zip": lambda d: tf.data.Dataset.zip((d.map(lambda x, y: x), d.map(lambda x, y: y).cache())),
}
AFTERWARDS = {
    "repeat": lambda d: d.prefetch(20).repeat(3),
    "snapshot": lambda d: d.prefetch(20),
    **OPERATORS,
}
# Methods of a dataset that have no elements of another dataset in a state.
WITHOUT_A_STATE = set(
    "as_numpy_iterator cardinality counter element_spec fingerprint from_tensor_slices from_tensors"
    " get_single_element list_files load options random range reduce save snapshot sparse_batch"
    " unique repeat".split()
)


def every_option():
    """Options that put buffers between a source and the labels' replacement."""
    options = tf.data.Options()
    for name in (
        "map_parallelization",
        "parallel_batch",
        "map_and_batch_fusion",
        "inject_prefetch",
    ):
        if hasattr(options.experimental_optimization, name):
            setattr(options.experimental_optimization, name, True)
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return options


def symbolic():
    options = tf.data.Options()
    options.experimental_symbolic_checkpoint = True
    return options


def ignoring():
    options = tf.data.Options()
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return options


OPTIONS = {"": tf.data.Options, "symbolic": symbolic, "ignoring": ignoring, "all": every_option}


def checkpoints(dataset, folder: Path) -> int:
    """Saves an iterator at its start, in the middle and at its end; returns how often it worked."""
    worked = 0
    for name, make in OPTIONS.items():
        iterator = iter(dataset.with_options(make()))
        for step in (1, 20, N):
            for _ in range(step):
                next(iterator, None)
            with contextlib.suppress(*REFUSALS):
                tf.train.Checkpoint(iterator=iterator).save(str(folder / f"{name}-{step}"))
                worked += 1
    return worked


def randomized(source, **settings):
    mechanism = RandomizedResponse(0.01, K)
    transform = randomize_labels(mechanism, insecure_seed=1, verbose=False, **settings)
    return source.apply(transform)


COMMON = {"batch", "cache", "map", "prefetch", "shuffle"}


def test_every_operator_of_tf_data_is_tried():
    public = {name for name in dir(tf.data.Dataset) if not name.startswith("_")}
    assert not public - OPERATORS.keys() - WITHOUT_A_STATE


@pytest.mark.parametrize("name", ["cache", "shuffle", "prefetch", "map", "batch", "unbatch"])
def test_the_search_finds_labels_in_the_states_of_the_source(name, tmp_path):
    assert checkpoints(OPERATORS[name](SOURCE), tmp_path)
    assert found(tmp_path, TRUE) >= 1


@pytest.mark.parametrize("name", with_slow(OPERATORS, OPERATORS.keys() - COMMON))
@pytest.mark.holds("data.randomize_labels")
def test_no_state_has_a_true_label_after_an_operator(name, tmp_path):
    before = OPERATORS[name](SOURCE)
    dataset = randomized(before, id_fn=lambda x: x)
    assert dataset.element_spec == before.element_spec
    checkpoints(dataset, tmp_path)
    assert found(tmp_path, TRUE) == 0


@pytest.mark.parametrize("name", with_slow(AFTERWARDS, AFTERWARDS.keys() - COMMON))
@pytest.mark.holds("data.randomize_labels")
def test_no_state_has_a_true_label_before_an_operator(name, tmp_path):
    whole = SOURCE.cache().prefetch(10)
    checkpoints(AFTERWARDS[name](randomized(whole)), tmp_path)
    assert found(tmp_path, TRUE) == 0


@pytest.mark.parametrize("options", OPTIONS)
def test_tensorflow_saves_no_iterator_before_its_end(options, tmp_path):
    iterator = iter(randomized(SOURCE).with_options(OPTIONS[options]()))
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    for _ in range(N // 2):
        next(iterator)
        with pytest.raises(REFUSALS):
            checkpoint.save(str(tmp_path / "iterator"))
    assert not list(tmp_path.glob("iterator*"))
    # Towards its end, TensorFlow may have read all elements: then it saves noisy ones.
    for _ in range(N // 2):
        next(iterator)
        with contextlib.suppress(*REFUSALS):
            checkpoint.save(str(tmp_path / "iterator"))
    assert found(tmp_path, TRUE) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64"])
@pytest.mark.parametrize("kind", ["tuple", "dict", "ragged"])
def test_no_state_has_a_true_label_of_any_type(kind, dtype, tmp_path):
    numbers = dtype.startswith("float")
    labels = (NUMBERS if numbers else TRUE).astype(dtype)
    x = tf.ragged.range(tf.range(N) % 3) if kind == "ragged" else np.arange(N)
    elements = {"x": x, "label": labels} if kind == "dict" else (x, labels)
    source = tf.data.Dataset.from_tensor_slices(elements).cache()
    mechanism = RROnBins(1.0, (0.0, 50.0), (10.0, 40.0), (0, 1)) if numbers else None
    transform = randomize_labels(mechanism or RandomizedResponse(0.01, K), insecure_seed=1)
    checkpoints(source.apply(transform), tmp_path)
    assert found(tmp_path, labels) == 0


class Holder(tf.Module):
    """A module that keeps a dataset, whose graph a SavedModel contains."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset


def saved_model(dataset, folder):
    tf.saved_model.save(Holder(dataset), str(folder / "model"))


def graph(dataset, folder):
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE.value
    variant = tf.data.experimental.to_variant(dataset)
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=policy)
    (folder / "graph.pb").write_bytes(text.numpy())


def snapshot(dataset, folder):
    list(dataset.snapshot(str(folder / "snapshot"), compression=None))


def cache_file(dataset, folder):
    list(dataset.cache(str(folder / "cache")))


def service(dataset, folder):
    with_service(dataset, folder, consume=True)


def distributed_save(dataset, folder):
    with_service(dataset, folder, consume=False)


def with_service(dataset, folder, consume):
    api = tf.data.experimental.service
    work = folder / "work"
    config = api.DispatcherConfig(fault_tolerant_mode=True, work_dir=str(work))
    dispatcher = api.DispatchServer(config)
    address = dispatcher.target.split("://")[1]
    worker = api.WorkerServer(api.WorkerConfig(dispatcher_address=address))
    if consume:
        list(dataset.apply(api.distribute("parallel_epochs", service=dispatcher.target)))
    else:
        path = str(folder / "saved")
        tf.data.experimental.distributed_save(dataset, path, address, compression=None)
        waiting = time.monotonic() + 20.0
        while not any(Path(path).rglob("DONE")) and time.monotonic() < waiting:
            time.sleep(0.1)
    del worker


WRITERS = {
    "save": lambda dataset, folder: dataset.save(str(folder / "saved")),
    "snapshot": snapshot,
    "cache": cache_file,
    "graph": graph,
    "SavedModel": saved_model,
    "service": service,
    "distributed_save": distributed_save,
}


# The service tries for half a minute.
@pytest.mark.parametrize("name", with_slow(WRITERS, {"distributed_save"}))
@pytest.mark.holds("data.randomize_labels")
def test_no_writer_of_tf_data_writes_a_true_label(name, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    WRITERS[name](SOURCE, before)
    assert found(before, TRUE) >= 0.9 * N
    with contextlib.suppress(*REFUSALS):
        WRITERS[name](randomized(SOURCE), after)
    assert found(after, TRUE) == 0


def test_a_backup_of_a_training_has_no_true_label(tmp_path):
    numbers = tf.data.Dataset.from_tensor_slices((np.arange(N, dtype=np.float32)[:, None], TRUE))
    dataset = randomized(numbers.shuffle(N).cache(), id_fn=lambda x: tf.cast(x[0], tf.int64))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backup = keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=3, delete_checkpoint=False)
    model.fit(dataset.batch(8), epochs=2, callbacks=[backup], verbose=0)
    assert any(tmp_path.iterdir())
    assert found(tmp_path, TRUE) == 0


def test_a_pipeline_of_the_noisy_labels_alone_has_checkpoints(tmp_path):
    transform = randomize_labels(RandomizedResponse(0.01, K), insecure_seed=1)
    SOURCE.apply(transform)
    noisy = tf.data.Dataset.from_tensor_slices(transform.noisy_labels.values)
    dataset = tf.data.Dataset.zip((SOURCE.map(lambda x, y: x), noisy)).shuffle(N, seed=0)
    assert checkpoints(dataset, tmp_path) == 12
    assert found(tmp_path, TRUE) == 0


def test_the_returned_dataset_keeps_what_it_needs():
    dataset = randomized(SOURCE.map(lambda x, y: (x, y)).cache())
    first = [int(y) for _, y in dataset]
    gc.collect()
    iterator = iter(dataset.batch(N))
    del dataset
    gc.collect()
    assert next(iterator)[1].numpy().tolist() == first
