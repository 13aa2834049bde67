"""On Intel's and NVIDIA's drivers, test everything up to executing a step. Mesa's shims replace the kernel
drivers, so every step ends in Timeout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

import pytest
from oracles.fixtures import FIXTURES
from places import SUPPORT

from vkbackend.tools.measure import compilers

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1800)]
# Debian 12's validation layer, 1.3.239, does not know this feature.
UNKNOWN_TO_VALIDATION = "cooperative_matrix"
MODELS_OF_A_PROCESS = 4


@pytest.mark.parametrize("devices", ["0", "0,0"])
@pytest.mark.parametrize("gpu", ["DG2", "BMG", "AMPERE"])
def test_every_architecture_is_submitted(gpu: str, devices: str) -> None:
    if why := compilers.missing(compilers.GPUS[gpu]):
        pytest.skip(why)
    results: dict[str, str] = {}
    for begin in range(0, len(FIXTURES), MODELS_OF_A_PROCESS):
        results |= submitted(gpu, devices, FIXTURES[begin : begin + MODELS_OF_A_PROCESS])
    assert results == dict.fromkeys(FIXTURES, "Timeout")


def submitted(gpu: str, devices: str, models: Sequence[str]) -> dict[str, str]:
    command, env = compilers.start(compilers.GPUS[gpu], "up_to_execution", [devices, *models])
    env |= {"PYTHONPATH": str(SUPPORT), "DEBUG": "1", "VKBACKEND_VALIDATION": "1", "VKBACKEND_TIMEOUT": "1"}
    env["VKBACKEND_DISABLE"] = UNKNOWN_TO_VALIDATION
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [line for line in done.stderr.splitlines() if "validation:" in line]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["model"]: row["ended"] for row in rows}
