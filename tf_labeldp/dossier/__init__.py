"""What a privacy officer signs: a report of all that left a label set, and checks of files."""

from tf_labeldp.dossier._report import Report, report
from tf_labeldp.dossier._verify import Published, verify

__all__ = ["Published", "Report", "report", "verify"]
