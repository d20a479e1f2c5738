"""The privacy statement in words and as JSON."""

from __future__ import annotations

import json
import math
import pathlib
import re
import warnings

import numpy as np
import pytest

from tf_labeldp.accounting import (
    Assumption,
    PrivacyBudget,
    PrivacyGuarantee,
    dp_sgd_charge,
    group_privacy,
)
from tf_labeldp.vault import PrivateLabels

STATEMENTS = {
    "pure": PrivacyGuarantee(1.5),
    "nothing": PrivacyGuarantee(0.0),
    "approximate": PrivacyGuarantee(0.1 + 0.2, 1e-5, assumptions=("the first", "ε ≥ 0 is meant")),
    "infinite": PrivacyGuarantee(math.inf),
    "seeded": PrivacyGuarantee(1.0, seeded=True),
    "compared": PrivacyGuarantee(1.0, 1e-6, unit="one user", relation="add_or_remove"),
    "counted": PrivacyGuarantee(1.0, 2e-6, num_units=60_000, remarks=("this draw lost less",)),
}


def test_json_round_trip_and_the_headline():
    for statement in STATEMENTS.values():
        assert PrivacyGuarantee.from_json(statement.to_json()) == statement
        assert str(statement).splitlines()[0] == statement.headline


def test_json_is_standard_and_complete():
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    fields = json.loads(STATEMENTS["infinite"].to_json(), parse_constant=refuse)
    assert fields == {
        "epsilon": "inf",
        "delta": 0.0,
        "unit": "the label of one training example",
        "relation": "replace_label",
        "assumptions": [],
        "seeded": False,
        "num_units": None,
        "remarks": [],
        "private": False,
    }
    counted = json.loads(STATEMENTS["counted"].to_json(), parse_constant=refuse)
    assert (counted["num_units"], counted["remarks"]) == (60_000, ["this draw lost less"])


def test_is_private():
    private = {name for name, statement in STATEMENTS.items() if statement.is_private}
    assert private == {"pure", "nothing", "approximate", "compared", "counted"}


def test_the_relation_is_replacement_of_a_label_and_is_printed():
    statement = PrivacyGuarantee(1.0)
    assert statement.relation == "replace_label"
    text = str(statement)
    assert "If the label of one training example changed (replace_label)," in text
    compared = str(STATEMENTS["compared"])
    assert "If one user were added or removed (add_or_remove: for comparison only)," in compared


def test_words_say_what_the_numbers_mean():
    text = str(STATEMENTS["approximate"])
    assert text.startswith("(0.3, 1e-05)-label-DP\n")
    assert f"{math.exp(0.3):.4g} times as likely" in text
    assert "no outcome would become more than" in text
    assert "except with probability 1e-05.\n" in text
    assert text.endswith("      [other] the first\n      [other] ε ≥ 0 is meant")
    assert "probability" not in str(STATEMENTS["pure"])


def test_assumptions_are_grouped_by_who_vouches_for_them_with_their_codes():
    """Reasons why nothing is promised, which nobody vouches for, come first."""
    notes = [
        Assumption("public-features", "holder", "The features are public."),
        Assumption("steps-fixed", "trainer", "The number of steps was fixed."),
        Assumption("public-bins", "holder", "The bins are public."),
        Assumption("not-promised", "nobody", "Nothing is promised: a reason."),
    ]
    statement = PrivacyGuarantee(math.inf, assumptions=tuple(notes))
    assert str(statement).splitlines()[1:] == [
        "  Assumptions, by who must vouch for them (docs/privacy.md#who-must-vouch-for-what):",
        "    Not assigned: read these first:",
        "      [not-promised] Nothing is promised: a reason.",
        "    Those who train and publish:",
        "      [steps-fixed] The number of steps was fixed.",
        "    The label holder:",
        "      [public-features] The features are public.",
        "      [public-bins] The bins are public.",
    ]
    assert json.loads(statement.to_json())["assumptions"] == [
        {"code": note.code, "who": note.who, "text": str(note)} for note in notes
    ]
    grouped = statement.assumptions_by_voucher().values()
    assert sorted(one for group in grouped for one in group) == sorted(notes)


def test_the_page_that_statements_name_explains_every_code_of_the_library():
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs" / "privacy.md").read_text(encoding="utf-8")
    section = page.partition("## Who must vouch for what")[2]
    codes = set()
    for path in root.glob("tf_labeldp/**/*.py"):
        codes |= set(re.findall(r'Assumption\(\s*"([a-z0-9-]+)", ?', path.read_text("utf-8")))
    assert len(codes) > 30
    assert {code for code in codes if f"`{code}`" not in section} == set()


def test_a_statement_fits_on_a_screen():
    labels = PrivateLabels(np.arange(90) % 3, 3, budget=PrivacyBudget(2.0, 1e-3))
    labels.charge(dp_sgd_charge(4.0, 0.1, 20, 1e-3), what="steps")
    assert len(str(labels.guarantee()).splitlines()) <= 24


def test_words_for_an_infinite_and_a_huge_epsilon():
    text = str(STATEMENTS["infinite"])
    assert text.startswith("NOT PRIVATE: nothing is promised") and "times as likely" not in text
    assert "label-DP" not in text and "inf" not in text
    assert "e^1000 times as likely" in str(PrivacyGuarantee(1000.0))


def test_a_seeded_statement_says_that_it_is_not_private():
    text = str(STATEMENTS["seeded"])
    assert text.startswith("NOT PRIVATE: seeded.")
    assert json.loads(STATEMENTS["seeded"].to_json())["private"] is False
    assert "NOT PRIVATE" not in str(STATEMENTS["pure"])


