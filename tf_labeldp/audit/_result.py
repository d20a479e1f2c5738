"""Results of audits."""

from __future__ import annotations

import dataclasses
import os

from tf_labeldp._progress import for_terminal


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """A lower bound on epsilon; print it.

    Attributes:
        lower_bound: epsilon is at least this, at the given confidence.
        confidence: least probability that the bound of a sound mechanism is below its epsilon.
        claimed: claimed epsilon; None for no claim.
        delta: delta of the claim and of the bound.
        attack: the attack in words.

    Example:
        >>> print(AuditResult(1.2, 0.95, 1.0, 0.0, "1,000 draws"))
        epsilon is at least 1.2, with 0.95 confidence
          by: 1,000 draws
          claimed: 1: the claim is FALSE, or covers something else than the audit
          of a correct mechanism, at most 1 audit in 20 ends like this: repeat the audit
    """

    lower_bound: float
    confidence: float
    claimed: float | None
    delta: float
    attack: str

    @property
    def refutes(self) -> bool:
        """Whether the bound exceeds the claim."""
        return self.claimed is not None and self.lower_bound > self.claimed

    def __str__(self) -> str:
        at = f" at delta={self.delta:g}" if self.delta else ""
        bound, claim = _distinct(self.lower_bound, self.claimed)
        found = f"epsilon is at least {bound}{at}, with {self.confidence:.9g} "
        lines = [f"{found}confidence", f"  by: {self.attack}"]
        if self.claimed is not None:
            verdict = (
                "the claim is FALSE, or covers something else than the audit"
                if self.refutes
                else "no contradiction; an audit can't show that a claim is true"
            )
            lines.append(f"  claimed: {claim}: {verdict}")
        if self.refutes:
            audits = f"{1.0 / (1.0 - self.confidence):,.0f}"
            lines.append(
                f"  of a correct mechanism, at most 1 audit in {audits} ends like this: repeat the "
                "audit"
            )
        return for_terminal(*lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes an image of the bound and the claim; needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.0, 1.8), layout="constrained")
        axes = figure.subplots()
        axes.barh([0], [self.lower_bound], color="tab:red" if self.refutes else "tab:blue")
        if self.claimed is not None:
            axes.axvline(self.claimed, color="black", linestyle="--")
            axes.annotate("claimed", (self.claimed, 0.45), ha="right", rotation=90, va="top")
        axes.set_yticks([])
        axes.set_xlim(0.0, 1.15 * max(self.lower_bound, self.claimed or 0.0, 1e-3))
        axes.set_xlabel(f"epsilon shown by the audit ({self.confidence:.4g} confidence)")
        figure.savefig(path, dpi=150)


def _distinct(bound: float, claim: float | None) -> tuple[str, str]:
    """Returns both numbers with three digits, or as many as show that they differ."""
    for digits in range(3, 17):
        texts = f"{bound:.{digits}g}", "" if claim is None else f"{claim:.{digits}g}"
        if claim is None or bound <= claim or texts[0] != texts[1]:
            break
    return texts


@dataclasses.dataclass(frozen=True)
class LabelInference:
    """The accuracy of guessing labels with a model and without it; print it.

    Attributes:
        accuracy: share of labels guessed right with the model.
        baseline: share guessed right from public features alone.
        advantage: ``accuracy - baseline``.
        interval: confidence interval of the advantage.
        confidence: confidence of the interval.

    Example:
        >>> LabelInference(0.9, 0.6, 0.3, (0.2, 0.4), 0.95).advantage
        0.3
    """

    accuracy: float
    baseline: float
    advantage: float
    interval: tuple[float, float]
    confidence: float

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"the model guesses {self.accuracy:.1%} of the labels, features alone "
            f"{self.baseline:.1%}\n  advantage: {self.advantage:+.1%} ({low:+.1%} to {high:+.1%}, "
            f"with {self.confidence:.4g} confidence)"
        )
