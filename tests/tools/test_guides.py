"""Every command of a guide prints the text that the guide shows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_lines import run_line
from device_sets import device_infos
from places import ROOT

PAGES = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
STORY = "generate .*Once upon a time.*--temp 0"
PRINTS = {  # Each entry maps the words after `vkbackend` to an expression for the output.
    "devices": r"index +name +vendor.*\n +0 ",
    "plan ": r"(?s)blk\.0\S* +Vulkan0.*predicted +[\d.]+ ms per token",
    STORY: r"(?s)^, there was (?!.*Once upon a time)(\S+\s+){4,}",
    "bench ": r"(?s)pp64.*tg16",
    "verify ": r"(?s)rms_norm\.f32 +.*pass.*\d+ pass, 0 FAIL",
    "generate .*Once. -n 2": r"(?s)\brms_norm\S* .*\bmat_\S+ ",
}


def commands() -> list[str]:
    blocks = [
        text
        for page in PAGES
        for text in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    return list(dict.fromkeys(line for text in blocks for line in text.splitlines() if line.strip()))


def first_of_each_kind(lines: list[str]) -> list[Any]:
    """Mark commands as wide if an earlier command has the same subcommand and variables."""
    kinds: set[tuple[str, str]] = set()
    params = []
    for line in lines:
        variables, _, words = line.rpartition("vkbackend ")
        kind = variables, words.split()[0]
        params.append(pytest.param(line, id=line, marks=[pytest.mark.wide] if kind in kinds else []))
        kinds.add(kind)
    return params


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    return {}


@pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
@pytest.mark.parametrize("command", first_of_each_kind(commands()))
def test_command(command: str, outputs: dict[str, str], tmp_path: Path) -> None:
    variables, _, words = command.rpartition("vkbackend ")
    (wanted,) = (pattern for begin, pattern in PRINTS.items() if re.match(begin, words))
    shutil.copy(ROOT / "models/demo/demo.gguf", tmp_path / "model.gguf")
    result = run_line(command, tmp_path)
    assert result.returncode == 0, result.stderr
    output = result.stderr if "DEBUG=" in variables else result.stdout
    assert re.search(wanted, output), output
    if re.match(STORY, words):
        outputs[command] = result.stdout.strip()
        longest = max(outputs.values(), key=len)
        assert all(map(longest.startswith, outputs.values())), "every placement and device writes one story"
