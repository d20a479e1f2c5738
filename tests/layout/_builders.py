"""A small call of each public entry point that takes public inputs.

A builder passes every public argument through ``put``, as in ``put("features", X)``, and returns
the object whose statement has to include its receipts. The builder of a class serves its methods
that have no builder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp import accounting, data, features, heads, mechanisms, pate, scale
from tf_labeldp.accounting import PublicInput
from tf_labeldp.boosting import PrivateBoosting
from tf_labeldp.plugins import Clusters, TrainedModel
from tf_labeldp.self_supervised import SCAN, SimCLR
from tf_labeldp.semi_supervised import DivideMix, FixMatch
from tf_labeldp.semi_supervised.targets import Targets
from tf_labeldp.vault import Keyed, Numbers, Users

N, K = 64, 2
Y = np.arange(N) % K
X = (4.0 * np.eye(4)[Y] + np.random.default_rng(0).normal(size=(N, 4))).astype(np.float32)
IMAGES = np.random.default_rng(1).uniform(size=(N, 8, 8, 1)).astype(np.float32)
HALF = np.full(K, 1.0 / K)
GROUPS = np.arange(N) // 2 % 4
DELTA = 1e-3
BUDGET = ldp.PrivacyBudget(50.0, DELTA)
RR = mechanisms.RandomizedResponse(1.0, K)
RR_WITH_PRIOR = mechanisms.RRWithPrior(1.0, K)
CLUSTER_RR = ldp.ClusterRandomizedResponse(K, 0.1, 4.0, resampling_probability=0.5)


class Put:
    """Attaches a receipt to the argument under test, and returns all other arguments unchanged."""

    def __init__(self, name, receipt, *, itself=False):
        self.name, self.receipt, self.itself = name, receipt, itself
        self.value: Any = None
        self.was_called = False

    def __call__(self, name, value):
        if name != self.name:
            return value
        self.value, self.was_called = value, True
        if not self.itself:
            return PublicInput(value, (self.receipt,))
        if isinstance(value, keras.layers.Layer):
            TrainedModel(value).attach([self.receipt])
            return value
        return FunctionWithReceipts(value, (self.receipt,))

    def only(self, name, value, keyword=None):
        """Returns the keyword argument, or none unless it is under test."""
        return {keyword or name: self(name, value)} if name == self.name else {}

    @property
    def can_carry_receipts(self):
        """Whether the value is a model or a function, which carries receipts itself."""
        return callable(self.value) and not isinstance(self.value, type)


class FunctionWithReceipts:
    """A function that was made from labels."""

    def __init__(self, function, receipts):
        self._function, self.receipts = function, receipts

    def __call__(self, *args, **kwargs):
        return self._function(*args, **kwargs)


def labels_of(budget=BUDGET, **options):
    """Returns a vault of N classes."""
    return ldp.PrivateLabels(Y, K, budget=budget, insecure_seed=0, **options)


def numbers_of():
    """Returns a vault of N numbers."""
    return ldp.PrivateLabels(Y + 0.0, Numbers(0.0, 1.0), budget=BUDGET, insecure_seed=0)


def dense(outputs=K, shape=(4,)):
    """Returns a small network with fresh weights."""
    layers = [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(outputs)]
    return keras.Sequential(layers)


def compiled(model):
    """Returns the model, compiled for rows of targets."""
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    return model


def same(x, training=False):
    """Returns a view of images or rows: the unchanged input."""
    return x


def private_model(model=None):
    """Returns a small model that trains privately, compiled."""
    inputs = keras.Input((4,))
    model = model or ldp.LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ldp.LabelDPOptimizer("sgd", 1.0, 4.0), loss)
    return model


def learner():
    """Returns FixMatch around a small network, compiled."""
    return compiled(FixMatch(dense(K, (8, 8, 1)), weak=same, strong=same))


def draw_from(randomizer, labels, public):
    """Has the vault call the method of a randomizer."""
    public = accounting.public_input(public)
    if randomizer.public_input is None:
        return labels.randomize(public.with_value(randomizer))
    return labels.randomize(randomizer, **{randomizer.public_input: public})


def release_key():
    return scale.ReleaseKey.create(Path(tempfile.mkdtemp()) / "labels.key")


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "accounting.public_input": lambda put: accounting.public_input(put("values", X)),
    "mechanisms.ChannelMechanism": lambda put: mechanisms.ChannelMechanism(
        1.0,
        inputs=put("inputs", (0.0, 1.0)),
        outputs=put("outputs", (0.0, 1.0)),
        probabilities=put("probabilities", ((0.6, 0.4), (0.4, 0.6))),
    ),
    "mechanisms.HistogramMechanism": lambda put: mechanisms.HistogramMechanism(
        1.0, values=put("values", (0.0, 1.0))
    ),
    "mechanisms.Priors": lambda put: mechanisms.Priors(
        put("probabilities", np.full((4, K), 0.5)),
        put("groups", GROUPS),
        put("values", np.array([0.0, 1.0])),
        shift=put("shift", np.zeros(N)),
    ),
    "mechanisms.Priors.of": lambda put: mechanisms.Priors.of(put("priors", HALF)),
    "mechanisms.RROnBins": lambda put: mechanisms.RROnBins(
        1.0,
        inputs=put("inputs", (0.0, 1.0)),
        outputs=put("outputs", (0.0, 1.0)),
        bin_of_input=put("bin_of_input", (0, 1)),
    ),
    "mechanisms.SurveyChannel": lambda put: mechanisms.SurveyChannel(
        put("probabilities", ((0.6, 0.4), (0.4, 0.6)))
    ),
    "mechanisms.SurveyChannel.from_forced_response": lambda put: (
        mechanisms.SurveyChannel.from_forced_response(put("forced", (0.2, 0.2)))
    ),
    "mechanisms.SurveyChannel.from_unrelated_question": lambda put: (
        mechanisms.SurveyChannel.from_unrelated_question(0.7, put("shares", HALF))
    ),
    "mechanisms.optimal_unbiased": lambda put: mechanisms.optimal_unbiased(
        put("values", [0.0, 1.0]), put("probabilities", HALF), 1.0
    ),
    "mechanisms.optimal_bins": lambda put: mechanisms.optimal_bins(
        put("values", [0.0, 1.0]), put("probabilities", HALF), 1.0
    ),
    "vault.PrivateLabels": lambda put: ldp.PrivateLabels(
        Y,
        K,
        budget=BUDGET,
        draws=put("draws", "stored"),
        unlabelled=put("unlabelled", None),
        users=put("users", None),
    ),
    "vault.Keyed": lambda put: ldp.PrivateLabels(
        Y,
        K,
        budget=BUDGET,
        draws=Keyed(put("ids", np.arange(N))),
        store=Path(tempfile.mkdtemp()) / "store",
    ),
    "vault.Users": lambda put: Users(put("ids", np.arange(N))),
    "vault.Randomizer.draw_from": lambda put: draw_from(
        CLUSTER_RR, labels_of(), put("public", GROUPS)
    ),
    "vault.PrivateLabels.extend": lambda put: labels_of().extend(
        Y, rows=put("rows", None), unlabelled=put("unlabelled", [2])
    ),
    "vault.PrivateLabels.evaluate": lambda put: labels_of().evaluate(
        put("predictions", Y), "accuracy", 1.0
    ),
    "vault.PrivateLabels.guarantee": lambda put: labels_of().guarantee(after=put("after", [RR])),
    "vault.PrivateLabels.release": lambda put: labels_of().release(
        put("mechanism", mechanisms.HistogramMechanism(1.0, K)),
        put("indices", np.arange(N)),
        put("public_input", GROUPS),
    ),
    "vault.PrivateLabels.split": lambda put: labels_of().split(put("held_out", np.arange(8)))[0],
    "vault.ClusterRandomizedResponse.draw_from": lambda put: draw_from(
        CLUSTER_RR, labels_of(), put("public", GROUPS)
    ),
    "vault.LabelRandomizer": lambda put: numbers_of().randomize(
        ldp.LabelRandomizer(1.0, values=put("values", (0.0, 1.0)), prior=put("prior", (0.5, 0.5)))
    ),
    "vault.LabelRandomizer.draw_from": lambda put: draw_from(
        ldp.LabelRandomizer(1.0, values=(0.0, 1.0), prior=(0.5, 0.5)),
        numbers_of(),
        put("public", None),
    ),
    "vault.NoisyLabels": lambda put: ldp.NoisyLabels(
        put("values", Y),
        put("indices", np.arange(N)),
        put("mechanism", RR_WITH_PRIOR),
        put("priors", mechanisms.Priors(HALF)),
        receipts=labels_of().randomize(RR).receipts,
    ),
    "vault.NoisyLabels.evaluate": lambda put: (
        labels_of()
        .randomize(RR)
        .evaluate(put("predictions", Y), "accuracy", model=put("model", dense()))
    ),
    "vault.ConformalPredictor": lambda put: ldp.vault.ConformalPredictor(
        put("model", same), 0.5, alpha=0.1
    ),
    "vault.conformal": lambda put: ldp.conformal(
        put("model", lambda x: np.full((len(x), K), 0.5)),
        put("held_out", (X, labels_of())),
        0.5,
        1.0,
    ),
    "vault.select": lambda put: ldp.select(
        put("predictions", [Y, 1 - Y]),
        labels_of(),
        0.5,
        candidates=put("candidates", [labels_of().randomize(RR) for _ in range(2)]),
    ),
    "vault.declare": lambda put: ldp.declare(
        put("artefact", dense()),
        because="a test",
        made_of=put("made_of", [labels_of().randomize(RR)]),
    ),
    "dossier.save": lambda put: ldp.save(
        put("model", dense()), tempfile.mkdtemp(), metrics=put("metrics", [])
    ),
    "vault.guarantee": lambda put: ldp.guarantee(put("artefact", dense())),
    "features.Clusters.of": lambda put: Clusters.of(put("clusters", GROUPS)),
    "features.Clusters.from_assignments": lambda put: Clusters.from_assignments(
        put("assignments", GROUPS)
    ),
    "features.NeighbourSmoothing": lambda put: features.NeighbourSmoothing(
        put("encoder", dense(3)), num_neighbours=2
    ).fit(put("X", X)),
    "features.PatchDictionary": lambda put: features.PatchDictionary(4, 3, pooling=1).fit(
        put("X", IMAGES)
    ),
    "features.PublicEncoder": lambda put: features.PublicEncoder(put("model", dense(3))).fit(
        put("X", X)
    ),
    "features.RandomFourierFeatures": lambda put: features.RandomFourierFeatures(8).fit(
        put("X", X)
    ),
    "features.TableCodes": lambda put: features.TableCodes().fit(put("X", X)),
    "features.denoise_labels": lambda put: features.denoise_labels(
        put("noisy_labels", Y), put("clusters", GROUPS), K
    ),
    "features.find_clusters": lambda put: features.find_clusters(
        put("features", X), 2, encoder=put("encoder", dense(3))
    ),
    "heads.BootstrappedHead": lambda put: heads.BootstrappedHead(
        2.0,
        DELTA / 2,
        put("network", dense()),
        encoder=put("encoder", same),
        views=put("views", same),
        shares=(1.0,),
        epochs=1,
        verbose=0,
    ).fit(put("X", X), labels_of()),
    "heads.HeadPriorRandomizer": lambda put: labels_of().randomize(
        heads.HeadPriorRandomizer(4.0, DELTA / 2, encoder=put("encoder", dense(3))), features=X
    ),
    "heads.HeadPriorRandomizer.draw_from": lambda put: draw_from(
        heads.HeadPriorRandomizer(4.0, delta=DELTA / 2), labels_of(), put("public", X)
    ),
    "heads.HeadResidualRandomizer": lambda put: numbers_of().randomize(
        heads.HeadResidualRandomizer(4.0, DELTA / 2, encoder=put("encoder", dense(3))), features=X
    ),
    "heads.HeadResidualRandomizer.draw_from": lambda put: draw_from(
        heads.HeadResidualRandomizer(4.0, delta=DELTA / 2), numbers_of(), put("public", X)
    ),
    "heads.HeadResidualRandomizer.draw_with_head": lambda put: heads.HeadResidualRandomizer(
        4.0, delta=DELTA / 2
    ).draw_with_head(
        numbers_of(),
        accounting.public_input(put("public", X)),
        put("sample_weight", np.ones(N)),
    )[1],
    "heads.NoiseCluster.to_keras": lambda put: (
        heads.NoiseCluster(2, 1.0, encoder=dense(3))
        .fit(X, labels_of())
        .to_keras(put("encoder", dense(3)))
    ),
    "heads.TeacherLabels.batches": lambda put: heads.teacher_labels(np.eye(K)[Y]).batches(
        put("inputs", X), 16, augment=put("augment", same)
    ),
    "heads.teacher_labels": lambda put: heads.teacher_labels(put("probabilities", np.eye(K)[Y])),
    "training.LabelDPModel.declare": lambda put: private_model().declare(
        "a test", made_of=put("made_of", [labels_of().randomize(RR)])
    ),
    "training.LabelDPModel.from_model": lambda put: private_model(
        ldp.LabelDPModel.from_model(put("model", dense()), put("inputs", keras.Input((4,))))
    ),
    "training.make_private": lambda put: ldp.make_private(
        put("model", dense()),
        epsilon=1.0,
        x=put("x", X),
        encoder=put("encoder", np.asarray),
        labels=labels_of(),
        epochs=1,
        batch_size=32,
        sample_weight=put("sample_weight", np.ones(N)),
        class_weight=put("class_weight", {1: 2.0}),
    )[:2],
    "self_supervised.SCAN.clusters": lambda put: SCAN(dense(3, (8, 8, 1)), 2).clusters(
        put("images", IMAGES)
    ),
    "pate.PATE": lambda put: pate.PATE(
        1.0,
        DELTA / 2,
        num_teachers=4,
        num_queries=4,
        teacher=put("teacher", lambda rows, labels, queries: np.zeros(len(queries), np.int64)),
    ).answer(put("features", X), labels_of()),
    "pate.fix_match_teacher": lambda put: pate.fix_match_teacher(
        put("network", dense(K, (8, 8, 1))),
        optimizer=put("optimizer", keras.optimizers.SGD()),
        **put.only("settings", same, "weak"),
    ),
    "front_door.PrivateRegressor": lambda put: ldp.PrivateRegressor(
        1.0, DELTA / 2, encoder=put("encoder", dense(3))
    ).fit(put("X", X), numbers_of(), **put.only("sample_weight", np.ones(N))),
    "front_door.PrivateSearchCV": lambda put: ldp.PrivateSearchCV(
        put("estimator", ldp.PrivateRidge(1.0, DELTA / 2)),
        put("param_grid", {"penalty": [1.0, 10.0]}),
        1.0,
        DELTA / 2,
    ).fit(put("X", X), labels_of(), **put.only("sample_weight", np.ones(N))),
}


def builds(place):
    """Registers a builder that takes more than an expression."""

    def register(builder):
        BUILDERS[place] = builder

    return register


@builds("vault.PrivateLabels.charge")
def _(put):
    labels = labels_of()
    labels.charge(
        accounting.Charge.of(RR),
        what="a use",
        indices=put("indices", [0, 1]),
        made_of=put("made_of", None),
    )
    return labels


@builds("vault.PrivateLabels.check_budget")
def _(put):
    """Returns the error: the budget is enough for the use, and not for its public inputs."""
    labels = labels_of(ldp.PrivacyBudget(1.0, DELTA))
    try:
        labels.check_budget(put("mechanism", RR), put("indices", np.arange(N)))
    except ldp.BudgetExceededError as error:
        return error


@builds("vault.PrivateLabels.reserve")
def _(put):
    labels = labels_of()
    with labels.reserve(put("uses", {"a": RR})):
        labels.randomize(RR, key="a")
    return labels


@builds("vault.PrivateLabels.randomize")
def _(put):
    if put.name == "features":
        randomizer = heads.HeadPriorRandomizer(4.0, delta=DELTA / 2)
        return labels_of().randomize(randomizer, features=put("features", X))
    if put.name == "clusters":
        return labels_of().randomize(CLUSTER_RR, clusters=put("clusters", GROUPS))
    mechanism, indices = put("mechanism", RR_WITH_PRIOR), put("indices", np.arange(N))
    return labels_of().randomize(mechanism, indices, put("priors", HALF))


def _fits(head, labels):
    def fit(put):
        encoder = put("encoder", dense(3))
        weights = put.only("class_weight", None if labels is numbers_of else {1: 2.0})
        fitted = head(1.0, DELTA / 2, encoder=encoder, **weights)
        return fitted.fit(put("X", X), labels(), **put.only("sample_weight", np.ones(N)))

    return fit


def _exports(head, labels):
    def export(put):
        return _fits(head, labels)(Put("", None)).to_keras(put("encoder", dense(3)))

    return export


for _head, _labels in (
    (heads.PrivateRidge, labels_of),
    (heads.PrivateLogisticRegression, labels_of),
    (heads.PrivatePoissonRegression, numbers_of),
):
    BUILDERS[f"heads.{_head.__name__}"] = _fits(_head, _labels)
    BUILDERS[f"heads.{_head.__name__}.to_keras"] = _exports(_head, _labels)


@builds("heads.NoiseCluster")
def _(put):
    if put.name == "clusters":
        head = heads.NoiseCluster(None, 1.0, clusters=put("clusters", GROUPS))
    else:
        weights = put.only("class_weight", {1: 2.0})
        head = heads.NoiseCluster(2, 1.0, encoder=put("encoder", dense(3)), **weights)
    return head.fit(put("X", X), labels_of())


@builds("boosting.PrivateBoosting")
def _(put):
    model = PrivateBoosting(max_trees=2, class_weight=put("class_weight", {1: 2.0}))
    if put.name == "start":
        model.start = put("start", ldp.PrivateRidge(1.0, DELTA / 2).fit(X, labels_of()))
    weights = put.only("sample_weight", np.ones(N))
    return model.fit(put("X", X), labels_of().randomize(RR), **weights)


@builds("data.poisson_batches")
def _(put):
    users = put.only("users", np.arange(N) // 2)
    if users:
        users["max_examples_per_user"] = 2
    return data.poisson_batches(
        put("features", X),
        labels_of(),
        sampling_probability=0.5,
        steps=1,
        sample_weight=put("sample_weight", np.ones(N)),
        class_weight=put("class_weight", {1: 2.0}),
        **users,
    )


@builds("data.PoissonBatches.map")
def _(put):
    batches = data.poisson_batches(X, labels_of(), sampling_probability=0.5, steps=1)
    return batches.map(put("function", lambda x: 2.0 * x))


@builds("data.randomize_labels")
def _(put):
    mechanism, public = RR_WITH_PRIOR, {"priors": put("priors", HALF)}
    if put.name == "clusters":
        mechanism, public = CLUSTER_RR, {"clusters": put("clusters", GROUPS)}
    public |= put.only("id_fn", lambda x: tf.strings.as_string(x[0]))
    transform = data.randomize_labels(
        put("mechanism", mechanism), budget=BUDGET, verbose=False, **public
    )
    tf.data.Dataset.from_tensor_slices((X, Y)).apply(transform)
    return transform


@builds("training.LabelDPModel")
def _(put):
    network, inputs = dense(), keras.Input((4,))
    put(put.name, network)
    # The argument is a tensor of Keras, which carries the receipts of its layers.
    TrainedModel(network).attach([put.receipt])
    if put.name == "kwargs":
        return private_model(ldp.LabelDPModel(inputs=inputs, outputs=network(inputs)))
    return private_model(ldp.LabelDPModel(inputs, network(inputs)))


@builds("training.LabelDPModel.fit")
def _(put):
    model = private_model()
    weights = put.only("settings", np.ones(N), "sample_weight")
    model.fit(put("x", X), Y, batch_size=32, verbose=0, **weights)
    return model


@builds("training.MultiStageTraining")
def _(put):
    stages = ldp.MultiStageTraining(
        put("features", X),
        labels_of(),
        epsilon=1.0,
        fractions=(0.5, 0.5),
        epochs_per_stage=1,
        priors=put("priors", HALF),
        encoder=put("encoder", np.asarray),
        sample_weight=put("sample_weight", np.ones(N)),
        class_weight=put("class_weight", {1: 2.0}),
        verbose=0,
    )
    model = compiled(dense())
    options = {"epochs": stages.epochs, "shuffle": False, "verbose": 0}
    model.fit(stages.dataset(), callbacks=[stages], **options)
    return model


@builds("training.RecordReceipts")
def _(put):
    noisy, model = labels_of().randomize(RR), compiled(dense())
    callback = ldp.RecordReceipts(put("noisy", noisy))
    model.fit(X, noisy.posterior(), callbacks=[callback], verbose=0)
    return model


@builds("training.fit")
def _(put):
    noisy, model = labels_of().randomize(RR), compiled(dense())
    options = put.only("settings", np.ones(N), "sample_weight") | put.only("encoder", np.asarray)
    ldp.fit(put("model", model), put("x", X), put("noisy", noisy), verbose=0, **options)
    return model


@builds("self_supervised.SimCLR")
def _(put):
    network, views = put("network", dense(3, (8, 8, 1))), put("views", same)
    model = SimCLR(network, views, projection_dim=2)
    model.compile("sgd")
    if put.name == "x":
        model.fit(put("x", IMAGES), batch_size=32, verbose=0)
    return model


@builds("self_supervised.SCAN")
def _(put):
    encoder, weak, strong = (
        put("encoder", dense(3, (8, 8, 1))),
        put("weak", same),
        put("strong", same),
    )
    model = SCAN(encoder, 2, num_neighbours=2, weak=weak, strong=strong)
    model.compile("sgd")
    if put.name == "x":
        model.fit(put("x", IMAGES), batch_size=32, epochs=1, self_label_epochs=0, verbose=0)
    return model


def _learns(learner, **options):
    def learn(put):
        network, priors = put("network", dense(K, (8, 8, 1))), put("priors", HALF)
        weak, strong = put("weak", same), put("strong", same)
        model = compiled(learner(network, weak=weak, strong=strong, priors=priors))
        if put.name not in ("x", "y", "clusters", "sample_weight"):
            return model
        model.fit(
            put("x", IMAGES),
            put("y", labels_of().randomize(RR)),
            batch_size=16,
            epochs=1,
            steps_per_epoch=1,
            verbose=0,
            **put.only("clusters", GROUPS),
            **put.only("sample_weight", np.ones(N)),
            **options,
        )
        return model

    return learn


BUILDERS["semi_supervised.FixMatch"] = _learns(FixMatch)
BUILDERS["semi_supervised.DivideMix"] = _learns(DivideMix, warmup_epochs=0)

BUILDERS["semi_supervised.FixMatch.from_paper"] = lambda put: FixMatch.from_paper(
    put("network", dense(K, (8, 8, 1))),
    put("weak", same),
    put("strong", same),
    **put.only("settings", HALF, "priors"),
)


@builds("semi_supervised.FixMatch.fit_targets")
def _(put):
    model = learner()
    targets = Targets(np.arange(N), np.eye(K, dtype=np.float32)[Y], np.ones(N, np.float32), None)
    model.fit_targets(put("images", IMAGES), put("labelled", targets), 16, 1, 0, verbose=0)
    return model


@builds("front_door.PrivateClassifier")
def _(put):
    network = put.only("model", dense())
    encoder = {} if network else {"encoder": put("encoder", dense(3))}
    weights = put.only("class_weight", {1: 2.0})
    door = ldp.PrivateClassifier(1.0, DELTA / 2, epochs=1, **network, **encoder, **weights)
    return door.fit(put("X", X), labels_of(), **put.only("sample_weight", np.ones(N)))


def _registers(check):
    def register(put):
        key, mechanism, priors = release_key(), put("mechanism", RR_WITH_PRIOR), put("priors", HALF)
        if check:
            key.check("first", mechanism, priors)
        key.register("first", mechanism, priors, num_rows=N)
        if check:
            # A registered release may be checked again, with its receipts.
            key.check("first", mechanism, priors)
        return key.receipts("first")

    return register


BUILDERS["scale.ReleaseKey.register"] = _registers(check=False)
BUILDERS["scale.ReleaseKey.check"] = _registers(check=True)
