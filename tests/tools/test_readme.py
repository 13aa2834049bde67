"""Every command of the README prints the text that the README shows. Every Python example of the docs
runs.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from command_lines import run_line
from device_sets import device_infos
from places import ROOT

SETUP = ("bash tools/setup.sh", "bash tools/demo.sh", "bash tools/test.sh")
STORY = r"(?s)^, there was (?!.*Once upon a time)(\S+\s+){25,}"  # The command generates 60 tokens.
PRINTS = {  # Each entry maps the words after `vkbackend` to an expression for the output.
    "devices": r"index +name +vendor.*\n +0 ",
    'generate -p "Once upon a time" -n 60 --temp 0': STORY,
    "plan ": r"(?s)blk\.0 +Vulkan0\.0 .*Vulkan0\.1 .*predicted +[\d.]+ ms per token",
    "models": r"(?s)llama.*qwen3.*gemma",
    "info ": r"general\.architecture +.*llama",
    "bench ": r"(?s)pp64.*tg16",
    "perplexity ": r"PPL = +[1-9]",
    "verify ": r"(?s)rms_norm\.f32 +.*pass.*\d+ pass, 0 FAIL",
    "export ": r"",
}


def blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


COMMANDS = [
    line.split("  #")[0].strip()
    for text in blocks("README.md", "bash")
    for line in text.splitlines()
    if line.strip()
]
EXAMPLES = [
    pytest.param(code, id=f"{name}-{i}")
    for name in ("README.md", "docs/python.md")
    for i, code in enumerate(blocks(name, "python"))
]
EXAMPLE_PRINTS = {
    "README.md-0": STORY,
    "docs/python.md-0": r"(?s)^, there was .*\(5, 1024\).*'weights'",
    "docs/python.md-1": r"(?s)^\['.+', '.+'\]\n3 continuations\n.*'n_requests': 5",
    "docs/python.md-2": r"\S+ \S+",
    "docs/python.md-3": r"(?s)^, there was .*\(1 of \d+ tokens computed\)",
}
needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")


@cache
def run(command: str) -> subprocess.CompletedProcess[str]:
    """Run the installed script where the command names its path, and other commands in this process."""
    if not command.startswith(".venv/bin/"):
        return run_line(command, ROOT)
    bin_dir = Path(sys.executable).parent
    return subprocess.run(
        ["bash", "-c", command.replace(".venv/bin/", f"{bin_dir}/")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=110,
        env=os.environ | {"PATH": f"{bin_dir}:{os.environ['PATH']}"},
    )


def test_the_quick_start_is_three_commands() -> None:
    quick = [line.split("  #")[0].strip() for line in blocks("README.md", "bash")[0].splitlines()]
    assert quick[0] == SETUP[0] and len(quick) == 3
    assert set(SETUP) < set(COMMANDS)


@needs_device
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in SETUP])
def test_command(command: str) -> None:
    words = command.removeprefix(".venv/bin/").removeprefix("vkbackend ")
    (wanted,) = (pattern for begin, pattern in PRINTS.items() if words.startswith(begin))
    result = run(command)
    assert result.returncode == 0, result.stderr
    assert re.search(wanted, result.stdout), result.stdout


@needs_device
def test_one_and_two_devices_write_the_same_text() -> None:
    texts = {run(command).stdout for command in COMMANDS if " generate" in command}
    assert len(texts) == 1, texts


@needs_device
@pytest.mark.parametrize("code", EXAMPLES)
def test_python_example(
    code: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "example.py"
    script.write_text(code.replace("models/demo/", f"{ROOT}/models/demo/"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(EXAMPLE_PRINTS[request.node.callspec.id], printed), printed
