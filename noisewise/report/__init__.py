"""A run or a comparison as one HTML file that needs nothing else, as figures for papers, and live while it trains."""

from noisewise.report.figures import write_figures
from noisewise.report.page import write_report

__all__ = ["write_figures", "write_report"]
