"""``clipping="label_distance"`` in training: its refusals, charges, statements and steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from label_dp_cases import DELTA, LOSS, SIGMA, N, batches, features, network, optimizer

import tf_labeldp as ldp
from tf_labeldp.accounting import dp_sgd_guarantee
from tf_labeldp.training import GaussianNoise, GaussNewton, LabelDPModel, LabelDPOptimizer
from tf_labeldp.vault import Numbers, Rows

BY_DISTANCE = {"clipping": "label_distance"}
K = 2


def codes() -> np.ndarray:
    return np.arange(N) % K


def vault(num_classes: int = K) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(codes(), num_classes, budget=ldp.PrivacyBudget(3.0, DELTA))


class OtherNoise(GaussianNoise):
    """Noise of another author, accounted for gradients of norm ``l2_norm_clip``."""


def private_model(
    loss: Any = LOSS, jit: bool = False, outputs: int = K, **settings: Any
) -> LabelDPModel:
    keras.utils.set_random_seed(0)
    model = network(keras.layers.Dense(5, "tanh"), units=outputs)
    noise = settings.pop("noise", None) or GaussianNoise(SIGMA, source="device" if jit else "host")
    private = optimizer(None, clip=0.1, noise=noise, **BY_DISTANCE, **settings)
    model.compile(private, loss=loss, jit_compile=jit)
    return model


def test_the_statement_is_that_of_this_clipping() -> None:
    model, labels = private_model(), vault()
    model.fit(batches(labels), epochs=2, verbose=0)
    exact = dp_sgd_guarantee(SIGMA, 0.1, 6, DELTA, **BY_DISTANCE)
    found = model.guarantee(DELTA)
    assert found.epsilon == pytest.approx(exact.epsilon)
    assert labels.guarantee().epsilon == pytest.approx(exact.epsilon)
    assert found.epsilon > 1.02 * dp_sgd_guarantee(SIGMA, 0.1, 6, DELTA).epsilon
    assert any("for any two labels are at most twice" in text for text in found.assumptions)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_a_replaced_label_moves_a_step_by_the_distance_at_most(jit: bool) -> None:
    """The noise of a seed is the same, so what is left between two fits is the label."""
    sums = []
    for label in range(K):
        noise = GaussianNoise(1e-3, source="device" if jit else "host", insecure_seed=1)
        model = private_model(jit=jit, noise=noise)
        before = [np.array(weight) for weight in model.get_weights()]
        y = np.where(np.arange(N) == 0, label, codes())
        model.fit(features(), y, batch_size=N, verbose=0)
        moved = [(a - b) * N / 0.5 for a, b in zip(before, model.get_weights(), strict=True)]
        sums.append(np.concatenate([part.ravel() for part in moved]).astype(np.float64))
    apart = [np.linalg.norm(a - b) for a in sums for b in sums]
    assert 0.19 < max(apart) <= 0.2 * (1 + 1e-3)


def test_settings_are_fixed_and_kept() -> None:
    private = optimizer(**BY_DISTANCE)
    again = LabelDPOptimizer.from_config(private.get_config())
    assert again.clipping == private.clipping == "label_distance"
    assert LabelDPOptimizer("sgd", 1.0, 1.0).clipping == "norm"
    with pytest.raises(AttributeError):
        private.clipping = "norm"
    with pytest.raises(ValueError, match="clipping must be one of norm, label_distance, got"):
        LabelDPOptimizer("sgd", 1.0, 1.0, clipping="distance")
    with pytest.raises(ValueError, match=r"expected GaussianNoise.*got OtherNoise"):
        LabelDPOptimizer("sgd", 1.0, noise=OtherNoise(1.0), **BY_DISTANCE)


def test_other_losses_and_more_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="plain cross-entropy of logits, got loss"):
        private_model(loss=lambda y_true, y_pred: keras.ops.mean(y_pred, axis=1))
    with pytest.raises(ValueError, match=r"is for two classes.*Use clipping='norm'"):
        private_model(outputs=3)
    model = private_model(outputs=1, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    labels = vault(3)
    with pytest.raises(ValueError, match=r"expected two classes .*got 3.*'norm'"):
        model.fit(batches(labels), verbose=0)
    assert not list(labels.history())


def test_labels_that_are_no_classes_are_refused_before_anything_is_charged() -> None:
    budget = ldp.PrivacyBudget(3.0, DELTA)
    for labels in (
        ldp.PrivateLabels(np.zeros(N), Numbers(0.0, 1.0), budget=budget),
        ldp.PrivateLabels(np.zeros((N, K), int), Rows(K), budget=budget),
    ):
        model = private_model()
        with pytest.raises(ValueError, match="expected two classes for"):
            model.fit(batches(labels), verbose=0)
        assert not list(labels.history())


def test_users_and_soft_labels_are_refused() -> None:
    labels = vault()
    by_user = batches(labels, q=0.2, users=np.arange(N) // 2, max_examples_per_user=2)
    with pytest.raises(ValueError, match="got batches of users"):
        private_model().fit(by_user, verbose=0)
    assert not list(labels.history())
    soft = np.full((N, K), 1.0 / K, np.float32)
    model = private_model(loss=keras.losses.CategoricalCrossentropy(from_logits=True))
    for data in ((features(), soft), (batches(soft), None)):
        with pytest.raises(ValueError, match="some are neither"):
            model.fit(*data, verbose=0)


@pytest.mark.slow
def test_it_trains_with_a_denoiser_and_with_a_preconditioner() -> None:
    for settings in ({"denoiser": ldp.AltConv(8)}, {"preconditioner": GaussNewton(8)}):
        model = private_model(**settings)
        before = model.get_weights()
        history = model.fit(batches(vault()), verbose=0).history
        assert np.isfinite(history["noisy_gradient_norm"][0])
        assert not np.array_equal(before[0], model.get_weights()[0])
