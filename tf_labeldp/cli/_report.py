"""``tf-labeldp report``: what has left a label set, as a page and as JSON."""

from __future__ import annotations

import argparse

from tf_labeldp.cli._console import CommandError, load_tensorflow, say
from tf_labeldp.dossier import report
from tf_labeldp.vault import LabelStoreError


def run(args: argparse.Namespace) -> int:
    """Writes the report; returns the exit code: 1 if a file or an audit contradicts its claim."""
    if args.published:
        load_tensorflow()
    try:
        found = report(args.store, published=args.published, audit=args.audit)
        found.save(args.output)
    except (LabelStoreError, OSError, ValueError) as error:
        raise CommandError(" ".join(str(error).split())) from None
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the plot of a report needs {error.name}: pip install 'tf-labeldp[plots]'"
        ) from None
    say(f"{found}\n\nreport: {args.output / 'report.html'}")
    content = found.content
    wrong = any(one["problems"] for one in content["published"])
    return int(wrong or any(one["refutes"] for one in content["audits"]))
