"""The receipts of every public input of every public name arrive in the statement of the result.

Introspection finds the entry points (``_entry_points.py``), and small builders call them
(``_builders.py``). Functions that return arrays or numbers, by their annotation, are exempt: an
array carries no receipts.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from _builders import BUILDERS, IMAGES, Put, X, Y, labels_of, learner, private_model
from _entry_points import TRAINING, Argument, arguments, arguments_of_engines, kind_of
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp import features
from tf_labeldp.accounting import (
    Assumption,
    Charge,
    PrivacyGuarantee,
    Public,
    PublicInput,
    Receipt,
    public_input,
)

pytestmark = pytest.mark.usefixtures("repeatable_and_eager")

ARGUMENTS = arguments()
PUBLIC = [each for each in ARGUMENTS if each.kind == "public" and each.can_be_stated]
MARK = Assumption("other", "nobody", "The mark of the receipt that this test looks for.")


def an_earlier_use() -> Receipt:
    """Returns the receipt of a use of other labels, marked by an assumption."""
    priced = Charge.of(ldp.RandomizedResponse(0.25, 2))
    charge = Charge(priced.epsilon, priced.delta, priced.event, (MARK,))
    return labels_of().charge(charge, what="an earlier use")


def arrives(receipt: Receipt, result: Any) -> bool:
    """Returns whether a result has a receipt, and counts it in its statement."""
    if isinstance(result, PrivacyGuarantee):
        return MARK in result.assumptions
    # A budget check counts the receipts of public inputs.
    if isinstance(result, ldp.BudgetExceededError):
        return True
    if isinstance(result, ldp.PrivateLabels):
        receipts = result.receipts
    elif isinstance(result, tuple) and all(isinstance(item, Receipt) for item in result):
        receipts = result
    else:
        receipts = public_input(result).receipts
    is_stated = True
    if hasattr(result, "guarantee"):
        is_stated = MARK in result.guarantee().assumptions
    elif isinstance(result, keras.Model):
        is_stated = MARK in ldp.guarantee(result).assumptions
    return is_stated and receipt.id in {found.id for found in receipts}


def builder_of(argument: Argument) -> Any:
    """Returns the builder of an entry point or of its class, or None."""
    return BUILDERS.get(argument.place) or BUILDERS.get(argument.place.rpartition(".")[0])


def check(argument: Argument, builder: Any) -> None:
    """Fails unless the receipts of this argument arrive, in a ``PublicInput`` or in the value."""
    assert builder, f"{argument.place} takes public inputs: add a builder to _builders.py"
    put = Put(argument.name, an_earlier_use())
    result = builder(put)
    assert put.was_called, f"the builder of {argument.place} passes no {argument.name}"
    lost = f"{argument.place}: the receipts of {argument.name} are lost"
    assert arrives(put.receipt, result), lost
    if put.can_carry_receipts:
        put = Put(argument.name, an_earlier_use(), itself=True)
        assert arrives(put.receipt, builder(put)), f"{lost}, which carries them itself"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "part", with_slow(sorted({each.place.partition(".")[0] for each in PUBLIC}), TRAINING)
)
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


def test_every_argument_has_a_kind() -> None:
    """A wide type, such as Any, an array, a function or a Keras class, needs an annotation."""
    engines = arguments_of_engines()
    places = {each.place.rpartition(".")[0] for each in engines if each.kind == "public"}
    # The draws and releases of Beam, Spark and TFX.
    assert len(places) == 5, places
    assert [each for each in (*ARGUMENTS, *engines) if each.kind is None] == []


def test_every_builder_is_used() -> None:
    places = {each.place for each in PUBLIC}
    assert set(BUILDERS) <= places | {place.rpartition(".")[0] for place in places}


def test_introspection_finds_the_arguments() -> None:
    assert len(ARGUMENTS) >= 1217
    assert len(PUBLIC) >= 136


def trained_on_batches(x: Any) -> Any:
    model = private_model()
    batches = ldp.data.poisson_batches(x, labels_of(), sampling_probability=0.5, steps=1)
    model.fit(batches, verbose=0)
    return model


def selected(x: Any) -> Any:
    labels = labels_of()
    ldp.select(public_input(x).with_value([Y, 1 - Y]), labels, epsilon=0.5)
    return labels


# Results that take several steps, which a builder does not follow.
ROUTES = {
    "smoothing": lambda x: features.NeighbourSmoothing(num_neighbours=2).fit(x).to_keras(),
    "no smoothing": lambda x: (
        features.NeighbourSmoothing(num_neighbours=2, strength=0.0).fit(x).to_keras()
    ),
    "Fourier features": lambda x: features.RandomFourierFeatures(8).fit(x).to_keras(),
    "an encoder": lambda x: ldp.PrivateRidge(
        1.0, 1e-4, encoder=features.RandomFourierFeatures(8).fit(x)
    ).fit(X, labels_of()),
    "clusters": lambda x: ldp.heads.NoiseCluster(
        None, 1.0, clusters=features.find_clusters(x, 8)
    ).fit(X, labels_of()),
    "batches": trained_on_batches,
    "a selection": selected,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("route", ROUTES)
def test_receipts_arrive_through_several_steps(route: str) -> None:
    receipt = an_earlier_use()
    # Other rows, since equal weights would be recognized by their digests.
    others = X[::-1] + np.arange(4, dtype=np.float32)
    assert arrives(receipt, ROUTES[route](PublicInput(X, (receipt,))))
    assert not arrives(receipt, ROUTES[route](others))


def test_exported_patches_keep_receipts() -> None:
    receipt = an_earlier_use()
    patches = features.PatchDictionary(4, 3, pooling=1).fit(PublicInput(IMAGES, (receipt,)))
    assert arrives(receipt, patches.to_keras())


# Tests of the test.


class Forgetful:
    """A plug-in that takes a public input and drops its receipts."""

    def __init__(self, rows: Public[Any]) -> None:
        self.rows = np.asarray(public_input(rows).value)


class Careful(Forgetful):
    """A plug-in that keeps the receipts of its public input."""

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
    with pytest.raises(AssertionError, match="add a builder"):
        check(argument, None)
    with pytest.raises(AssertionError, match="passes no rows"):
        check(argument, lambda put: Careful(np.eye(2)))


def test_kinds_of_annotations() -> None:
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


def test_noisy_labels_without_a_receipt_of_the_draw_promise_nothing() -> None:
    """The receipts of priors do not cover the draw."""
    prior = labels_of().release(ldp.mechanisms.HistogramMechanism(1.0, 2)).priors()
    mechanism = ldp.RRWithPrior(1.0, 2)
    noisy = ldp.NoisyLabels(np.arange(4) % 2, np.arange(4), mechanism, prior)
    assert prior.receipts and noisy.guarantee().epsilon == float("inf")
    with pytest.raises(ValueError, match="noisy labels with receipts"):
        ldp.RecordReceipts(noisy)
    model = learner()
    model.fit(IMAGES[:4], noisy, batch_size=4, steps_per_epoch=1, verbose=0)
    assert ldp.guarantee(model).epsilon == float("inf")


@pytest.mark.slow
def test_many_rows_in_lists_are_read() -> None:
    """More than 100,000 objects are refused; rows of numbers are not objects."""
    assert public_input([[float(row)] for row in range(100_001)]).receipts == ()
    assert public_input([np.zeros(1) for _ in range(100_001)]).receipts == ()
    with pytest.raises(ValueError, match="at most 100,000 objects"):
        public_input([Careful(np.eye(1)) for _ in range(100_001)])
