"""``jit_compile=True``: a step is one program without host calls, and keeps every protection."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from label_dp_cases import (
    LOSS,
    SIGMA,
    D,
    N,
    after,
    batches,
    codes,
    features,
    network,
    optimizer,
    unchanged,
    vault,
    watch,
)

from tf_labeldp.training import AltConv, GaussianNoise, LabelDPModel, NoiseMechanism

# The guard of a step without a charge, which no fit takes.
from tf_labeldp.training._private_step import StepGuard


def private_model(
    *,
    jit: bool = True,
    eager: bool = False,
    together: int = 1,
    noise: NoiseMechanism | None = None,
    inner: Any = None,
    loss: Any = LOSS,
    extra: tuple[Any, ...] = (),
    metrics: list[str] | None = None,
    **settings: Any,
) -> LabelDPModel:
    model = network(*extra)
    noise = noise or GaussianNoise(SIGMA, source="device", insecure_seed=1)
    model.compile(
        optimizer(None, inner or keras.optimizers.Adam(0.1), noise=noise, **settings),
        loss=loss,
        metrics=metrics,
        jit_compile=jit,
        run_eagerly=eager,
        steps_per_execution=together,
    )
    return model


def values(model: LabelDPModel) -> list[np.ndarray]:
    """Returns the values of all variables that a step may write."""
    return [np.array(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]


def same(model: LabelDPModel, before: list[np.ndarray]) -> bool:
    pairs = zip(values(model), before, strict=True)
    return all(np.array_equal(now, old, equal_nan=True) for now, old in pairs)


class OnTheHost(keras.layers.Layer):
    """A custom operation that XLA can't compile; its message would quote its inputs."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__(name="custom")
        self.backward = backward

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def run(values: Any) -> Any:
            def on_host(some: Any) -> Any:
                return tf.ensure_shape(tf.numpy_function(np.array, [some], some.dtype), some.shape)

            if self.backward:
                return tf.identity(values), on_host
            return on_host(values), tf.identity

        return run(inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("backward", "nested"), [(False, True), (True, False)])
def test_a_layer_that_xla_cannot_compile_is_named(backward: bool, nested: bool) -> None:
    layer: Any = OnTheHost(backward)
    first = keras.layers.Dense(3, name="first")
    extra = (keras.Sequential([keras.Input((D,)), first, layer]),) if nested else (first, layer)
    model = private_model(extra=extra)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"XLA can't compile layer 'custom' \(OnTheHost\)"):
        model.fit(batches(vault()), verbose=0)
    assert unchanged(model, before)


# One program, which agrees with the others.


def operations(function: Any) -> set[str]:
    """Returns the types of a function's operations, and of those that it calls."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for made in graph.library.function for node in made.node_def)]
    return {node.op for node in nodes}


HOST = {"PyFunc", "EagerPyFunc", "PyFuncStateless", "Print", "PrintV2", "Assert"}


@pytest.mark.parametrize(
    ("settings", "atol"),
    [
        ({}, 1e-5),
        ({"method": "vectorized"}, 1e-5),
        # Solved to a hundredth; rounding is multiplied by what the solver divides by.
        pytest.param({"denoiser": AltConv(8)}, 5e-3, marks=pytest.mark.slow),
    ],
    ids=["ghost", "vectorized", "AltConv"],
)
def test_eager_graph_and_xla_agree_with_the_same_noise(
    settings: dict[str, Any], atol: float
) -> None:
    def trained(**mode: bool) -> tuple[np.ndarray, float]:
        model = private_model(**settings, **mode)
        history = model.fit(batches(codes(), q=0.4, insecure_seed=3), epochs=2, verbose=0)
        weights = np.concatenate([part.ravel() for part in model.get_weights()])
        return weights, history.history["noisy_gradient_norm"][-1]

    compiled, graph, eager = (
        trained(**mode) for mode in ({"jit": True}, {"jit": False}, {"jit": False, "eager": True})
    )
    for other in (graph, eager):
        np.testing.assert_allclose(compiled[0], other[0], rtol=0.0, atol=atol)
        assert compiled[1] == pytest.approx(other[1], rel=1e-3)


@pytest.mark.slow
def test_the_program_of_a_step_has_no_host_call() -> None:
    found = {}
    row = [tf.constant(part[:10]) for part in (features(), codes(), np.ones(N, np.float32))]
    for jit in (True, False):
        model = private_model(jit=jit)

        def look(jit: bool = jit, model: Any = model) -> None:
            step = tf.function(model.train_step, autograph=False)
            found[jit] = operations(step.get_concrete_function(tuple(row)))

        model.fit(batches(codes()), callbacks=[watch(on_epoch_begin=look)], verbose=0)
    assert not found[True] & HOST
    assert "PyFunc" in found[False]  # that the search would find one


def drawn_keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns the list that every key of 256 bits goes to from now on."""
    keys, secure = [], os.urandom

    def urandom(size: int) -> bytes:
        drawn = secure(size)
        keys.extend([drawn] if size == 32 else [])
        return drawn

    monkeypatch.setattr(os, "urandom", urandom)
    return keys


