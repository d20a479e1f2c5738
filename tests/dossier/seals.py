"""The seal of files of noisy labels, which has no key: a forger can make it, too."""

from __future__ import annotations

import json

import numpy as np

from tf_labeldp.accounting import PublicInput


def sealed(fields, arrays):
    """Returns the text of a statement whose digest fits its fields and the arrays."""
    content = {name: part for name, part in fields.items() if name != "digest"}
    names = sorted(arrays)
    text = json.dumps([content, names], sort_keys=True).encode()
    parts = [*(arrays[name] for name in names), np.frombuffer(text, np.uint8)]
    content["digest"] = PublicInput.digest_of(*parts)
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
