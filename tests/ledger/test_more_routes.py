"""Natural uses in which receipts, or training in the clear, may be missed."""

from __future__ import annotations

import functools
import math
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from ledger_cases import (
    DELTA,
    SPARSE,
    D,
    K,
    N,
    X,
    Y,
    codes,
    dp_sgd,
    has_no_record,
    in_the_clear,
    multi_stage,
    plain,
    private,
    stated,
    vault,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import tf_labeldp as ldp
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    HistogramMechanism,
    PeerToPeerRandomizedResponse,
    RandomizedResponse,
    RRWithPrior,
    check_mechanism,
)
from tf_labeldp.plugins import Clusters, EventFields
from tf_labeldp.vault import Numbers


def test_a_model_whose_optimizer_took_uncovered_steps_promises_nothing():
    model = in_the_clear()
    assert math.isinf(stated(model))
    text = str(ldp.guarantee(model))
    assert f"took {-(-N // 32)} steps that no receipt covers" in text
    for mend in ("tf_labeldp.fit(model, x, noisy)", "RecordReceipts(noisy)", "declare(model"):
        assert mend in text


@pytest.mark.slow
def test_weights_that_changed_since_the_last_counted_training_promise_nothing():
    for change in ("fit", "compile", "by hand"):
        model, _ = multi_stage(vault())
        assert stated(model) == 2.0
        if change == "by hand":
            model.set_weights([0.5 * weight for weight in model.get_weights()])
        else:
            model.compile("sgd", SPARSE)
            model.fit(X, Y, verbose=0)
            if change == "compile":
                model.compile("sgd", SPARSE)
        assert math.isinf(stated(model)) and "without receipts" in str(ldp.guarantee(model))
        layer = model.layers[0]
        assert math.isinf(stated(keras.Model(model.inputs, layer.output)))


def test_a_loaded_model_with_its_optimizer_is_recognized_by_its_weights(tmp_path):
    """Receipts cover the steps in its file if its weights come from a counted training."""
    model, _ = multi_stage(vault())
    model.save(tmp_path / "model.keras")
    for load in (keras.models.load_model, ldp.load_model):
        loaded = load(tmp_path / "model.keras")
        assert int(loaded.optimizer.iterations) > 0 and stated(loaded) == 2.0
        loaded.optimizer.apply([tf.ones_like(w) for w in loaded.trainable_weights])
        assert math.isinf(stated(loaded))
    in_the_clear().save(tmp_path / "clear.keras")
    assert math.isinf(stated(keras.models.load_model(tmp_path / "clear.keras")))


def test_a_layers_own_weights_are_read():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(K, trainable=False)

        def build(self, shape):
            self.inner.build(shape)
            self.own = self.add_weight(shape=(D,), initializer="normal", name="own")

        def call(self, x):
            return self.inner(x + self.own)

    def model():
        return keras.Sequential([keras.Input((D,)), Block()])

    assert math.isinf(stated(in_the_clear(model=model())))
    trained, _ = multi_stage(vault(), model=model())
    copy = model()
    copy.set_weights(trained.get_weights())
    assert stated(copy) == 2.0


def test_averages_of_weights_at_the_end_of_stages_are_recognized():
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


class Attribute:
    """An encoder in an attribute, in a container."""

    def __init__(self, model):
        self.parts = {"model": [model]}

    def transform(self, x):
        return self.parts["model"][0].predict(x, verbose=0)


WRAPPED = {
    "partial": lambda encoder: functools.partial(lambda model, x: model(x), encoder),
    "attribute": Attribute,
    "method": lambda encoder: Attribute(encoder).transform,
    "transformer": lambda encoder: FunctionTransformer(Attribute(encoder).transform).fit(X),
    "pipeline": lambda encoder: make_pipeline(
        FunctionTransformer(Attribute(encoder).transform), StandardScaler()
    ).fit(X),
    "public input": ldp.accounting.public_input,
}


@pytest.mark.filterwarnings("ignore:the release is indistinguishable")
@pytest.mark.parametrize("how", WRAPPED)
def test_an_encoder_is_found_in_its_wrapper(how):
    model, _ = multi_stage(vault())
    encoder = keras.Model(model.inputs, model.layers[0].output)
    head = PrivateRidge(0.5, noise="laplace", encoder=WRAPPED[how](encoder))
    head.fit(X + 0.5, vault())
    assert head.guarantee().epsilon == pytest.approx(2.5)


def test_an_encoder_with_too_many_objects_is_refused():
    encoder = functools.partial(lambda objects, x: x, [object() for _ in range(100_001)])
    with pytest.raises(ValueError, match="at most 100,000 objects"):
        PrivateRidge(0.5, noise="laplace", encoder=encoder).fit(X, vault())


def carrying(epsilon=2.0):
    return vault().randomize(RandomizedResponse(epsilon, K))


