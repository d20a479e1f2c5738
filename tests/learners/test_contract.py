"""The contract of learners: configuration, receipts, files and bad input."""

import itertools
import warnings

import keras
import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp.accounting import PublicInput
from tf_labeldp.mechanisms import Priors
from tf_labeldp.self_supervised import SCAN, SimCLR, weak_views
from tf_labeldp.semi_supervised import DivideMix, FixMatch

IMAGES, CLASSES = shapes(60)
# Each learner with settings other than the defaults, and the options of a short fit.
MEMBERS = {
    SimCLR: ({"projection_dim": 4, "temperature": 0.5}, {"batch_size": 20}),
    SCAN: (
        {"num_clusters": 3, "num_neighbours": 4, "entropy_weight": 2.0, "threshold": 0.5},
        {"batch_size": 20, "self_label_epochs": 1},
    ),
    FixMatch: (
        {
            "threshold": 0.6,
            "unlabelled_weight": 0.5,
            "unlabelled_ratio": 2,
            "temperature": 0.5,
            "priors": [0.5, 0.25, 0.25],
            "l2_penalty": 0.01,
            "from_logits": False,
        },
        {"batch_size": 20},
    ),
    DivideMix: (
        {
            "clean_threshold": 0.4,
            "temperature": 0.6,
            "mixup_alpha": 2.0,
            "unlabelled_weight": 5.0,
            "ramp_epochs": 3,
            "division": "channel",
            "priors": [0.5, 0.25, 0.25],
        },
        {"batch_size": 20, "epochs": 2},
    ),
}
LABELLED = (FixMatch, DivideMix)
SEEDS = itertools.count(1)


def parts(learner):
    """The Keras objects of a learner, by argument, with weights that no other test has trained."""
    views = ["views"] if learner is SimCLR else ["weak", "strong"]
    net = network(activation="softmax" if learner is FixMatch else None, seed=next(SEEDS))
    name = "encoder" if learner is SCAN else "network"
    return {name: net, **{view: keras.layers.GaussianNoise(0.1) for view in views}}


def compiled(model):
    model.compile("sgd", "categorical_crossentropy" if isinstance(model, FixMatch) else None)
    return model


@pytest.mark.parametrize("learner", with_slow(MEMBERS, {DivideMix, SCAN}))
@pytest.mark.holds(
    "self_supervised.SCAN",
    "self_supervised.SimCLR",
    "semi_supervised.DivideMix",
    "semi_supervised.FixMatch",
)
def test_receipts_of_labels_and_public_inputs_are_in_the_statement_and_the_file(learner, tmp_path):
    """Every input carries its own epsilon, a power of two, and the statement has their sum."""
    vault = ldp.PrivateLabels(CLASSES, NUM_CLASSES, budget=ldp.PrivacyBudget(9.0))
    spent = []

    def drawn():
        spent.append(2.0 ** (1 - len(spent)))
        return vault.randomize(ldp.RandomizedResponse(spent[-1], NUM_CLASSES))

    def public(value):
        return PublicInput(value, drawn().receipts)

    settings, options = MEMBERS[learner]
    inputs = [drawn()] if learner in LABELLED else []
    if "priors" in settings:
        settings = {**settings, "priors": public(settings["priors"])}
    arguments = {name: public(part) for name, part in parts(learner).items()}
    model = compiled(learner(**arguments, **settings))
    model.fit(public(IMAGES), *inputs, **options, verbose=0)
    assert ldp.guarantee(model).epsilon == pytest.approx(sum(spent))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert ldp.guarantee(loaded).epsilon == pytest.approx(sum(spent))
    np.testing.assert_array_equal(loaded(IMAGES), model(IMAGES))


@pytest.mark.parametrize("learner", MEMBERS)
def test_the_configuration_lists_every_argument(learner):
    settings, _ = MEMBERS[learner]
    config = learner(**parts(learner), **settings).get_config()
    assert {name: config[name] for name in settings} == settings
    again = learner.from_config(config).get_config()
    assert again == config and set(config) == {"name", *settings, *parts(learner)}


