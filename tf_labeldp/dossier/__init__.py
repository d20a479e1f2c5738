"""The report that a privacy officer signs, and checks of published files."""

from tf_labeldp.dossier._report import Report, report
from tf_labeldp.dossier._verify import Published, verify

__all__ = ["Published", "Report", "report", "verify"]