def test_receipts_of_a_public_input_are_counted():
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
        with pytest.raises(ldp.BudgetExceededError, match="of an input"):
            use(poor)
        assert poor.guarantee().epsilon == 0.0


def test_clusters_that_a_budget_does_not_allow_cost_nothing():
    clusters = Clusters(np.arange(N) % 2, 2, encoder=carrying())
    labels = vault(epsilon=1.0)
    with pytest.raises(ldp.BudgetExceededError):
        labels.randomize(ldp.ClusterRandomizedResponse.for_epsilon(1.0, K), clusters=clusters)
    assert labels.guarantee().epsilon == 0.0
    rich = vault()
    noisy = rich.randomize(ldp.ClusterRandomizedResponse.for_epsilon(1.0, K), clusters=clusters)
    assert noisy.guarantee().epsilon == rich.guarantee().epsilon == pytest.approx(3.0)


def test_priors_of_a_transform_are_counted():
    priors = vault().release(HistogramMechanism(2.0, K)).priors()
    transform = ldp.data.randomize_labels(
        RRWithPrior(1.0, K),
        priors=priors,
        budget=ldp.PrivacyBudget(3.0),
        verbose=False,
    )
    tf.data.Dataset.from_tensor_slices((X, Y)).apply(transform)
    assert transform.guarantee().epsilon == 3.0


def test_inherited_receipts_compose_as_in_the_statement():
    """Disjoint draws of another label set cost their maximum, in the budget too."""
    other = vault()
    parts = [
        other.randomize(RandomizedResponse(1.0, K), part) for part in np.split(np.arange(N), 4)
    ]
    labels = vault(epsilon=4.0)
    labels.adopt([receipt for part in parts for receipt in part.receipts])
    assert labels.guarantee().epsilon == 1.0 and labels.remaining() == 3.0
    labels.randomize(RandomizedResponse(3.0, K))
    with pytest.raises(ldp.BudgetExceededError):
        labels.randomize(RandomizedResponse(0.1, K))


def sampled(channel, labels):
    above = np.random.default_rng().random(len(labels))[:, np.newaxis] > channel.cumsum(1)[labels]
    return above.sum(axis=1).clip(max=len(channel) - 1)


class Parity(RandomizedResponse):
    """Reveals the parity of the class: epsilon-DP, but its uses compose as those of two classes."""

    def transition_matrix(self, prior=None):
        even = np.arange(self.num_classes) % 2
        truth = np.exp(self.epsilon) / (1.0 + np.exp(self.epsilon))
        same = even[:, np.newaxis] == even
        return np.where(same, truth, 1.0 - truth) / (self.num_classes / 2)

    def randomize(self, labels, public=None, *, rng=None):
        return sampled(self.transition_matrix(), labels)


class TooGood(Parity):
    """Claims an event with almost no loss."""

    def dp_event(self):
        return EventFields.gaussian(1e4).dp_event()


def uses(mechanism, number, num_classes):
    budget = ldp.PrivacyBudget(100.0, DELTA)
    labels = ldp.PrivateLabels(np.arange(N) % num_classes, num_classes, budget=budget)
    for _ in range(number):
        labels.randomize(mechanism)
    return labels


def test_a_derived_mechanism_does_not_inherit_an_event():
    found = uses(Parity(1.0, 20), 15, 20).guarantee()
    truth = uses(RandomizedResponse(1.0, 2), 15, 2).guarantee()
    assert found.epsilon >= truth.epsilon * (1 - 1e-6)
    with pytest.raises(ValueError, match="the dp_event of TooGood promises"):
        check_mechanism(TooGood(1.0, 20))


class Table(ClassificationMechanism):
    """Draws from a channel in its arguments."""

    def __init__(self, epsilon, num_classes, table=None):
        self.epsilon, self.num_classes = epsilon, num_classes
        exact = RandomizedResponse(epsilon, num_classes).transition_matrix()
        self.table = exact if table is None else np.asarray(table)

    def transition_matrix(self, prior=None):
        return self.table

    def randomize(self, labels, public=None, *, rng=None):
        return sampled(self.table, labels)


class OfClusters(Table):
    public_input = "clusters"

    def randomize(self, labels, public=None, *, rng=None):
        assert len(public) == len(labels)
        return sampled(self.table, labels)


class OfPriors(Table):
    public_input = "priors"

    def randomize(self, labels, public=None, *, rng=None):
        assert public.ndim in (1, 2)
        return sampled(self.table, labels)


def test_plug_ins_take_clusters_priors_and_arrays():
    even = np.full((K, K), 1.0 / K)
    assert vault().randomize(Table(1.0, K, even)).guarantee().epsilon == 1.0
    assert vault().randomize(OfClusters(1.0, K), clusters=Y).guarantee().epsilon == 1.0
    assert vault().randomize(OfPriors(1.0, K), priors=np.ones(K) / K).guarantee().epsilon == 1.0


class PeersInTheClear(PeerToPeerRandomizedResponse):
    def randomize(self, labels, public=None, *, rng=None):
        return np.asarray(labels)


