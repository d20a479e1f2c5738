"""The report that a privacy officer signs, model cards, and checks of published files."""

from tf_labeldp.dossier._card import save
from tf_labeldp.dossier._report import Report, report
from tf_labeldp.dossier._verify import Published, verify

__all__ = ["Published", "Report", "report", "save", "verify"]
