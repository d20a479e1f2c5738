"""Writes the library's results on one Keras backend, arrays and statements, into a folder.

    KERAS_BACKEND=jax python everything.py FOLDER [FOLDER_OF_ANOTHER_BACKEND]

``test_backends.py`` runs it on each backend and compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches, randomize_labels
from tf_labeldp.features import NeighbourSmoothing, PatchDictionary, RandomFourierFeatures
from tf_labeldp.heads import NoiseCluster
from tf_labeldp.keras_layers import ALIBILoss, ForwardCorrectedLoss, LabelWeightedLoss, Mixup

N, K = 240, 4
RNG = np.random.default_rng(0)
Y = np.arange(N) % K
CENTRES = np.array([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0]])
X = (CENTRES[Y] + 0.3 * RNG.normal(size=(N, 2))).astype(np.float32)
IMAGES = (RNG.random((N, 8, 8, 1)) + Y[:, None, None, None] * (np.arange(8) / 8)[:, None]).astype(
    np.float32
)
# The inputs that differ from X.
INPUTS = {"patches": IMAGES, "neighbours": IMAGES.reshape(N, -1)}
LOGITS = keras.losses.CategoricalCrossentropy(from_logits=True)

ARRAYS: dict[str, Any] = {}
STATEMENTS: dict[str, str] = {}


def vault(epsilon: float = 9.0) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(Y, K, budget=ldp.PrivacyBudget(epsilon, 1e-4), insecure_seed=5)


def classifier(seed: int = 1, **settings: Any) -> keras.Model:
    """Maps points (batch, 2) to logits, with the same weights on every backend."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((2,)), layers.Dense(16, "relu"), layers.Dense(K)])
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(0.0, 0.5, weight.shape) for weight in model.weights])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.02), "loss": LOGITS, **settings})
    return model


def losses() -> None:
    """Takes one step of gradient descent with each loss."""
    labels = vault(99.0)
    rr = ldp.RandomizedResponse(1.5, K)
    noisy = labels.randomize(rr)
    targets = {
        "posterior": (LOGITS, noisy.posterior()),
        "weighted": (LabelWeightedLoss(from_logits=True), noisy.debiased()),
        "corrected": (
            ForwardCorrectedLoss(rr.transition_matrix(), from_logits=True),
            noisy.values,
        ),
    }
    for alibi in (ldp.ALIBI(4.0, K), ldp.ALIBI(4.0, K, 1e-5, "gaussian")):
        targets[alibi.noise] = (ALIBILoss.of(alibi), labels.randomize(alibi).values)
    for name, (loss, target) in targets.items():
        model = classifier(optimizer=keras.optimizers.SGD(0.1), loss=loss)
        history = model.fit(X, np.asarray(target), batch_size=N, shuffle=False, verbose=0)
        ARRAYS[f"{name} loss"] = history.history["loss"]
        ARRAYS[f"{name} step"] = np.concatenate([part.ravel() for part in model.get_weights()])
    STATEMENTS["labels"] = str(labels.guarantee())


def mixup() -> None:
    """Checks that features and targets are mixed alike; the draws differ by backend."""
    one_hot = np.eye(K, dtype=np.float32)[Y]
    layer = Mixup(1.0, seed=0)
    x, y = map(keras.ops.convert_to_numpy, layer((X, one_hot), training=True))
    share = np.sum((x - X[::-1]) * (X - X[::-1])) / np.sum((X - X[::-1]) ** 2)
    assert 0.0 < share < 1.0
    np.testing.assert_allclose(x, share * X + (1 - share) * X[::-1], atol=1e-5)
    np.testing.assert_allclose(y, share * one_hot + (1 - share) * one_hot[::-1], atol=1e-5)


