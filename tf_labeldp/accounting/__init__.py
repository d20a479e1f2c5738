"""Guarantees, budgets, receipts, and all events of ``dp_accounting``; loads no TensorFlow."""

from tf_labeldp.accounting._annotations import Private, Public, Setting
from tf_labeldp.accounting._guarantee import Assumption, PrivacyGuarantee
from tf_labeldp.accounting.budget import (
    BudgetExceededError,
    Charge,
    PrivacyBudget,
    group_privacy,
    item_budget_for_group,
)
from tf_labeldp.accounting.dp_sgd import (
    calibrate_noise_multiplier,
    dp_sgd_charge,
    dp_sgd_guarantee,
)
from tf_labeldp.accounting.peer_to_peer import peer_to_peer_guarantee
from tf_labeldp.accounting.provenance import PublicInput, public_input
from tf_labeldp.accounting.receipt import LabelSet, Receipt, ReceiptError
from tf_labeldp.accounting.receipts import Receipts

__all__ = [
    "Assumption",
    "BudgetExceededError",
    "Charge",
    "LabelSet",
    "PrivacyBudget",
    "PrivacyGuarantee",
    "Private",
    "Public",
    "PublicInput",
    "Receipt",
    "ReceiptError",
    "Receipts",
    "Setting",
    "calibrate_noise_multiplier",
    "dp_sgd_charge",
    "dp_sgd_guarantee",
    "group_privacy",
    "item_budget_for_group",
    "peer_to_peer_guarantee",
    "public_input",
]
