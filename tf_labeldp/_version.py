"""The version, in one place."""

__version__ = "0.4.0.dev0"
MADE_BY = f"tf-labeldp {__version__}"
"""The maker of a file, in its field ``made_by``."""
