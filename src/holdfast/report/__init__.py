"""Pictures and pages made from a run's files alone; nothing here imports JAX."""

from holdfast.report.run_files import Run, open_run
from holdfast.report.summary import print_summary
from holdfast.report.write import write_report

__all__ = ["Run", "open_run", "print_summary", "write_report"]
