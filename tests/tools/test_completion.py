from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vkbackend.tools.cli import COMMANDS, main

pytestmark = pytest.mark.no_vulkan

# Bash passes the words before the cursor, and the word that contains the cursor.
TAB = """
eval "$(vkbackend completion bash)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete vkbackend
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bin")
    (folder / "vkbackend").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m vkbackend "$@"\n', encoding="utf-8"
    )
    (folder / "vkbackend").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def tab(line: str, path: str, folder: Path) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", TAB, "bash", line], env={**os.environ, "PATH": path}, cwd=folder,
        capture_output=True, text=True, encoding="utf-8", timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    return {word.strip() for word in done.stdout.splitlines()}


def test_commands_flags_and_values_are_completed(path: str, tmp_path: Path) -> None:
    (tmp_path / "story.gguf").touch()
    assert set(COMMANDS) <= tab("vkbackend ", path, tmp_path)
    assert tab("vkbackend generate --tens", path, tmp_path) == {"--tensor-split"}
    assert {"bash", "zsh", "fish"} <= tab("vkbackend completion ", path, tmp_path)
    assert tab("vkbackend generate -m sto", path, tmp_path) == {"story.gguf"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_read_by_its_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "vkbackend" in script and "_ARGCOMPLETE" in script
    if shutil.which(shell):
        read = subprocess.run(
            [shell, "-n"], input=script, capture_output=True, text=True, encoding="utf-8", timeout=60
        )
        assert read.returncode == 0 and not read.stderr
