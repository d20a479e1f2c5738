"""Receipts together: each once, in the order of the uses, with one statement."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable
from typing import Any

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting._annotations import Setting
from tf_labeldp.accounting._guarantee import PrivacyGuarantee
from tf_labeldp.accounting.budget import Charge
from tf_labeldp.accounting.composition import Composition
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.receipt import LabelSet, Receipt, ReceiptError

FORMAT = 3
"""The format of receipts in files. A newer one is refused; 1 (of 0.2) and 2 (of 0.3) are read.

This and the other formats of files (of a store, of its records, of noisy labels) rise in the first
release that writes what the release before would refuse or misread: a field that is new, is gone or
has another meaning."""
_LEAST_BYTES, _MOST_RATIO = 1 << 22, 100
"""Receipts may unpack to this size, or to this multiple of the packed one."""


class Receipts(tuple[Receipt, ...]):
    """Receipts in the order of their uses: a tuple that composes to one statement.

    Guarantee:
        ``guarantee()`` covers all outputs of these receipts together, for the replacement of one
        label: a composition of promises made before the draws. Receipts of one label set compose in
        sequence on each shared example, and in parallel on different examples (``ghazi2021``,
        Observation 4). Two label sets may contain labels of the same people, in any order, so the
        worst example of one is added to the worst of the other, unless they were declared to be of
        different populations (``people``). A step on several label sets, whose row i has labels of
        the same example, counts once: its cost is for the replacement of all labels of an example.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> first = labels.randomize(RandomizedResponse(0.5, 2), key="first")
        >>> second = labels.randomize(RandomizedResponse(0.25, 2), key="second")
        >>> both = Receipts.merged(first.receipts, second.receipts, first.receipts)
        >>> len(both), both.guarantee().epsilon
        (2, 0.75)
    """

    __slots__ = ()

    def __new__(cls, receipts: Iterable[Receipt] = ()) -> Receipts:
        """Returns these receipts."""
        return super().__new__(cls, receipts)

    @classmethod
    def merged(cls, *several: Iterable[Receipt]) -> Receipts:
        """Returns all receipts, each once, in order of first appearance.

        Raises:
            ReceiptError: two receipts with one id have different contents.
        """
        found: dict[str, Receipt] = {}
        for receipt in itertools.chain(*several):
            found[receipt.id] = receipt.agreed(found.get(receipt.id))
        return cls(found.values())

    @classmethod
    def of_weights(cls, sample_weight: Setting[Any], class_weight: Setting[Any]) -> Receipts:
        """Returns the free receipt of weights in training on noisy labels, or none without weights.

        A statement names it. Weights ``"balanced"`` come from the noisy labels, and have none.
        """
        if sample_weight is None and (class_weight is None or isinstance(class_weight, str)):
            return cls()
        free = Charge(0.0, 0.0, EventFields.NONE)
        labels = LabelSet.new(0)
        return cls([Receipt(labels, free, "public weights", "declared", sample_weights=True)])

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of all uses that these receipts record.

        ``delta`` is by default the largest delta of the receipts.
        """
        return Composition(self).guarantee(delta)

    def standing(self) -> Receipts:
        """Returns the receipts without those of unknown cost that a declaration replaces."""
        declared = {name for receipt in self for name in receipt.declares}
        return Receipts(
            receipt
            for receipt in Receipts.merged(self)
            if receipt.kind != "unknown" or receipt.id not in declared
        )

    def to_bytes(self, **more: Setting[Any]) -> bytes:
        """Returns receipts in the format of model files, with ``more`` values for JSON."""
        content = {"format": FORMAT, "version": __version__, **more}
        content["receipts"] = [receipt.to_json() for receipt in self]
        return zlib.compress(json.dumps(content).encode(), 9)

    @classmethod
    def from_bytes(cls, content: bytes) -> tuple[Receipts, dict[str, Any]]:
        """Returns the receipts, and everything that ``to_bytes`` wrote with them."""
        try:
            data = _validate.json_of(_validate.unpacked(content, _LEAST_BYTES, _MOST_RATIO))
            written = _validate.integer_at_least("the format", data["format"], 1)
            if written > FORMAT:
                raise ReceiptError.of_newer(
                    "these receipts were", f"format {written}", data["version"]
                )
            listed = list(data["receipts"])
        except ReceiptError:
            raise
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ReceiptError(
                f"the receipts of this file are damaged ({error}), so the cost of its labels can't "
                "be counted. Use an unchanged copy of the file."
            ) from error
        return cls(map(Receipt.from_json, listed)), data
