"""One small call for each public entry point that takes public inputs.

A builder gets ``put``, gives every public argument through it, ``put("features", X)``, and returns
what the statement is asked of. The builder of a class serves the methods that have none.
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
from tf_labeldp.self_supervised import SCAN, SimCLR
from tf_labeldp.semi_supervised import DivideMix, FixMatch
from tf_labeldp.semi_supervised.targets import Targets
from tf_labeldp.vault.model_history import attach

BUILDERS: dict[str, Callable[[Any], Any]] = {}
N, K = 64, 2
Y = np.arange(N) % K
X = (4.0 * np.eye(4)[Y] + np.random.default_rng(0).normal(size=(N, 4))).astype(np.float32)
IMAGES = np.random.default_rng(1).uniform(size=(N, 8, 8, 1)).astype(np.float32)
HALF = np.full(K, 1.0 / K)
GROUPS = np.arange(N) // 2 % 4
RR = mechanisms.RandomizedResponse(1.0, K)
RR_WITH_PRIOR = mechanisms.RRWithPrior(1.0, K)
DELTA = 1e-3
CLUSTER_RR = ldp.ClusterRandomizedResponse(K, 0.1, 4.0, resampling_probability=0.5)


class Put:
    """Hands out the argument that is looked at with a receipt, and all others as they are."""

    def __init__(self, name, receipt, *, itself=False):
        self.name, self.receipt, self.itself = name, receipt, itself
        self.value: Any = None
        self.was_asked = False

    def __call__(self, name, value):
        """Returns a value; that of this argument with the receipt."""
        if name != self.name:
            return value
        self.value, self.was_asked = value, True
        if not self.itself:
            return PublicInput(value, (self.receipt,))
        if isinstance(value, keras.layers.Layer):
            attach(value, [self.receipt])
            return value
        return Carrying(value, (self.receipt,))

    @property
    def can_carry_itself(self):
        """Whether the value is a model or a function, which carries receipts of its own."""
        return callable(self.value) and not isinstance(self.value, type)


class Carrying:
    """A function that was made of labels, and knows it."""

    def __init__(self, function, receipts):
        self._function, self.receipts = function, receipts

    def __call__(self, *args, **kwargs):
        return self._function(*args, **kwargs)


def builds(*places):
    """Registers a builder."""

    def register(builder):
        BUILDERS.update(dict.fromkeys(places, builder))
        return builder

    return register


def labels_of(epsilon=50.0, **options):
    """Returns a vault of N classes."""
    budget = ldp.PrivacyBudget(epsilon, DELTA)
    return ldp.PrivateLabels(Y, K, budget=budget, insecure_seed=0, **options)


def numbers_of(**options):
    """Returns a vault of N numbers."""
    budget = ldp.PrivacyBudget(50.0, DELTA)
    return ldp.PrivateLabels(Y + 0.0, low=0.0, high=1.0, budget=budget, **options)


def dense(outputs=K, shape=(4,)):
    """Returns a small network with its own weights."""
    layers = [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(outputs)]
    return keras.Sequential(layers)


def compiled(model):
    """Returns the model, compiled for rows of targets."""
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    return model


def same(x, training=False):
    """Returns a view of images or rows: themselves."""
    return x


# accounting, mechanisms


@builds("mechanisms.Priors")
def _(put):
    groups = put("groups", GROUPS)
    rows = put("probabilities", np.full((4, K), 0.5))
    return mechanisms.Priors(rows, groups, put("values", np.array([0.0, 1.0])))


# vault


@builds("vault.PrivateLabels")
def _(put):
    budget = ldp.PrivacyBudget(50.0, DELTA)
    return ldp.PrivateLabels(Y, K, budget=budget, draws="keyed", ids=put("ids", np.arange(N)))


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
    """Returns the error: what comes along with the use passes a budget for the use alone."""
    labels = labels_of(epsilon=1.0)
    try:
        labels.check_budget(put("mechanism", RR), put("indices", np.arange(N)))
    except ldp.BudgetExceededError as error:
        return error


@builds("vault.PrivateLabels.randomize")
def _(put):
    if put.name == "features":
        randomizer = heads.HeadPriorRandomizer(4.0, delta=DELTA / 2)
        return labels_of().randomize(randomizer, features=put("features", X))
    if put.name == "clusters":
        randomizer = CLUSTER_RR
        return labels_of().randomize(randomizer, clusters=put("clusters", GROUPS))
    mechanism, indices = put("mechanism", RR_WITH_PRIOR), put("indices", np.arange(N))
    return labels_of().randomize(mechanism, indices, put("priors", HALF))


@builds("vault.PrivateLabels.release")
def _(put):
    mechanism = put("mechanism", mechanisms.HistogramMechanism(1.0, K))
    return labels_of().release(mechanism, put("indices", np.arange(N)), put("public_input", GROUPS))


@builds("vault.ClusterRandomizedResponse.draw_from")
def _(put):
    randomizer = CLUSTER_RR
    return randomizer.draw_from(labels_of(), None, _behind_the_edge(put, GROUPS))


@builds("vault.LabelRandomizer")
def _(put):
    values, prior = put("values", (0.0, 1.0)), put("prior", (0.5, 0.5))
    return numbers_of().randomize(ldp.LabelRandomizer(1.0, values=values, prior=prior))


@builds("vault.LabelRandomizer.draw_from")
def _(put):
    randomizer = ldp.LabelRandomizer(1.0, values=(0.0, 1.0), prior=(0.5, 0.5))
    return randomizer.draw_from(numbers_of(), None, _behind_the_edge(put, None))


@builds("vault.NoisyLabels.evaluate")
def _(put):
    noisy = labels_of().randomize(RR)
    return noisy.evaluate(put("predictions", Y), "accuracy", model=put("model", dense()))


@builds("vault.declare")
def _(put):
    model = put("artefact", dense())
    return ldp.declare(model, because="a test", made_of=put("made_of", [X]))


def _behind_the_edge(put, value):
    """Returns the argument ``public`` of a randomizer, as the vault gives it."""
    return accounting.public_input(put("public", value))


# features


@builds("features.NeighbourSmoothing")
def _(put):
    encoder = put("encoder", dense(3))
    return features.NeighbourSmoothing(encoder, num_neighbours=2).fit(put("inputs", X))


@builds("features.Clusters.from_assignments")
def _(put):
    made = features.find_clusters(X, 2)
    return type(made).from_assignments(put("assignments", GROUPS))


@builds("features.denoise_labels")
def _(put):
    noisy, clusters = put("noisy_labels", Y), put("clusters", GROUPS)
    return features.denoise_labels(noisy, clusters, K)


# heads


def _fits(head, **options):
    def builder(put):
        encoder = put("encoder", dense(3))
        labels = labels_of() if "low" not in options else numbers_of()
        made = head(1.0, DELTA / 2, encoder=encoder)
        return made.fit(put("features", X), labels)

    return builder


def _exports(head, **options):
    def builder(put):
        made = _fits(head, **options)(Put("", put.receipt))
        return made.to_keras(put("encoder", dense(3)))

    return builder


for _head, _options in (
    (heads.PrivateRidge, {}),
    (heads.PrivateLogisticRegression, {}),
    (heads.PrivatePoissonRegression, {"low": 0.0}),
):
    builds(f"heads.{_head.__name__}")(_fits(_head, **_options))
    builds(f"heads.{_head.__name__}.to_keras")(_exports(_head, **_options))


@builds("heads.NoiseCluster")
def _(put):
    if put.name == "clusters":
        head = heads.NoiseCluster(None, 1.0, clusters=put("clusters", GROUPS))
    else:
        head = heads.NoiseCluster(2, 1.0, encoder=put("encoder", dense(3)))
    return head.fit(put("features", X), labels_of())


@builds("heads.NoiseCluster.to_keras")
def _(put):
    head = heads.NoiseCluster(2, 1.0, encoder=dense(3)).fit(X, labels_of())
    return head.to_keras(put("encoder", dense(3)))


@builds("heads.BootstrappedHead")
def _(put):
    head = heads.BootstrappedHead(
        2.0,
        DELTA / 2,
        put("network", dense()),
        encoder=put("encoder", same),
        views=put("views", same),
        shares=(1.0,),
        epochs=1,
        verbose=0,
    )
    return head.fit(put("inputs", X), labels_of())


@builds("heads.HeadPriorRandomizer")
def _(put):
    randomizer = heads.HeadPriorRandomizer(4.0, DELTA / 2, encoder=put("encoder", dense(3)))
    return labels_of().randomize(randomizer, features=X)


@builds("heads.HeadPriorRandomizer.draw_from")
def _(put):
    randomizer = heads.HeadPriorRandomizer(4.0, delta=DELTA / 2)
    return randomizer.draw_from(labels_of(), None, _behind_the_edge(put, X))


@builds("heads.TeacherLabels.batches")
def _(put):
    made = heads.teacher_labels(np.eye(K)[Y])
    return made.batches(put("inputs", X), 16, augment=put("augment", same))


# data, training


@builds("data.poisson_batches")
def _(put):
    options = {}
    if put.name == "users":
        options = {"users": put("users", np.arange(N) // 2), "max_examples_per_user": 2}
    return data.poisson_batches(
        put("features", X), labels_of(), sampling_probability=0.5, steps=1, **options
    )


@builds("data.randomize_labels")
def _(put):
    public = {"priors": put("priors", HALF)}
    mechanism: Any = RR_WITH_PRIOR
    if put.name == "clusters":
        public = {"clusters": put("clusters", GROUPS)}
        mechanism = CLUSTER_RR
    if put.name == "id_fn":
        public["id_fn"] = put("id_fn", lambda x: tf.strings.as_string(x[0]))
    budget = ldp.PrivacyBudget(50.0, DELTA)
    transform = data.randomize_labels(
        put("mechanism", mechanism), budget=budget, verbose=False, **public
    )
    tf.data.Dataset.from_tensor_slices((X, Y)).apply(transform)
    return transform


def private_model():
    """Returns a small model that trains privately, compiled."""
    inputs = keras.Input((4,))
    return _compiled_privately(ldp.LabelDPModel(inputs, keras.layers.Dense(K)(inputs)))


def _compiled_privately(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ldp.LabelDPOptimizer("sgd", 1.0, 4.0), loss)
    return model


@builds("training.LabelDPModel")
def _(put):
    layer = put(put.name, dense())
    layer = layer.value if isinstance(layer, PublicInput) else layer
    if isinstance(layer, keras.Model) and not put.itself:
        attach(layer, [put.receipt])  # tensors of Keras carry what their layers do
    inputs = keras.Input((4,))
    if put.name == "kwargs":
        return _compiled_privately(ldp.LabelDPModel(inputs=inputs, outputs=layer(inputs)))
    return _compiled_privately(ldp.LabelDPModel(inputs, layer(inputs)))


@builds("training.LabelDPModel.fit")
def _(put):
    model = private_model()
    weights = {} if put.name != "settings" else {"sample_weight": put("settings", np.ones(N))}
    model.fit(put("x", X), Y, batch_size=32, verbose=0, **weights)
    return model


@builds("training.LabelDPModel.from_model")
def _(put):
    inputs = keras.Input((4,))
    model = ldp.LabelDPModel.from_model(put("model", dense()), put("inputs", inputs))
    return _compiled_privately(model)


@builds("training.MultiStageTraining")
def _(put):
    features_of, priors = put("features", X), put("priors", HALF)
    stages = ldp.MultiStageTraining(
        features_of,
        labels_of(),
        epsilon=1.0,
        fractions=(0.5, 0.5),
        epochs_per_stage=1,
        priors=priors,
        verbose=0,
    )
    model = compiled(dense())
    options = {"epochs": stages.epochs, "shuffle": False, "verbose": 0}
    model.fit(stages.dataset(), callbacks=[stages], **options)
    return model


@builds("training.RecordReceipts")
def _(put):
    noisy = labels_of().randomize(RR)
    model = compiled(dense())
    recorded = ldp.RecordReceipts(put("noisy", noisy))
    model.fit(X, noisy.posterior(), callbacks=[recorded], verbose=0)
    return model


@builds("training.fit")
def _(put):
    model = compiled(dense())
    weights = {} if put.name != "settings" else {"sample_weight": put("settings", np.ones(N))}
    noisy = labels_of().randomize(RR)
    ldp.fit(put("model", model), put("x", X), put("noisy", noisy), verbose=0, **weights)
    return model


@builds("training.make_private")
def _(put):
    model, batches, _ = ldp.make_private(
        put("model", dense()),
        epsilon=1.0,
        x=put("x", X),
        labels=labels_of(),
        epochs=1,
        batch_size=32,
    )
    return [model, batches]


# learners


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
    encoder, options = put("encoder", dense(3, (8, 8, 1))), {}
    for name in ("weak", "strong"):
        options[name] = put(name, same)
    model = SCAN(encoder, 2, num_neighbours=2, **options)
    model.compile("sgd")
    if put.name == "x":
        model.fit(put("x", IMAGES), batch_size=32, epochs=1, self_label_epochs=0, verbose=0)
    return model


def _learns(learner, **options_of_fit):
    def builder(put):
        network, options = put("network", dense(K, (8, 8, 1))), {}
        for name, value in (("weak", same), ("strong", same), ("priors", HALF)):
            options[name] = put(name, value)
        model = learner(network, **options)
        model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
        if put.name not in ("x", "y", "clusters", "sample_weight"):
            return model
        given: dict[str, Any] = {}
        for name, value in (("clusters", GROUPS), ("sample_weight", np.ones(N))):
            if name == put.name:
                given[name] = put(name, value)
        noisy = labels_of().randomize(RR)
        model.fit(
            put("x", IMAGES),
            put("y", noisy),
            batch_size=16,
            epochs=1,
            steps_per_epoch=1,
            verbose=0,
            **options_of_fit,
            **given,
        )
        return model

    return builder


builds("semi_supervised.FixMatch")(_learns(FixMatch))
builds("semi_supervised.DivideMix")(_learns(DivideMix, warmup_epochs=0))


def learner():
    """Returns FixMatch around a small network, compiled."""
    return compiled(FixMatch(dense(K, (8, 8, 1)), weak=same, strong=same))


@builds("semi_supervised.FixMatch.fit_targets")
def _(put):
    model = learner()
    targets = Targets(np.arange(N), np.eye(K, dtype=np.float32)[Y], np.ones(N, np.float32), None)
    model.fit_targets(put("images", IMAGES), put("labelled", targets), 16, 1, 0, verbose=0)
    return model


@builds("pate.PATE")
def _(put):
    teacher = put("teacher", _majority)
    model = pate.PATE(1.0, DELTA / 2, num_teachers=4, num_queries=4, teacher=teacher)
    return model.answer(put("features", X), labels_of())


def _majority(rows, labels, queries):
    """Returns the votes of a teacher: always the first class."""
    return np.zeros(len(queries), np.int64)


@builds("pate.fix_match_teacher")
def _(put):
    settings = {} if put.name != "settings" else {"weak": put("settings", same)}
    return pate.fix_match_teacher(put("network", dense(K, (8, 8, 1))), **settings)


# front door, scale


@builds("front_door.PrivateClassifier")
def _(put):
    model = None if put.name != "model" else put("model", dense())
    encoder = put("encoder", dense(3)) if model is None else None
    door = ldp.PrivateClassifier(1.0, DELTA / 2, model=model, encoder=encoder, epochs=1)
    return door.fit(put("features", X), labels_of())


@builds("front_door.PrivateRegressor")
def _(put):
    door = ldp.PrivateRegressor(1.0, DELTA / 2, encoder=put("encoder", dense(3)))
    return door.fit(put("features", X), numbers_of())


@builds("front_door.PrivateSearchCV")
def _(put):
    head = ldp.PrivateRidge(1.0, DELTA / 2)
    search = ldp.PrivateSearchCV(
        put("estimator", head), put("param_grid", {"penalty": [1.0, 10.0]}), 1.0, DELTA / 2
    )
    return search.fit(put("features", X), labels_of())


@builds("scale.ReleaseKey.register")
def _(put):
    key = _key()
    key.register("first", put("mechanism", RR_WITH_PRIOR), put("priors", HALF), num_rows=N)
    return key.receipts("first")


@builds("scale.ReleaseKey.check")
def _(put):
    """Returns what is listed: a release that was checked may be listed with what it carries."""
    key = _key()
    mechanism, priors = put("mechanism", RR_WITH_PRIOR), put("priors", HALF)
    key.check("first", mechanism, priors)
    key.register("first", mechanism, priors, num_rows=N)
    key.check("first", mechanism, priors)
    return key.receipts("first")


def _key():
    return scale.ReleaseKey.create(Path(tempfile.mkdtemp()) / "labels.key")


BUILDERS |= {
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
    "mechanisms.Priors.of": lambda put: mechanisms.Priors.of(put("priors", HALF)),
    "mechanisms.RROnBins": lambda put: mechanisms.RROnBins(
        1.0,
        inputs=put("inputs", (0.0, 1.0)),
        outputs=put("outputs", (0.0, 1.0)),
        bin_of_input=put("bin_of_input", (0, 1)),
    ),
    "mechanisms.optimal_bins": lambda put: mechanisms.optimal_bins(
        put("values", [0.0, 1.0]), put("probabilities", HALF), 1.0
    ),
    "vault.PrivateLabels.evaluate": lambda put: labels_of().evaluate(
        put("predictions", Y), "accuracy", 1.0
    ),
    "vault.PrivateLabels.guarantee": lambda put: labels_of().guarantee(after=put("after", [RR])),
    "vault.PrivateLabels.split": lambda put: labels_of().split(put("held_out", np.arange(8)))[0],
    "vault.NoisyLabels": lambda put: ldp.NoisyLabels(
        put("values", Y),
        put("indices", np.arange(N)),
        put("mechanism", RR_WITH_PRIOR),
        put("priors", mechanisms.Priors(HALF)),
        receipts=labels_of().randomize(RR).receipts,
    ),
    "vault.guarantee": lambda put: ldp.guarantee(put("artefact", dense())),
    "features.PatchDictionary": lambda put: features.PatchDictionary(4, 3, pooling=1).fit(
        put("images", IMAGES)
    ),
    "features.RandomFourierFeatures": lambda put: features.RandomFourierFeatures(8).fit(
        put("table", X)
    ),
    "features.find_clusters": lambda put: features.find_clusters(
        put("features", X), 2, encoder=put("encoder", dense(3))
    ),
    "heads.teacher_labels": lambda put: heads.teacher_labels(put("probabilities", np.eye(K)[Y])),
    "training.LabelDPModel.declare": lambda put: private_model().declare(
        "a test", made_of=put("made_of", [X])
    ),
    "self_supervised.SCAN.clusters": lambda put: SCAN(dense(3, (8, 8, 1)), 2).clusters(
        put("images", IMAGES)
    ),
}
