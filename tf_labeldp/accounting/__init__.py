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
    gaussian_event,
    pure_dp_event,
    randomized_response_event,
)
from tf_labeldp.accounting._gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from tf_labeldp.accounting._guarantee import PrivacyGuarantee

__all__ = [
    "BudgetExceededError",
    "Charge",
    "PrivacyBudget",
    "PrivacyGuarantee",
    "compose_charges",
    "compose_events",
    "composed_epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_event",
    "gaussian_sigma",
    "pure_dp_event",
    "randomized_response_event",
]
