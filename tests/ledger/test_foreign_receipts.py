"""Receipts from someone else: none of them lowers a statement, or what a budget has spent.

The ids of receipts are public, since published files have them. The author of an encoder or a prior
may write receipts with these ids into it, with digests that fit.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tf_labeldp as ldp
from tf_labeldp.accounting import Charge, LabelSet, PublicInput, Receipt, ReceiptError, Receipts
from tf_labeldp.plugins import Composition, EventFields, TrainedModel
from tf_labeldp.vault.uses import LabelsTogether

BOUNDED = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
FEW = settings(BOUNDED, max_examples=40)
N = 8
Y = np.arange(N) % 2
X = np.eye(N, 4, dtype=np.float32) + Y[:, None]
BUDGET = ldp.PrivacyBudget(20.0, 1e-5)
RR = ldp.RandomizedResponse(3.0, 2)


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a receipt with the digest of its present content."""
    rest = {name: value for name, value in fields.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return {**rest, "digest": digest}


def crafted(receipt: Receipt, **fields: Any) -> Receipt:
    """Returns the receipt of a file in which someone changed fields and the digest."""
    return Receipt.from_json(sealed({**receipt.to_json(), **fields}))


def free(of: Receipt | None = None) -> dict[str, Any]:
    """Returns the charge of no cost, with the assumptions of a receipt."""
    notes = [] if of is None else [note.to_json() for note in of.charge.assumptions]
    return {"epsilon": 0.0, "delta": 0.0, "event": EventFields.NONE, "assumptions": notes}


def an_encoder() -> Receipt:
    """Returns the receipt of an encoder of someone else, which is free."""
    charge = Charge(0.0, 0.0, EventFields.NONE)
    return Receipt(LabelSet.new(10, stored=True), charge, "an encoder", "declared")


def vault(path: Path | None = None, **options: Any) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(Y, 2, budget=BUDGET, store=path, **options)


def part_of(labels: ldp.PrivateLabels) -> ldp.PrivateLabels:
    """Returns the part of the labels that has spent less."""
    return labels.split(np.arange(3, N))[1]


def published() -> list[Receipt]:
    """Returns receipts of several vaults, with shared uses, parts and unknown training."""
    first, second, other = vault(), vault(), vault(people="north")
    receipts = [
        *first.randomize(RR, key="a").receipts,
        *first.randomize(ldp.RandomizedResponse(0.5, 2), np.arange(3)).receipts,
        *second.randomize(ldp.RandomizedResponse(1.0, 2), np.arange(3, N)).receipts,
        *other.randomize(ldp.RandomizedResponse(2.0, 2)).receipts,
    ]
    for _ in range(2):
        charge = Charge.of(ldp.RandomizedResponse(0.25, 2))
        receipts += LabelsTogether([first, second]).charge(charge, what="a step", unit="label")
    return receipts


PUBLISHED = published()
UNKNOWN = Receipt(LabelSet.new(0), Charge.unknown("trained elsewhere"), "training", "unknown")
IDS = [receipt.id for receipt in (*PUBLISHED, UNKNOWN)]
USES = sorted({receipt.use for receipt in PUBLISHED} - {""})
NAMES = [receipt.labels.name for receipt in PUBLISHED]
CHARGES = [
    free(),
    *(receipt.to_json()["charge"] for receipt in PUBLISHED),
    {**free(), "epsilon": 1e-9, "event": EventFields.NOT_PRIVATE},
    {**free(), "epsilon": "inf", "event": EventFields.NOT_PRIVATE},
]
CHARGE = Charge.of(ldp.RandomizedResponse(1.0, 2))


def bits_of(rows, total):
    """Returns the bytes that name these rows among all examples of a receipt."""
    return Receipt(LabelSet.new(total), CHARGE, "a use", examples=rows).examples.bits


BITS = [None, *(base64.b64encode(bits_of([row], N)).decode() for row in range(3))]
CLAIM = {"code": "declared", "who": "authors", "text": "Declared by its author, not checked: x"}
SOMETHING = {
    "id": st.sampled_from([*IDS, *USES, "0" * 32]),
    "use": st.sampled_from(["", *USES, *IDS]),
    "plan": st.sampled_from(["", *USES, *IDS]),
    "answers": st.lists(st.sampled_from([*IDS, *USES]), max_size=3, unique=True),
    "kind": st.sampled_from(["draw", "release", "steps", "failed", "unknown", "declared"]),
    "charge": st.sampled_from(CHARGES),
    "examples": st.sampled_from(BITS),
    "delta": st.sampled_from([0.0, 1e-9, 0.5]),
    "unit": st.sampled_from(["label", "row", "user"]),
    "num_units": st.sampled_from([None, 0, 1, 1000]),
    "key": st.sampled_from(["", "a"]),
}


@st.composite
def foreign(draw: Any, receipts: list[Receipt] = PUBLISHED) -> list[Receipt]:
    """Receipts that someone made out of published ones, as far as files can have them."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        fields = draw(st.sampled_from([*receipts, an_encoder(), UNKNOWN])).to_json()
        fields["id"] = draw(st.uuids()).hex
        for name in draw(st.lists(st.sampled_from(sorted(SOMETHING)), max_size=4, unique=True)):
            fields[name] = draw(SOMETHING[name])
        if draw(st.booleans()):
            changes = {
                "name": draw(st.sampled_from([*NAMES, "f" * 32])),
                "people": draw(st.sampled_from([None, "north", "south"])),
                "stored": draw(st.booleans()),
                "size": draw(st.sampled_from([0, 1, N, 100])),
            }
            fields["labels"] = {**fields["labels"], **changes}
        if fields["answers"] and draw(st.booleans()):
            notes = [*fields["charge"]["assumptions"], CLAIM]
            fields |= {"kind": "declared", "charge": {**fields["charge"], "assumptions": notes}}
        try:
            found.append(Receipt.from_json(sealed(fields)))
        except ReceiptError:
            continue  # No file has such a receipt.
    return found


def is_at_least(stated: ldp.PrivacyGuarantee, honest: ldp.PrivacyGuarantee) -> bool:
    """Returns whether a statement has at least the epsilon and the assumptions of another."""
    if math.isinf(honest.epsilon) and math.isfinite(stated.epsilon):
        # The statement names the author's claim.
        return any(note.startswith("Declared by its author") for note in stated.assumptions)
    reasons = {note for note in honest.assumptions if note.code not in ABOUT_SETS}
    return stated.epsilon >= honest.epsilon * (1 - 1e-9) and reasons <= set(stated.assumptions)


ABOUT_SETS = ("public-features", "one-example-per-set", "disjoint-people", "stated-by-label")
"""Codes of the assumptions that more label sets and other units replace by others."""


@pytest.mark.slow
@BOUNDED
@given(
    st.lists(st.sampled_from([*PUBLISHED, UNKNOWN]), min_size=1, unique_by=id), foreign(), st.data()
)
def test_no_statement_falls(own: list[Receipt], others: list[Receipt], data: Any) -> None:
    """Of models, heads and noisy labels: they merge lists of receipts, in any order."""
    own = data.draw(st.permutations(own))
    mixed = data.draw(st.permutations([*own, *others]))
    for delta in (0.0, 1e-5):
        honest = Receipts(own).guarantee(delta)
        for order in ([*own, *others], [*others, *own], mixed):
            try:
                stated = Receipts(order).guarantee(delta)
                again = Receipts.merged(order).guarantee(delta)
            except ReceiptError:
                # One id with two contents.
                assert {receipt.id for receipt in own} & {receipt.id for receipt in others} or (
                    len({receipt.id for receipt in others}) < len(others)
                )
                continue
            assert is_at_least(stated, honest)
            assert again.epsilon == stated.epsilon


@pytest.mark.slow
@FEW
@given(st.data())
def test_no_budget_is_given_back(tmp_path_factory: Any, data: Any) -> None:
    """Of vaults with and without a store, and of stores that are opened again."""
    path = tmp_path_factory.mktemp("vault") / "store" if data.draw(st.booleans()) else None
    labels = vault(path)
    labels.randomize(RR, key="a")
    labels.randomize(ldp.RandomizedResponse(0.5, 2), np.arange(3), key="b")
    own = list(labels.receipts)
    names = [receipt.id for receipt in own]
    others = data.draw(foreign(own))
    others += [
        crafted(one, answers=[], use=data.draw(st.sampled_from(names))) for one in others[:1]
    ]
    before = labels.guarantee(), labels.remaining(), part_of(labels).remaining()
    try:
        labels.adopt(others)
    except (ReceiptError, ldp.BudgetExceededError):
        pass
    handles = [labels] if path is None else [labels, vault(path)]
    for handle in handles:
        assert is_at_least(handle.guarantee(), before[0])
        assert handle.remaining() <= before[1] * (1 + 1e-6)
        assert part_of(handle).remaining() <= before[2] * (1 + 1e-6)
        assert {receipt.id for receipt in handle.receipts} >= set(names)
        assert max(use.epsilon_so_far for use in handle.history()) >= 3.5
    if path is not None:
        assert ldp.report(path).statement.epsilon >= before[0].epsilon * (1 - 1e-9)


# Each field that a receipt of someone else had believed.


@pytest.mark.parametrize("field", ["answers", "use", "id"])
@pytest.mark.parametrize("first", [True, False])
def test_a_receipt_erases_no_cost(field: str, first: bool, tmp_path: Path) -> None:
    labels = vault(tmp_path / "store")
    noisy = labels.randomize(RR, key="a")
    name = noisy.receipts[-1].id
    if field == "answers":
        claim = {**free(), "assumptions": [CLAIM]}
        other = crafted(an_encoder(), answers=[name], charge=claim)
    else:
        other = crafted(an_encoder(), **{field: name})
    order = [other, *noisy.receipts] if first else [*noisy.receipts, other]
    if field == "id":
        for merge in (
            Receipts.merged,
            lambda receipts: Receipts(receipts).guarantee(),
            lambda receipts: Receipts(receipts).standing(),
            Composition,
            labels.adopt,
        ):
            with pytest.raises(ReceiptError, match="expected one content for the receipt"):
                merge(order)
    else:
        labels.adopt([other])
        assert Receipts(order).guarantee().epsilon == 3.0
        assert {receipt.id for receipt in Receipts(tuple(order)).standing()} >= {name}
    priced = {**RR_TINY.to_json()["charge"], "assumptions": [CLAIM]}
    more = {"answers": [name]} if field == "answers" else {field: name}
    other = crafted(RR_TINY, kind="declared", charge=priced, **more)
    if field == "id":
        with pytest.raises(ReceiptError):
            labels.adopt([other])
    else:
        labels.adopt([other])
    for handle in (labels, vault(tmp_path / "store")):
        assert handle.guarantee().epsilon >= 3.0 and handle.remaining() < 18.0
        # The vault still draws, and refuses the receipt again.
        assert handle.randomize(ldp.RandomizedResponse(0.5, 2)).guarantee().epsilon == 0.5


RR_TINY = Receipt(LabelSet("e" * 32, N), Charge.of(ldp.RandomizedResponse(1e-6, 2)), "priors")


@pytest.mark.slow
def test_a_model_on_an_encoder_of_someone_else(tmp_path: Path) -> None:
    """The encoder's file has the id of the draw; so has the model's file, for ``verify``."""
    labels = vault(tmp_path / "store")
    noisy = labels.randomize(RR, key="a")
    noisy.save(tmp_path / "noisy")
    name = ldp.NoisyLabels.load(tmp_path / "noisy").receipts[-1].id
    claim = {**free(), "assumptions": [CLAIM]}
    cases = {
        "answers": crafted(an_encoder(), answers=[name], charge=claim),
        "use": crafted(an_encoder(), use=name),
        "id": crafted(an_encoder(), id=name),
    }
    for field, receipt in cases.items():
        encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        TrainedModel(encoder).attach([receipt])
        encoder.save(tmp_path / f"{field}.keras")
        model = keras.Sequential([ldp.load_model(tmp_path / f"{field}.keras")])
        model.add(keras.layers.Dense(2, "softmax"))
        model.compile("adam", "categorical_crossentropy")
        if field == "id":
            with pytest.raises(ReceiptError):
                ldp.fit(model, X, noisy, targets="posterior", verbose=0)
            continue
        ldp.fit(model, X, noisy, targets="posterior", verbose=0)
        assert ldp.guarantee(model).epsilon == 3.0
        model.save(tmp_path / f"model-{field}.keras")
        for store in (None, tmp_path / "store"):
            found = ldp.dossier.verify(tmp_path / f"model-{field}.keras", store=store)
            assert found.guarantee.epsilon == 3.0


def test_priors_of_someone_else(tmp_path: Path) -> None:
    labels = vault(tmp_path / "store")
    name = labels.randomize(RR, key="a").receipts[-1].id
    for number, other in enumerate(
        (crafted(an_encoder(), use=name), crafted(an_encoder(), id=name))
    ):
        priors = PublicInput(np.array([0.6, 0.4]), (other,))
        if number:
            with pytest.raises(ReceiptError):
                labels.randomize(ldp.RRWithPrior(1.0, 2), priors=priors)
        else:
            noisy = labels.randomize(ldp.RRWithPrior(1.0, 2), priors=priors)
            assert noisy.guarantee().epsilon == 1.0
    assert labels.guarantee().epsilon == vault(tmp_path / "store").guarantee().epsilon == 4.0


def test_a_declaration_replaces_unknown_costs_alone_and_none_of_a_ledgers_own() -> None:
    labels = LabelSet.new(N)
    unknown = Receipt(labels, Charge.unknown("who knows"), "training", "unknown")
    priced = Receipt(labels, Charge.of(RR), "a draw")
    both = [unknown, priced, Receipt.of_declaration([unknown, priced], "nothing to see")]
    for order in itertools.permutations(both):
        assert Receipts(order).guarantee().epsilon == 3.0
        own = Composition(order, own=labels.name)
        assert math.isinf(own.guarantee().epsilon)
        assert set(Receipts(order).standing()) == set(both[1:])


def test_a_shared_use_counts_for_every_person_and_only_at_one_cost() -> None:
    """Whichever label set is first, and also with the name of a label set of another use."""
    first, second = LabelSet("a", N), LabelSet("b", N)

    def use(labels: LabelSet, epsilon: float, rows: Any = None, name: str = "") -> Receipt:
        charge = Charge.of(ldp.RandomizedResponse(epsilon, 2))
        return Receipt(labels, charge, "a use", examples=rows, use=name)

    own = [use(first, 1.0, [0], "step"), use(second, 2.0, [3])]
    assert Receipts(own).guarantee().epsilon == 3.0
    for other in (
        use(second, 1.0, [0], "step"),
        use(LabelSet("c", N, "north"), 1.0, [5], "step"),
        use(LabelSet("c", N), 1.0, np.zeros(N, bool), "step"),
        use(LabelSet("c", 1), 1e-6, None, "step"),
        use(LabelSet("c", N), 1.0, None, own[1].id),
    ):
        for order in itertools.permutations([*own, other]):
            assert Receipts(order).guarantee().epsilon >= 3.0
            assert Composition(order, own="a").guarantee().epsilon >= 3.0
    # Costs that differ are two uses.
    assert Receipts([own[0], use(second, 0.5, None, "step")]).guarantee().epsilon == 1.5


def test_a_label_set_of_two_populations_may_be_of_either() -> None:
    """A small receipt of someone else moves no cost to other people."""

    def draw(name: str, people: str, epsilon: float, use: str = "") -> Receipt:
        charge = Charge.of(ldp.RandomizedResponse(epsilon, 2))
        return Receipt(LabelSet(name, N, people), charge, "a draw", use=use)

    moved = [draw("a", "south", 1e-6), draw("b", "south", 1e-6)]
    own = [draw("a", "north", 1.0), draw("b", "north", 1.0)]
    for order in itertools.permutations([*own, moved[0]]):
        assert Receipts(order).guarantee().epsilon >= 2.0
    shared = [draw("a", "north", 1.0, "step"), draw("b", "north", 1.0, "step")]
    for order in itertools.permutations([*shared, *moved]):
        assert Receipts(order).guarantee().epsilon >= 1.0


# Every field of a file.

BAD: dict[str, list[Any]] = {
    "time": [5, None, "yesterday", "2026-99-99"],
    "kind": ["gift", None, 3, ["draw"], "unknown"],
    "unit": ["household", None],
    "relation": ["add_or_remove", "both", None],
    "id": ["", "x" * 1000, 5, None],
    "use": [None, 7, "x" * 1000],
    "plan": [None, 7, "x" * 1000],
    "plan_uses": [0, -1, 1.5, True, None],
    "budget_epsilon": [-1.0, 0.0, math.nan, "1"],
    "answers": [["x"], "x", [5], [""], None],
    "what": [None, 5, "x" * 10**6],
    "key": [None, 5],
    "actor": [None, 5],
    "version": [None, 3, "x" * 1000],
    "output_digest": [5, "x" * 1000],
    "delta": [-0.1, 1.0, None, "0", True],
    "num_units": [-1, 2.5, "3"],
    "seeded": [0, None, "no"],
    "metrics_reported": [1, None],
    "sample_weights": [2, None],
    "examples": ["", "not base64", base64.b64encode(b"no zlib").decode(), 5, [1, 2]],
    "labels": [None, {}, {"name": "a", "people": None, "stored": False}],
    "charge": [
        None,
        {},
        {"epsilon": 1.0, "delta": 0.0, "event": EventFields.NONE, "assumptions": []},
    ],
    "size": [-5, 10**18, 2.5, True, None, "9"],
    "name": ["", None, 7, "x" * 1000],
    "people": [7, True],
    "stored": [None, 1],
    "epsilon": [-1.0, math.nan, None, True, "1.0", [1.0]],
    "delta of the charge": [-1.0, 1.0, None, True, "0"],
    "event": [{"class": "GiftDpEvent"}, None, {}, EventFields.NONE],
    "assumptions": [["x" * 10**6], [5], [{"code": 1, "who": "x", "text": "y"}], 7],
}


@pytest.mark.parametrize("field", BAD)
def test_a_field_that_no_version_writes_is_refused(field: str) -> None:
    receipt = Receipt(LabelSet("a", N), Charge.of(RR), "a draw", examples=[1, 2])
    assert Receipt.from_json(receipt.to_json()).id == receipt.id
    for value in BAD[field]:
        fields = receipt.to_json()
        if field in ("size", "name", "people", "stored"):
            fields["labels"][field] = value
        elif field in ("epsilon", "event", "assumptions"):
            fields["charge"][field] = value
        elif field == "delta of the charge":
            fields["charge"]["delta"] = value
        else:
            fields[field] = value
        with pytest.raises(ReceiptError, match="a receipt is damaged or was edited"):
            Receipt.from_json(json.loads(json.dumps(sealed(fields))))


GAUSSIAN = {"class": "GaussianDpEvent", "noise_multiplier": 5.0}


@pytest.mark.parametrize(
    "event",
    [
        {"class": "GaussianDpEvent", "noise_multiplier": -5.0},
        {"class": "GaussianDpEvent", "noise_multiplier": math.nan},
        {"class": "RandomizedResponseDpEvent", "noise_parameter": 1.5, "num_buckets": 2},
        {"class": "SelfComposedDpEvent", "event": GAUSSIAN, "count": -1},
        {"class": "SelfComposedDpEvent", "event": GAUSSIAN, "count": 0.5},
        {"class": "PoissonSampledDpEvent", "sampling_probability": -0.5, "event": GAUSSIAN},
        {"class": "PoissonSampledDpEvent", "sampling_probability": 1.5, "event": GAUSSIAN},
        {"class": "ZCDpEvent", "rho": -1.0, "xi": 0.0},
        {"class": "AddedDeltaDpEvent", "delta": -0.5},
        {"class": "ComposedDpEvent", "events": [GAUSSIAN, {"class": "ZCDpEvent", "rho": -1.0}]},
    ],
)
def test_an_event_with_impossible_numbers_is_refused(event: dict[str, Any]) -> None:
    """``dp_accounting`` would compose a count of -1, which takes another use off."""
    fields = Receipt(LabelSet("a", N), Charge.of(RR), "a draw").to_json()
    charge = {**fields["charge"], "event": event, "delta": 1e-6}
    with pytest.raises(ReceiptError, match="with a possible"):
        Receipt.from_json(sealed({**fields, "charge": charge}))
    with pytest.raises(ValueError, match="with a possible"):
        Charge(3.0, 1e-6, event)


def test_examples_in_a_file_are_among_the_labels() -> None:
    fields = Receipt(LabelSet("a", 5), Charge.of(RR), "a draw", examples=[1, 2]).to_json()
    for bits in (
        bits_of([5], N),  # beyond the five
        bits_of([1], 100),
        bits_of([1], 5) + b"more",
        bits_of([1], 5)[:-1],
        bits_of([1], 2**27),  # a few bytes for megabytes
    ):
        with pytest.raises(ReceiptError, match="damaged or was edited"):
            Receipt.from_json(sealed({**fields, "examples": base64.b64encode(bits).decode()}))


@pytest.mark.parametrize("total", [2, 5, 8, 9, 16, 23])
def test_the_last_example_is_read_and_no_bit_after_it(total: int) -> None:
    labels, whole = LabelSet("a", total), -(-total // 8) * 8
    for rows in ([0], [total - 1]):
        fields = Receipt(labels, CHARGE, "a draw", examples=rows).to_json()
        assert np.asarray(Receipt.from_json(fields).examples).tolist() == rows
    for row in range(total, whole):
        bits = base64.b64encode(bits_of([row], whole)).decode()
        with pytest.raises(ReceiptError, match=f"not among {total}"):
            Receipt.from_json(sealed({**fields, "examples": bits}))


def test_no_more_is_unpacked_than_the_examples_take() -> None:
    """Else a short file may keep a reader busy: here the damage at the end is not reached."""
    fields = Receipt(LabelSet("a", 5), CHARGE, "a draw", examples=[1, 2]).to_json()
    stream = zlib.compressobj()
    damaged = stream.compress(bytes(1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH) + b"\xff"
    with pytest.raises(zlib.error, match="invalid block"):
        zlib.decompress(damaged)
    with pytest.raises(ReceiptError, match="not among 5"):
        Receipt.from_json(sealed({**fields, "examples": base64.b64encode(damaged).decode()}))


def test_only_a_declaration_with_its_reason_replaces_receipts() -> None:
    claim = Receipt.of_declaration([UNKNOWN], "x").to_json()
    assert Receipt.from_json(claim).declares == (UNKNOWN.id,)
    for fields in (
        {**claim, "charge": {**claim["charge"], "assumptions": []}},
        {**claim, "kind": "draw"},
    ):
        with pytest.raises(ReceiptError, match="replaces others without a declaration"):
            Receipt.from_json(sealed(fields))


def test_a_field_of_a_newer_version_is_no_damage() -> None:
    fields = Receipt(LabelSet("a", N), Charge.of(RR), "a draw").to_json()
    newer = sealed({**fields, "version": "9.1", "weather": "fair"})
    with pytest.raises(ReceiptError, match=r"newer version of tf-labeldp \(9\.1\)"):
        Receipt.from_json(newer)
    with pytest.raises(ReceiptError, match="damaged or was edited"):
        Receipt.from_json({**newer, "weather": "foul"})


def test_receipts_that_differ_by_when_and_where_are_the_same() -> None:
    """Free receipts of encoders and assumptions are made again wherever they are needed."""
    receipt = an_encoder()
    again = crafted(receipt, time="2030-01-01T00:00:00+00:00", actor="another", version="0.3.0")
    assert len(Receipts.merged([receipt], [again])) == 1
    sized = crafted(receipt, labels={**receipt.to_json()["labels"], "size": 0})
    assert Receipts.merged([receipt, sized]) == Receipts.merged([sized, receipt]) == (sized,)
