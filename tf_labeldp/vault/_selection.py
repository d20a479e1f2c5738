"""Which of several models is best on private labels, by one release for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, public_input
from tf_labeldp.accounting._public_input import bare
from tf_labeldp.mechanisms import SelectionMechanism
from tf_labeldp.mechanisms._metrics import check_length
from tf_labeldp.vault._evaluation import as_released
from tf_labeldp.vault._noisy_labels import NoisyStatistic
from tf_labeldp.vault._private_labels import PrivateLabels


def select(
    predictions: Public[Sequence[Any]],
    labels: Private[PrivateLabels],
    epsilon: float,
    metric: str | None = None,
    *,
    key: str | None = None,
) -> int:
    """Returns which of several models is best on private labels, by one release for all of them.

    Guarantee:
        That of ``mechanisms.SelectionMechanism``: epsilon-DP for the replacement of one label,
        however many models there are; charged to the vault. The models have statements of their
        own. Select on labels that no model was trained on (``labels.split``): the two uses then
        compose in parallel, and the choice does not favour the model that learnt them best.

    Args:
        predictions: of each model, in the order of the labels, as ``PrivateLabels.evaluate`` takes
            them.
        labels: a ``PrivateLabels``.
        epsilon: finite and above zero. The chosen model is within about ``2 ln(m) / epsilon``
            right answers of the best of m, on average.
        metric: ``"accuracy"`` (the default for classes), ``"log_loss"`` or ``"brier"``; ``"mse"``
            (the default for numbers) or ``"mae"``.
        key: the name of the release in the vault.

    Returns:
        The number of the chosen model, from 0.

    Raises:
        BudgetExceededError: the vault's budget does not allow it; nothing was released.
        ValueError: no model, predictions of a wrong shape, or another metric.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> labels = PrivateLabels([0, 1] * 500, 2, budget=PrivacyBudget(1.0))
        >>> select([np.zeros(1000, int), np.array([0, 1] * 500)], labels, epsilon=0.5)
        1
    """
    return int(release_choice(predictions, labels, epsilon, metric, key).values)


def release_choice(
    predictions: Public[Any],
    labels: PrivateLabels,
    epsilon: float,
    metric: str | None,
    key: str | None,
) -> NoisyStatistic:
    """Returns the choice of ``select``, with its receipt."""
    mechanism = selection_mechanism(labels, epsilon, metric)
    made_of = public_input(predictions)
    predictions = [bare(of_model) for of_model in made_of.value]
    if not len(predictions):
        raise ValueError("there are no models to choose from; give the predictions of each.")
    for of_model in predictions:
        check_length(len(labels), np.shape(of_model)[0])
    public = np.stack([as_released(of_model, mechanism) for of_model in predictions])
    return labels.release(mechanism, public_input=made_of.with_value(public), key=key)


def selection_mechanism(
    labels: PrivateLabels, epsilon: float, metric: str | None
) -> SelectionMechanism:
    """Returns the mechanism of ``select`` for the labels of a vault."""
    known = labels.kind.metrics
    metric = _validate.one_of("metric", known[0] if metric is None else metric, known)
    return SelectionMechanism(epsilon, metric, **labels.kind.mechanism_arguments())
