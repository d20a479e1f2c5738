"""Audits of mechanisms by draws, of training by canaries, and of finished models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Setting
from tf_labeldp.audit import _bounds
from tf_labeldp.audit._result import AuditResult, LabelInference
from tf_labeldp.mechanisms import ClassificationMechanism, Priors, RegressionMechanism

_MOST_OUTPUTS, _BINS = 2048, 256
"""A column with more different outputs than the first is binned into the second, by quantiles."""
_MOST_LABELS, _NUMBERS = 16, 5
"""Labels that are compared: at most the first of many classes, the second of a range."""
Draw = Callable[[np.ndarray, np.random.Generator], Any]


@_validate.clears_frames
def audit_mechanism(  # noqa: PLR0913 (one audit: its claim, its draws, its bound)
    mechanism: Setting[Any],
    labels: Private[Any] = None,
    *,
    public: Setting[Any] = None,
    claimed: float | None = None,
    delta: float | None = None,
    draws: int = 400_000,
    family: str | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditResult:
    """Bounds a mechanism's epsilon from below, by draws for the two labels that differ most.

    Half of the draws choose two labels and a set of outputs that is likely for the first and
    unlikely for the second; the other half bound the set's two probabilities (Clopper-Pearson;
    Jagielski, Ullman and Oprea 2020). With ``family="gaussian"`` the set is a half line, and the
    counts bound the distance of two Gaussians, which gives epsilon at the small deltas that counts
    can't reach (Nasr et al. 2023). This is valid for Gaussian noise of any size.

    Args:
        mechanism: a mechanism of classes or numbers; or a function ``draw(labels, rng)`` that
            returns, for labels (n,), the outputs of n independent runs: numbers (n,) or rows
            (n, d).
        labels: labels to compare, two or more; the result names none of them. None compares the
            mechanism's classes (16 of them, if there are more) or five numbers of its range.
        public: prior for a mechanism that draws with one: (K,), or rows (n, K) or ``Priors``, whose
            most even row is used, because it reveals most.
        claimed: claimed epsilon; None takes the mechanism's.
        delta: in [0, 1); None takes the mechanism's, or 0.
        draws: number of draws in total, at least 1,000. Bounds tighten with its square root.
        family: ``"gaussian"``, or None.
        confidence: confidence of the bound, in (0, 1). At 0.95 up to 1 audit in 20 refutes a
            correct mechanism; a report audits at 1 - 1e-6.
        seed: seed of the draws; None for fresh ones.

    Raises:
        TypeError: neither a mechanism of single labels nor a function.
        ValueError: arguments out of range, or not one output per label.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> found = audit_mechanism(RandomizedResponse(1.0, 10), seed=0)
        >>> 0.9 < found.lower_bound < 1.0, found.refutes
        (True, False)
    """
    _validate.integer_at_least("draws", draws, 1000)
    _validate.number_in("confidence", confidence, "(0, 1)")
    if isinstance(mechanism, (ClassificationMechanism, RegressionMechanism)):
        claimed = mechanism.epsilon if claimed is None else claimed
        delta = mechanism.delta if delta is None else delta
        if has_own := labels is None:
            labels = _labels_of(mechanism)
        uses_priors = isinstance(mechanism, ClassificationMechanism) and mechanism.uses_priors
        prior = _most_even(public) if uses_priors and public is not None else None
        draw: Draw = lambda values, rng: mechanism.randomize(values, prior, rng=rng)  # noqa: E731
    elif callable(mechanism) and public is None:
        draw, has_own = mechanism, False
    else:
        raise TypeError(
            "expected a mechanism of single labels or a function draw(labels, rng), got "
            f"{type(mechanism).__name__}. Wrap a noisy statistic in a function that returns, for "
            "each label, the statistic of data with this label in one place."
        )
    values = np.unique(np.asarray([] if labels is None else labels))
    if values.size < 2:
        raise ValueError(
            f"expected two or more different labels to compare, got {values.size}. Name them "
            "with labels=."
        )
    delta = _validate.number_in("delta", 0.0 if delta is None else delta, "[0, 1)")
    rng = np.random.default_rng(seed)
    # The labels and the event are chosen on half of the draws, and the bound is that of the others:
    # on the draws that chose the event, its bound would be too high.
    first = draws // 2 // values.size
    drawn = _drawn(draw, np.repeat(values, first), rng)
    if family is None:
        low, high, event, split = _best_event(drawn.reshape(values.size, first, -1), delta)
    else:
        _validate.one_of("family", family, ("gaussian",))
        if not delta:
            raise ValueError("family='gaussian' needs delta above zero, got 0. Set delta=.")
        low, high, event, split = _half_line(drawn.reshape(values.size, first, -1))
    second = draws // 4
    chosen = np.repeat(values[[low, high]], second)
    inside = event[split(_drawn(draw, chosen, rng))].reshape(2, second).sum(axis=1)
    bound: Any = _bounds.event_bound if family is None else _bounds.gaussian_bound
    lower_bound = float(bound(*inside.tolist(), second, delta, 1.0 - confidence))
    # Labels of a caller may be true ones; those of a mechanism are public.
    named = f"labels {values[low]} and {values[high]}" if has_own else "two of the given labels"
    attack = (
        f"{second:,} draws each for {named}, distinguished by a set of outputs chosen on other "
        "draws"
    )
    return AuditResult(lower_bound, confidence, claimed, delta, attack)


@_validate.clears_frames
def audit_training(
    fit: Setting[Callable[[np.ndarray], Any]],
    labels: Private[Any],
    num_classes: int,
    *,
    canaries: int,
    claimed: float | None = None,
    delta: float = 0.0,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditResult:
    """Bounds the epsilon of training from below, by many canaries in one run.

    A canary is an example whose label is one of two classes, chosen by a fair coin that training
    does not see. The auditor guesses the coins with the most decisive scores (Steinke, Nasr and
    Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2; their coin includes
    or leaves out an example, and ours chooses between two labels).

    Args:
        fit: ``fit(labels)`` trains on labels (n,) and returns scores (n, K) of each example's
            classes, such as a model's log-probabilities.
        labels: classes (n,), ``int``; those of the canaries are replaced. They may be made up.
        num_classes: K.
        canaries: number of canaries, from 1 to n. Good canaries are isolated: their features reveal
            little about their labels, and the model can memorize them.
        claimed: claimed epsilon.
        delta: in [0, 1).
        confidence: confidence of the bound, in (0, 1).
        seed: seed of canaries and coins; None for fresh ones. It must differ from the seed of
            training.

    Raises:
        ValueError: arguments out of range, scores of another shape or not finite.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> rng = np.random.default_rng(0)
        >>> def fit(labels):
        ...     return np.eye(3)[RandomizedResponse(1.0, 3).randomize(labels, rng=rng)]
        >>> audit_training(fit, np.zeros(5000, int), 3, canaries=5000, claimed=1.0, seed=1).refutes
        False
    """
    num_classes = _validate.integer_at_least("num_classes", num_classes, 2)
    trained = _validate.class_indices("labels", labels, num_classes).copy()
    _validate.number_in("confidence", confidence, "(0, 1)")
    delta = _validate.number_in("delta", delta, "[0, 1)")
    if not 1 <= canaries <= trained.size:
        raise ValueError(f"canaries must be in 1..{trained.size} (examples), got {canaries}.")
    rng = np.random.default_rng(seed)
    chosen = rng.choice(trained.size, canaries, replace=False)
    # Two different classes in random order, so that scores that favour a class reveal no coin.
    pairs = np.stack([rng.integers(num_classes, size=canaries)] * 2, axis=1)
    pairs[:, 1] += rng.integers(1, num_classes, size=canaries)
    pairs %= num_classes
    coins = rng.integers(2, size=canaries)
    rows = np.arange(canaries)
    trained[chosen] = pairs[rows, coins]
    scores = _scores("the scores of fit", fit(trained), trained.size, num_classes)[chosen]
    difference = scores[rows, pairs[:, 1]] - scores[rows, pairs[:, 0]]
    return _result_of_guesses(
        difference, coins, rng, claimed, delta, confidence, "canaries of one run"
    )


@_validate.clears_frames
def audit_model(
    scores: Setting[Any],
    labels: Private[Any],
    proxy: Setting[Any],
    *,
    claimed: float | None = None,
    delta: float = 0.0,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditResult:
    """Bounds the epsilon of a finished model from below, without training it again.

    A second label of each example is drawn from a public proxy of the label distribution. The
    auditor guesses which of the two the model was trained on. If labels do come from the proxy,
    only the model's memory distinguishes them ("Observational auditing of label privacy", 2025,
    arXiv 2511.14084; the bound is that of ``audit_training``). If they do not, the bound may be too
    high: use a proxy that never saw these labels, such as a model trained on other examples.

    The result depends on true labels without noise. Keep it secret: no statement covers it.

    Args:
        scores: the model's scores (n, K) of its training examples, such as log-probabilities.
        labels: classes (n,), ``int``, that the model was trained on.
        proxy: public class probabilities (n, K) of each example, above zero.
        claimed: claimed epsilon.
        delta: in [0, 1).
        confidence: confidence of the bound, in (0, 1).
        seed: seed of the second labels; None for fresh ones.

    Raises:
        ValueError: arguments out of range, or shapes that differ.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> labels = rng.integers(2, size=4000)
        >>> proxy = np.full((4000, 2), 0.5)
        >>> audit_model(proxy, labels, proxy, claimed=0.1).refutes  # it has learnt nothing
        False
    """
    _validate.number_in("confidence", confidence, "(0, 1)")
    delta = _validate.number_in("delta", delta, "[0, 1)")
    trained, scores, public = _with_proxy(scores, labels, proxy)
    rng = np.random.default_rng(seed)
    draws = (public.cumsum(axis=1) < rng.random((trained.size, 1))).sum(axis=1)
    draws = np.minimum(draws, public.shape[1] - 1)
    differ = np.flatnonzero(draws != trained)
    rows = np.arange(differ.size)
    coins = rng.integers(2, size=differ.size)
    pairs = np.stack([trained[differ], draws[differ]], axis=1)
    pairs[coins == 1] = pairs[coins == 1, ::-1]  # the label is in place `coins`
    gain = (scores - np.log(public))[differ]
    difference = gain[rows, pairs[:, 1]] - gain[rows, pairs[:, 0]]
    attack = "labels against others of the proxy"
    return _result_of_guesses(difference, coins, rng, claimed, delta, confidence, attack)


@_validate.clears_frames
def label_inference(
    scores: Setting[Any], labels: Private[Any], proxy: Setting[Any], *, confidence: float = 0.95
) -> LabelInference:
    """Measures how much better a model guesses labels than features alone.

    Good predictions are no leak, so the measure is the advantage over the best guess without the
    labels (Wu et al. 2023, "Does label differential privacy prevent label inference attacks?";
    Busa-Fekete et al. 2021, "Population level privacy leakage in binary classification with label
    noise"). The result depends on true labels without noise, as with ``audit_model``.

    Args:
        scores: the model's scores (n, K) of its training examples.
        labels: classes (n,), ``int``, that the model was trained on.
        proxy: public probabilities (n, K), above zero, from a model that never saw these labels.
        confidence: confidence of the interval, in (0, 1), by the normal approximation.

    Raises:
        ValueError: shapes that differ, or arguments out of range.

    Example:
        >>> proxy = np.array([[0.6, 0.4]] * 100)
        >>> labels = np.arange(100) % 2
        >>> print(label_inference(np.eye(2)[labels], labels, proxy))
        the model guesses 100.0% of the labels, features alone 50.0%
          advantage: +50.0% (+40.2% to +59.8%, with 0.95 confidence)
    """
    from scipy import stats

    _validate.number_in("confidence", confidence, "(0, 1)")
    true, scores, public = _with_proxy(scores, labels, proxy)
    with_model, without = scores.argmax(axis=1) == true, public.argmax(axis=1) == true
    difference = with_model.astype(float) - without
    error = difference.std(ddof=1) / math.sqrt(true.size)
    reach = float(stats.norm.ppf(0.5 + 0.5 * confidence) * error)
    advantage = float(difference.mean())
    interval = (advantage - reach, advantage + reach)
    return LabelInference(
        float(with_model.mean()), float(without.mean()), advantage, interval, confidence
    )


def _most_even(priors: Any) -> np.ndarray:
    """Returns the row of priors under which a draw reveals most."""
    rows = np.atleast_2d(priors.probabilities if isinstance(priors, Priors) else priors)
    return rows[int(np.argmin(np.square(rows).sum(axis=1)))]


def _labels_of(mechanism: Any) -> np.ndarray:
    if isinstance(mechanism, ClassificationMechanism):
        number = min(mechanism.num_classes, _MOST_LABELS)
        return np.linspace(0, mechanism.num_classes - 1, number).astype(int)
    low, high = mechanism.label_range()
    return np.linspace(low, high, _NUMBERS)


def _drawn(draw: Draw, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns outputs (n, d)."""
    outputs = np.asarray(draw(labels, rng), dtype=np.float64)
    if outputs.ndim not in (1, 2) or len(outputs) != labels.size:
        raise ValueError(
            f"expected outputs of shape ({labels.size},) or ({labels.size}, d) for {labels.size} "
            f"labels, got {outputs.shape}. Return one independent run per label."
        )
    return outputs.reshape(labels.size, -1)


def _best_event(drawn: np.ndarray, delta: float) -> tuple[int, int, np.ndarray, Callable[..., Any]]:
    """Returns two labels, a set of codes, and the function from outputs to codes.

    ``drawn`` has outputs (L, m, d) of L labels; the set is a mask over codes.
    """
    number, size, width = drawn.shape
    split = _codes(drawn.reshape(-1, width))
    codes = split(drawn.reshape(-1, width)).reshape(number, size)
    # The last code is for outputs that appear in later draws alone.
    kinds = int(codes.max()) + 2
    counts = np.stack([np.bincount(row, minlength=kinds) for row in codes])
    best: tuple[float, int, int, np.ndarray] = (-1.0, 0, 1, np.zeros(kinds, bool))
    for low, high in itertools.permutations(range(number), 2):
        order = np.argsort(-(counts[low] + 0.5) / (counts[high] + 0.5), kind="stable")
        hits, others = counts[low][order].cumsum(), counts[high][order].cumsum()
        bounds = _bounds.event_bound(hits, others, size, delta, 0.05)
        last = int(np.argmax(bounds))
        if bounds[last] > best[0]:
            event = np.zeros(kinds, bool)
            event[order[: last + 1]] = True
            event[-1] = False
            best = (float(bounds[last]), low, high, event)
    return best[1], best[2], best[3], split


def _codes(outputs: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function from outputs (n, d) to codes (n,); many outputs share codes by bins."""
    edges = []
    for column in outputs.T:
        values = np.unique(column)
        if values.size <= _MOST_OUTPUTS:
            edges.append(0.5 * (values[1:] + values[:-1]))
        else:
            bins = max(2, round(_BINS ** (1.0 / outputs.shape[1])))
            edges.append(np.unique(np.quantile(column, np.arange(1, bins) / bins)))

    def cells(rows: np.ndarray) -> np.ndarray:
        columns = zip(edges, rows.T, strict=True)
        return np.stack([np.searchsorted(edge, column) for edge, column in columns], axis=1)

    cells_found = np.unique(cells(outputs), axis=0)
    code_of = {cell.tobytes(): code for code, cell in enumerate(cells_found)}

    def split(rows: np.ndarray) -> np.ndarray:
        unique, inverse = np.unique(cells(rows), axis=0, return_inverse=True)
        codes = np.array([code_of.get(cell.tobytes(), len(cells_found)) for cell in unique])
        return codes[inverse.ravel()]

    return split


def _half_line(drawn: np.ndarray) -> tuple[int, int, np.ndarray, Callable[..., Any]]:
    """Returns the labels with the most distant means, and the half line of the first."""
    if drawn.shape[2] != 1:
        raise ValueError(
            f"family='gaussian' needs one number per label, got {drawn.shape[2]}. Project the "
            "statistic on the direction in which the label moves it."
        )
    means = drawn[:, :, 0].mean(axis=1)
    low, high = int(np.argmax(means)), int(np.argmin(means))
    middle = 0.5 * (means[low] + means[high])
    return low, high, np.array([False, True]), lambda rows: (rows[:, 0] > middle).astype(int)


def _scores(name: str, scores: Any, rows: int, num_classes: int) -> np.ndarray:
    found = np.asarray(scores, dtype=np.float64)
    if found.shape != (rows, num_classes) or not np.all(np.isfinite(found)):
        raise ValueError(
            f"expected {name} to be finite and of shape ({rows}, {num_classes}), got shape "
            f"{found.shape}. Score each class of each example."
        )
    return found


def _with_proxy(scores: Any, labels: Any, proxy: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_classes = np.shape(scores)[-1]
    true = _validate.class_indices("labels", labels, num_classes)
    checked = _scores("scores", scores, true.size, num_classes)
    public = _validate.prior_rows("proxy", proxy, true.size, num_classes)
    if public.min() <= 0.0:
        raise ValueError(
            f"proxy must be above zero everywhere, got {public.min():g}. Mix it with a uniform one."
        )
    return true, checked, np.broadcast_to(public, checked.shape)


def _result_of_guesses(
    difference: np.ndarray,
    coins: np.ndarray,
    rng: np.random.Generator,
    claimed: float | None,
    delta: float,
    confidence: float,
    attack: str,
) -> AuditResult:
    """Returns the result of guessing coins by the signs of differences, the largest first."""
    guess = np.where(difference == 0.0, rng.integers(2, size=coins.size), difference > 0.0)
    order = np.argsort(-np.abs(difference), kind="stable")
    bound, guesses, hits = _bounds.one_run_bound(guess == coins, order, delta, 1.0 - confidence)
    words = f"{hits:,} of {guesses:,} guesses right, of {coins.size:,} {attack}"
    return AuditResult(bound, confidence, claimed, delta, words)
