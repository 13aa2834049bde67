"""Terminal output of all commands: consoles, tables, sizes, escaping."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

MIB = 1 << 20
SHORT_WORD = 12
UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MANY_COLUMNS = 8  # Tables with more columns get less padding.
ANY_WIDTH = 10_000
PIPE_WIDTH = 160  # Width if stdout is not a terminal and COLUMNS is unset. Every table fits.


class _Table(Table):
    names: Sequence[str] = ()
    rows_of_cells: Sequence[Sequence[str]] = ()


class _Console(Console):
    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        """Wrap text that is wider than the terminal, because rich would crop it. Print a wider table as a
        list."""
        shown = (self._fitting(item) if isinstance(item, _Table) else item for item in objects)
        super().print(*shown, crop=crop, **options)

    def _fitting(self, table: _Table) -> RenderableType:
        needed = Measurement.get(self, self.options.update(width=ANY_WIDTH), table)
        if needed.minimum > self.width:
            return _list_of(table, self.width)
        _narrow(table, needed.maximum - self.width)
        lines = []
        for segments in self.render_lines(table, pad=False):
            line = Text.assemble(*((part.text, part.style or "") for part in segments), overflow="ignore")
            line.rstrip()
            line.no_wrap = True
            lines.append(line)
        return Group(*lines)  # without trailing blanks

    def on_broken_pipe(self) -> None:
        """Raise the error, because main() handles a closed stdout. Rich would exit here."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    has_width = is_terminal or "COLUMNS" in os.environ  # because rich reads both
    return _Console(stderr=stderr, highlight=False, width=None if has_width else PIPE_WIDTH)


def printable(text: str, keep: str = "") -> str:
    """Escape characters that control a terminal, except those in `keep`."""
    return "".join(
        c if c in keep or c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table with right-aligned numbers. Markup in cells is not parsed."""
    out = _Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    out.collapse_padding = len(columns) > MANY_COLUMNS
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        cells = [_cell(row[i]) for row in rows]
        words = [word for cell in cells for word in cell.split()]
        short = [
            word for word in (*cells, *words) if numeric or len(word) <= SHORT_WORD or UUID.fullmatch(word)
        ]
        whole = [*column.split(), *short]  # rich must not cut these words
        out.add_column(
            Text(column),
            justify="right" if numeric else "left",
            overflow="fold",
            # Rich shrinks wide columns first and ignores their min_width.
            no_wrap=any(map(UUID.fullmatch, words)),
            min_width=max(map(len, whole), default=1),
        )
    out.names, out.rows_of_cells = columns, [[_cell(cell) for cell in row] for row in rows]
    for row in out.rows_of_cells:
        out.add_row(*map(Text, row))
    return out


def _narrow(table: _Table, excess: int) -> None:
    """Shrink the widest columns by `excess` characters in total, but keep the longest word of each column.
    Rich would ignore min_width and drop text."""
    texts = list(zip(table.names, *table.rows_of_cells, strict=True))
    widest = [max(map(cell_len, cells)) for cells in texts]
    least = [
        most if column.no_wrap else max(cell_len(word) for cell in cells for word in cell.split() or [""])
        for column, cells, most in zip(table.columns, texts, widest, strict=True)
    ]
    widths = list(widest)
    for level in range(max(widest), 0, -1):
        if sum(widest) - sum(widths) >= excess:
            break
        widths = [min(most, max(low, level)) for low, most in zip(least, widest, strict=True)]
    for column, width in zip(table.columns, widths, strict=True):
        column.max_width = width


def _list_of(table: _Table, width: int) -> Text:
    """Return a block of `column value` lines for each row. A long value begins below its column's name, and
    no word is cut."""
    indent = "  "
    aligned = max(map(len, table.names[1:]), default=0)
    lines = [Text(str(table.title), "italic")] if table.title else []
    last = ""
    for first, *rest in table.rows_of_cells:
        first = last = first or last  # an empty cell means the same value as in the row above
        lines.append(Text(f"{table.names[0]} {first}", "bold"))
        for name, value in zip(table.names[1:], rest, strict=True):
            whole = f"{indent}{name:<{aligned}}  {value}"
            if len(whole) <= width:
                lines.append(Text(whole))
                continue
            room = max(width - 2 * len(indent), 1)
            lines += [Text(indent + name), *(
                Text((2 * indent if len(part) <= room else "") + part)
                for part in textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
            )]  # fmt: skip
    return Text("\n", no_wrap=True, overflow="ignore").join(lines)


def _cell(value: Any) -> str:
    return printable(f"{value:.1f}" if isinstance(value, float) else str(value))


def size(n_bytes: int) -> str:
    """Format bytes with a unit: 512 B, 1.5 MiB, 24.0 GiB."""
    value, unit = float(n_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def write_json(value: Any, indent: int | None = None) -> None:
    """Write JSON to stdout in ASCII. NaN and infinity become strings."""
    sys.stdout.write(json.dumps(jsonable(value), indent=indent, allow_nan=False) + "\n")


def write_md(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")


def jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def tell_notes(notes: Iterable[str], err: Console) -> None:
    for line in notes:
        err.print(printable(line), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(out: Console, *columns: ProgressColumn | str, keep: bool = False) -> Iterator[Progress]:
    """Show a progress bar on a terminal. If `keep` is set, the final bar remains, and is also printed to
    files and pipes."""
    bar = Progress(*columns, console=out, transient=not keep, disable=not out.is_terminal)
    with bar:
        try:
            yield bar
        except BaseException:
            bar.live.transient = True  # an error message follows
            raise
    if keep and not out.is_terminal:
        out.print(bar)


@contextmanager
def byte_progress(
    out: Console, label: str, *, keep: bool = False, then: str = ""
) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar for bytes. Yield a function that takes the number of finished bytes and of all
    bytes. After the last byte, `then` replaces the label."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
    with progress_bar(out, *columns, TransferSpeedColumn(), keep=keep) as bar:
        task = bar.add_task(printable(label), total=None)

        def show(done: int, total: int) -> None:
            text = printable(then if then and done >= total else label)
            bar.update(task, completed=done, total=total, description=text)

        yield show
        bar.update(task, description=printable(label))
