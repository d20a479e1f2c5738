"""Guarantees, budgets, and every translation to ``dp_accounting``; loads no TensorFlow."""

from tf_labeldp.accounting._budget import (
    BudgetExceededError,
    Charge,
    PrivacyBudget,
    compose_charges,
    group_privacy,
    item_budget_for_group,
)
from tf_labeldp.accounting._dp_sgd import (
    calibrate_noise_multiplier,
    dp_sgd_assumptions,
    dp_sgd_charge,
    dp_sgd_guarantee,
)
from tf_labeldp.accounting._events import (
    approximate_dp_event,
    compose_events,
    composed_epsilon,
    dp_sgd_event,
    gaussian_event,
    pure_dp_event,
    randomized_response_event,
)
from tf_labeldp.accounting._gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from tf_labeldp.accounting._guarantee import PrivacyGuarantee
from tf_labeldp.accounting._peer_to_peer import (
    peer_to_peer_assumptions,
    peer_to_peer_bound,
    peer_to_peer_delta,
    peer_to_peer_guarantee,
)
from tf_labeldp.accounting._receipts import (
    LabelSet,
    Receipt,
    ReceiptError,
    compose_receipts,
)

__all__ = [
    "BudgetExceededError",
    "Charge",
    "LabelSet",
    "PrivacyBudget",
    "PrivacyGuarantee",
    "Receipt",
    "ReceiptError",
    "approximate_dp_event",
    "calibrate_noise_multiplier",
    "compose_charges",
    "compose_events",
    "compose_receipts",
    "composed_epsilon",
    "dp_sgd_assumptions",
    "dp_sgd_charge",
    "dp_sgd_event",
    "dp_sgd_guarantee",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_event",
    "gaussian_sigma",
    "group_privacy",
    "item_budget_for_group",
    "peer_to_peer_assumptions",
    "peer_to_peer_bound",
    "peer_to_peer_delta",
    "peer_to_peer_guarantee",
    "pure_dp_event",
    "randomized_response_event",
]
