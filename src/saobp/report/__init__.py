"""HTML report of runs and diagnoses, with an explorer that refines attention in the browser."""

from saobp.report.explorer import explorer_data, write_explorer
from saobp.report.page import PAGE_BYTES, write_report
from saobp.report.page_assets import MissingPlotlyError
from saobp.report.run_view import Run, read_runs
from saobp.report.tables import PageTable

__all__ = [
    "PAGE_BYTES",
    "MissingPlotlyError",
    "PageTable",
    "Run",
    "explorer_data",
    "read_runs",
    "write_explorer",
    "write_report",
]
