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
)

_FALSE_ALARM = 1e-9
"""The largest probability that a sound mechanism fails the test."""
_TOLERANCE = 1e-9
"""Rounding of doubles that is allowed in the sums of rows and in log-ratios."""
_MOST_LABELS, _MOST_COLUMNS = 8, 64
"""Most classes with test draws, and most columns of a statistic that are tested one by one."""
_WIDEST = 4096
"""Most columns of a statistic that are compared; those of wider ones are added up into as many."""
_LARGEST_USE = 1000
"""Most labels of a use whose size is drawn."""
_QUANTILES = np.linspace(0.01, 0.99, 50)
"""Ends of the half-lines that are tried, as quantiles of the outputs for both labels together."""
_LARGEST_EPSILON, _LEAST = 700.0, 1e-290
"""Larger epsilons overflow e^epsilon; smaller likelihoods lose digits as subnormal doubles."""
_DELTAS = (0.003, 0.03, 0.3)
"""Deltas at which an event is compared with the channel."""


def check_mechanism(
    mechanism: Setting[Mechanism],
    *,
    draws: int = 20_000,
    public_input: Setting[Any] = None,
    size: int | None = None,
) -> bool:
    """Raises unless a mechanism's claims agree with its behaviour on synthetic labels.

    A vault runs it before the first use of a plug-in. It checks

    * the channel: rows of probabilities, no two of which differ by more than ``epsilon`` and
      ``delta`` allow; for numbers the worst log-ratio of ``likelihood``;
    * the draws: shape, dtype and range, and that they follow the channel (binomial tests of each
      output for each label), or, without a channel, that no set of outputs is with confidence more
      than ``e^epsilon`` times as likely for one label, or for one of two data sets that differ in
      one label, as for the other (Clopper-Pearson bounds; Jagielski et al. 2020). The numbers of
      labels of a use are random, and so are the other labels of a statistic and the row that
      differs;
    * its own event (``dp_event``), if any: it must not promise more than the channel.

    A sound mechanism fails with probability 1e-9 at most. This is a test and no proof: it misses
    violations that are too small for the number of draws, and violations on other inputs.

    Args:
        mechanism: any mechanism.
        draws: number of labels to draw for, at least 1,000.
        public_input: public input of a noisy statistic, one row per label. Without it, the draws of
            a statistic that needs one are not tested.
        size: a number of labels that uses of a statistic are tested with, too.

    Returns:
        Whether the draws were tested: False for labels or public inputs that can't be made up, for
        a statistic that fails on all labels of its size, and for draws too few to find true labels
        at this epsilon. The statement of a vault then has the word "untested".

    Raises:
        TypeError: ``mechanism`` is not a mechanism.
        ValueError: the mechanism violates its claims.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> check_mechanism(RandomizedResponse(epsilon=1.0, num_classes=3))
        True
        >>> class Honest(RandomizedResponse):
        ...     def randomize(self, labels, priors=None, *, rng=None):
        ...         return labels
        >>> check_mechanism(Honest(1.0, 3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the draws of Honest do not follow its transition_matrix: ...
    """
    name = type(Mechanism.checked(mechanism)).__name__
    draws = _validate.integer_at_least("draws", draws, 1000)
    _validate.positive_finite(f"{name}.epsilon", mechanism.epsilon)
    _validate.number_in(f"{name}.delta", mechanism.delta, "[0, 1)")
    if isinstance(mechanism, ClassificationMechanism):
        return _check_classes(mechanism, draws)
    if isinstance(mechanism, RegressionMechanism):
        return _check_numbers(mechanism, draws)
    if isinstance(mechanism, LabelMechanism):
        return _check_without_channel(mechanism, draws)
    statistic = AggregateMechanism.checked(mechanism)
    return _check_statistic(statistic, draws, public_input, size)


