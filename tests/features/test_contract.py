"""The contract that every feature map keeps: no labels, one configuration, one Keras model."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from sklearn.base import clone

from tf_labeldp import PrivacyBudget, PrivateLabels, features, guarantee
from tf_labeldp.accounting import PublicInput, public_input
from tf_labeldp.features import (
    NeighbourSmoothing,
    PatchDictionary,
    PublicEncoder,
    RandomFourierFeatures,
    TableCodes,
)
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.plugins import FeatureMap

RNG = np.random.default_rng(0)
ROWS = (
    3.0 * RNG.normal(size=(3, 5))[RNG.integers(3, size=200)] + RNG.normal(size=(200, 5))
).astype(np.float32)
IMAGES = RNG.normal(size=(60, 12, 12)).cumsum(axis=1).cumsum(axis=2).astype(np.float32)


ENCODER = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)], name="encoder")
ENCODER.trainable = False


class Member(NamedTuple):
    """A feature map as a function of its arguments, and inputs to fit it on."""

    make: Any
    inputs: np.ndarray
    uses_seed: bool = True
    # An argument that may be 3 or 4.
    argument: str = "seed"


MEMBERS = {
    "RandomFourierFeatures": Member(lambda **how: RandomFourierFeatures(20, **how), ROWS),
    "PatchDictionary": Member(lambda **how: PatchDictionary(7, 5, pooling=2, **how), IMAGES),
    "NeighbourSmoothing": Member(lambda **how: NeighbourSmoothing(**how), ROWS, False),
    "NeighbourSmoothing of an encoder": Member(
        lambda **how: NeighbourSmoothing(RandomFourierFeatures(10).fit(ROWS), **how), ROWS, False
    ),
    "TableCodes": Member(lambda **how: TableCodes(**how), ROWS, False, "most_categories"),
    "PublicEncoder": Member(lambda **how: PublicEncoder(ENCODER, **how), ROWS, False, "size"),
}


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


def test_every_map_is_in_the_table():
    values = vars(features).values()
    public = {kind for kind in values if isinstance(kind, type) and issubclass(kind, FeatureMap)}
    assert public == {type(each.make()) for each in MEMBERS.values()}


def test_configuration_round_trip(member):
    mapping = member.make(**{member.argument: 3})
    again = clone(mapping)
    assert type(again) is type(mapping) and again.get_params() == mapping.get_params()
    assert again.set_params(**{member.argument: 4}) is again
    assert [each.get_params()[member.argument] for each in (again, mapping)] == [4, 3]
    assert mapping.__sklearn_tags__().transformer_tags is not None
    for unfitted in (lambda: mapping.transform(member.inputs), mapping.to_keras):
        with pytest.raises(ValueError, match="not fitted"):
            unfitted()


@pytest.mark.holds(
    "features.NeighbourSmoothing",
    "features.PatchDictionary",
    "features.PublicEncoder",
    "features.RandomFourierFeatures",
    "features.TableCodes",
)
def test_no_method_reads_labels_and_the_seed_repeats(member):
    """An ``object()`` has nothing to read; scikit-learn's pipelines pass labels by place."""
    x = member.inputs
    expected = member.make().fit_transform(x)
    assert expected.dtype == np.float32 and expected.shape == (len(x), expected.shape[1])
    for labels in ((), (object(),)):
        mapping = member.make()
        np.testing.assert_array_equal(mapping.fit_transform(x, *labels), expected)
        assert mapping.n_features_out_ == expected.shape[1]
    if member.uses_seed:
        np.testing.assert_array_equal(member.make().fit(x, object()).transform(x), expected)
        assert np.abs(member.make(seed=4).fit_transform(x) - expected).max() > 0.01


def test_the_keras_model_computes_the_same_and_saves(member, tmp_path):
    mapping = member.make().fit(member.inputs)
    model = mapping.to_keras()
    assert model.trainable_weights == []
    model.save(tmp_path / "map.keras")
    fresh = member.inputs + 0.1 * RNG.normal(size=member.inputs.shape).astype(np.float32)
    expected = mapping.transform(fresh)
    for found in (model, keras.models.load_model(tmp_path / "map.keras")):
        np.testing.assert_allclose(found.predict(fresh, verbose=0), expected, atol=1e-3)


def test_receipts_of_the_inputs_are_kept(member, tmp_path):
    labels = PrivateLabels([0, 1] * 30, 2, budget=PrivacyBudget(1.0))
    (receipt,) = labels.randomize(RandomizedResponse(1.0, 2)).receipts
    mapping = member.make().fit(PublicInput(member.inputs, (receipt,)))
    if isinstance(mapping, PublicEncoder):  # whose Keras model learns nothing from these rows
        assert [found.kind for found in mapping.receipts_] == ["draw", "declared"]
        return
    assert mapping.receipts_ == (receipt,)
    model = mapping.to_keras()
    model.save(tmp_path / "map.keras")
    for value in (
        mapping,
        mapping.transform,
        model,
        keras.models.load_model(tmp_path / "map.keras"),
    ):
        assert [found.id for found in public_input(value).receipts] == [receipt.id]
    assert guarantee(model).epsilon == 1.0


def test_numbers_that_are_not_finite_are_refused(member):
    bad = member.inputs.copy()
    bad[7] = np.inf
    with pytest.raises(ValueError, match="finite"):
        member.make().fit(bad)
    with pytest.raises(ValueError, match="finite"):
        member.make().fit(member.inputs).transform(bad)
