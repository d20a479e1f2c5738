"""``tf-labeldp forget``: erases what a store holds of its labels, and keeps its account."""

from __future__ import annotations

import argparse

from tf_labeldp.cli._console import CommandError, say
from tf_labeldp.vault import LabelStoreError, forget


def run(args: argparse.Namespace) -> int:
    """Erases and says so; returns the exit code."""
    if not args.yes:
        raise CommandError(
            f"this erases the draws, the key and the digest of the labels in {args.store} for "
            "good, and nothing can be drawn of these labels any more; say so with --yes"
        )
    try:
        left = forget(args.store)
    except LabelStoreError as error:
        raise CommandError(" ".join(str(error).split())) from None
    say(
        f"{args.store}: forgotten. What was spent is kept: tf-labeldp report {args.store}\n"
        "Backups of the folder, and what was published, are not touched."
        + (f"\nStill there, and none of the store's: {', '.join(left)}" if left else "")
    )
    return 0
