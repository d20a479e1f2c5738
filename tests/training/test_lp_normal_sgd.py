"""LP-Normal-SGD (``ghazi2021``, Algorithm 6) is Self-Span on steps of a single example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from label_dp_cases import recorded

import tf_labeldp as ldp
from tf_labeldp.accounting import dp_sgd_guarantee
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer, NoOp, SelfSpan

N, D, K, LIPSCHITZ, SIGMA, RATE = 12, 3, 4, 8.0, 0.5, 0.2


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(N, D)).astype(np.float32), rng.integers(0, K, N)


def private_model(denoiser: ldp.training.Denoiser | None = None) -> LabelDPModel:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    # No gradient is as long as the Lipschitz constant, so that none is clipped, as in the paper.
    optimizer = LabelDPOptimizer(
        keras.optimizers.SGD(RATE),
        LIPSCHITZ,
        SIGMA,
        denoiser or SelfSpan(tolerance=1e-5, max_products=60),
        insecure_seed=6,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    return model


def algorithm_6(
    kernel: np.ndarray,
    bias: np.ndarray,
    project_noise: bool = True,
    order: Sequence[int] = range(N),
) -> np.ndarray:
    """The algorithm in numpy, for a linear model with cross-entropy; W is everything."""
    x, y = data()
    rng = np.random.default_rng(6)
    w = np.concatenate([kernel.ravel(), bias]).astype(np.float64)
    for t in order:
        scores = x[t] @ w[: D * K].reshape(D, K) + w[D * K :]
        p = np.exp(scores - scores.max())
        p /= p.sum()
        by_logit = p - np.eye(K)  # row k: the gradient by the logits for label k
        gradients = np.stack([np.concatenate([np.outer(x[t], g).ravel(), g]) for g in by_logit])
        noise = SIGMA * LIPSCHITZ * rng.standard_normal(w.size)
        if project_noise:
            basis, sizes, _ = np.linalg.svd(gradients.T, full_matrices=False)
            basis = basis[:, sizes > 1e-9]
            noise = basis @ (basis.T @ noise)
        w -= RATE * (gradients[y[t]] + noise)
    return w


def test_self_span_on_single_examples_is_lp_normal_sgd() -> None:
    model = private_model()
    start = model.get_weights()
    model.fit(*data(), batch_size=1, shuffle=False, verbose=0)
    found = np.concatenate([part.ravel() for part in model.get_weights()])
    # The span is found to 1e-5 of gradients of length 20, over 12 steps of 0.2.
    np.testing.assert_allclose(found, algorithm_6(*start), atol=1e-3)
    assert np.max(np.abs(found - algorithm_6(*start, project_noise=False))) > 0.1


def vault() -> ldp.PrivateLabels:
    return ldp.PrivateLabels(data()[1], K, budget=ldp.PrivacyBudget(100.0, delta=1e-3))


def single_examples(labels: ldp.PrivateLabels) -> Any:
    return ldp.data.poisson_batches(
        data()[0], labels, sampling_probability=1 / N, steps=N, insecure_seed=3
    )


@pytest.mark.slow
@pytest.mark.holds("data.poisson_batches")
def test_lp_normal_sgd_on_a_vault_uses_each_label_once_per_epoch() -> None:
    model, labels = private_model(), vault()
    start = model.get_weights()
    model.fit(single_examples(labels), verbose=0)
    # The same seed gives the same order.
    steps = recorded(private_model(), single_examples(vault()))
    drawn = [x[weights > 0] for x, _, weights in steps]
    order = [int(np.flatnonzero(np.all(data()[0] == row, axis=1))[0]) for (row,) in drawn]
    assert sorted(order) == list(range(N)) and order != list(range(N))
    found = np.concatenate([part.ravel() for part in model.get_weights()])
    np.testing.assert_allclose(found, algorithm_6(*start, order=order), atol=1e-3)
    # One use without amplification, however many steps.
    once = dp_sgd_guarantee(SIGMA, 1.0, 1, 1e-3).epsilon
    assert labels.guarantee().epsilon == pytest.approx(once, rel=1e-9)
    assert model.guarantee().epsilon == labels.guarantee().epsilon
    model.fit(single_examples(labels), verbose=0)
    twice = dp_sgd_guarantee(SIGMA, 1.0, 2, 1e-3).epsilon
    assert labels.guarantee().epsilon == pytest.approx(twice, rel=1e-9)


def test_single_examples_are_for_self_span_alone() -> None:
    model, labels = private_model(NoOp()), vault()
    with pytest.raises(ValueError, match=r"mean batch must be at least 2, got 1\. SelfSpan alone"):
        model.fit(single_examples(labels), verbose=0)
    assert labels.guarantee().epsilon == 0.0
