"""Noise and denoisers of other authors: how they are used, charged and stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import DELTA, SIGMA, batches, codes, features, private_model, unchanged
from label_dp_cases import vault as vault_of

from tf_labeldp.accounting import dp_sgd_guarantee, public_input
from tf_labeldp.training import (
    Denoiser,
    GaussianNoise,
    LabelDPModel,
    NoiseMechanism,
    PrivacySpent,
    VertexLosses,
)

CLAIM = "{} adds the noise of its dp_event: its author's claim, not this library's."
NO_EVENT = "Nothing is promised: {} states no cost of its steps (its dp_event is None)."


class Silent(NoiseMechanism):
    """Noise with the required method alone, and no stated cost."""

    def __init__(self, noise_multiplier: float) -> None:
        self.noise_multiplier = noise_multiplier

    def add_noise(self, clipped_sum: Any, l2_norm_clip: float, state: Any) -> Any:
        scale = self.noise_multiplier * l2_norm_clip
        return [part + scale * tf.random.normal(tf.shape(part)) for part in clipped_sum], state


class Stated(Silent):
    """Noise with a stated cost."""

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        return GaussianNoise(self.noise_multiplier).dp_event(sampling_probability, steps)

    def assumptions(self) -> tuple[str, ...]:
        return ("nobody predicts TensorFlow's generator",)


class Derived(GaussianNoise):
    """Inherits the event, whatever it adds."""


class Correlated(Stated):
    """Has a state: the noise of the previous step."""

    def initial_state(self, shapes: Any) -> Any:
        return [tf.zeros(shape) for shape in shapes]

    def add_noise(self, clipped_sum: Any, l2_norm_clip: float, state: Any) -> Any:
        zeros = [tf.zeros_like(part) for part in clipped_sum]
        fresh, _ = super().add_noise(zeros, l2_norm_clip, ())
        parts = zip(clipped_sum, fresh, state, strict=True)
        return [part + new - 0.5 * old for part, new, old in parts], fresh


def trained(noise: NoiseMechanism, labels: Any, epochs: int = 2) -> LabelDPModel:
    model = private_model(None, noise=noise)
    model.fit(batches(labels), epochs=epochs, verbose=0)
    return model


# Noise.


@pytest.mark.holds("training.NoiseMechanism")
def test_noise_without_a_stated_cost_promises_nothing() -> None:
    model = trained(Silent(SIGMA), codes())
    found = model.guarantee(DELTA)
    assert not found.is_private
    assert found.headline == "NOT PRIVATE: nothing is promised"
    assert found.assumptions[0] == NO_EVENT.format("Silent")
    model.fit(batches(codes()), verbose=0)
    assert model.guarantee(DELTA).epsilon == np.inf


def test_no_vault_pays_for_noise_without_a_stated_cost() -> None:
    labels, model = vault_of(), private_model(None, noise=Silent(SIGMA))
    before = model.get_weights()
    with pytest.raises(ValueError, match="expected noise with a known cost, got Silent"):
        model.fit(batches(labels), verbose=0)
    assert unchanged(model, before)
    assert labels.guarantee().epsilon == 0.0
    assert public_input(model).receipts == ()


@pytest.mark.parametrize(
    ("kind", "with_vault"), [(Stated, False), (Derived, True), (Correlated, True)]
)
def test_noise_of_another_is_stated_as_its_authors_claim(kind: Any, with_vault: bool) -> None:
    labels = vault_of()
    model = trained(kind(SIGMA), labels if with_vault else codes())
    found = model.guarantee(DELTA)
    assert found.epsilon == dp_sgd_guarantee(SIGMA, 0.1, 6, DELTA).epsilon
    assert found.assumptions.count(CLAIM.format(kind.__name__)) == 1
    assert set(kind(SIGMA).assumptions()) <= set(found.assumptions)
    if with_vault:
        assert labels.guarantee().epsilon == found.epsilon
        assert CLAIM.format(kind.__name__) in labels.guarantee().assumptions


def test_the_claim_stays_with_the_weights(tmp_path: Path, forget: Any) -> None:
    model = trained(Stated(SIGMA), vault_of())
    model.save(tmp_path / "model.keras")
    forget()
    again = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Stated": Stated})
    assert type(again.optimizer.noise) is Stated
    assert again.guarantee() == model.guarantee()
    # Also without the class, and after training with other noise.
    weights = private_model()
    model.save_weights(tmp_path / "some.weights.h5")
    weights.load_weights(tmp_path / "some.weights.h5")
    weights.fit(batches(vault_of()), verbose=0)
    assert CLAIM.format("Stated") in weights.guarantee().assumptions
    assert weights.guarantee().epsilon == dp_sgd_guarantee(SIGMA, 0.1, 9, DELTA).epsilon


def test_an_event_that_costs_more_is_charged_in_full() -> None:
    class Twice(Stated):
        def dp_event(self, sampling_probability: float, steps: int) -> Any:
            return super().dp_event(sampling_probability, 2 * steps)

    labels = vault_of()
    model = trained(Twice(SIGMA), labels)
    assert labels.guarantee().epsilon == dp_sgd_guarantee(SIGMA, 0.1, 12, DELTA).epsilon
    assert model.guarantee().epsilon == labels.guarantee().epsilon
    target = dp_sgd_guarantee(SIGMA, 0.1, 13, DELTA).epsilon  # two epochs are 12, three 18
    history = private_model(None, noise=Twice(SIGMA)).fit(
        batches(codes()), epochs=5, callbacks=[PrivacySpent(DELTA, target, 0)], verbose=0
    )
    assert len(history.history["epsilon"]) == 2


def test_noise_that_turns_out_to_be_seeded_is_stated_so() -> None:
    class Late(Stated):
        def add_noise(self, clipped_sum: Any, l2_norm_clip: float, state: Any) -> Any:
            self.seeded = True
            return super().add_noise(clipped_sum, l2_norm_clip, state)

    labels = vault_of()
    model = trained(Late(SIGMA), labels, epochs=1)
    expected = dp_sgd_guarantee(SIGMA, 0.1, 3, DELTA).epsilon
    assert model.guarantee(DELTA).epsilon == expected
    assert model.guarantee(DELTA).seeded
    assert model.guarantee(DELTA).headline.startswith("NOT PRIVATE: seeded")
    assert labels.guarantee().seeded
    assert labels.guarantee().epsilon == expected


# Denoisers.


class Scaled(Denoiser):
    """Needs neither the batch nor other examples."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def denoise(self, gradients: Any, vertices: Any, state: Any) -> Any:
        assert vertices is None
        return [self.factor * part for part in gradients], state, {"factor": tf.constant(7.0)}

    def get_config(self) -> dict[str, Any]:
        return {"factor": self.factor}


