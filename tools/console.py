"""What the commands share on the terminal: consoles, plain tables, sizes, and text made safe to show."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

MIB = 1 << 20
PIPE_WIDTH = 160  # columns where there is no terminal: enough for every table unwrapped


def console(*, stderr: bool = False) -> Console:
    """A console for stdout or stderr."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if is_terminal else PIPE_WIDTH)


def printable(text: str, keep: str = "") -> str:
    """`text` with every character that a terminal could obey, other than those to `keep`, written as an
    escape.
    """
    return "".join(
        c if c in keep or c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table; numbers stand right, and no cell is read as markup."""
    out = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        out.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        out.add_row(
            *(Text(printable(f"{cell:.1f}" if isinstance(cell, float) else str(cell))) for cell in row)
        )
    return out


def size(n_bytes: int) -> str:
    """Bytes in the unit that fits: 512 B, 1.5 MiB, 24.0 GiB."""
    value, unit = float(n_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def write_json(value: Any, indent: int | None = None) -> None:
    """One JSON document on stdout, ASCII only; numbers that JSON lacks (NaN, infinity) become strings."""
    sys.stdout.write(json.dumps(_jsonable(value), indent=indent, allow_nan=False) + "\n")


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def tell_notes(notes: Iterable[str], err: Console) -> None:
    """What of a file is not used, a line each."""
    for line in notes:
        err.print(printable(line), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def byte_progress(out: Console, what: str, *, keep: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for bytes; yields the function to call with (done, in all). With `keep` it stays."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
    with Progress(*columns, TransferSpeedColumn(), console=out, transient=not keep) as bar:
        task = bar.add_task(printable(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
