"""Guarantees, budgets, and every translation to ``dp_accounting``; loads no TensorFlow."""

from tf_labeldp.accounting._budget import (
    BudgetExceededError,
    Charge,
    PrivacyBudget,
    compose_charges,
)
from tf_labeldp.accounting._events import (
    compose_events,
    composed_epsilon,
    pure_dp_event,
    randomized_response_event,
)
from tf_labeldp.accounting._guarantee import PrivacyGuarantee

__all__ = [
    "BudgetExceededError",
    "Charge",
    "PrivacyBudget",
    "PrivacyGuarantee",
    "compose_charges",
    "compose_events",
    "composed_epsilon",
    "pure_dp_event",
    "randomized_response_event",
]
