"""Pictures and pages made from a run's files alone; nothing here imports JAX."""

from holdfast.report.page import write_report
from holdfast.report.run_files import Run, open_run, readable
from holdfast.report.summary import print_outcome, print_summary

__all__ = ["Run", "open_run", "print_outcome", "print_summary", "readable", "write_report"]
