"""What ``LabelDPModel`` states: the epsilon of what was done, for each way to draw batches."""

from __future__ import annotations

import math

import keras
import pytest
import tensorflow as tf
from label_dp_cases import DELTA, LOSS, SIGMA, N, batches, codes, features, private_model, vault

from tf_labeldp.accounting import PrivacyGuarantee, dp_sgd_guarantee
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer, SelfSpan


def same(found: PrivacyGuarantee, expected: PrivacyGuarantee) -> bool:
    rests_on = set(expected.assumptions) <= set(found.assumptions)
    numbers = (found.epsilon, found.delta, found.unit, found.relation)
    return rests_on and numbers == (
        expected.epsilon,
        expected.delta,
        expected.unit,
        expected.relation,
    )


def test_arrays_are_used_once_an_epoch_without_amplification() -> None:
    model = private_model()
    model.fit(features(), codes(), epochs=3, batch_size=8, verbose=0)
    expected = dp_sgd_guarantee(SIGMA, 1.0, 3, N**-1.1)
    assert same(model.guarantee(), expected)
    assert same(model.guarantee(DELTA), dp_sgd_guarantee(SIGMA, 1.0, 3, DELTA))


@pytest.mark.parametrize("with_vault", [True, False])
def test_poisson_batches_are_stated_as_sampled(with_vault: bool) -> None:
    model = private_model()
    model.fit(batches(vault() if with_vault else codes()), epochs=2, verbose=0)
    found = model.guarantee() if with_vault else model.guarantee(DELTA)
    assert same(found, dp_sgd_guarantee(SIGMA, 0.1, 6, DELTA))
    assert found.is_private


def test_denoisers_that_reveal_the_batch_are_stated_by_passes() -> None:
    labels = vault(epsilon=50.0)
    model = private_model(denoiser=SelfSpan(max_products=4))
    # 25 examples a batch, 4 batches a pass: an epoch of 6 steps uses an example twice at most.
    model.fit(batches(labels, q=0.25, steps=6), epochs=2, verbose=0)
    assert same(model.guarantee(), dp_sgd_guarantee(SIGMA, 1.0, 4, DELTA))
    assert labels.guarantee().epsilon == model.guarantee().epsilon


def test_the_next_epoch_is_counted_before_it_is_taken() -> None:
    model, labels, seen = private_model(), vault(), []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(
            (model.guarantee().epsilon, model.guarantee_after_next_epoch().epsilon)
        )
    )
    model.fit(batches(labels), epochs=3, callbacks=[watch], verbose=0)
    assert [now for now, _ in seen[1:]] == pytest.approx([after for _, after in seen[:-1]])
    with pytest.raises(RuntimeError, match="no fit is under way"):
        model.guarantee_after_next_epoch()


def test_of_unknown_data_nothing_is_promised() -> None:
    model = private_model()
    dataset = tf.data.Dataset.from_tensor_slices((features(), codes()))
    model.fit(dataset.batch(10, drop_remainder=True), verbose=0)
    assert model.guarantee().epsilon == math.inf
    assert any("not known how often" in text for text in model.guarantee().assumptions)
    model.fit(features(), codes(), verbose=0)  # known data do not mend it
    assert model.guarantee().epsilon == math.inf


@pytest.mark.parametrize("seeded", ["noise", "batches", "neither"])
def test_seeds_are_not_private(seeded: str) -> None:
    model = private_model(seed=1 if seeded == "noise" else None)
    model.fit(batches(codes(), seed=1 if seeded == "batches" else None), verbose=0)
    assert model.guarantee().seeded is (seeded != "neither")
    assert ("NOT PRIVATE: seeded" in str(model.guarantee())) is (seeded != "neither")


def test_a_model_compiled_anew_remembers_what_it_has_spent() -> None:
    model = private_model()
    model.fit(features(), codes(), verbose=0)
    once = model.guarantee(DELTA)
    model.compile(LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, SIGMA), loss=LOSS)
    assert model.guarantee(DELTA) == once
    model.fit(features(), codes(), verbose=0)
    assert model.guarantee(DELTA).epsilon == dp_sgd_guarantee(SIGMA, 1.0, 2, DELTA).epsilon


def test_models_that_share_weights_share_what_was_spent_on_them() -> None:
    model = private_model()
    model.fit(features(), codes(), verbose=0)
    other = LabelDPModel.from_model(model)
    other.compile(LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, SIGMA), loss=LOSS)
    assert other.guarantee(DELTA) == model.guarantee(DELTA)
    other.fit(features(), codes(), verbose=0)
    assert other.guarantee(DELTA).epsilon == dp_sgd_guarantee(SIGMA, 1.0, 2, DELTA).epsilon
    assert model.guarantee(DELTA).epsilon == other.guarantee(DELTA).epsilon


def test_nothing_is_charged_for_nothing() -> None:
    assert private_model().guarantee() == PrivacyGuarantee(epsilon=0.0)