def test_the_defaults_are_the_papers():
    config = DivideMix(**parts(DivideMix)).get_config()
    papers = {"clean_threshold": 0.5, "temperature": 0.5, "mixup_alpha": 4.0}
    assert papers.items() <= config.items()


@pytest.mark.parametrize("learner", LABELLED)
def test_labels_without_a_receipt_promise_nothing(learner):
    settings = {} if learner is DivideMix else {"from_logits": False}
    model = compiled(learner(**parts(learner), **settings))
    model.fit(IMAGES, CLASSES, 20, verbose=0)
    assert ldp.guarantee(model).epsilon == np.inf


GROUPED = Priors(np.full((2, 3), 1 / 3), groups=np.array([0, 1, 1]))


@pytest.mark.parametrize(
    "learner, change, match",
    [
        (SimCLR, {"network": keras.Sequential([keras.layers.Dense(2)])}, "built Keras model"),
        (SimCLR, {"temperature": 0.0}, "temperature"),
        (SCAN, {"encoder": None}, "built Keras model"),
        (SCAN, {"num_clusters": 1}, "num_clusters"),
        (SCAN, {"threshold": 1.0}, "threshold"),
        (FixMatch, {"network": None}, "built Keras model"),
        (FixMatch, {"threshold": 1.0}, "threshold"),
        (FixMatch, {"unlabelled_ratio": 0}, "unlabelled_ratio"),
        (FixMatch, {"from_logits": True}, "from_logits=True contradicts"),
        (FixMatch, {"priors": [0.5, 0.5]}, "priors"),
        (FixMatch, {"priors": "equal"}, "priors"),
        (FixMatch, {"l2_penalty": -1.0}, "l2_penalty"),
        (FixMatch, {"priors": GROUPED}, "priors"),
        (DivideMix, {"clean_threshold": 0.0}, "clean_threshold"),
        (DivideMix, {"division": "guess"}, "division"),
        (DivideMix, {"network": network(activation="softmax")}, "from_logits=True contradicts"),
        (DivideMix, {"priors": [0.5, 0.5]}, "priors"),
        (DivideMix, {"priors": GROUPED}, "priors"),
    ],
)
def test_bad_settings(learner, change, match):
    with pytest.raises(ValueError, match=match):
        learner(**{**parts(learner), **MEMBERS[learner][0], **change})


@pytest.mark.slow
@pytest.mark.parametrize("learner", LABELLED)
def test_evaluate_takes_classes_and_rows_of_classes(learner):
    model = learner(**parts(learner), **({} if learner is DivideMix else {"from_logits": False}))
    # FixMatch without a loss has the likelihoods of the labels.
    model.compile("sgd", metrics=["accuracy"])
    model.fit(IMAGES, CLASSES, 20, steps_per_epoch=1, verbose=0)
    rows, predicted = np.eye(NUM_CLASSES)[CLASSES], model.predict(IMAGES, verbose=0)
    found = model.evaluate(IMAGES, CLASSES, verbose=0)
    assert found == model.evaluate(IMAGES, CLASSES[:, None], verbose=0)
    assert found == model.evaluate(IMAGES, rows, verbose=0)
    expected = -np.log((predicted * rows).sum(axis=1)), predicted.argmax(axis=1) == CLASSES
    np.testing.assert_allclose(found[:2], np.mean(expected, axis=1), rtol=1e-5)


@pytest.mark.parametrize("learner", LABELLED)
def test_all_images_with_the_labels_of_a_part_are_refused(learner):
    """A part counts its examples from 0, so labels would go to other images."""
    vault = ldp.PrivateLabels(CLASSES, NUM_CLASSES, budget=ldp.PrivacyBudget(1.0))
    _, rest = vault.split(np.arange(30, 60))
    noisy = rest.randomize(ldp.RandomizedResponse(1.0, NUM_CLASSES))
    settings = {} if learner is DivideMix else {"from_logits": False}
    model = compiled(learner(**parts(learner), **settings))
    with pytest.raises(ValueError, match=r"Give x\[labels.indices\]"):
        model.fit(IMAGES, noisy, 20, verbose=0)
    history = model.fit(IMAGES[rest.indices], noisy, 20, steps_per_epoch=1, verbose=0)
    assert history.epoch == [0]
    assert ldp.guarantee(model).epsilon == 1.0


