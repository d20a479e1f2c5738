"""The test of a mechanism: its channel, its draws and its event against the stated epsilon."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Charge, Setting
from tf_labeldp.mechanisms.base import (
    AggregateMechanism,
    ClassificationMechanism,
    LabelMechanism,
    Mechanism,
    RegressionMechanism,
    checked_mechanism,
    checked_output,
    has_own_event,
)

_FALSE_ALARM = 1e-9
"""The largest probability that a sound mechanism fails the test."""
_TOLERANCE = 1e-9
_MOST_LABELS, _MOST_COLUMNS = 8, 64
"""Most classes with test draws, and most columns of a statistic that are tested one by one."""
_QUANTILES = np.linspace(0.01, 0.99, 50)
_LARGEST_EPSILON, _LEAST = 700.0, 1e-290
"""Larger epsilons overflow e^epsilon; smaller likelihoods lose digits as subnormal doubles."""
_DELTAS = (0.003, 0.03, 0.3)
"""Deltas at which an event is compared with the channel."""


def check_mechanism(
    mechanism: Setting[Mechanism], *, draws: int = 20_000, public_input: Setting[Any] = None
) -> None:
    """Raises unless a mechanism's claims agree with its behaviour on synthetic labels.

    A vault runs it before the first use of a plug-in. It checks

    * the channel: rows of probabilities, no two of which differ by more than ``epsilon`` and
      ``delta`` allow; for numbers the worst log-ratio of ``likelihood``;
    * the draws: shape, dtype and range, and that they follow the channel (binomial tests of each
      output for each label), or, without a channel, that no set of outputs is with confidence more
      than ``e^epsilon`` times as likely for one label, or for one of two data sets that differ in
      one label, as for the other (Clopper-Pearson bounds; Jagielski et al. 2020);
    * its own event (``dp_event``), if any: it must not promise more than the channel.

    A sound mechanism fails with probability 1e-9 at most. This is a test and no proof: it misses
    violations that are too small for the number of draws, and violations on other inputs.

    Args:
        mechanism: any mechanism.
        draws: number of labels to draw for, at least 1,000.
        public_input: public input of a noisy statistic, one row per label. Without it, the draws of
            a statistic that needs one are not tested.

    Raises:
        TypeError: ``mechanism`` is not a mechanism.
        ValueError: the mechanism violates its claims.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> check_mechanism(RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> class Honest(RandomizedResponse):
        ...     def randomize(self, labels, priors=None, *, rng=None):
        ...         return labels
        >>> check_mechanism(Honest(1.0, 3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the draws of Honest do not follow its transition_matrix: ...
    """
    name = type(checked_mechanism(mechanism, Mechanism)).__name__
    draws = _validate.integer_at_least("draws", draws, 1000)
    _validate.positive_finite(f"{name}.epsilon", mechanism.epsilon)
    _validate.number_in(f"{name}.delta", mechanism.delta, "[0, 1)")
    if isinstance(mechanism, ClassificationMechanism):
        _check_classes(mechanism, draws)
    elif isinstance(mechanism, RegressionMechanism):
        _check_numbers(mechanism, draws)
    elif isinstance(mechanism, LabelMechanism):
        _check_rows(mechanism, draws)
    elif isinstance(mechanism, AggregateMechanism):
        _check_statistic(mechanism, draws, public_input)


def _check_classes(mechanism: ClassificationMechanism, draws: int) -> None:
    num_classes = _validate.integer_at_least("num_classes", mechanism.num_classes, 2)
    middle = np.random.default_rng().permutation(np.arange(1, num_classes - 1))
    chosen = np.concatenate([[0, num_classes - 1], middle[: _MOST_LABELS - 2]])
    channels = _channels(mechanism, num_classes)
    outputs = mechanism.num_outputs
    level = _FALSE_ALARM / (2 * outputs * chosen.size * len(channels))
    for prior, channel in channels:
        _check_channel(mechanism, channel, (num_classes, outputs))
        labels = np.random.default_rng().permutation(np.repeat(chosen, draws // chosen.size))
        noisy = _drawn(mechanism, labels, prior)
        for label in chosen:
            counts = np.bincount(noisy[labels == label], minlength=outputs)
            _check_counts(mechanism, counts, channel[label], level)
    if not has_own_event(mechanism):
        return
    for delta in _DELTAS:
        most = Charge.of_event(mechanism.dp_event(), delta).epsilon
        needed = max(_delta_needed(channel, most) for _, channel in channels)
        if needed > delta + 1e-3:
            raise ValueError(
                f"the dp_event of {type(mechanism).__name__} promises epsilon={most:.6g} at "
                f"delta={delta:g}, but its channel needs delta={needed:.6g}. Remove dp_event: the "
                "event of epsilon then takes its place."
            )


def _channels(
    mechanism: ClassificationMechanism, num_classes: int
) -> list[tuple[np.ndarray | None, np.ndarray]]:
    """Returns test priors with their channels; (None, channel) for a mechanism without priors."""
    if not mechanism.uses_priors:
        return [(None, np.asarray(mechanism.transition_matrix(), dtype=np.float64))]
    falling = 0.5 ** np.minimum(np.arange(num_classes), 30)
    falling /= falling.sum()
    uniform = np.full(num_classes, 1.0 / num_classes)
    found: list[tuple[np.ndarray | None, np.ndarray]] = []
    refusal = ValueError()
    for prior in (uniform, 0.9 * uniform + 0.1 * falling, falling):
        try:
            channel = np.asarray(mechanism.transition_matrix(prior), dtype=np.float64)
            found.append((prior, channel))
        except ValueError as error:  # A mechanism may refuse some priors, but not all.
            refusal = error
    if not found:
        raise refusal
    return found


def _check_channel(mechanism: Mechanism, channel: np.ndarray, shape: tuple[int, int]) -> None:
    name = type(mechanism).__name__
    if channel.shape != shape:
        raise ValueError(
            f"{name}.transition_matrix must have shape {shape}, P[output | input], got "
            f"{channel.shape}."
        )
    sums = channel.sum(axis=1)
    if not np.all(channel >= 0.0) or np.abs(sums - 1.0).max() > _TOLERANCE:
        raise ValueError(
            f"the rows of {name}.transition_matrix must be probabilities that sum to one, got sums "
            f"from {sums.min():.9g} to {sums.max():.9g}."
        )
    if mechanism.delta == 0.0:
        _check_worst(mechanism, channel, f"channel of {name}")
        return
    delta = _delta_needed(channel, mechanism.epsilon + _TOLERANCE)
    if delta > mechanism.delta + _TOLERANCE:
        raise ValueError(
            f"the channel of {name} needs delta={delta:.6g} at its epsilon of "
            f"{mechanism.epsilon:.6g}, more than its delta of {mechanism.delta:.6g}. State the "
            "larger delta, or add noise."
        )


def _delta_needed(channel: np.ndarray, epsilon: float) -> float:
    grown = math.exp(min(epsilon, _LARGEST_EPSILON)) * channel
    return max(float(np.maximum(row - grown, 0.0).sum(axis=1).max()) for row in channel)


def _check_worst(mechanism: Mechanism, table: np.ndarray, name: str) -> None:
    with np.errstate(divide="ignore"):
        logs = np.log(table[:, table.max(axis=0) > _LEAST])
    worst = float((logs.max(axis=0) - logs.min(axis=0)).max())
    if worst > mechanism.epsilon + _TOLERANCE and mechanism.epsilon < _LARGEST_EPSILON:
        raise ValueError(
            f"the {name} has a worst log-ratio of {worst:.6g}, more than its epsilon of "
            f"{mechanism.epsilon:.6g}. State the larger epsilon, or add noise."
        )


def _check_counts(
    mechanism: Mechanism, counts: np.ndarray, expected: np.ndarray, level: float
) -> None:
    from scipy import stats  # takes longer to load than all mechanisms together

    size = int(counts.sum())
    tails = np.minimum(
        stats.binom.cdf(counts, size, expected), stats.binom.sf(counts - 1, size, expected)
    )
    if tails.min() < level:
        place = int(np.argmin(tails))
        raise ValueError(
            f"the draws of {type(mechanism).__name__} do not follow its transition_matrix: an "
            f"output of probability {expected[place]:.4g} had a share of "
            f"{counts[place] / size:.4g} in {size} draws. Correct one of the two."
        )


def _check_numbers(mechanism: RegressionMechanism, draws: int) -> None:
    low, high = mechanism.label_range()
    labels = np.append(np.linspace(low, high, 3), np.random.default_rng().uniform(low, high))
    outputs = [_drawn(mechanism, np.full(draws // 4, label)) for label in labels]
    table = np.asarray(mechanism.likelihood(np.concatenate(outputs), labels), dtype=np.float64).T
    if mechanism.delta == 0.0:
        _check_worst(mechanism, table, f"likelihood of {type(mechanism).__name__}")
    _check_ratios(mechanism, outputs)


def _check_rows(mechanism: LabelMechanism, draws: int) -> None:
    classes = getattr(mechanism, "num_classes", None)
    if classes is None or mechanism.public_input == "features":
        return  # There are no synthetic labels or features for it.
    labels = sorted({0, int(np.random.default_rng().integers(classes)), classes - 1})
    _check_ratios(mechanism, [_drawn(mechanism, np.full(draws // 2, label)) for label in labels])


def _drawn(mechanism: LabelMechanism, labels: np.ndarray, prior: Any = None) -> np.ndarray:
    """Returns checked draws; for a mechanism with clusters, all labels are in one."""
    clusters = mechanism.public_input == "clusters"
    public = np.zeros(labels.size, dtype=np.int64) if clusters else prior
    return mechanism.check_output(mechanism.randomize(labels, public), labels.size)


def _check_statistic(mechanism: AggregateMechanism, draws: int, public_input: Any) -> None:
    label_range, rows = mechanism.label_range(), getattr(mechanism, "num_labels", None)
    size = 3 if public_input is None else len(public_input)
    has_kind = mechanism.num_classes is not None or label_range is not None or rows is not None
    if not has_kind or not size:
        return
    two = np.random.default_rng().permutation(int(mechanism.num_classes or 2))[:2]
    ends = np.asarray(label_range or two)
    same = np.full((size,) if rows is None else (size, rows), ends[0])
    other = same.copy()
    other[0] = ends[1]
    try:
        mechanism.release(same, public_input)
    except (TypeError, ValueError):
        if public_input is None:
            return  # The statistic needs a public input.
        raise

    def released(labels: np.ndarray) -> np.ndarray:
        statistic = mechanism.release(labels, public_input)
        return np.ravel(checked_output(mechanism, statistic, None, "biuf")).astype(np.float64)

    repeats = max(50, min(draws // 20, 20_000_000 // size))
    drawn = [np.stack([released(labels) for _ in range(repeats)]) for labels in (same, other)]
    _check_ratios(mechanism, drawn)


def _check_ratios(mechanism: Mechanism, outputs: list[np.ndarray]) -> None:
    level = _FALSE_ALARM / (2 * len(outputs) ** 2)
    rows = [output.reshape(len(output), -1) for output in outputs]
    for first, second in itertools.permutations(rows, 2):
        half = len(first) // 2
        direction, value = _likelier_set(first[:half], second[:half])
        mine, other = first[half:] @ direction, second[half:] @ direction
        least = float(_at_least(np.sum(mine > value), mine.size, level))
        most = float(_at_most(np.sum(other > value), other.size, level))
        if least > math.exp(min(mechanism.epsilon, _LARGEST_EPSILON)) * most + mechanism.delta:
            raise ValueError(
                f"{type(mechanism).__name__} violates its epsilon of "
                f"{mechanism.epsilon:.4g}: a set of outputs has probability {least:.4g} or "
                f"more for one label, and {most:.4g} or less for another. Add noise."
            )


def _likelier_set(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the half-space ``outputs @ direction > value`` with the largest confident ratio.

    Half-lines are tried along each column, and along the difference of the means.
    """
    directions = np.eye(first.shape[1])[:_MOST_COLUMNS]
    directions = np.vstack([directions, first.mean(axis=0) - second.mean(axis=0)])
    best, chosen = -math.inf, (directions[0], math.inf)
    for direction in np.vstack([directions, -directions]):
        mine, other = first @ direction, second @ direction
        values = np.unique(np.quantile(np.concatenate([mine, other]), _QUANTILES))
        least = _at_least(np.sum(mine > values[:, np.newaxis], axis=1), mine.size, 0.01)
        most = _at_most(np.sum(other > values[:, np.newaxis], axis=1), other.size, 0.01)
        ratios = least / most
        if ratios.max() > best:
            best, chosen = ratios.max(), (direction, values[np.argmax(ratios)])
    return chosen


def _at_least(hits: np.ndarray, size: int, level: float) -> np.ndarray:
    """Returns lower confidence bounds on probabilities (Clopper and Pearson 1934)."""
    from scipy import special

    return np.where(hits > 0, special.betaincinv(np.maximum(hits, 1), size - hits + 1, level), 0.0)


def _at_most(hits: np.ndarray, size: int, level: float) -> np.ndarray:
    return 1.0 - _at_least(size - hits, size, level)
