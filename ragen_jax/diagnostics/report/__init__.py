"""The health report: one HTML page of a run, that opens from disk without a network."""

from ragen_jax.diagnostics.report.page import FILE, write_report

__all__ = ["FILE", "write_report"]
