"""The short verbs: about mechanisms before a release, and about stores and files after it."""

from __future__ import annotations

import argparse

from tf_labeldp.cli._console import CommandError, explained, load_tensorflow, say


def run_recommend(args: argparse.Namespace) -> int:
    from tf_labeldp.front_door import recommend

    say(str(recommend(args.epsilon, args.examples, args.kind)))
    return 0


def audit(args: argparse.Namespace) -> int:
    from tf_labeldp.audit import audit_mechanism
    from tf_labeldp.vault import NoisyLabels

    try:
        noisy = NoisyLabels.load(args.output)
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(
            f"{args.output} is no output of tf-labeldp randomize ({error})"
        ) from None
    options = {"public": noisy.priors, "draws": args.draws, "seed": args.seed}
    with explained(TypeError):
        found = audit_mechanism(noisy.mechanism, **options)
    say(f"{noisy.mechanism}\n{found}")
    if args.plot is not None:
        found.plot(args.plot)
        say(f"plot: {args.plot}")
    return int(found.refutes)


def run_report(args: argparse.Namespace) -> int:
    from tf_labeldp.dossier import report
    from tf_labeldp.vault import LabelStoreError

    if args.published:
        load_tensorflow()
    try:
        with explained(LabelStoreError, OSError, ValueError):
            found = report(args.store, published=args.published, audit=args.audit)
            found.save(args.output)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the plot of a report needs {error.name}: pip install 'tf-labeldp[plots]'"
        ) from None
    say(f"{found}\n\nreport: {args.output / 'report.html'}")
    wrong = any(file["problems"] for file in found.content["published"])
    return int(wrong or any(audit["refutes"] for audit in found.content["audits"]))


def run_verify(args: argparse.Namespace) -> int:
    from tf_labeldp.dossier import verify
    from tf_labeldp.vault import LabelStoreError

    load_tensorflow()
    with explained(LabelStoreError, OSError, ValueError):
        found = verify(args.file, store=args.store, report=args.report)
    say(str(found))
    return int(bool(found.problems))


def run_forget(args: argparse.Namespace) -> int:
    from tf_labeldp.vault import LabelStoreError, forget

    if not args.yes:
        raise CommandError(
            f"this erases the draws, the key and the digest of the labels in {args.store} for "
            "good, and nothing can be drawn of these labels any more; confirm with --yes"
        )
    with explained(LabelStoreError):
        left = forget(args.store)
    say(
        f"{args.store}: forgotten. The account is kept: tf-labeldp report {args.store}\n"
        "Backups of the folder and published files are not touched."
        + (f"\nOther files are still there: {', '.join(left)}" if left else "")
    )
    return 0
