"""Natural uses in which a ledger may lose sight of receipts, or of training in the clear."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import sys
from typing import Any

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from ledger_cases import DELTA, SPARSE, D, K, N, X, Y, dp_sgd, multi_stage, plain, private, vault
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import tf_labeldp as ldp
from tf_labeldp import _optimizers
from tf_labeldp.accounting._events import gaussian_event
from tf_labeldp.accounting._receipts import LabelSet, Receipt, compose_receipts
from tf_labeldp.features._clusters import Clusters
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    HistogramMechanism,
    PeerToPeerRandomizedResponse,
    RandomizedResponse,
    RRWithPrior,
    check_mechanism,
    optimal_bins,
)
from tf_labeldp.vault import _carried


def fitted_in_the_clear(epochs: int = 1, model: Any = None) -> keras.Model:
    model = plain() if model is None else model
    model.compile(keras.optimizers.SGD(0.1), SPARSE)
    model.fit(X, Y, epochs=epochs, verbose=0)
    return model


def stated(artefact: Any) -> float:
    return ldp.guarantee(artefact).epsilon


# Training in the clear, where the optimizer is gone before anybody asks.


def test_a_model_that_is_compiled_anew_remembers() -> None:
    assert math.isinf(multi_stage(vault(), model=fitted_in_the_clear())[1].guarantee().epsilon)
    model = fitted_in_the_clear()
    model.compile("sgd", SPARSE)
    assert math.isinf(stated(model))


def test_an_encoder_whose_classifier_is_gone_remembers() -> None:
    def pretrained() -> keras.Model:
        model = fitted_in_the_clear()
        return keras.Model(model.inputs, model.layers[0].output)

    with pytest.warns(UserWarning, match="no receipt is about"):
        head = PrivateRidge(1.0, 1e-4, encoder=pretrained()).fit(X, vault())
    assert math.isinf(head.guarantee().epsilon)


def test_a_loop_with_an_optimizer_of_its_own_is_seen() -> None:
    model, features = plain(), tf.constant(X)

    def loop() -> None:
        optimizer = keras.optimizers.Adam()
        with tf.GradientTape() as tape:
            loss = SPARSE(Y, model(features))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)

    loop()
    assert math.isinf(stated(model))


def test_weights_that_were_moved_before_the_source_was_gone_are_known(tmp_path: Any) -> None:
    source, copy = fitted_in_the_clear(), plain()
    source.save(tmp_path / "source.keras")
    copy.set_weights(source.get_weights())
    del source
    assert math.isinf(stated(copy))
    assert math.isinf(stated(keras.models.load_model(tmp_path / "source.keras")))


def test_a_loaded_optimizer_counts_from_its_file(tmp_path: Any) -> None:
    """Steps of another process are no evidence; steps here are, also where the count goes back."""
    model = plain()
    model.compile("sgd", SPARSE)
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "start.weights.h5")
    model, _ = multi_stage(vault())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) > 0 and stated(loaded) == 2.0
    loaded.optimizer.apply([tf.ones_like(w) for w in loaded.trainable_weights])
    assert math.isinf(stated(loaded))
    model.compile("sgd", SPARSE)
    model.load_weights(tmp_path / "start.weights.h5")
    assert int(model.optimizer.iterations) == 0
    model.fit(X, Y, verbose=0)
    assert math.isinf(stated(model))


def test_steps_of_a_restored_checkpoint_are_no_evidence(tmp_path: Any) -> None:
    def compiled() -> keras.Model:
        model = plain()
        model.compile("sgd", SPARSE)
        model.optimizer.build(model.trainable_variables)
        return model

    model = compiled()
    model.optimizer.iterations.assign(7)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "one"))
    other = compiled()
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    assert int(other.optimizer.iterations) == 7
    assert stated(other) == 0.0


def test_weights_that_a_layer_has_beside_its_layers_are_seen() -> None:
    class Block(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(K, trainable=False)

        def build(self, shape: Any) -> None:
            self.inner.build(shape)
            self.own = self.add_weight(shape=(D,), initializer="normal", name="own")

        def call(self, x: Any) -> Any:
            return self.inner(x + self.own)

    def model() -> keras.Model:
        return keras.Sequential([keras.Input((D,)), Block()])

    assert math.isinf(stated(fitted_in_the_clear(model=model())))
    trained, _ = multi_stage(vault(), model=model())
    copy = model()
    copy.set_weights(trained.get_weights())
    assert stated(copy) == 2.0


def test_averages_of_weights_at_the_end_of_stages_are_known() -> None:
    model = plain()
    stages = ldp.MultiStageTraining(
        X, vault(), epsilon=2.0, fractions=(1.0,), epochs_per_stage=1, batch_size=40, verbose=0
    )
    model.compile(
        keras.optimizers.SGD(0.1, use_ema=True),
        keras.losses.CategoricalCrossentropy(from_logits=True),
    )
    data = stages.dataset()
    model.fit(data, epochs=stages.epochs, callbacks=[stages], shuffle=False, verbose=0)
    copy = plain()
    copy.set_weights(model.get_weights())
    assert stated(copy) == 2.0


def test_weights_without_a_history_are_a_named_assumption() -> None:
    for model in (plain(), multi_stage(vault())[0], dp_sgd(private(), vault())):
        assert "the weights that training began with" in str(ldp.guarantee(model))


# Encoders in wrappers.

ENCODER: Any = None


class OfAGlobal:
    """It names its encoder in a method, and a method that names it in another."""

    def transform(self, x: Any) -> Any:
        return self.called(x)

    def called(self, x: Any) -> Any:
        return ENCODER.predict(x, verbose=0)


class Slots:
    __slots__ = ("model", "words")

    def __init__(self, model: Any) -> None:
        self.model, self.words = model, [str(one) for one in range(20_000)]

    def transform(self, x: Any) -> Any:
        return self.model.predict(x, verbose=0)


def served(encoder: Any, folder: Any) -> Any:
    encoder.export(folder / "served", verbose=False)
    module = tf.saved_model.load(folder / "served")
    [name] = module.signatures["serving_default"].structured_input_signature[1]

    def call(x: Any) -> Any:
        rows = tf.constant(x, tf.float32)
        [found] = module.signatures["serving_default"](**{name: rows}).values()
        return found

    return call


WRAPPED = {
    "tf.function": lambda one, _: tf.function(lambda x: one(x)),
    "in parts": lambda one, _: lambda x: np.concatenate([one(x[i : i + 50]) for i in (0, 50, 100)]),
    "inner": lambda one, _: lambda x: (lambda part: one(part).numpy())(x),
    "partial": lambda one, _: functools.partial(lambda model, x: model(x), one),
    "transformer": lambda one, _: FunctionTransformer(lambda x: one.predict(x, verbose=0)).fit(X),
    "pipeline": lambda one, _: make_pipeline(
        FunctionTransformer(lambda x: one.predict(x, verbose=0)), StandardScaler()
    ).fit(X),
    "slots": lambda one, _: Slots(one),
    "global": lambda one, _: OfAGlobal(),
    "saved model": served,
}


@pytest.mark.filterwarnings("ignore:the release is indistinguishable")
@pytest.mark.parametrize("how", WRAPPED)
def test_an_encoder_is_seen_in_its_wrapper(
    how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = multi_stage(vault())
    encoder = keras.Model(model.inputs, model.layers[0].output)
    monkeypatch.setitem(globals(), "ENCODER", encoder)
    head = PrivateRidge(0.5, noise="laplace", encoder=WRAPPED[how](encoder, tmp_path))
    head.fit(X + 0.5, vault())
    assert head.guarantee().epsilon == pytest.approx(2.5)


def test_what_has_no_end_is_refused() -> None:
    class Endless:
        words = "of a class"

        def __init__(self) -> None:
            self.objects = [object() for _ in range(100_001)]

    with pytest.raises(ValueError, match="more than 100,000 objects"):
        PrivateRidge(0.5, encoder=Endless()).fit(X, vault())


# What carries receipts into a vault.


def carrying(epsilon: float = 2.0) -> Any:
    return vault().randomize(RandomizedResponse(epsilon, K))


def test_public_input_that_was_made_of_labels_is_counted() -> None:
    noisy = carrying()
    clusters = Clusters(np.arange(N) % 2, 2, encoder=noisy)
    statistic = vault().release(HistogramMechanism(2.0, K))
    for use in (
        lambda labels: labels.release(HistogramMechanism(0.5, K), public_input=clusters),
        lambda labels: labels.release(HistogramMechanism(0.5, K), public_input=noisy),
        lambda labels: labels.randomize(RRWithPrior(0.5, K), priors=statistic.priors()),
    ):
        labels = vault()
        assert use(labels).guarantee().epsilon == labels.guarantee().epsilon == 2.5
        poor = vault(epsilon=1.0)
        with pytest.raises(ldp.BudgetExceededError, match="which came along"):
            use(poor)
        assert poor.guarantee().epsilon == 0.0


def test_clusters_that_a_budget_does_not_allow_cost_nothing() -> None:
    clusters = Clusters(np.arange(N) % 2, 2, encoder=carrying())
    labels = vault(epsilon=1.0)
    with pytest.raises(ldp.BudgetExceededError):
        labels.randomize(ldp.ClusterRandomizedResponse.for_epsilon(1.0, K), clusters=clusters)
    assert labels.guarantee().epsilon == 0.0
    rich = vault()
    noisy = rich.randomize(ldp.ClusterRandomizedResponse.for_epsilon(1.0, K), clusters=clusters)
    assert noisy.guarantee().epsilon == rich.guarantee().epsilon == pytest.approx(3.0)


def test_priors_of_a_transform_are_counted() -> None:
    priors = vault().release(HistogramMechanism(2.0, K)).priors()
    transform = ldp.data.randomize_labels(
        RRWithPrior(1.0, K),
        priors=priors,
        budget=ldp.PrivacyBudget(3.0),
        verbose=False,
    )
    tf.data.Dataset.from_tensor_slices((X, Y)).apply(transform)
    assert transform.guarantee().epsilon == 3.0


def test_bins_of_a_noisy_histogram_are_counted() -> None:
    grid = tuple(np.linspace(0.0, 10.0, 11))
    numbers, budget = np.linspace(0.0, 10.0, N), ldp.PrivacyBudget(9.0)
    labels = ldp.PrivateLabels(numbers, low=0, high=10, budget=budget)
    priors = labels.release(HistogramMechanism(3.0, values=grid)).priors()
    other = ldp.PrivateLabels(numbers, low=0, high=10, budget=budget)
    for known in (labels, other):
        noisy = known.randomize(optimal_bins(grid, priors, 1.0))
        assert noisy.guarantee().epsilon == known.guarantee().epsilon == 4.0


def test_what_came_along_is_added_up_as_the_statement_adds_it_up() -> None:
    """Disjoint draws of another label set cost their largest, in the budget too."""
    other = vault()
    parts = [
        other.randomize(RandomizedResponse(1.0, K), part) for part in np.split(np.arange(N), 4)
    ]
    labels = vault(epsilon=4.0)
    labels.adopt([one for part in parts for one in part.receipts])
    assert labels.guarantee().epsilon == 1.0 and labels.remaining() == 3.0
    labels.randomize(RandomizedResponse(3.0, K))
    with pytest.raises(ldp.BudgetExceededError):
        labels.randomize(RandomizedResponse(0.1, K))


def test_many_disjoint_draws_of_two_label_sets_add_up_to_two() -> None:
    receipts = []
    for name in (LabelSet.new(40), LabelSet.new(40)):
        for place in range(40):
            charge = ldp.accounting.Charge.of_event(
                ldp.accounting._events.pure_dp_event(1.0 + place / 1000), 0.0
            )
            receipts.append(Receipt(name, charge, "a draw", examples=np.array([place])))
    # Each of the two is rounded up to a grid of 1e-4.
    assert compose_receipts(receipts).epsilon == pytest.approx(2 * 1.039, abs=3e-4)


# Mechanisms of others.


def sampled(channel: np.ndarray, labels: Any) -> np.ndarray:
    above = np.random.default_rng().random(len(labels))[:, np.newaxis] > channel.cumsum(1)[labels]
    return above.sum(axis=1).clip(max=len(channel) - 1)


class Parity(RandomizedResponse):
    """Tells whether the class is even, and is epsilon-DP; but its uses add up as two classes'."""

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        even = np.arange(self.num_classes) % 2
        truth = np.exp(self.epsilon) / (1.0 + np.exp(self.epsilon))
        same = even[:, np.newaxis] == even
        return np.where(same, truth, 1.0 - truth) / (self.num_classes / 2)

    def randomize(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        return sampled(self.transition_matrix(), labels)


class TooGood(Parity):
    """Its event says that next to nothing is lost."""

    def dp_event(self) -> dp_accounting.DpEvent:
        return gaussian_event(1e4)


def uses(mechanism: Any, number: int, num_classes: int) -> ldp.PrivateLabels:
    budget = ldp.PrivacyBudget(100.0, DELTA)
    labels = ldp.PrivateLabels(np.arange(N) % num_classes, num_classes, budget=budget)
    for _ in range(number):
        labels.randomize(mechanism)
    return labels


def test_a_derived_mechanism_does_not_inherit_an_event() -> None:
    found = uses(Parity(1.0, 20), 15, 20).guarantee()
    truth = uses(RandomizedResponse(1.0, 2), 15, 2).guarantee()
    assert found.epsilon >= truth.epsilon * (1 - 1e-6)
    with pytest.raises(ValueError, match="the dp_event of TooGood promises"):
        check_mechanism(TooGood(1.0, 20))


class Table(ClassificationMechanism):
    """Draws by a table, which its arguments hold."""

    def __init__(self, epsilon: float, num_classes: int, table: Any = None) -> None:
        self.epsilon, self.num_classes = epsilon, num_classes
        exact = RandomizedResponse(epsilon, num_classes).transition_matrix()
        self.table = exact if table is None else np.asarray(table)

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        return self.table

    def randomize(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        return sampled(self.table, labels)


class OfClusters(Table):
    public_input = "clusters"

    def randomize(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        assert len(public) == len(labels)
        return sampled(self.table, labels)


class OfPriors(Table):
    public_input = "priors"

    def randomize(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        assert public.ndim in (1, 2)
        return sampled(self.table, labels)


def test_mechanisms_of_others_take_clusters_priors_and_arrays() -> None:
    even = np.full((K, K), 1.0 / K)
    assert vault().randomize(Table(1.0, K, even)).guarantee().epsilon == 1.0
    assert vault().randomize(OfClusters(1.0, K), clusters=Y).guarantee().epsilon == 1.0
    assert vault().randomize(OfPriors(1.0, K), priors=np.ones(K) / K).guarantee().epsilon == 1.0


def test_a_table_that_changes_is_checked_again() -> None:
    labels, mechanism = vault(), Table(1.0, K)
    labels.randomize(mechanism)
    mechanism.table = np.eye(K)
    with pytest.raises(ValueError, match="worst log-ratio of inf"):
        labels.randomize(mechanism)


class PeersInTheClear(PeerToPeerRandomizedResponse):
    def randomize(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        return np.asarray(labels)


class CountsInTheClear(HistogramMechanism):
    def release(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        if public is None:
            raise ValueError("clusters are missing")
        return np.bincount(labels, minlength=K).astype(float)


def test_what_could_only_be_checked_with_public_input_is_checked_with_it() -> None:
    two = ldp.PrivateLabels(Y % 2, 2, budget=ldp.PrivacyBudget(9.0))
    with pytest.raises(ValueError, match="does not keep to its epsilon"):
        two.randomize(PeersInTheClear(1.4, 0.2, 0.5, 5))
    with pytest.raises(ValueError, match="does not keep to its epsilon"):
        vault().release(CountsInTheClear(1.0, K), public_input=np.arange(N) % 2)


class Exits(Table):
    def randomize(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        if np.array_equal(labels, Y):
            raise SystemExit(f"the label is {labels[0]}")
        return sampled(self.table, labels)


def test_a_mechanism_that_ends_the_process_is_charged_and_says_nothing() -> None:
    labels = vault()
    with pytest.raises(RuntimeError, match="The draw was charged") as caught:
        labels.randomize(Exits(1.0, K))
    assert labels.guarantee().epsilon == 1.0
    assert caught.value.__context__ is None and caught.value.__cause__ is None


# Plain models in other processes.


@pytest.mark.parametrize("torn", [False, True])
def test_a_store_knows_the_weights_of_plain_models(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    store = tmp_path / "store"
    labels = vault(store=store)
    model, _ = multi_stage(labels)
    model.save(tmp_path / "model.keras")
    if torn:  # a process was killed while it wrote
        with open(store / "weights", "a") as file:
            file.write('{"weights": ["0')
    known = labels.guarantee()
    del labels
    for name in ("_OF_WEIGHTS", "_CARRIED"):  # as in another process
        monkeypatch.setattr(_carried, name, type(getattr(_carried, name))())
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert stated(loaded) == 0.0
    assert "the weights that training began with" in str(ldp.guarantee(loaded))
    again = ldp.PrivateLabels(Y, K, store=store)
    assert stated(loaded) == known.epsilon == 2.0
    assert dp_sgd(private(loaded), again).guarantee().epsilon > 2.0
    assert again.guarantee().epsilon == pytest.approx(stated(private(loaded)))


def test_damaged_lines_about_weights_are_refused(tmp_path: Any) -> None:
    labels = vault(store=tmp_path / "store")
    multi_stage(labels)
    text = (tmp_path / "store" / "weights").read_text()
    (tmp_path / "store" / "weights").write_text(text.replace('"weights"', '"others"'))
    with pytest.raises(ldp.LabelStoreError, match="weights is damaged"):
        ldp.PrivateLabels(Y, K, store=tmp_path / "store")
    (tmp_path / "store" / "weights").write_text('{"weights": ["00' + "\n" + text)
    ldp.PrivateLabels(Y, K, store=tmp_path / "store")  # a line that was not written whole


def test_a_statement_needs_no_store_that_is_gone(tmp_path: Any) -> None:
    labels = vault(store=tmp_path / "store")
    model, _ = multi_stage(labels)
    shutil.rmtree(tmp_path / "store")
    model.compile("sgd", SPARSE)
    model.fit(X, Y, verbose=0)
    assert math.isinf(stated(model)) and stated(plain()) == 0.0


# What the watch on optimizers must not miss, and must not do.


class OfItsOwn(keras.optimizers.SGD):
    """Takes steps without asking its base class, and can't be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)
        self._iterations.assign_add(1)


def test_an_optimizer_that_does_all_itself_is_seen() -> None:
    model = plain()
    model.compile(OfItsOwn(), SPARSE)
    model.fit(X, Y, verbose=0)
    assert math.isinf(stated(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_floats_are_known_by_their_values(dtype: str) -> None:
    def short() -> keras.Model:
        layers = [keras.layers.Dense(5, dtype=dtype), keras.layers.Dense(K, dtype=dtype)]
        return keras.Sequential([keras.Input((D,)), *layers])

    model, copy = fitted_in_the_clear(model=short()), short()
    copy.set_weights(model.get_weights())
    del model
    assert math.isinf(stated(copy))


def test_weights_of_earlier_epochs_are_known(tmp_path: Any) -> None:
    model, copies = plain(), []
    model.compile("sgd", SPARSE)
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: copies.append(model.get_weights())
    )
    files = keras.callbacks.ModelCheckpoint(tmp_path / "at-{epoch}.keras")
    model.fit(X, Y, epochs=3, callbacks=[keep, files], verbose=0)
    for epoch, values in enumerate(copies, start=1):
        copy = plain()
        copy.set_weights(values)
        assert math.isinf(stated(copy))
        assert math.isinf(stated(keras.models.load_model(tmp_path / f"at-{epoch}.keras")))


def test_layers_that_did_not_move_tell_nothing() -> None:
    def seeded() -> keras.Model:
        keras.utils.set_random_seed(7)
        return plain()

    still = seeded()
    still.compile(keras.optimizers.SGD(0.0), SPARSE)
    still.fit(X, Y, verbose=0)
    assert math.isinf(stated(still))
    assert stated(seeded()) == 0.0


# In this process, as in most, Keras came first: every test here holds that order too.
@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param("keras", marks=pytest.mark.slow), "tf_labeldp"])
def test_the_watch_begins_whichever_is_imported_first(first: str) -> None:
    second = {"keras": "tf_labeldp", "tf_labeldp": "keras"}[first]
    code = (
        f"import {first}, {second}, numpy as np\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse'); model.fit(np.eye(2), np.ones(2), verbose=0)\n"
        "model.compile('sgd', 'mse')\n"
        "assert not tf_labeldp.guarantee(model).is_private"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Large(ldp.mechanisms.RegressionMechanism):
    """Any of 2,000 numbers, or the true one where its table says so."""

    def __init__(self, epsilon: float, table: Any = None) -> None:
        self.epsilon = epsilon
        self.table = np.zeros(2000) if table is None else np.asarray(table)

    def label_range(self) -> tuple[float, float]:
        return 0.0, 1999.0

    def randomize(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        places = np.asarray(labels).astype(int)
        noise = np.random.default_rng().integers(0, 2000, places.size)
        return np.where(self.table[places] > 0, places, noise).astype(float)

    def likelihood(self, outputs: Any, labels: Any) -> np.ndarray:
        return np.full((np.size(outputs), np.size(labels)), 1.0 / 2000)


def test_a_large_table_that_changes_is_checked_again() -> None:
    numbers = np.random.default_rng(0).integers(0, 2000, N).astype(float)
    labels = ldp.PrivateLabels(numbers, low=0, high=1999, budget=ldp.PrivacyBudget(9.0))
    labels.randomize(Large(1.0))
    spoilt = np.zeros(2000)
    spoilt[10:1990] = 1.0  # in the part that NumPy does not show
    with pytest.raises(ValueError, match="Large does not keep to its epsilon"):
        labels.randomize(Large(1.0, spoilt))


@pytest.mark.parametrize("change", ["average", "scale"])
def test_weights_that_were_changed_by_hand_after_a_copy_are_noted(tmp_path, change):
    """Their values changed without a step, and are of the same training in the clear."""

    def new_model():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    rng = np.random.default_rng(0)
    x, y = rng.random((64, 3)).astype("float32"), rng.integers(0, 2, 64)
    model = new_model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    snapshots = []
    for _ in range(3):
        model.fit(x, y, epochs=1, verbose=0)
        snapshots.append(model.get_weights())
    if change == "average":
        model.set_weights([sum(parts) / 3 for parts in zip(*snapshots, strict=True)])
    else:
        assert math.isinf(ldp.guarantee(model).epsilon)  # asked before the change, too
        model.set_weights([0.5 * part for part in snapshots[-1]])
    model.save_weights(tmp_path / "changed.weights.h5")
    other = new_model()
    other.load_weights(tmp_path / "changed.weights.h5")
    assert math.isinf(ldp.guarantee(other).epsilon)
    ldp.declare(model, because="the labels are public")
    assert ldp.guarantee(model).epsilon == ldp.guarantee(other).epsilon == 0.0


def test_a_copy_of_one_layer_looks_at_that_layer_alone(monkeypatch):
    """Weights are copied layer by layer, too, which must not take a look at the model each time."""
    model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(3) for _ in range(5))])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)
    looked_at = []
    digests = _optimizers.weight_digests

    def counted(variables):
        looked_at.append(list(variables))
        return digests(looked_at[-1])

    monkeypatch.setattr(_optimizers, "weight_digests", counted)
    layer = model.layers[2]
    layer.get_weights()
    mine = {id(one) for one in layer.weights}
    own = [seen for seen in looked_at if any(id(one) in mine for one in seen)]
    assert [{id(one) for one in seen} for seen in own] == [mine]
    assert math.isinf(ldp.guarantee(model).epsilon)
