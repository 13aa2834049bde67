"""Paths and errors of files in messages."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from systems import WINDOWS

from vkbackend.atomic_file import replacing
from vkbackend.errors import StateError
from vkbackend.paths import quoted, why

pytestmark = pytest.mark.no_vulkan


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (PureWindowsPath("C:/Users/Ä B/model.gguf"), r"'C:\Users\Ä B\model.gguf'"),
        ("\\\\?\\C:\\new\\table.gguf", r"'\\?\C:\new\table.gguf'"),
        (r"\\server\share", r"'\\server\share'"),
        (PurePosixPath("/a b/c.gguf"), "'/a b/c.gguf'"),
        ("", "''"),
        (" a ", "' a '"),
        ("it's", '"it\'s"'),
        ("'\"", "'\\'\"'"),
    ],
)
def test_a_path_is_quoted_without_doubled_backslashes(path: str | Path, text: str) -> None:
    assert quoted(path) == text


@pytest.mark.parametrize("name", ["a\\n\nb", "\x1b[31mred", "a\0b", "\x9b", "\u202egpj.exe", "\udcff"])
def test_a_hostile_name_is_escaped(name: str) -> None:
    text = quoted(f"C:\\models\\{name}")
    assert text.isprintable() and text == repr(f"C:\\models\\{name}")


def test_an_error_of_the_system_is_given_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(OSError) as missing:
        os.stat(tmp_path / "missing")
    assert why(missing.value) == missing.value.strerror and "missing" not in why(missing.value)
    assert why(OSError("no number")) == "no number"
    assert why(ValueError("embedded null byte")) == "embedded null byte"


@pytest.mark.parametrize("path", ["/", "a\0b", *(["nul"] if WINDOWS else [])])
def test_a_path_that_names_no_file_cannot_be_replaced(path: str) -> None:
    with pytest.raises(StateError, match="is not a file name; give another"), replacing(path, StateError):
        pytest.fail("a temporary file was made")
