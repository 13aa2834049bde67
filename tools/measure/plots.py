"""Plots with matplotlib (extra "plot")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vkbackend.atomic_file import check_target
from vkbackend.errors import InvalidArgument, UnsupportedFeature
from vkbackend.paths import why


def plotting():  # type: ignore[no-untyped-def]  # matplotlib is an extra
    """Import pyplot for drawing without a display. Raises UnsupportedFeature if matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UnsupportedFeature(
            '--plot needs the package matplotlib (extra "plot"): pip install matplotlib'
        ) from None
    return pyplot


def check_plot(path: str) -> None:
    kinds = plotting().figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in kinds:
        raise InvalidArgument(
            f"--plot {path}: expected a name that ends in one of {', '.join(sorted(kinds))}"
        )
    check_target(path, InvalidArgument)


def save(figure: Any, path: str) -> None:
    """Write the plot. Raises InvalidArgument if the file cannot be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: the plot cannot be written: {why(error)}") from None
