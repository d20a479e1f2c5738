"""Every public input of every public name: its receipts arrive in the statement of what comes out.

The entry points are found by introspection (``_entry_points.py``) and called by small builders
(``_builders.py``). Functions whose result is an array or a number, by their return annotation, are
exempt: an array carries nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _builders import BUILDERS, IMAGES, Put, X, Y, labels_of, learner, private_model
from _entry_points import Argument, arguments, arguments_of_engines, kind_of

import tf_labeldp as ldp
from tf_labeldp.accounting import (
    Assumption,
    Charge,
    PrivacyGuarantee,
    Public,
    PublicInput,
    Receipt,
    public_input,
)

ARGUMENTS = arguments()
PUBLIC = [one for one in ARGUMENTS if one.kind == "public" and one.can_be_stated]
MARK = Assumption("other", "nobody", "The mark of the receipt that this test looks for.")


def an_earlier_use() -> Receipt:
    """Returns the receipt of a use of other labels, which its assumption tells from all others."""
    priced = Charge.of(ldp.RandomizedResponse(0.25, 2))
    charge = Charge(priced.epsilon, priced.delta, priced.event, (MARK,))
    return labels_of().charge(charge, what="an earlier use")


def arrives(receipt: Receipt, made: Any) -> bool:
    """Returns whether a receipt is among those of what was made, and in its statement."""
    if isinstance(made, PrivacyGuarantee):
        return MARK in made.assumptions
    if isinstance(made, ldp.BudgetExceededError):  # a check counts what comes along
        return True
    if isinstance(made, ldp.PrivateLabels):
        receipts = made.receipts
    elif isinstance(made, tuple) and all(isinstance(one, Receipt) for one in made):
        receipts = made
    else:
        receipts = public_input(made).receipts
    is_stated = True
    if hasattr(made, "guarantee"):
        is_stated = MARK in made.guarantee().assumptions
    elif isinstance(made, keras.Model):
        is_stated = MARK in ldp.guarantee(made).assumptions
    return is_stated and receipt.id in {one.id for one in receipts}


def builder_of(argument: Argument) -> Any:
    """Returns the builder of an entry point, or of its class; None without one."""
    return BUILDERS.get(argument.place) or BUILDERS.get(argument.place.rpartition(".")[0])


def check(argument: Argument, builder: Any) -> None:
    """Fails unless the receipts of this argument arrive, whatever carries them."""
    assert builder, f"{argument.place} takes public inputs: give it a builder in _builders.py"
    put = Put(argument.name, an_earlier_use())
    made = builder(put)
    assert put.was_asked, f"the builder of {argument.place} gives no {argument.name}"
    assert arrives(put.receipt, made), f"{argument.place}: the receipts of {argument.name} are lost"
    if put.can_carry_itself:
        put = Put(argument.name, an_earlier_use(), itself=True)
        made = builder(put)
        what = f"{argument.place}: the receipts of a {argument.name} that carries some are lost"
        assert arrives(put.receipt, made), what


@pytest.fixture(autouse=True)
def repeatable_and_eager() -> Iterator[None]:
    """Fixes the seeds, and saves the time in which TensorFlow compiles steps that are run once."""
    keras.utils.set_random_seed(0)
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", sorted({one.place.partition(".")[0] for one in PUBLIC}))
def test_receipts_of_a_public_input_arrive(part: str) -> None:
    lost = []
    for argument in PUBLIC:
        if argument.place.startswith(f"{part}."):
            keras.utils.set_random_seed(0)
            try:
                check(argument, builder_of(argument))
            except Exception as error:
                lost.append(f"{argument.place}, {argument.name}: {error!r}")
    assert not lost, "\n".join(lost)


def test_every_argument_says_what_it_is() -> None:
    """A wide type, such as Any, an array, a function or a Keras class, needs an annotation."""
    engines = arguments_of_engines()
    found = {one.place.rpartition(".")[0] for one in engines if one.kind == "public"}
    assert len(found) == 5, found  # what draws or releases, in Beam, Spark and TFX
    assert [one for one in (*ARGUMENTS, *engines) if one.kind is None] == []


def test_no_builder_is_left_over() -> None:
    used = {one.place for one in PUBLIC} | {one.place.rpartition(".")[0] for one in PUBLIC}
    assert set(BUILDERS) <= used


def test_the_walk_covers_what_it_did() -> None:
    places, stated = {one.place for one in ARGUMENTS}, {one.place for one in PUBLIC}
    covered = (
        f"{len(ARGUMENTS)} arguments of {len(places)} public callables; receipts of "
        f"{len(PUBLIC)} arguments are followed through {len(stated)}"
    )
    assert len(ARGUMENTS) >= 1242, covered
    assert len(PUBLIC) >= 136, covered


# What is made of a value that keeps receipts finds them.


def smoothed(x: Any) -> Any:
    return ldp.features.NeighbourSmoothing(num_neighbours=2).fit(x).to_keras()


def unsmoothed(x: Any) -> Any:
    return ldp.features.NeighbourSmoothing(num_neighbours=2, strength=0.0).fit(x).to_keras()


def fourier(x: Any) -> Any:
    return ldp.features.RandomFourierFeatures(8).fit(x).to_keras()


def encoded(x: Any) -> Any:
    encoder = ldp.features.RandomFourierFeatures(8).fit(x)
    return ldp.PrivateRidge(1.0, 1e-4, encoder=encoder).fit(X, labels_of())


def clustered(x: Any) -> Any:
    clusters = ldp.features.find_clusters(x, 8)
    return ldp.heads.NoiseCluster(None, 1.0, clusters=clusters).fit(X, labels_of())


def trained_on_batches(x: Any) -> Any:
    model = private_model()
    batches = ldp.data.poisson_batches(x, labels_of(), sampling_probability=0.5, steps=1)
    model.fit(batches, verbose=0)
    return model


def selected(x: Any) -> Any:
    labels = labels_of()
    predictions = public_input(x).with_value([Y, 1 - Y])
    ldp.select(predictions, labels, epsilon=0.5)
    return labels


@pytest.mark.filterwarnings("ignore")
def test_what_is_made_of_a_made_value_finds_its_receipts() -> None:
    receipt = an_earlier_use()
    others = X[::-1] + np.arange(4, dtype=np.float32)  # equal weights are known by their digests
    for make in (smoothed, unsmoothed, fourier, encoded, clustered, trained_on_batches, selected):
        assert arrives(receipt, make(PublicInput(X, (receipt,)))), make
        assert not arrives(receipt, make(others)), make
    patches = ldp.features.PatchDictionary(4, 3, pooling=1).fit(PublicInput(IMAGES, (receipt,)))
    assert arrives(receipt, patches.to_keras())


# Tests of the test.


class Forgetful:
    """A plug-in that takes a public input, and drops what it was made of."""

    def __init__(self, rows: Public[Any]) -> None:
        self.rows = np.asarray(public_input(rows).value)


class Careful(Forgetful):
    """One that keeps it."""

    def __init__(self, rows: Public[Any]) -> None:
        super().__init__(rows)
        self.receipts = public_input(rows).receipts


def test_a_plug_in_that_drops_receipts_is_found() -> None:
    argument = Argument("plug_in.Forgetful", "rows", "Public[Any]", None)
    check(argument, lambda put: Careful(put("rows", np.eye(2))))
    with pytest.raises(AssertionError, match="the receipts of rows are lost"):
        check(argument, lambda put: Forgetful(put("rows", np.eye(2))))


def test_a_missing_builder_or_argument_is_found() -> None:
    argument = Argument("plug_in.Careful", "rows", "Public[Any]", None)
    with pytest.raises(AssertionError, match="give it a builder"):
        check(argument, None)
    with pytest.raises(AssertionError, match="gives no rows"):
        check(argument, lambda put: Careful(np.eye(2)))


def test_an_annotation_says_what_an_argument_is() -> None:
    kinds = {
        "Public[Any]": "public",
        "dataclasses.InitVar[Public[Mapping[str, Any] | None]]": "public",
        "PublicInput[Any]": "public",
        "Private[PrivateLabels]": "private",
        "Setting[Any]": "setting",
        "Annotated[Any, 'setting']": "setting",
        "float | Sequence[float] | None": "setting",
        "str | os.PathLike[str]": "setting",
        "type[OneReleaseHead]": "setting",
        "Any": None,
        "np.ndarray | None": None,
        "Callable[[], tf.Tensor]": None,
        "keras.Model": None,
        "Sequence[Any]": None,
        "PrivateLabels": None,
        "LabelMechanism": None,
        "OneReleaseHead": None,
    }
    assert {annotation: kind_of(annotation) for annotation in kinds} == kinds


def test_noisy_labels_without_a_receipt_of_their_own_promise_nothing() -> None:
    """Priors with receipts are no receipt of the draw."""
    prior = labels_of().release(ldp.mechanisms.HistogramMechanism(1.0, 2)).priors()
    mechanism = ldp.RRWithPrior(1.0, 2)
    noisy = ldp.NoisyLabels(np.arange(4) % 2, np.arange(4), mechanism, prior)
    assert prior.receipts and noisy.guarantee().epsilon == float("inf")
    with pytest.raises(ValueError, match="expected noisy labels with receipts, got none"):
        ldp.RecordReceipts(noisy)
    model = learner()
    model.fit(IMAGES[:4], noisy, batch_size=4, steps_per_epoch=1, verbose=0)
    assert ldp.guarantee(model).epsilon == float("inf")


def test_many_rows_in_lists_are_read() -> None:
    """100,000 objects are too many to look into, and rows of numbers are none."""
    assert public_input([[float(one)] for one in range(100_001)]).receipts == ()
    assert public_input([np.zeros(1) for _ in range(100_001)]).receipts == ()
    with pytest.raises(ValueError, match="at most 100,000 objects"):
        public_input([Careful(np.eye(1)) for _ in range(100_001)])
