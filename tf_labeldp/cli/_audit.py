"""``tf-labeldp audit``: holds the mechanism of noisy labels against its epsilon."""

from __future__ import annotations

import argparse

from tf_labeldp.audit import audit_mechanism
from tf_labeldp.cli._console import CommandError, say
from tf_labeldp.dossier._report import evenest
from tf_labeldp.vault import NoisyLabels


def run(args: argparse.Namespace) -> int:
    """Prints what was found, and returns the exit code: 1 if it refutes the claim."""
    try:
        noisy = NoisyLabels.load(args.output)
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(
            f"{args.output} is no output of tf-labeldp randomize ({error})"
        ) from None
    prior = evenest(noisy.mechanism, noisy.priors)
    try:
        found = audit_mechanism(noisy.mechanism, public=prior, draws=args.draws, seed=args.seed)
    except TypeError as error:
        raise CommandError(str(error)) from None
    say(f"{noisy.mechanism}\n{found}")
    if args.plot is not None:
        found.plot(args.plot)
        say(f"plot: {args.plot}")
    return int(found.refutes)
