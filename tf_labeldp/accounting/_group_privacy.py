"""Group privacy: what a guarantee for one label promises for all the labels of one user."""

from __future__ import annotations

import dataclasses
import math

from tf_labeldp import _validate
from tf_labeldp.accounting._budget import PrivacyBudget
from tf_labeldp.accounting._guarantee import PrivacyGuarantee


def group_privacy(guarantee: PrivacyGuarantee, group_size: int) -> PrivacyGuarantee:
    """Returns what a guarantee for one label promises for up to k labels replaced at once.

    Privacy: (epsilon, delta) for one label is ``(k epsilon, delta (e^(k epsilon) - 1) /
    (e^epsilon - 1))`` for k of them: the labels are replaced one after another, and the n-th step
    multiplies what was lost before by e^epsilon. For pure randomized response k epsilon is reached.
    Noise that is added once for a user, as DP-SGD by user adds it, costs less:
    ``dp_sgd_guarantee(..., privacy_unit="user")``.

    Source: Vadhan 2017, "The complexity of differential privacy", Lemma 2.2, whose proof gives this
    sum, ``delta (1 + e^epsilon + ... + e^((k - 1) epsilon))``. The lemma rounds it up to
    ``k e^(k epsilon) delta``, and ``ghazi2024`` (section 6) uses that.

    Args:
        guarantee: for one label.
        group_size: k, the most labels that one user has, at least 1. Public knowledge.

    Returns:
        The statement for all labels of one user, with the same relation and assumptions and one
        more. For ``group_size=1`` the guarantee as it is.

    Raises:
        TypeError: ``group_size`` is not an integer.
        ValueError: ``group_size`` below 1, or delta would be 1 or more, which promises nothing.

    Example:
        >>> group_privacy(PrivacyGuarantee(epsilon=0.5), group_size=4).epsilon
        2.0
    """
    k = _validate.integer_at_least("group_size", group_size, 1)
    if k == 1:
        return guarantee
    delta = guarantee.delta
    if delta > 0.0:
        log_delta = math.log(delta) + _log_growth(guarantee.epsilon, k)
        if not log_delta < 0.0:
            raise ValueError(
                f"for {k} labels at once, epsilon={guarantee.epsilon:g} and delta={delta:g} "
                "promise nothing: delta grows to 1 or more. Use a smaller epsilon or delta for one "
                "label (item_budget_for_group), or fewer labels a user."
            )
        delta = math.exp(log_delta)
    return dataclasses.replace(
        guarantee,
        epsilon=k * guarantee.epsilon,
        delta=delta,
        unit=f"all labels of one user (at most {k} examples)",
        num_units=None,
    ).with_assumptions([f"no user has more than {k} examples"])


def item_budget_for_group(budget: PrivacyBudget, group_size: int) -> PrivacyBudget:
    """Returns the budget for one label that is this budget for all the labels of one user.

    Privacy: ``group_privacy`` of a guarantee within the budget returned is within ``budget``, and
    no larger budget has this property: the exact inverse of ``group_privacy``.

    Source: that of ``group_privacy``.

    Args:
        budget: for all labels of one user.
        group_size: k, the most labels that one user has, at least 1. Public knowledge.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: ``group_size`` below 1.

    Example:
        >>> item_budget_for_group(PrivacyBudget(epsilon=2.0), group_size=4)
        PrivacyBudget(epsilon=0.5, delta=0.0)
    """
    if not isinstance(budget, PrivacyBudget):
        raise TypeError(
            f"budget must be a PrivacyBudget, got {type(budget).__name__}. Write "
            "budget=PrivacyBudget(epsilon=1.0)."
        )
    k = _validate.integer_at_least("group_size", group_size, 1)
    epsilon = budget.epsilon / k
    return PrivacyBudget(epsilon, budget.delta * math.exp(-_log_growth(epsilon, k)))


def _log_growth(epsilon: float, k: int) -> float:
    """Returns the log of (e^(k epsilon) - 1) / (e^epsilon - 1), by which delta grows."""
    if epsilon == 0.0:
        return math.log(k)
    return (k - 1) * epsilon + math.log(math.expm1(-k * epsilon) / math.expm1(-epsilon))