@pytest.mark.parametrize("learner", MEMBERS)
def test_a_learner_that_is_not_compiled(learner):
    labels = [CLASSES] if learner in LABELLED else []
    settings = {} if learner is DivideMix else MEMBERS[learner][0]
    with pytest.raises(ValueError, match=r"call `compile\(\)`"):
        learner(**parts(learner), **settings).fit(IMAGES, *labels, batch_size=20)


@pytest.mark.slow
@pytest.mark.parametrize("learner", MEMBERS)
def test_mixed_precision(learner):
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        settings, options = MEMBERS[learner]
        settings = {**settings, "division": "mixture"} if learner is DivideMix else settings
        if learner is FixMatch:
            # A running threshold, and likelihoods.
            settings = {"from_logits": False}
        model = learner(**parts(learner), **settings)
        model.compile("sgd")
        labels = [CLASSES] if learner in LABELLED else []
        history = model.fit(IMAGES, *labels, **options, verbose=0).history
        assert np.all(np.isfinite(history["loss"]))
        inner = model.encoder if learner is SCAN else model.network
        assert inner.compute_dtype == "bfloat16"
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


@pytest.mark.slow
@pytest.mark.parametrize("learner", MEMBERS)
def test_xla_compiles_training(learner):
    """Also the views, of which ``test_views`` compiles all others."""
    settings, options = MEMBERS[learner]
    if learner is DivideMix:
        settings = {**settings, "division": "mixture"}
        options = {"batch_size": 20, "warmup_epochs": 0}
    arguments = parts(learner)
    layers = [keras.Input((12, 12, 1)), keras.layers.Flatten()]
    layers.append(keras.layers.Dense(3, "softmax" if learner is FixMatch else None))
    net = arguments[next(iter(arguments))] = keras.Sequential(layers)
    if learner is not DivideMix:
        arguments["views" if learner is SimCLR else "weak"] = weak_views()
    model = learner(**arguments, **settings)
    with warnings.catch_warnings():
        # Keras would train without XLA, with a warning.
        warnings.filterwarnings("error", message=".*jit_compile")
        loss = "categorical_crossentropy" if learner is FixMatch else None
        model.compile("sgd", loss, jit_compile=True)
    before = net.get_weights()
    labels = [CLASSES] if learner in LABELLED else []
    history = model.fit(IMAGES, *labels, **options, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    assert not all(map(np.array_equal, before, net.get_weights()))


@pytest.mark.parametrize("given", [["weak"], ["strong"], ["weak", "strong"]])
def test_images_have_the_range_of_our_own_views(given):
    net, views = network(seed=next(SEEDS)), {name: keras.layers.Identity() for name in given}
    match = "one label per image" if len(given) == 2 else r"images must be in \[0, 1\]"
    with pytest.raises(ValueError, match=match):
        compiled(FixMatch(net, **views)).fit(IMAGES * 255, CLASSES[:9], verbose=0)


@pytest.mark.parametrize("learner", MEMBERS)
@pytest.mark.parametrize(
    "images, match",
    [
        (IMAGES[..., 0], "images must have shape"),
        (np.full((40, 12, 12, 1), 255, np.uint8), "255"),
        (IMAGES * 255, r"images must be in \[0, 1\]"),
    ],
)
def test_bad_images(learner, images, match):
    name, net = next(iter(parts(learner).items()))
    model = compiled(learner(**{name: net}, **MEMBERS[learner][0]))
    with pytest.raises(ValueError, match=match):
        model.fit(images, *([CLASSES] if learner in LABELLED else []))
    assert model.optimizer.iterations == 0
