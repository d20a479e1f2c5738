"""``tf-labeldp recommend``: which method at which epsilon."""

from __future__ import annotations

import argparse

from tf_labeldp.cli._console import say
from tf_labeldp.front_door import recommend


def run(args: argparse.Namespace) -> int:
    """Prints the recommendation and returns the exit code."""
    say(str(recommend(args.epsilon, args.examples, args.kind)))
    return 0