def heads_of(folder: Path) -> None:
    """Loads the files of another backend before this process makes the same weights."""
    expected = dict(np.load(folder / "arrays.npz"))
    statements = json.loads((folder / "statements.json").read_text())
    for path in folder.glob("*.keras"):
        model = keras.models.load_model(path)
        outputs = model.predict(INPUTS.get(path.stem, X), verbose=0)
        np.testing.assert_allclose(outputs, expected[f"{path.stem} model"], rtol=1e-3, atol=1e-4)
        assert str(ldp.guarantee(model)) == statements[path.stem]


def heads(folder: Path) -> None:
    """Fits heads on an encoder and on feature maps, and saves them as models."""
    encoder = keras.Sequential(classifier(2).layers[:1])
    labels = vault(99.0)
    fitted = {
        "encoder": ldp.PrivateRidge(2.0, 1e-5, encoder=encoder).fit(X, labels),
        "logistic": ldp.PrivateLogisticRegression(2.0, 1e-5).fit(X, labels),
        "clusters": NoiseCluster(4, 2.0).fit(X, labels),
    }
    maps = {
        "patches": PatchDictionary(num_atoms=8, patch_size=3, pooling=2),
        "fourier": RandomFourierFeatures(32),
        "neighbours": NeighbourSmoothing(num_neighbours=5),
    }
    for name, feature_map in maps.items():
        x = INPUTS.get(name, X)
        fitted[name] = ldp.PrivateRidge(2.0, 1e-5).fit(feature_map.fit_transform(x), labels)
    for name, head in fitted.items():
        model, x = head.to_keras(), INPUTS.get(name, X)
        if name in maps:
            model = keras.Sequential([keras.Input(x.shape[1:]), maps[name].to_keras(), model])
        elif name == "encoder":
            ARRAYS[f"{name} head"] = head.predict_proba(X)
        ARRAYS[f"{name} model"] = model.predict(x, verbose=0)
        STATEMENTS[name] = str(ldp.guarantee(model))
        model.save(folder / f"{name}.keras")
        loaded = keras.models.load_model(folder / f"{name}.keras")
        np.testing.assert_allclose(
            loaded.predict(x, verbose=0), ARRAYS[f"{name} model"], rtol=1e-3, atol=1e-4
        )
        assert ldp.guarantee(loaded).epsilon == ldp.guarantee(model).epsilon > 0.0


def ledger() -> None:
    """Trains without receipts, and declares it."""
    model = classifier(3)
    model.fit(X, np.eye(K)[Y], epochs=2, verbose=0)
    STATEMENTS["in the clear"] = str(ldp.guarantee(model))
    assert ldp.guarantee(model).epsilon == np.inf
    labels = vault()
    noisy = labels.randomize(ldp.RandomizedResponse(2.0, K))
    trained = classifier(5)
    trained.fit(noisy.to_dataset(X, targets="posterior").batch(32), verbose=0)
    assert ldp.guarantee(trained).epsilon == np.inf
    ldp.declare(trained, because="trained on noisy labels alone", made_of=[noisy])
    STATEMENTS["declared"] = str(ldp.guarantee(trained))


def plain_training(folder: Path) -> None:
    """Trains plain Keras models on noisy labels, with averages, copies, files and more epochs."""
    labels = vault(99.0)
    noisy, more = [labels.randomize(ldp.RandomizedResponse(e, K)) for e in (2.0, 1.0)]
    for average in (False, True):
        optimizer = keras.optimizers.SGD(0.1, use_ema=average)
        model = classifier(8, optimizer=optimizer)
        ldp.fit(model, X, noisy, epochs=2, batch_size=32, shuffle=False, verbose=0)
        ARRAYS[f"ldp.fit, average {average}"] = model.predict(X, verbose=0)
        STATEMENTS[f"ldp.fit, average {average}"] = str(ldp.guarantee(model))
        copy = classifier(9)
        copy.set_weights(model.get_weights())
        assert ldp.guarantee(copy).epsilon == ldp.guarantee(model).epsilon == 2.0
        path = folder / "plain.keras"
        model.save(path)
        loaded = ldp.load_model(path)
        path.unlink()  # the other files are of heads
        assert ldp.guarantee(loaded).epsilon == 2.0
        data = more.to_dataset(X, targets="posterior").batch(32)
        record = ldp.RecordReceipts(more)
        loaded.fit(data, epochs=2, callbacks=[record], verbose=0)
        ARRAYS[f"RecordReceipts, average {average}"] = loaded.predict(X, verbose=0)
        STATEMENTS[f"RecordReceipts, average {average}"] = str(ldp.guarantee(loaded))
        assert ldp.guarantee(loaded).epsilon == 3.0
        loaded.fit(X, np.eye(K)[Y], verbose=0)
        assert ldp.guarantee(loaded).epsilon == np.inf


