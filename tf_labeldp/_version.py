"""The version, in one place."""

__version__ = "0.4.0.dev0"