class Averaged(Denoiser):
    """Keeps a moving average of noisy gradients."""

    def initial_state(self, shapes: Any) -> Any:
        return [tf.zeros(shape) for shape in shapes]

    def denoise(self, gradients: Any, vertices: Any, state: Any) -> Any:
        mean = [0.5 * old + 0.5 * new for old, new in zip(state, gradients, strict=True)]
        return mean, mean, {}


@pytest.mark.parametrize("data", [(batches(codes()),), (features(), codes())])
def test_a_denoiser_that_needs_no_examples_is_used(data: Any) -> None:
    model = private_model(noise_multiplier=1e-9, denoiser=Scaled(0.0))
    before = model.get_weights()
    history = model.fit(*data, verbose=0).history
    assert unchanged(model, before)
    assert history["factor"] == [7.0]


def test_a_denoiser_costs_nothing() -> None:
    labels = vault_of()
    model = private_model(denoiser=Averaged())
    model.fit(batches(labels), epochs=2, verbose=0)
    assert labels.guarantee().epsilon == dp_sgd_guarantee(SIGMA, 0.1, 6, DELTA).epsilon
    # It has private inputs alone, so nothing rests on a claim of its author.
    assert not any("claim" in text for text in model.guarantee().assumptions)


def state_of(model: LabelDPModel) -> list[np.ndarray]:
    variables = model.optimizer.variables
    return [np.array(v) for v in variables if v.name.startswith("denoiser")]


def test_a_state_of_a_denoiser_is_kept_and_saved(tmp_path: Path) -> None:
    model = private_model(denoiser=Averaged())
    model.fit(batches(codes()), epochs=2, verbose=0)
    state = state_of(model)
    assert all(np.any(part != 0.0) for part in state)
    model.save(tmp_path / "model.keras")
    kinds = {"Averaged": Averaged}
    again = keras.models.load_model(tmp_path / "model.keras", custom_objects=kinds)
    for old, new in zip(state, state_of(again), strict=True):
        np.testing.assert_array_equal(old, new)
    assert again.guarantee() == model.guarantee()


def test_a_denoiser_of_another_that_shows_the_batch_gets_no_amplification() -> None:
    class OfTheBatch(Denoiser):
        reveals_batch = True

        def denoise(self, gradients: Any, vertices: VertexLosses, state: Any) -> Any:
            return gradients, state, {"rows": tf.reduce_sum(vertices.mask)}

    labels = vault_of(epsilon=50.0)
    model = private_model(denoiser=OfTheBatch())
    history = model.fit(batches(labels, q=0.25, steps=6), epochs=2, verbose=0).history
    assert history["rows"] == [25.0, 25.0]
    assert labels.guarantee().epsilon == dp_sgd_guarantee(SIGMA, 1.0, 4, DELTA).epsilon
