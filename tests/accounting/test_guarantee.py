"""The privacy statement in words and as JSON."""

from __future__ import annotations

import json
import math

import pytest

from tf_labeldp.accounting import PrivacyGuarantee

STATEMENTS = {
    "pure": PrivacyGuarantee(1.5),
    "nothing": PrivacyGuarantee(0.0),
    "approximate": PrivacyGuarantee(0.1 + 0.2, 1e-5, assumptions=("the first", "ε ≥ 0 is meant")),
    "infinite": PrivacyGuarantee(math.inf),
    "seeded": PrivacyGuarantee(1.0, seeded=True),
    "compared": PrivacyGuarantee(1.0, 1e-6, unit="one user", relation="add_or_remove"),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_json_round_trip(name):
    statement = STATEMENTS[name]
    assert PrivacyGuarantee.from_json(statement.to_json()) == statement


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
        "private": False,
    }


def test_is_private():
    private = {name for name, statement in STATEMENTS.items() if statement.is_private}
    assert private == {"pure", "nothing", "approximate", "compared"}


def test_the_relation_is_replacement_of_a_label_and_is_printed():
    statement = PrivacyGuarantee(1.0)
    assert statement.relation == "replace_label"
    text = str(statement)
    assert "(replace_label)" in text and "differ in the value of one unit" in text
    assert "protects: the label of one training example" in text
    assert "weaker; for comparison only" in str(STATEMENTS["compared"])


def test_words_say_what_the_numbers_mean():
    text = str(STATEMENTS["approximate"])
    assert text.startswith("(0.3, 1e-05)-label-DP\n")
    assert f"{math.exp(0.3):.4g} times as likely" in text
    assert "but for probability 1e-05" in text
    assert "assumes: the first\n" in text and text.endswith("assumes: ε ≥ 0 is meant")
    assert "probability" not in str(STATEMENTS["pure"])


def test_words_for_an_infinite_and_a_huge_epsilon():
    text = str(STATEMENTS["infinite"])
    assert text.startswith("(inf, 0)-label-DP") and "times as likely" not in text
    assert "e^1000 times as likely" in str(PrivacyGuarantee(1000.0))


def test_a_seeded_statement_says_that_it_is_not_private():
    text = str(STATEMENTS["seeded"])
    assert text.startswith("NOT PRIVATE: seeded.")
    assert json.loads(STATEMENTS["seeded"].to_json())["private"] is False
    assert "NOT PRIVATE" not in str(STATEMENTS["pure"])


def test_with_assumptions_adds_and_keeps():
    grown = STATEMENTS["approximate"].with_assumptions(["the third"])
    assert grown.assumptions == ("the first", "ε ≥ 0 is meant", "the third")
    assert (grown.epsilon, grown.delta) == (0.1 + 0.2, 1e-5)
    assert len(STATEMENTS["approximate"].assumptions) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": -1.0}, "epsilon must be zero or more, got -1"),
        ({"epsilon": math.nan}, "epsilon must be zero or more, got nan"),
        ({"epsilon": 1.0, "delta": 1.0}, r"delta must be in \[0, 1\), got 1"),
        ({"epsilon": 1.0, "relation": "remove"}, "relation must be one of .*got 'remove'"),
    ],
)
def test_bad_statements(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivacyGuarantee(**arguments)


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(2.0, "2"), (2.0000004, "2.00001"), (0.1 + 0.2, "0.3"), (0.1, "0.1"), (1 / 3, "0.333334")],
)
def test_what_is_shown_promises_no_more_than_what_holds(epsilon, shown):
    assert str(PrivacyGuarantee(epsilon)).startswith(f"({shown}, 0)-label-DP")


def test_the_factor_is_rounded_up():
    assert "more than 7.39 times" in str(PrivacyGuarantee(2.0))  # e^2 = 7.38906
