from __future__ import annotations

import io
import re

import pytest

from vkbackend.tools.console import PIPE_WIDTH, _Console, byte_progress, console, table

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


UUID = "6d657361-3235-2e30-2e37-2d327e627000"
NAMES = ("index", "name", "driver", "memory", "UUID")
ROWS = [
    (i, "llvmpipe (LLVM 15.0.6, 256 bits)", "llvmpipe Mesa 25.0.7 (LLVM)", "23.5 GiB", UUID) for i in (0, 1)
]


@pytest.mark.parametrize("width", [40, 60, 76, 80, 90, 100, 120])
def test_a_table_fits_or_becomes_a_list(width: int) -> None:
    out, file = screen(width)
    out.print(table("devices", NAMES, ROWS))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines), lines
    assert sum(UUID in line for line in lines) == 2, "what is copied stays in one line"
    assert any(line.split() == [*NAMES] for line in lines) == (width >= 76)
    assert ("index 0" in lines and "  memory  23.5 GiB" in lines) == (width < 76)
    assert file.getvalue().count("23.5 GiB") == file.getvalue().count("25.0.7") == 2


@pytest.mark.parametrize("width", [60, 88, 92, 96, 100, 104, 110, 160])
def test_no_column_is_cut_where_another_can_wrap(width: int) -> None:
    names = ("architecture", "models", "tensor parallel", "layer split", "state save", "control vectors",
             "experts", "sliding window", "recurrent")  # fmt: skip
    models = ("Llama 1 to 3, Mistral, Mixtral, SmolLM", "GPT OSS")
    rows = [("llama", models[0], "heads, ffn, experts", *["yes"] * 6), ("", models[1], "heads", *["-"] * 6)]
    out, file = screen(width)
    out.print(table("", names, rows))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert {word for cell in (*names, *rows[0], *rows[1]) for word in cell.split()} <= set(
        file.getvalue().split()
    )
    if lines[0].startswith("architecture llama"):
        assert sum(line == "architecture llama" for line in lines) == 2


def test_columns_sets_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "80")
    assert console().width == 80


def test_no_color_disables_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        out, file = screen(80, terminal=True)
        with byte_progress(out, "loading", keep=True) as progress:
            progress(5, 5)
        out.print(table("devices", NAMES, ROWS))
        shown[value] = bool(re.search(r"\x1b\[(\d+;)*(3[0-8]|9\d)[;m]", file.getvalue()))
    assert shown == {"": True, "1": False}


@pytest.mark.parametrize("keep", [False, True])
def test_a_progress_bar_is_kept_after_success(keep: bool) -> None:
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
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\s", "", file.getvalue().rpartition("\x1b[2K")[2])