def test_nothing_promised_is_said_of_a_seeded_statement_too():
    """Not even secret random bits would make it one."""
    text = str(PrivacyGuarantee(math.inf, seeded=True))
    assert text.startswith("NOT PRIVATE: nothing is promised") and "label-DP" not in text


@pytest.mark.parametrize("seeded", [False, True])
def test_add_or_remove_is_never_headed_label_dp(seeded):
    statement = PrivacyGuarantee(1.0, 1e-6, relation="add_or_remove", seeded=seeded)
    headline = statement.headline
    assert ")-label-DP" not in headline
    assert "(1, 1e-06)-DP under add_or_remove, which is weaker than label-DP" in headline
    assert headline.startswith("NOT PRIVATE: seeded.") == seeded


@pytest.mark.parametrize(
    ("delta", "units", "line"),
    [
        (1e-5, 60_000, "  delta: 0.6 / n, for n = 60,000"),
        (1 / 3e4, 10_000, "  delta: 0.334 / n, for n = 10,000"),  # rounded up
        (1e-3, 1000, "  delta: 1 / n, for n = 1,000 (WARNING: not below 1 / n; such a delta"),
    ],
)
def test_delta_is_told_in_parts_of_one_over_n(delta, units, line):
    lines = str(PrivacyGuarantee(1.0, delta, num_units=units)).splitlines()
    (found,) = [one for one in lines if one.startswith("  delta:")]
    assert found.startswith(line)
    assert ("WARNING" in found) == (delta * units >= 1.0)


def test_no_line_for_a_delta_of_zero_or_an_unknown_number_of_units():
    for statement in (PrivacyGuarantee(1.0, num_units=10), PrivacyGuarantee(1.0, 1e-5)):
        assert "  delta:" not in str(statement)


def test_a_delta_that_is_not_below_one_over_n_is_warned_of():
    with pytest.warns(UserWarning, match=r"not below 1/n = 0\.001"):
        PrivacyGuarantee(1.0, 1e-3, num_units=1000).warn_of_delta()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for statement in (
            PrivacyGuarantee(1.0, 1e-3),  # for nobody knows how many
            PrivacyGuarantee(1.0, 0.99e-3, num_units=1000),
        ):
            assert statement.warn_of_delta() is statement


def test_remarks_come_last_and_promise_nothing_more():
    plain = PrivacyGuarantee(1.0, assumptions=("the first",))
    grown = plain.with_remarks(["this draw lost 0.5"]).with_remarks(["and no more"])
    assert grown.remarks == ("this draw lost 0.5", "and no more") and plain.remarks == ()
    assert (grown.epsilon, grown.delta, grown.assumptions) == (1.0, 0.0, ("the first",))
    assert str(grown).startswith(str(plain))
    assert str(grown).splitlines()[-2:] == [
        "  remark: this draw lost 0.5",
        "  remark: and no more",
    ]


def test_with_assumptions_adds_and_keeps():
    grown = STATEMENTS["approximate"].with_assumptions(["the first", "the third", "the third"])
    assert grown.assumptions == ("the first", "ε ≥ 0 is meant", "the third")
    assert (grown.epsilon, grown.delta) == (0.1 + 0.2, 1e-5)
    assert len(STATEMENTS["approximate"].assumptions) == 2


def test_bad_statements():
    for arguments, message in (
        ({"epsilon": -1.0}, "epsilon must be zero or more, got -1"),
        ({"epsilon": math.nan}, "epsilon must be zero or more, got nan"),
        ({"epsilon": 1.0, "delta": 1.0}, r"delta must be in \[0, 1\), got 1"),
        ({"epsilon": 1.0, "relation": "remove"}, "relation must be one of .*got 'remove'"),
    ):
        with pytest.raises(ValueError, match=message):
            PrivacyGuarantee(**arguments)


def test_what_is_shown_promises_no_more_than_what_holds():
    shown = {2.0: "2", 2.0000004: "2.00001", 0.1 + 0.2: "0.3", 0.1: "0.1", 1 / 3: "0.333334"}
    for epsilon, words in shown.items():
        assert str(PrivacyGuarantee(epsilon)).startswith(f"({words}, 0)-label-DP")
    assert "more than 7.39 times" in str(PrivacyGuarantee(2.0))  # e^2 = 7.38906


def test_a_statement_names_the_figure_for_any_adaptive_use():
    """Next to the figure for uses that were fixed in advance, in words and in JSON."""
    stated = PrivacyGuarantee(0.75, 1e-6, adaptive=(2.0, 1e-5))
    assert stated.headline == "(0.75, 1e-06)-label-DP"
    line = "For any adaptive use: (2, 1e-05)-label-DP, the budget, which a privacy filter keeps."
    assert line in str(stated)
    written = json.loads(stated.to_json())
    assert written["adaptive"] == {"epsilon": 2.0, "delta": 1e-5}
    assert PrivacyGuarantee.from_json(stated.to_json()) == stated
    plain = PrivacyGuarantee(0.75, 1e-6)
    assert "adaptive" not in str(plain) and "adaptive" not in json.loads(plain.to_json())
    assert PrivacyGuarantee.from_json(plain.to_json()) == plain
    for_two = group_privacy(stated, 2).adaptive
    assert for_two == (4.0, pytest.approx(1e-5 * (1.0 + math.exp(2.0))))