class CountsInTheClear(HistogramMechanism):
    def release(self, labels, public=None, *, rng=None):
        if public is None:
            raise ValueError("clusters are missing")
        return np.bincount(labels, minlength=K).astype(float)


def test_plug_ins_are_checked_with_their_public_input():
    two = ldp.PrivateLabels(Y % 2, 2, budget=ldp.PrivacyBudget(9.0))
    with pytest.raises(ValueError, match="violates its epsilon"):
        two.randomize(PeersInTheClear(1.4, 0.2, 0.5, 5))
    with pytest.raises(ValueError, match="violates its epsilon"):
        vault().release(CountsInTheClear(1.0, K), public_input=np.arange(N) % 2)


class Exits(Table):
    def randomize(self, labels, public=None, *, rng=None):
        if np.array_equal(labels, Y):
            raise SystemExit(f"the label is {labels[0]}")
        return sampled(self.table, labels)


def test_a_mechanism_that_exits_is_charged_and_its_message_withheld():
    labels = vault()
    with pytest.raises(RuntimeError, match="The draw was charged") as caught:
        labels.randomize(Exits(1.0, K))
    assert labels.guarantee().epsilon == 1.0
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_a_store_recognizes_the_weights_of_plain_models(tmp_path, forget):
    store = tmp_path / "store"
    labels = vault(store=store)
    model, _ = multi_stage(labels)
    model.save(tmp_path / "model.keras")
    known = labels.guarantee()
    del labels
    forget()  # Another process has no weights.
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert has_no_record(loaded)
    assert "initial-weights" in codes(loaded)
    again = ldp.PrivateLabels(Y, K, store=store)
    assert stated(loaded) == known.epsilon == 2.0
    assert dp_sgd(private(loaded), again).guarantee().epsilon > 2.0
    assert again.guarantee().epsilon == pytest.approx(stated(private(loaded)))


def test_b9_removed_or_damaged_records_of_weights_are_refused(tmp_path):
    labels = vault(store=tmp_path / "store")
    multi_stage(labels)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    of_weights = [path for path in files if b'"weights"' in path.read_bytes()]
    assert of_weights
    for path in of_weights:
        whole = path.read_bytes()
        for content in (None, whole.replace(b"weights", b"Weights")):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(ldp.LabelStoreError, match=r"lacks record|is damaged"):
                ldp.PrivateLabels(Y, K, store=tmp_path / "store")
            path.write_bytes(whole)
    ldp.PrivateLabels(Y, K, store=tmp_path / "store")


def test_a_statement_needs_no_store(tmp_path):
    labels = vault(store=tmp_path / "store")
    model, _ = multi_stage(labels)
    shutil.rmtree(tmp_path / "store")
    model.compile("sgd", SPARSE)
    model.fit(X, Y, verbose=0)
    assert math.isinf(stated(model)) and not has_no_record(model)


class OwnSteps(keras.optimizers.SGD):
    """Takes steps without its base class, and can't be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other):
        return self is other

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)
        self._iterations.assign_add(1)


def test_steps_of_a_users_optimizer_are_detected():
    model = plain()
    model.compile(OwnSteps(), SPARSE)
    model.fit(X, Y, verbose=0)
    assert math.isinf(stated(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_floats_are_recognized_by_their_values(dtype):
    def short():
        layers = [keras.layers.Dense(5, dtype=dtype), keras.layers.Dense(K, dtype=dtype)]
        return keras.Sequential([keras.Input((D,)), *layers])

    model, copy = multi_stage(vault(), model=short())[0], short()
    copy.set_weights(model.get_weights())
    assert stated(copy) == 2.0


class Large(ldp.mechanisms.RegressionMechanism):
    """A random number out of 2,000, or the true label if its table is set there."""

    def __init__(self, epsilon, table=None):
        self.epsilon = epsilon
        self.table = np.zeros(2000) if table is None else np.asarray(table)

    def label_range(self):
        return 0.0, 1999.0

    def randomize(self, labels, public=None, *, rng=None):
        places = np.asarray(labels).astype(int)
        noise = np.random.default_rng().integers(0, 2000, places.size)
        return np.where(self.table[places] > 0, places, noise).astype(float)

    def likelihood(self, outputs, labels):
        return np.full((np.size(outputs), np.size(labels)), 1.0 / 2000)


def test_a_large_table_that_changes_is_checked_again():
    numbers = np.random.default_rng(0).integers(0, 2000, N).astype(float)
    labels = ldp.PrivateLabels(numbers, Numbers(0, 1999), budget=ldp.PrivacyBudget(9.0))
    labels.randomize(Large(1.0))
    revealing = np.zeros(2000)
    revealing[10:1990] = 1.0  # NumPy's repr does not show this part.
    with pytest.raises(ValueError, match="Large violates its epsilon"):
        labels.randomize(Large(1.0, revealing))
