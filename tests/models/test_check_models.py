"""The oracle script of the test material holds on every device set: greedy tokens, logits, tokenization."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from device_sets import DEVICE_SETS, for_every_runtime
from places import ROOT


@pytest.mark.parametrize("devices", [for_every_runtime(p) if p.id == "0,0" else p for p in DEVICE_SETS])
def test_check_models(shared: Path, devices: list[str]) -> None:
    result = subprocess.run(
        [
            sys.executable,
            str(shared / "oracles" / "check_models.py"),
            str(shared / "models"),
            "--devices",
            ",".join(devices),
            "--only",
            "^stories260K-(F32|F16|Q8_0|Q4_0)$",
            "--nmse",
            "1e-5",
            "--nmse-quant",
            "5e-4",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0 and "4 of 4 hold" in result.stdout, result.stdout + result.stderr