@pytest.mark.slow
def test_every_step_of_a_program_has_its_own_noise_of_the_stated_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise, extra = GaussianNoise(SIGMA, source="device"), (keras.layers.Dense(300),)
    model = private_model(noise=noise, inner=keras.optimizers.SGD(1.0), extra=extra)
    moves, keys, last = [], drawn_keys(monkeypatch), [model.get_weights()]
    keys_by_step = []

    def keep() -> None:
        now = model.get_weights()
        moves.append(np.concatenate([(a - b).ravel() for a, b in zip(now, last[0], strict=True)]))
        last[0] = now
        keys_by_step.append(keys[-1])

    # No example has weight, so a step moves by its noise alone.
    fit = {"sample_weight": np.zeros(N), "batch_size": 20, "epochs": 2, "verbose": 0}
    for _ in range(2):
        model.fit(features(), codes(), callbacks=[watch(on_train_batch_end=keep)], **fit)
    steps = 2 * 2 * 5
    # Each fit has another key.
    assert len(set(keys_by_step)) == 2 and len(set(keys_by_step[: steps // 2])) == 1
    sample = np.stack(moves) / (SIGMA / 20.0)
    limit = 6.0 / np.sqrt(sample.shape[1])  # of 190 pairs; a chance of 4e-7
    assert np.max(np.abs(np.corrcoef(sample)[np.triu_indices(steps, 1)])) < limit
    low, high = scipy.stats.chi2.ppf([1e-6, 1.0 - 1e-6], sample.size)
    assert low < np.sum(sample**2) < high
    assert high < 1.21 * low  # so that noise a tenth larger or smaller would mostly be noticed


# Guards.


@pytest.mark.slow
def test_extra_steps_of_a_callback_change_nothing_and_raise() -> None:
    model, kept = private_model(metrics=["accuracy"]), []
    model.report_training_metrics = True
    more = tf.data.Dataset.from_tensors((features(), codes(), np.ones(N, np.float32)))

    def take_more() -> None:
        kept.append((model.train_function, values(model)))
        model.train_function(iter(more))

    callback = watch(on_epoch_end=take_more)
    with pytest.raises(RuntimeError, match="has not been charged"):
        model.fit(features(), codes(), batch_size=N, callbacks=[callback], verbose=0)
    function, before = kept[0]
    assert same(model, before)
    # Kept until after fit, it takes no step either.
    with pytest.raises(RuntimeError, match="has not been charged"):
        function(iter(more))
    assert same(model, before)
    model.fit(features(), codes(), batch_size=N, verbose=0)  # and another fit goes on
    assert not same(model, before)


@pytest.mark.slow
@pytest.mark.holds("training.StepGuard")
def test_steps_beyond_those_charged_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps in two executions, of which four are charged."""

    def data() -> Any:
        return batches(codes(), q=0.4, steps=6, insecure_seed=3)

    expected, kept = private_model(), []
    keep = watch(on_train_batch_end=lambda: kept.append(values(expected)))
    expected.fit(data(), callbacks=[keep], verbose=0)
    original = StepGuard.admit
    monkeypatch.setattr(StepGuard, "admit", lambda self, steps: original(self, min(steps, 4)))
    model = private_model(together=3)
    with pytest.raises(RuntimeError, match=r"step 4: .*has not been charged"):
        model.fit(data(), verbose=0)
    for now, old in zip(values(model), kept[3], strict=True):
        np.testing.assert_allclose(now, old, atol=1e-5)


@pytest.mark.holds("training.StepGuard")
def test_labels_of_a_step_that_is_not_charged_are_zeros() -> None:
    guard, labels = StepGuard(compiled=True), (tf.constant([3, 1]), tf.ones([2]))
    guard.price(GaussianNoise(SIGMA))
    assert [part.numpy().tolist() for part in guard.admitted(labels)] == [[0, 0], [0.0, 0.0]]
    guard.admit(1)
    assert [part.numpy().tolist() for part in guard.admitted(labels)] == [[3, 1], [1.0, 1.0]]

    def failing() -> dict[str, tf.Tensor]:
        guard.check_outputs({"first": tf.constant(False)}, 0)
        return {}

    guard.guarded(failing, [])
    assert [part.numpy().tolist() for part in guard.admitted(labels)] == [[0, 0], [0.0, 0.0]]


def test_a_guard_lets_through_what_was_admitted() -> None:
    guard = StepGuard()
    noise = GaussianNoise(1.0)

    def refuses() -> None:
        with pytest.raises(RuntimeError, match="has not been charged"):
            guard.take_step(noise)
        assert "has not been charged" in str(guard.error)

    guard.price(noise)
    refuses()
    guard.admit(2)
    guard.take_step(noise)
    guard.take_step(noise)
    refuses()
    guard.admit(2)
    guard.admit(1)  # does not add up
    guard.take_step(noise)
    refuses()


def overflowing() -> Any:
    """Returns a layer of ones, whose sum of features of 3e38 is infinite."""
    return keras.layers.Dense(4, kernel_initializer="ones", name="first")


@pytest.mark.slow
def test_a_model_that_overflows_stops_with_the_step_and_the_layer() -> None:
    x = features()
    model = private_model(extra=(overflowing(),), together=2)
    x[55] = 3e38  # in the sixth batch of ten
    kept: list[Any] = []
    keep = watch(on_train_batch_end=lambda: kept.append(values(model)))
    with pytest.raises(FloatingPointError, match="step 5: the output of layer 'first'"):
        model.fit(x, codes(), batch_size=10, shuffle=False, verbose=0, callbacks=[keep])
    assert int(model.optimizer.iterations) == 5
    assert len(kept) == 2
    assert all(np.all(np.isfinite(part)) for part in values(model))


@pytest.mark.slow
def test_a_step_that_is_stopped_leaves_weight_decay_undone() -> None:
    x = features()
    x[55] = 3e38  # in the sixth batch of ten
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    model, kept = private_model(inner=inner, extra=(overflowing(),)), []
    keep = watch(on_train_batch_end=lambda: kept.append(values(model)))
    with pytest.raises(FloatingPointError, match="step 5: "):
        model.fit(x, codes(), batch_size=10, shuffle=False, verbose=0, callbacks=[keep])
    assert len(kept) == 5 and same(model, kept[-1])


def test_two_threads_can_not_take_steps_at_once() -> None:
    guard, inside, private = StepGuard(compiled=True), [], optimizer()
    guard.price(private.noise)

    def run(data: Any) -> Any:
        if data == "first":  # while it is under way, another thread comes
            with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="two threads"):
                pool.submit(take, "second").result()
        inside.append(data)

    take = guard.taking_turns(run, private)
    take("first")
    take("third")
    assert inside == ["first", "third"]


class Changing(GaussianNoise):
    """Noise whose multiplier changes: the program has the first."""

    multiplier = SIGMA

    @property
    def noise_multiplier(self) -> float:  # type: ignore[override]
        return self.multiplier


@pytest.mark.slow
def test_noise_that_changes_under_way_stops_training() -> None:
    noise = Changing(SIGMA, source="device")
    model, kept = private_model(noise=noise), []

    def change() -> None:
        noise.multiplier = 10.0 * SIGMA
        kept.append(model.get_weights())

    callback = watch(on_train_batch_end=change)
    with pytest.raises(RuntimeError, match="noise was changed during training"):
        model.fit(batches(codes()), epochs=2, callbacks=[callback], verbose=0)
    assert unchanged(model, kept[0])


def test_a_program_that_can_not_be_compiled_reveals_no_label() -> None:
    def quoting(y_true: Any, y_pred: Any) -> Any:
        text = tf.strings.join(["the labels are ", tf.strings.as_string(y_true)])
        return tf.reduce_sum(y_pred, axis=1) * tf.cast(tf.strings.length(text), tf.float32)

    model = private_model(loss=quoting)
    before = values(model)
    with pytest.raises(RuntimeError, match="whose text is withheld") as caught:
        model.fit(batches(codes()), verbose=0)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert unchanged(model, before[: len(model.get_weights())])


@pytest.mark.slow
def test_noise_of_python_is_exchanged_for_that_of_the_program_and_the_statement_says_so() -> None:
    labels, model, private = vault(), network(), optimizer()
    model.compile(private, loss=LOSS, jit_compile="auto")
    assert model.jit_compile is False and private.noise.source == "host"
    model.fit(batches(labels), verbose=0)
    assert "AES-256" in str(model.guarantee()) and "ChaCha20" not in str(model.guarantee())
    with pytest.warns(UserWarning, match="from ChaCha20 instead of AES-256"):
        model.compile(private, loss=LOSS, jit_compile=True)
    assert model.jit_compile is True and private.noise.source == "device"
    assert private.noise.noise_multiplier == SIGMA
    model.fit(batches(labels), verbose=0)
    # The steps of both fits are priced alike, and each generator is named.
    assert model.guarantee().epsilon == labels.guarantee().epsilon == after(2)
    assert "AES-256" in str(model.guarantee()) and "ChaCha20" in str(model.guarantee())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.compile(private, loss=LOSS, jit_compile=True)


@pytest.mark.slow
def test_a_seed_stays_when_noise_is_exchanged() -> None:
    found = []
    for source in ("host", "device"):
        noise = GaussianNoise(SIGMA, source=source, insecure_seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if source == "host" else "error")
            model = private_model(noise=noise)
        model.fit(batches(codes(), insecure_seed=0), verbose=0)
        assert "seeded" in str(model.guarantee())
        found.append(model.get_weights())
    assert all(map(np.array_equal, *found))


class OfPython(NoiseMechanism):
    """Noise of another library, which is drawn in Python."""

    noise_multiplier = SIGMA

    def add_noise(self, clipped_sum: Any, l2_norm_clip: float, state: Any) -> Any:
        return clipped_sum, state


def test_other_noise_of_python_is_refused() -> None:
    model, private = network(), optimizer(None, noise=OfPython())
    with pytest.raises(ValueError, match="needs noise that is drawn in the compiled program"):
        model.compile(private, loss=LOSS, jit_compile=True)


@pytest.mark.slow
def test_a_saved_model_compiles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = drawn_keys(monkeypatch)
    model = private_model(noise=GaussianNoise(SIGMA, source="device"))
    model.fit(batches(codes()), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.jit_compile is True and loaded.optimizer.noise.source == "device"
    loaded.fit(batches(codes()), verbose=0)
    assert loaded.guarantee().epsilon > model.guarantee().epsilon
    secret = np.frombuffer(b"".join(keys), np.uint32).astype(np.int64)
    assert secret.size >= 8 * 4
    for variable in (*model.variables, *model.optimizer.variables):
        assert not np.isin(secret, variable.numpy()).any()
    # Nor does a checkpoint of TensorFlow hold it.
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "c"))
    shapes = [shape for _, shape in tf.train.list_variables(path)]
    assert [8] not in shapes
