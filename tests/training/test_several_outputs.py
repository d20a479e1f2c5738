"""Models with several outputs: one clip over the sum of their losses, and one unit of privacy."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import DELTA, SIGMA, D, K, N, after, features, optimizer, recorded

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError, dp_sgd_charge, public_input
from tf_labeldp.data import poisson_batches
from tf_labeldp.plugins import Batch, Clip, OutputLosses, PerExampleClipping, Speed
from tf_labeldp.training import GaussNewton, LabelDPModel, SelfConv
from tf_labeldp.vault import LabelStoreError, Rows, Store

layers, losses = keras.layers, keras.losses
RNG = np.random.default_rng(5)
CLICKS, KINDS = RNG.integers(0, 2, N), RNG.integers(0, K, N)
LOSSES = {
    "click": losses.BinaryCrossentropy(from_logits=True),
    "kind": losses.SparseCategoricalCrossentropy(from_logits=True),
}
WEIGHTS = {"click": 0.5, "kind": 2.0}
Y = {"click": CLICKS[:, None].astype(np.float32), "kind": KINDS}


def outputs_of(x: Any) -> dict[str, Any]:
    hidden = layers.Dense(5, "tanh", name="hidden")(x)
    return {"click": layers.Dense(1, name="click")(hidden), "kind": layers.Dense(K, name="kind")(x)}


def two_headed(form: str = "dict") -> LabelDPModel:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((D,))
    outputs = outputs_of(inputs)
    return LabelDPModel(inputs, outputs if form == "dict" else list(outputs.values()))


def compiled(form: str = "dict", **settings: Any) -> LabelDPModel:
    model = two_headed(form)
    settings = {"loss": LOSSES, "loss_weights": WEIGHTS, **settings}
    model.compile(optimizer(settings.pop("noise", SIGMA)), **settings)
    return model


def vault(labels: Any, kind: Any, epsilon: float = 3.0, **settings: Any) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(labels, kind, budget=ldp.PrivacyBudget(epsilon, DELTA), **settings)


def two_vaults(**settings: Any) -> dict[str, ldp.PrivateLabels]:
    return {"click": vault(CLICKS, 2, **settings), "kind": vault(KINDS, K, **settings)}


def batches(labels: Any, q: float = 0.1, steps: int = 3, **settings: Any) -> Any:
    return poisson_batches(features(), labels, sampling_probability=q, steps=steps, **settings)


def reference(model: Any, x: Any, y: Any, clip: float) -> list[np.ndarray]:
    """The sum of the clipped gradients of the examples, one after the other."""
    total = [np.zeros(variable.shape) for variable in model.trainable_variables]
    for row in range(len(x)):
        with tf.GradientTape() as tape:
            found = model(x[row : row + 1], training=True)
            found = found if isinstance(found, dict) else dict(zip(LOSSES, found, strict=True))
            loss = sum(
                WEIGHTS[name] * tf.reduce_sum(LOSSES[name](y[name][row : row + 1], found[name]))
                for name in LOSSES
            )
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        norm = float(tf.linalg.global_norm(gradients))
        factor = min(1.0, clip / norm)
        total = [t + factor * g.numpy() for t, g in zip(total, gradients, strict=True)]
    return total


def clipped(model: Any, y: Any, clip: float, method: str) -> list[np.ndarray]:
    loss = OutputLosses(model, LOSSES, WEIGHTS)
    clipping = PerExampleClipping(model, Speed(method))
    batch = Batch(features(), y, np.ones(N, np.float32), loss)
    return [np.asarray(part) for part in clipping.clipped_sum(batch, Clip(clip)).gradients]


@pytest.mark.slow
@pytest.mark.holds("training.LabelDPModel")
@pytest.mark.parametrize("method", ["ghost", "vectorized"])
@pytest.mark.parametrize("form", ["dict", "list"])
def test_one_clip_bounds_the_gradient_of_the_weighted_sum(method: str, form: str) -> None:
    """The sum is that of a loop over examples; all labels of one example move it by at most 2 C."""
    model, clip = two_headed(form), 0.7
    expected = reference(model, features(), Y, clip)
    found = clipped(model, Y, clip, method)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    largest = 0.0
    for kind in range(K):
        changed = {"click": Y["click"].copy(), "kind": Y["kind"].copy()}
        changed["click"][7], changed["kind"][7] = 1 - changed["click"][7], kind
        others = clipped(model, changed, clip, method)
        moved = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(others, found, strict=True)))
        largest = max(largest, moved)
    assert clip < largest <= 2 * clip * (1 + 1e-4)


@pytest.mark.slow
def test_a_step_of_fit_is_that_of_the_reference() -> None:
    for labels in (Y, [Y["click"], Y["kind"]]):
        model = compiled("list", noise=1e-9, loss_weights=list(WEIGHTS.values()))
        before = model.get_weights()
        expected = reference(model, features(), Y, 1.0)
        model.fit(features(), labels, batch_size=N, verbose=0)
        for old, new, part in zip(before, model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(new - old, -0.5 * part / N, atol=1e-6)


# Statements.


@pytest.mark.slow
@pytest.mark.holds("training.LabelDPModel")
def test_several_vaults_are_charged_for_one_use(tmp_path: Any) -> None:
    """Each statement has the cost of the steps once, with and without stores."""
    for settings in ({}, {"people": "customers"}, {"store": None}, {"store": True}):
        labels = {}
        for name, values, size in (("click", CLICKS, 2), ("kind", KINDS, K)):
            own = dict(settings)
            if "store" in own:
                path = tmp_path / f"project is {own['store']}" / name
                own["store"] = Store(path, project=own["store"])
            labels[name] = vault(values, size, **own)
        model = compiled()
        model.fit(batches(labels), epochs=2, verbose=0)
        stated = model.guarantee()
        assert stated.epsilon == pytest.approx(after(2))
        assert stated.unit == "the whole row of labels of one training example"
        assert "same-examples" in {note.code for note in stated.assumptions}
        for one in labels.values():
            assert one.guarantee().epsilon == pytest.approx(after(2))
            assert len(one.history()) == 1
            assert public_input(model).receipts[-1].use in {r.use for r in one.receipts}
        # Noisy labels of one of the vaults add their cost, whichever it is.
        for one in labels.values():
            noisy = one.randomize(ldp.RandomizedResponse(0.5, one.num_classes))
            both = ldp.accounting.Receipts(
                (*public_input(model).receipts, *noisy.receipts)
            ).guarantee(DELTA)
            assert both.epsilon > after(2) + 0.1
    assert len(public_input(model).receipts) == 4


@pytest.mark.slow
def test_receipts_of_a_shared_use_travel_through_files(tmp_path: Any, forget: Any) -> None:
    model = compiled()
    model.fit(batches(two_vaults()), epochs=1, verbose=0)
    model.save(tmp_path / "m.keras")
    forget()
    loaded = ldp.load_model(tmp_path / "m.keras")
    assert loaded.guarantee().epsilon == model.guarantee().epsilon == pytest.approx(after(1))
    assert loaded.get_compile_config()["loss_weights"] == WEIGHTS


@pytest.mark.slow
def test_the_budget_of_each_vault_is_checked_before_any_is_charged() -> None:
    labels = {"click": vault(CLICKS, 2), "kind": vault(KINDS, K, epsilon=after(1) * 1.01)}
    with pytest.raises(BudgetExceededError):
        compiled().fit(batches(labels), epochs=2, verbose=0)
    assert all(one.guarantee().epsilon == 0.0 for one in labels.values())
    compiled().fit(batches(labels), epochs=1, verbose=0)
    assert all(one.guarantee().epsilon == pytest.approx(after(1)) for one in labels.values())


def test_epochs_that_one_vault_reserved_are_checked_with_the_others() -> None:
    labels = {"click": vault(CLICKS, 2), "kind": vault(KINDS, K, epsilon=after(1) * 1.01)}
    epoch = dp_sgd_charge(SIGMA, 0.1, 3, DELTA)
    with labels["click"].reserve({"training": [epoch] * 2}):
        with pytest.raises(BudgetExceededError, match="2 epochs of LabelDPModel"):
            compiled().fit(batches(labels), epochs=2, verbose=0)
    assert not labels["click"].receipts and not labels["kind"].receipts


@pytest.mark.slow
def test_a_vault_of_rows_gives_columns_to_outputs() -> None:
    rows = RNG.integers(0, 2, (N, 3))
    labels = vault(rows, Rows(3))

    def made(noise: float) -> LabelDPModel:
        inputs = keras.Input((D,))
        outputs = {"tags": layers.Dense(2)(inputs), "click": layers.Dense(1)(inputs)}
        model = LabelDPModel(inputs, outputs)
        model.compile(optimizer(noise), loss=losses.BinaryCrossentropy(from_logits=True))
        return model

    sampled = batches(labels, q=1.0, steps=1, columns={"tags": [2, 0], "click": 1})
    with pytest.raises(BudgetExceededError):
        made(1e-9).fit(sampled, verbose=0)
    model = made(SIGMA)
    model.fit(batches(labels, columns={"tags": [2, 0], "click": 1}), verbose=0)
    assert labels.guarantee().epsilon == pytest.approx(after(1))
    assert model.guarantee().unit == "the whole row of labels of one training example"
    [(_, seen, _)] = recorded(made(50.0), sampled)
    np.testing.assert_array_equal(seen["tags"][:N], rows[:, [2, 0]])
    np.testing.assert_array_equal(seen["click"][:N, 0], rows[:, 1])


def test_one_vault_for_two_outputs_is_one_label() -> None:
    labels = vault(KINDS, K)
    inputs = keras.Input((D,))
    heads = {name: layers.Dense(K, name=name)(inputs) for name in ("main", "auxiliary")}
    model = LabelDPModel(inputs, heads)
    model.compile(optimizer(), loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(batches({"main": labels, "auxiliary": labels}), verbose=0)
    assert model.guarantee().unit == "the label of one training example"
    assert labels.guarantee().epsilon == pytest.approx(after(1)) == model.guarantee().epsilon


@pytest.mark.slow
def test_validation_and_reported_metrics_of_several_outputs() -> None:
    model = compiled("list", metrics={"kind": ["accuracy"]})
    history = model.fit(batches(two_vaults()), validation_data=(features(), Y), verbose=0)
    assert {"val_loss", "val_kind_accuracy"} <= set(history.history)
    assert not any(name.endswith("accuracy") for name in history.history if name[:3] != "val")
    model.report_training_metrics = True
    history = model.fit(features(), Y, batch_size=20, verbose=0)
    assert {"loss", "kind_accuracy"} <= set(history.history)


# What is refused, before anything is charged.


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"loss": {"click": "mse", "other": "mse"}}, r"a loss for the outputs .*got one for"),
        ({"loss": ["mse"]}, "a loss for each of the 2 outputs, got 1"),
        ({"loss_weights": {"other": 1.0}}, r"a weight for the outputs .*got one for"),
        ({"loss_weights": 2.0}, r"expected loss_weights for the outputs .*got 2.0"),
        ({"loss_weights": {"kind": np.nan}}, "loss_weights must be"),
        ({"loss": lambda y, p: y, "loss_weights": WEIGHTS}, "one function of all outputs"),
        ({"loss": {**LOSSES, "kind": "sparse_categorical_crossentropy"}}, "ends in 'kind'"),
    ],
    ids=range(7),
)
def test_losses_that_do_not_fit_the_outputs(settings: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        compiled(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"denoiser": SelfConv()}, {"preconditioner": GaussNewton(8)}, {"clipping": "label_distance"}],
    ids=["denoiser", "preconditioner", "label_distance"],
)
def test_settings_for_one_output(settings: Any) -> None:
    with pytest.raises(ValueError, match="expected a model with one output for"):
        two_headed().compile(optimizer(**settings), loss=LOSSES)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"clipping": "label_distance"}, {}], ids=["distance", "norm"])
def test_one_output_takes_its_labels_by_name(settings: Any) -> None:
    trained = []
    for named in (True, False):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((D,))
        model = LabelDPModel(inputs, layers.Dense(1, name="click")(inputs))
        model.compile(optimizer(insecure_seed=0, **settings), loss=LOSSES["click"])
        labels = vault(CLICKS, 2, 50.0)
        model.fit(batches({"click": labels} if named else labels, insecure_seed=0), verbose=0)
        trained.append(model.get_weights()[0])
    np.testing.assert_array_equal(*trained)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: vault(KINDS, K), "got labels without names. Give a dict"),
        (lambda: {"click": vault(CLICKS, 2)}, r"outputs \['click', 'kind'\], got labels of"),
        (
            lambda: {**two_vaults(), "more": vault(CLICKS, 2)},
            r"got labels of \['click', 'kind', 'm",
        ),
        (lambda: {"click": vault(KINDS, K), "kind": vault(KINDS, K)}, "labels of two classes for"),
        (lambda: (vault(CLICKS, 2),), "got 1 labels"),
    ],
    ids=range(5),
)
def test_labels_that_do_not_fit_the_outputs(make: Any, expected: str) -> None:
    labels, model = make(), compiled()
    with pytest.raises(ValueError, match=expected):
        model.fit(batches(labels), verbose=0)
    vaults = labels.values() if isinstance(labels, dict) else labels
    vaults = (labels,) if isinstance(labels, ldp.PrivateLabels) else vaults
    assert all(not one.receipts for one in vaults)
    assert model.guarantee().headline == "no record of any label"


def test_vaults_that_are_not_of_the_same_examples() -> None:
    of_others = {"click": vault(CLICKS, 2, people="a"), "kind": vault(KINDS, K, people="b")}
    with pytest.raises(ValueError, match="vaults of the populations"):
        batches(of_others)
    first, second = vault(np.tile(KINDS, 2), K).split(np.arange(N))
    with pytest.raises(ValueError, match="different parts of one vault"):
        batches({"a": first, "b": second})
    with pytest.raises(TypeError, match=r"vaults for all outputs.*got both"):
        batches({"click": CLICKS, "kind": vault(KINDS, K)})
    with pytest.raises(ValueError, match="got 100 rows and 50 labels"):
        batches({"click": vault(CLICKS[:50], 2), "kind": vault(KINDS, K)})
    rows = vault(np.ones((N, 2), int), Rows(2))
    for columns, expected in (({"a": 2}, r"columns in 0..1 .*got 2"), (3, "as a dict or list")):
        with pytest.raises(ValueError, match=expected):
            batches(rows, columns=columns)
    with pytest.raises(ValueError, match="for a vault with num_labels=L"):
        batches(vault(KINDS, K), columns={"a": 0})


@pytest.mark.slow
def test_a_charge_that_fails_halfway_takes_no_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The vault that was charged keeps the charge, and a later fit charges both."""
    labels = {"click": vault(CLICKS, 2), "kind": vault(KINDS, K, store=tmp_path / "kind")}
    model = compiled()
    before, made = model.get_weights(), batches(labels)

    def full(descriptor: int) -> None:
        if labels["click"].guarantee().epsilon:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(LabelStoreError, match="No space left"):
            model.fit(made, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert labels["click"].guarantee().epsilon == pytest.approx(after(1))
    assert labels["kind"].guarantee().epsilon == 0.0
    assert model.guarantee().headline == "no record of any label"
    model.fit(batches(labels), verbose=0)
    assert labels["click"].guarantee().epsilon == pytest.approx(after(2))
    assert (
        labels["kind"].guarantee().epsilon == pytest.approx(after(1)) == model.guarantee().epsilon
    )


@pytest.mark.slow
def test_labels_of_several_outputs_of_one_user() -> None:
    model, labels = compiled(), two_vaults()
    users = {"users": np.arange(N) // 2, "max_examples_per_user": 2}
    model.fit(batches(labels, q=0.2, **users), verbose=0)
    expected = ldp.accounting.dp_sgd_guarantee(SIGMA, 0.2, 3, DELTA, privacy_unit="user")
    assert model.guarantee().epsilon == pytest.approx(expected.epsilon)
    assert all(one.guarantee().unit == "all labels of one user" for one in labels.values())
