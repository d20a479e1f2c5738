"""``tf-labeldp audit``: holds the mechanism of noisy labels against its epsilon."""

from __future__ import annotations

import argparse

import numpy as np

from tf_labeldp.audit import audit_mechanism
from tf_labeldp.cli._console import CommandError, say
from tf_labeldp.vault import NoisyLabels


def run(args: argparse.Namespace) -> int:
    """Prints what was found, and returns the exit code: 1 if it refutes the claim."""
    try:
        noisy = NoisyLabels.load(args.output)
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(
            f"{args.output} is no output of tf-labeldp randomize ({error})"
        ) from None
    prior = None
    if noisy.priors is not None and getattr(noisy.mechanism, "uses_priors", False):
        rows = np.atleast_2d(np.asarray(noisy.priors))
        prior = rows[int(np.argmin(np.square(rows).sum(axis=1)))]  # the evenest, which tells most
    try:
        found = audit_mechanism(noisy.mechanism, public=prior, draws=args.draws, seed=args.seed)
    except TypeError as error:
        raise CommandError(str(error)) from None
    say(f"{noisy.mechanism}\n{found}")
    if args.plot is not None:
        found.plot(args.plot)
        say(f"plot: {args.plot}")
    return int(found.refutes)
