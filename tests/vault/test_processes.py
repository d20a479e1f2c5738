"""Several processes on one store spend one budget; forks without a store are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError
from tf_labeldp.vault import PrivateLabels


@pytest.fixture(scope="session")
def shared(run_writers):
    """Results of six concurrent processes: (folder, parent, a list of children)."""
    root, output = run_writers("shared")
    children = [json.loads(path.read_text()) for path in sorted(root.glob("*.json"))]
    return root, json.loads(output), children


def test_together_they_spend_the_budget_and_no_more(shared):
    """After 0.25, draws of 0.125 fit six times: of 24 tries, 18 are refused."""
    _, parent, children = shared
    assert len(children) == 6
    assert sum(len(child["drawn"]) for child in children) == 6
    assert sum(child["refused"] for child in children) == 18
    assert parent == {"epsilon": 1.0, "uses": 7}
    assert {child["epsilon"] for child in children if child["refused"]} == {1.0}


def test_every_returned_draw_is_in_the_store(shared, response):
    root, _, children = shared
    opened = PrivateLabels(np.arange(200) % 5, 5, store=root / "store")
    assert opened.guarantee().epsilon == 1.0 and opened.remaining() == 0.0
    keys = set()
    for child in children:
        for key, (values, receipt) in child["drawn"].items():
            noisy = opened.randomize(response(0.125), key=key)
            assert noisy.values.tolist() == values and noisy.receipts[0].id == receipt
            keys.add(key)
        assert opened.randomize(response(0.25), key="shared").values.tolist() == child["shared"]
    assert {receipt.key for receipt in opened.receipts} == keys | {"shared"}
    with pytest.raises(BudgetExceededError):
        opened.randomize(response(0.01), [0], key="more")


def test_a_fork_of_a_vault_without_a_store_is_refused(shared):
    for child in shared[2]:
        assert "this process was forked" in child["unstored"]
        assert "PrivateLabels(..., store=path)" in child["unstored"]