def stages(**settings: Any) -> Any:
    return ldp.MultiStageTraining(
        X,
        vault(),
        epsilon=3.0,
        fractions=(0.5, 0.5),
        epochs_per_stage=2,
        batch_size=32,
        temperature=1.0,
        filter_labels=True,
        verbose=0,
        **settings,
    )


def multi_stage() -> None:
    # Keras on PyTorch takes one step per execution.
    several = 1 if keras.backend.backend() == "torch" else 3
    for name, alpha, together in (("plain", 0.0, 1), ("mixup", 0.3, several)):
        run, model = stages(mixup_alpha=alpha), classifier(steps_per_execution=together)
        model.fit(run.dataset(), epochs=run.epochs, callbacks=[run], shuffle=False, verbose=0)
        noisy = run.noisy_labels()
        ARRAYS[f"stages, {name}: draws"] = noisy.values
        ARRAYS[f"stages, {name}: priors"] = np.asarray(noisy.priors)
        ARRAYS[f"stages, {name}: outputs"] = model.predict(X, verbose=0)
        STATEMENTS[f"stages, {name}"] = f"{run.reports} {run.guarantee()}"
        assert run.guarantee().epsilon == 3.0

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise KeyboardInterrupt

    run, model = stages(), classifier(6)
    try:
        model.fit(
            run.dataset(), epochs=run.epochs, callbacks=[run, Stop()], shuffle=False, verbose=0
        )
    except KeyboardInterrupt:
        assert ldp.guarantee(model).epsilon == 3.0  # the receipts cover all steps so far
        model.fit(X, np.eye(K)[Y], verbose=0, batch_size=N)
        assert ldp.guarantee(model).epsilon == np.inf

    run, model = stages(), classifier(7)
    before = model.get_weights()
    try:
        model.fit(X, np.eye(K)[Y], epochs=run.epochs, callbacks=[run], verbose=0)
    except RuntimeError as error:
        STATEMENTS["another dataset"] = str(error)
    for found, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def refused() -> None:
    """Checks that code for TensorFlow alone raises before a draw or a charge."""
    labels = vault()
    model = classifier()
    for make in (
        lambda: ldp.LabelDPModel(model.inputs, model.outputs),
        lambda: ldp.LabelDPModel.from_model(model),
        lambda: ldp.LabelDPOptimizer("sgd", 1.0, 1.0),
        lambda: poisson_batches(X, labels, sampling_probability=0.1, steps=1),
        lambda: randomize_labels(ldp.RandomizedResponse(1.0, K)),
    ):
        try:
            make()
        except RuntimeError as error:
            assert repr(keras.backend.backend()) in str(error), error
            assert "KERAS_BACKEND=tensorflow" in str(error), error
        else:
            assert keras.backend.backend() == "tensorflow"
    assert labels.history() == ()


if __name__ == "__main__":
    folder, *others = map(Path, sys.argv[1:])
    for other in others:
        heads_of(other)
    losses()
    mixup()
    heads(folder)
    ledger()
    plain_training(folder)
    multi_stage()
    refused()
    np.savez(folder / "arrays.npz", **ARRAYS)
    (folder / "statements.json").write_text(json.dumps(STATEMENTS))
    print(keras.backend.backend())
