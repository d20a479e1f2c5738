"""Texts from other people in a page and in a card, as ``for_terminal`` has them in a terminal.

Names of files, layers, classes and columns, and the words of receipts and declarations, come from
files. Written as they are, they could forge a line, hide the rest of a page, or run a script. The
data (receipts, statements, JSON) keep them unchanged: they are escaped where they are shown.
"""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

from tf_labeldp._progress import for_terminal

_MARKUP = re.compile(
    # An underscore within a word is no markup; addresses become links without brackets, too.
    r"[\\`*{\[\]<>&|~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\."
)
_MARKUP_AT_START = re.compile(r"^(\d*)([-+=:.)])")
"""Items of lists, rules, underlined headings and delimiters of a table."""


def for_html(*lines: Any) -> str:
    """Returns texts as lines, as the content of an element or of an attribute in quotes."""
    return html.escape(for_terminal(*lines), quote=True)


def for_markdown(text: Any) -> str:
    """Returns a text as one line of a paragraph, a heading or a cell, without any markup."""
    escaped = _MARKUP.sub(r"\\\g<0>", for_terminal(text).strip())
    return _MARKUP_AT_START.sub(r"\1\\\2", escaped)


def for_yaml(value: Any) -> str:
    """Returns lists, dicts, texts and numbers as YAML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{for_yaml(k)}: {for_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(for_yaml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no numbers for these, and NaN is a text in YAML.
        return ".nan" if math.isnan(value) else f"{'-' * (value < 0)}.inf"
    # YAML reads a pair of surrogates, which JSON writes for one character, as two.
    value = for_terminal(value) if isinstance(value, str) else value
    return json.dumps(value, ensure_ascii=False)
