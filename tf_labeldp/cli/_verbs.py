"""The short verbs: advice before a release, and checks of stores and files after it."""

from __future__ import annotations

import argparse
import math

from tf_labeldp.cli._console import CommandError, explained, load_tensorflow, say

_NOT_CHECKED = 3
"""The exit code if a part of a file could not be checked, and nothing is wrong."""
_ROUNDING = 1e-9
"""Relative error of sums of epsilon."""


def run_recommend(args: argparse.Namespace) -> int:
    from tf_labeldp.front_door import recommend

    number = None if args.numbers else args.num_classes
    choice = recommend(args.epsilon, args.examples, args.kind, num_classes=number)
    say(*str(choice).splitlines())
    if args.score is not None:
        needed = choice.epsilon_for(args.score)
        found = "more than measured" if math.isinf(needed) else f"{needed:.2g}"
        say(f"Epsilon for {args.score:g} %, {choice.curves_of}: {found}")
    return 0


def audit(args: argparse.Namespace) -> int:
    from tf_labeldp.audit import audit_mechanism
    from tf_labeldp.vault import NoisyLabels

    if args.output.suffix == ".keras" or (args.output / "model.keras").exists():
        raise CommandError(
            f"{args.output} is a model, and no output of tf-labeldp randomize, whose mechanism can "
            f"be audited; check a model with tf-labeldp verify {args.output}"
        )
    try:
        noisy = NoisyLabels.load(args.output)
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(
            f"{args.output} is no output of tf-labeldp randomize ({error})"
        ) from None
    with explained(TypeError):
        result = audit_mechanism(
            noisy.mechanism, public=noisy.priors, draws=args.draws, seed=args.seed
        )
    say(noisy.mechanism, *str(result).splitlines())
    stated = noisy.guarantee().epsilon
    rest = stated - noisy.mechanism.epsilon
    if math.isfinite(rest) and rest > _ROUNDING * stated:
        of = "the private histogram" if noisy.priors and noisy.priors.receipts else "other releases"
        say(
            f"This is a part of the stated epsilon {stated:.3g}; the other {rest:.3g}, of {of}, "
            "was not audited."
        )
    return int(result.refutes)


def run_report(args: argparse.Namespace) -> int:
    from tf_labeldp.dossier import report
    from tf_labeldp.vault import LabelStoreError

    if args.published:
        load_tensorflow()
    try:
        with explained(LabelStoreError, OSError, ValueError):
            result = report(args.store, published=args.published, audit=args.audit)
            result.save(args.output)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the plot of a report needs {error.name}: pip install 'tf-labeldp[plots]'"
        ) from None
    say(*str(result).splitlines(), "", f"report: {args.output / 'report.html'}")
    published = result.content["published"]
    wrong = any(file["problems"] for file in published)
    if wrong or any(audit["refutes"] for audit in result.content["audits"]):
        return 1
    return _NOT_CHECKED if any(file["not_checked"] for file in published) else 0


def run_verify(args: argparse.Namespace) -> int:
    from tf_labeldp.dossier import verify
    from tf_labeldp.vault import LabelStoreError

    load_tensorflow()
    with explained(LabelStoreError, OSError, ValueError):
        result = verify(args.file, store=args.store, report=args.report)
    say(*str(result).splitlines())
    return 1 if result.problems else _NOT_CHECKED if result.not_checked else 0


def run_forget(args: argparse.Namespace) -> int:
    from tf_labeldp.vault import LabelStoreError, forget

    if not args.yes:
        raise CommandError(
            f"this erases the draws, the key and the digest of the labels in {args.store} for "
            "good, and no further draw of these labels is possible; confirm with --yes"
        )
    with explained(LabelStoreError, OSError):
        left = forget(args.store)
    say(
        f"{args.store}: forgotten. The record of charges stays: tf-labeldp report {args.store}",
        "Backups of the folder and published files are not touched.",
        *([f"Other files are still there: {', '.join(left)}"] if left else []),
    )
    return 0


def run_give_back(args: argparse.Namespace) -> int:
    from tf_labeldp.vault import LabelStoreError, give_back

    with explained(LabelStoreError):
        uses = give_back(args.store, key=args.key)
    say(f"{args.store}: given back: {', '.join(uses) or 'nothing was reserved'}")
    return 0


def run_confirm_move(args: argparse.Namespace) -> int:
    from tf_labeldp.vault import LabelStoreError, confirm_move

    with explained(LabelStoreError):
        confirm_move(args.store)
    say(f"{args.store}: accepted here. Remove other copies, which must not be used.")
    return 0
