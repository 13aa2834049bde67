"""Every command and the Python example of the README run and do what the text says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from device_sets import device_infos
from places import ROOT

BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for kind, text in BLOCKS
    if kind == "bash"
    for line in text.splitlines()
    if line.strip()
]
needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")


def run(command: str) -> subprocess.CompletedProcess[str]:
    """The command with the interpreter that runs the tests in place of .venv/bin."""
    bin_dir = Path(sys.executable).parent
    return subprocess.run(
        ["bash", "-c", command.replace(".venv/bin/", f"{bin_dir}/")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ,
    )


def test_the_readme_begins_with_the_two_setup_commands() -> None:
    assert COMMANDS[:2] == ["bash tools/demo.sh", "bash tools/test.sh"]  # tried by CI and by test_setup.py


@needs_device
@pytest.mark.parametrize("command", COMMANDS[2:])
def test_command(command: str) -> None:
    result = run(command)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 40


@needs_device
def test_one_and_two_devices_write_the_same_text() -> None:
    texts = {run(command).stdout for command in COMMANDS[2:] if "generate" in command}
    assert len(texts) == 1, texts


@needs_device
def test_python_examples(tmp_path: Path) -> None:
    outputs = []
    for i, code in enumerate(text for kind, text in BLOCKS if kind == "python"):
        script = tmp_path / f"example{i}.py"
        script.write_text(code.replace("models/demo/", f"{ROOT}/models/demo/"))
        result = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110
        )
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout)
    first, second = outputs
    assert "(5, " in first and "weights" in first
    assert re.search(r"\(1 of \d+ tokens computed\)", second)
