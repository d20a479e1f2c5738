"""``tf-labeldp verify``: holds a published file against its statement."""

from __future__ import annotations

import argparse

from tf_labeldp.cli._console import CommandError, load_tensorflow, say
from tf_labeldp.dossier import verify
from tf_labeldp.vault import LabelStoreError


def run(args: argparse.Namespace) -> int:
    """Prints what was found; returns the exit code: 1 if something is wrong."""
    load_tensorflow()
    try:
        found = verify(args.file, store=args.store, report=args.report)
    except (LabelStoreError, OSError, ValueError) as error:
        raise CommandError(" ".join(str(error).split())) from None
    say(str(found))
    return int(bool(found.problems))
