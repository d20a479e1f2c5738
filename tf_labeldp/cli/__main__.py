"""Runs ``python -m tf_labeldp.cli``."""

import sys

from tf_labeldp.cli import main

if __name__ == "__main__":
    sys.exit(main())
