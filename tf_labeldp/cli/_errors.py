"""What goes wrong by the user's input; ``main`` prints the message and returns 2."""

from __future__ import annotations


class CommandError(ValueError):
    """A command cannot be carried out as asked; the message is one line and says what to do."""


class UsageError(CommandError):
    """The command line is not one that the command takes; its help says what it takes."""


class DatasetError(CommandError):
    """A data set could not be read; the message says what to do."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM); cleaned up after like a stop by hand."""