def _check_classes(mechanism: ClassificationMechanism, draws: int) -> bool:
    num_classes = _validate.integer_at_least("num_classes", mechanism.num_classes, 2)
    middle = np.random.default_rng().permutation(np.arange(1, num_classes - 1))
    chosen = np.concatenate([[0, num_classes - 1], middle[: _MOST_LABELS - 2]])
    channels = _channels(mechanism)
    outputs = mechanism.num_outputs
    level = _FALSE_ALARM / (2 * outputs * chosen.size * len(channels))
    for prior, channel in channels:
        _check_channel(mechanism, channel, (num_classes, outputs))
        labels = np.random.default_rng().permutation(np.repeat(chosen, draws // chosen.size))
        noisy = _drawn(mechanism, labels, prior)
        for label in chosen:
            counts = np.bincount(noisy[labels == label], minlength=outputs)
            _check_counts(mechanism, counts, channel[label], level)
    if not mechanism.has_own_event:
        return True
    for delta in _DELTAS:
        most = Charge.of_event(mechanism.dp_event(), delta).epsilon
        needed = max(_delta_needed(channel, most) for _, channel in channels)
        if needed > delta + 1e-3:
            raise ValueError(
                f"the dp_event of {type(mechanism).__name__} promises epsilon={most:.6g} at "
                f"delta={delta:g}, but its channel needs delta={needed:.6g}. Remove dp_event: the "
                "event of epsilon then takes its place."
            )
    return True


def _channels(mechanism: ClassificationMechanism) -> list[tuple[np.ndarray | None, np.ndarray]]:
    """Returns test priors with their channels; (None, channel) for a mechanism without priors."""
    if not mechanism.uses_priors:
        return [(None, np.asarray(mechanism.transition_matrix(), dtype=np.float64))]
    falling = 0.5 ** np.minimum(np.arange(mechanism.num_classes), 30)
    falling /= falling.sum()
    uniform = np.full(mechanism.num_classes, 1.0 / mechanism.num_classes)
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


def _check_numbers(mechanism: RegressionMechanism, draws: int) -> bool:
    low, high = mechanism.label_range()
    labels = np.append(np.linspace(low, high, 3), np.random.default_rng().uniform(low, high))
    outputs = [_drawn(mechanism, np.full(draws // 4, label)) for label in labels]
    table = np.asarray(mechanism.likelihood(np.concatenate(outputs), labels), dtype=np.float64).T
    if mechanism.delta == 0.0:
        _check_worst(mechanism, table, f"likelihood of {type(mechanism).__name__}")
    _check_ratios(mechanism, outputs)
    return True


def _check_without_channel(mechanism: LabelMechanism, draws: int) -> bool:
    classes = getattr(mechanism, "num_classes", None)
    if classes is None or mechanism.public_input == "features":
        return False  # There are no synthetic labels or features for it.
    labels = sorted({0, int(np.random.default_rng().integers(classes)), classes - 1})
    _check_ratios(mechanism, [_drawn(mechanism, np.full(draws // 2, label)) for label in labels])
    return True


def _drawn(mechanism: LabelMechanism, labels: np.ndarray, prior: Any = None) -> np.ndarray:
    """Returns checked draws, half of them in uses of random sizes, and half in one use.

    For a mechanism with clusters, all labels are in one, since clusters may have a smallest size.
    """
    clusters = mechanism.public_input == "clusters"
    ends, half = [0], 0 if clusters else labels.size // 2
    while ends[-1] < half:
        ends.append(min(half, ends[-1] + _random_size(1, _LARGEST_USE)))
    noisy = []
    for part in np.split(labels, ends[1:]):
        public = np.zeros(part.size, dtype=np.int64) if clusters else prior
        noisy.append(mechanism.check_output(mechanism.randomize(part, public), part.size))
    return np.concatenate(noisy)


def _random_size(low: int, high: int) -> int:
    """Returns a whole number in [low, high) whose logarithm is uniform."""
    return int(math.exp(np.random.default_rng().uniform(math.log(low), math.log(high))))


def _check_statistic(
    mechanism: AggregateMechanism, draws: int, public_input: Any, size: int | None
) -> bool:
    has_kind = mechanism.num_classes is not None or mechanism.label_range() is not None
    if not has_kind and mechanism.num_labels is None:
        return False
    if public_input is not None:
        rows = len(public_input) if size is None else size
        return bool(rows) and _check_size(mechanism, draws, public_input, rows)
    ends = [1, 10, 100, _LARGEST_USE]
    sizes = [_random_size(low, high) for low, high in itertools.pairwise(ends)]
    tested = [_check_size(mechanism, draws, None, each) for each in sizes]
    return any(tested) if size is None else _check_size(mechanism, draws, None, size)


def _check_size(mechanism: AggregateMechanism, draws: int, public_input: Any, size: int) -> bool:
    """Returns whether a statistic of ``size`` labels was tested."""
    pair = _two_data_sets(mechanism, size)
    failures = []
    for labels in pair:
        try:
            mechanism.release(labels, public_input)
        except Exception as error:
            failures.append(error)
    if len(failures) == 1:
        raise ValueError(
            f"{type(mechanism).__name__} fails on some of {size} made-up labels and not on others, "
            "so that a failure would reveal labels. Let it fail for its settings, its public input "
            "and the number of labels alone."
        ) from failures[0]
    if failures and public_input is not None:
        raise failures[0]
    if failures:
        return False
    # An output that is the label itself is found from this number on.
    grown = math.exp(min(mechanism.epsilon, _LARGEST_EPSILON))
    surest = math.log((grown + mechanism.delta) / (grown + 1.0))
    needed = 2 * math.ceil(math.log(_level(2)) / surest) + 2 if surest < 0.0 else math.inf
    most = draws // 20
    repeats = max(50, min(most, max(20_000_000 // size, int(min(needed, most)))))
    wide = _Sketch()

    def released(labels: np.ndarray) -> np.ndarray:
        statistic = mechanism.release(labels, public_input)
        return wide.of(np.ravel(mechanism.checked_output(statistic, None, "biuf")))

    outputs = [[released(labels) for _ in range(repeats)] for labels in pair]
    if len({output.shape for several in outputs for output in several}) > 1:
        return False
    _check_ratios(mechanism, [np.stack(several) for several in outputs])
    return repeats >= needed


def _two_data_sets(mechanism: AggregateMechanism, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random labels, and the same with another label in a random row.

    In few data sets all labels but one are equal.
    """
    rng, label_range = np.random.default_rng(), mechanism.label_range()
    columns, num_classes = mechanism.num_labels, int(mechanism.num_classes or 2)
    shape = (size,) if columns is None else (size, columns)
    labels: np.ndarray
    if label_range is None:
        before, after = rng.permutation(num_classes)[:2]
        labels = rng.integers(num_classes, size=shape)
    else:
        before, after = rng.permutation(np.asarray(label_range))
        labels = rng.uniform(label_range[0], label_range[1], shape)
    if size < 10:
        labels = np.full(shape, before)
    row, neighbour = int(rng.integers(size)), labels.copy()
    labels[row], neighbour[row] = before, after
    return labels, neighbour


class _Sketch:
    """Adds up the columns of wide outputs with random signs, the same for all outputs."""

    def __init__(self) -> None:
        self._places, self._signs = np.zeros(0, np.int64), np.zeros(0)

    def of(self, output: np.ndarray) -> np.ndarray:
        if output.size <= _WIDEST:
            return output.astype(np.float64)
        if output.size != self._places.size:
            rng = np.random.default_rng()
            self._places = rng.integers(_WIDEST, size=output.size)
            self._signs = rng.choice([-1.0, 1.0], output.size)
        return np.bincount(self._places, self._signs * output, _WIDEST)


def _level(data_sets: int) -> float:
    """Returns the level of each bound of a comparison of these data sets."""
    return _FALSE_ALARM / (2 * data_sets**2)


def _check_ratios(mechanism: Mechanism, outputs: list[np.ndarray]) -> None:
    level = _level(len(outputs))
    rows = [output.reshape(len(output), -1) for output in outputs]
    for first, second in itertools.permutations(rows, 2):
        # The set is chosen by one half of the draws and tested on the other: on the draws that
        # chose it, the likeliest of many sets would fail sound mechanisms.
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
    width = first.shape[1]
    directions = np.eye(min(width, _MOST_COLUMNS), width)
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
