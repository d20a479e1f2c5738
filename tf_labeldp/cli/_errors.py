"""What goes wrong by the user's input; ``main`` prints the message and returns 2."""

from __future__ import annotations


class CommandError(ValueError):
    """A command cannot be carried out as asked; the message is one line and says what to do."""


class DatasetError(CommandError):
    """A data set could not be read; the message says what to do."""
