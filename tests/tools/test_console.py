"""What commands show on terminals of any width, and of progress that ended badly."""

from __future__ import annotations

import io
import re

import pytest

from vkbackend.tools.console import _Console, byte_progress, table

pytestmark = pytest.mark.no_vulkan


def screen(width: int, terminal: bool = False) -> tuple[_Console, io.StringIO]:
    file = io.StringIO()
    return _Console(file=file, width=width, force_terminal=terminal, legacy_windows=False), file


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_no_number_is_cut_or_left_out(width: int) -> None:
    out, file = screen(width)
    rows = [(f"Vulkan{i}", "a name of several words", 21907.3 + i, 1.5, "-", 7) for i in range(2)]
    out.print(table("memory", ("device", "name", "free before", "weights", "PCI", "index"), rows))
    words = file.getvalue().split()
    for word in "Vulkan0 Vulkan1 21907.3 21908.3 1.5 7 device free before weights index several".split():
        assert word in words, file.getvalue()


@pytest.mark.parametrize("keep", [False, True])
def test_a_bar_stays_where_all_went_well(keep: bool) -> None:
    for terminal in (False, True):
        out, file = screen(80, terminal)
        with byte_progress(out, "loading", keep=keep) as progress:
            progress(5, 5)
        assert bool(shown(file)) == keep
        out, file = screen(80, terminal)
        with pytest.raises(ValueError, match="wrong"), byte_progress(out, "loading", keep=keep):
            raise ValueError("wrong")
        assert not shown(file)


def shown(file: io.StringIO) -> str:
    """What is left on the screen: the text behind the last line that was erased."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\s", "", file.getvalue().rpartition("\x1b[2K")[2])
