"""One contract for all denoisers, and each against its definition."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import poisson_batches
from tf_labeldp.gradients import GradientOperator, project_onto_hull
from tf_labeldp.training import (
    AltConv,
    Denoiser,
    LabelDPModel,
    LabelDPOptimizer,
    NoOp,
    SelfConv,
    SelfSpan,
    VertexLosses,
)

N, D, K, CLIP = 6, 4, 3, 1.0
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ALL = [
    NoOp(),
    SelfSpan(),
    SelfConv(smoothing=0.5, hull="joint"),
    AltConv(N),
    AltConv(N, solver="pgd", step_size=0.1, steps=5),
]


def name_of(denoiser: Denoiser) -> str:
    """A process-stable id: the class and the settings that are not its defaults."""
    defaults = type(denoiser)(**({"num_examples": N} if isinstance(denoiser, AltConv) else {}))
    plain = defaults.get_config()
    own = {k: getattr(v, "__name__", v) for k, v in denoiser.get_config().items() if v != plain[k]}
    return "-".join([type(denoiser).__name__, *(f"{k}={v}" for k, v in own.items())])


@pytest.fixture(params=ALL, ids=name_of)
def denoiser(request: pytest.FixtureRequest) -> Denoiser:
    return request.param


def weights() -> tf.Variable:
    values = 0.3 * np.random.default_rng(1).normal(size=(D, K))
    return tf.Variable(values.astype(np.float32))


def features(rows: int = N) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(rows, D)).astype(np.float32)


def vertices_of(w: tf.Variable, mask: Any = None, x: Any = None) -> VertexLosses:
    x = features() if x is None else x
    return VertexLosses(
        losses=lambda: -tf.nn.log_softmax(x @ w),
        predictions=lambda: tf.nn.softmax(x @ w),
        variables=[w],
        mask=mask,
        noise_stddev=0.2,
    )


def columns(w: tf.Variable, x: Any = None) -> np.ndarray:
    """The matrix G (d, N K) itself, by one tape a column."""
    x = features() if x is None else x
    found = []
    for i in range(len(x)):
        for k in range(K):
            with tf.GradientTape() as tape:
                loss = -tf.nn.log_softmax(x[i : i + 1] @ w)[0, k]
            found.append(tape.gradient(loss, w).numpy().ravel())
    return np.stack(found, axis=1).astype(np.float64)


def noisy(seed: int = 3) -> list[tf.Tensor]:
    return [tf.constant(np.random.default_rng(seed).normal(size=(D, K)).astype(np.float32))]


def denoised(denoiser: Denoiser, gradients: list[tf.Tensor], vertices: VertexLosses) -> Any:
    return denoiser.denoise(gradients, vertices, denoiser.initial_state([(D, K)]))


# The contract.


def test_configs_come_back(denoiser: Denoiser) -> None:
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(denoiser))
    assert type(again) is type(denoiser)
    assert again.get_config() == denoiser.get_config()
    arguments = set(inspect.signature(type(denoiser)).parameters) - {"args", "kwargs"}
    assert set(denoiser.get_config()) == arguments  # every one is kept, and in sight of help()
    if isinstance(denoiser, (AltConv, SelfConv)):
        of_0_2 = {**denoiser.get_config(), "smooth_towards": "uniform"}
        assert type(denoiser).from_config(of_0_2).get_config() == denoiser.get_config()


def test_files_of_0_2_that_smooth_towards_predictions_warn() -> None:
    of_0_2 = {**AltConv(8, smoothing=0.75).get_config(), "smooth_towards": "predictions"}
    with pytest.warns(UserWarning, match="towards uniform labels.*compile the model again"):
        AltConv.from_config(of_0_2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AltConv.from_config({**of_0_2, "smoothing": 1.0}).smoothing == 1.0


def test_the_result_is_shaped_like_the_gradient(denoiser: Denoiser) -> None:
    w = weights()
    before = w.numpy()
    [point], state, report = denoised(denoiser, noisy(), vertices_of(w))
    np.testing.assert_array_equal(point, denoised(denoiser, noisy(), vertices_of(w))[0][0])
    assert point.shape == (D, K)
    assert point.dtype == tf.float32
    assert np.all(np.isfinite(point))
    assert all(np.ndim(value) == 0 and np.isfinite(value) for value in report.values())
    tf.nest.assert_same_structure(state, denoiser.initial_state([(D, K)]))
    np.testing.assert_array_equal(before, w.numpy())
    denoiser.denoise(noisy(4), vertices_of(w), state)  # the next step takes the state


@pytest.mark.holds("training.Denoiser")
def test_no_label_is_within_reach() -> None:
    """Its inputs are the noisy gradient, public examples and the model, all without labels."""
    for denoiser in ALL:
        arguments = list(inspect.signature(denoiser.denoise).parameters)
        assert arguments == ["gradients", "vertices", "state"]
    assert {field.name for field in dataclasses.fields(VertexLosses)} == {
        *("losses", "predictions", "variables", "mask", "noise_stddev", "cross_entropy")
    }


class Recording(Denoiser):
    """Keeps the inputs of a denoiser in training."""

    def __init__(self, reveals_batch: bool) -> None:
        self.reveals_batch, self.num_examples = reveals_batch, 0 if reveals_batch else 8
        self.seen: list[Any] = []

    def denoise(self, gradients: Any, vertices: VertexLosses, state: Any) -> Any:
        self.seen.append((vertices.losses(), vertices.predictions(), vertices.mask))
        return gradients, state, {}


def trained_with(denoiser: Denoiser, labels: np.ndarray, steps: int, **settings: Any) -> Any:
    """Returns a model trained on 40 examples with these labels."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    inner = keras.optimizers.SGD(0.1)
    optimizer = LabelDPOptimizer(inner, CLIP, 1.0, denoiser, insecure_seed=0)
    model.compile(optimizer, loss=LOSS, **settings)
    sampling = {"sampling_probability": 0.25, "steps": steps, "insecure_seed": 3}
    model.fit(poisson_batches(features(40), labels, **sampling), verbose=0)
    return model


