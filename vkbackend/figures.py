"""Formats numbers for people."""

from __future__ import annotations


def short(value: float) -> str:
    """Return three significant digits, without an exponent for large numbers: 0.0123, 4.56, 12,345."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