LABELS = np.arange(40) % K


@pytest.mark.parametrize("reveals_batch", [True, False])
def test_permuted_labels_leave_all_inputs_of_a_denoiser(reveals_batch: bool) -> None:
    inputs = []
    for labels in (LABELS, LABELS[::-1].copy()):
        recording = Recording(reveals_batch)
        trained_with(recording, labels, steps=1, run_eagerly=True)
        inputs.append([np.array(part) for part in recording.seen[0] if part is not None])
    for first, second in zip(*inputs, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("denoiser", [AltConv(8), SelfConv()], ids=["AltConv", "SelfConv"])
def test_weights_and_states_follow_from_released_gradients(
    denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noisy gradients, other labels change neither weights nor a denoiser's state."""
    release = LabelDPOptimizer.add_noise

    def trained(labels: np.ndarray) -> list[np.ndarray]:
        model = trained_with(denoiser, labels, steps=3)
        state = [v for v in model.optimizer.variables if v.name.startswith("denoiser")]
        assert float(state[0]) > 0.0
        return [*model.get_weights(), *(keras.ops.convert_to_numpy(part) for part in state)]

    def same() -> bool:
        pairs = zip(trained(LABELS), trained(LABELS[::-1].copy()), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    assert not same()
    monkeypatch.setattr(
        LabelDPOptimizer,
        "add_noise",
        lambda self, clipped: release(self, [tf.ones_like(part) for part in clipped]),
    )
    assert same()


# Each against its definition.


def test_noop_changes_nothing() -> None:
    gradients = noisy()
    found, state, report = NoOp().denoise(gradients, vertices_of(weights()), ())
    assert found is gradients
    assert (state, report) == ((), {})


@pytest.mark.parametrize(
    ("kind", "smoothing"), [(SelfConv, 1.0), (SelfConv, 0.75), (AltConv, 0.75)]
)
def test_hulls_are_the_projection_and_then_smoothing(kind: Any, smoothing: float) -> None:
    w = weights()
    mask = tf.constant([1.0] * 4 + [0.0] * 2) if kind is SelfConv else None
    vertices = vertices_of(w, mask)
    settings = {"smoothing": smoothing, "max_products": 20, "residual": 0.0}
    denoiser = kind(**settings) if kind is SelfConv else kind(N, **settings)
    [point], curvature, report = denoised(denoiser, noisy(), vertices)
    predictions = vertices.predictions()
    operator = GradientOperator(vertices.losses, [w])
    found = project_onto_hull(
        operator, noisy(), predictions=predictions, max_products=20, mask=mask
    )
    by_hand = columns(w) @ np.ravel(found.smoothed(smoothing, mask))
    np.testing.assert_allclose(point.numpy().ravel(), by_hand, atol=1e-5)
    assert float(curvature) == pytest.approx(float(found.curvature), rel=1e-5)
    assert float(report["projection_products"]) == float(found.num_products)
    assert float(report["projection_gap"]) == pytest.approx(float(found.relative_gap), abs=1e-6)


def test_the_residual_is_added_back_after_smoothing() -> None:
    smoothing, w = 0.75, weights()
    [projected], _, _ = denoised(AltConv(N, smoothing, residual=0.0), noisy(), vertices_of(w))
    [found], _, _ = denoised(AltConv(N, smoothing, residual=0.25), noisy(), vertices_of(w))
    np.testing.assert_allclose(found, 0.75 * projected + 0.25 * noisy()[0], atol=1e-6)
    assert np.max(np.abs(projected - noisy()[0])) > 0.1


@pytest.mark.parametrize("kind", [SelfSpan, lambda **kinds: AltConv(N, **kinds)])
def test_kinds_of_products_are_used_and_agree(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    class Counted(tf.autodiff.ForwardAccumulator):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            passes.append(None)

    monkeypatch.setattr(tf.autodiff, "ForwardAccumulator", Counted)
    w = weights()
    [expected], _, _ = denoised(kind(), noisy(), vertices_of(w))
    assert not passes
    [found], _, report = denoised(kind(products="forward"), noisy(), vertices_of(w))
    assert len(passes) >= float(report["projection_products"]) // 2  # half are with the transpose
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: AltConv(0), "num_examples must be at least 1"),
        (lambda: AltConv(4, smoothing=0.0), r"smoothing must be in \(0, 1\], got 0"),
        (lambda: AltConv(4, residual=1.0), r"residual must be in \[0, 1\), got 1"),
        (lambda: AltConv(4, hull="box"), "hull must be one of"),
        (lambda: AltConv(4, max_products=2), "max_products must be at least 4"),
        (lambda: AltConv(4, step_size=0.1), "need solver='pgd'"),
        (lambda: AltConv(4, products="fast"), "products must be one of double_backward, forward"),
        (lambda: SelfSpan(tolerance=1e-7), r"tolerance must be in \[1e-06, inf\), got 1e-07"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_arguments_out_of_range(make: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make()


# In training.


def with_dropout() -> LabelDPModel:
    """Random layers inside and outside of a nested model, which have no effect in inference."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dropout(0.4), layers.Dense(6), layers.GaussianNoise(0.3)]
    )
    inputs = keras.Input((D,))
    hidden = layers.Dropout(0.2)(layers.Dense(8, "tanh")(inputs))
    return LabelDPModel(inputs, layers.Dense(K)(inner(hidden)))


def one_step(denoiser: Denoiser | None) -> np.ndarray:
    """Returns the gradient of a step without clipping or noise, as the weights moved by it."""
    model = with_dropout()
    before = model.get_weights()
    optimizer = LabelDPOptimizer(keras.optimizers.SGD(1.0), 1e3, 1e-9, denoiser, insecure_seed=1)
    model.compile(optimizer, loss=LOSS)
    batches = poisson_batches(
        features(), np.arange(N) % K, sampling_probability=1.0, steps=1, insecure_seed=1
    )
    model.fit(batches, verbose=0)
    return np.concatenate(
        [np.ravel(old - new) for old, new in zip(before, model.get_weights(), strict=True)]
    )


@pytest.mark.slow
def test_with_dropout_the_clean_gradient_is_its_own_projection() -> None:
    """Hull and span are of the function that the gradient is of: same mode, same masks."""
    clean = one_step(None)
    for denoiser in (SelfConv(relative_gap=1e-7, max_products=800), SelfSpan(1e-5, 400)):
        projected = one_step(denoiser)
        np.testing.assert_allclose(projected, clean, atol=1e-3 * np.linalg.norm(clean))
