"""Ops for subgroups equal their twins with subgroups of 4, 16 and 64. Lavapipe has these if its vectors have
another width (LP_NATIVE_VECTOR_WIDTH)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from device_sets import device_infos

WIDTHS = 128, 512, 2048  # bits: 32 per lane
CASES = (
    r"MatLane\(type='(f16|f32)'.*rows=[19],",
    r"MatLane\(type='q4_0', n=33,",
    r"MatLaneId\(type='q4_0'",
    r"MatWave\(type='f16', n=34,",
)


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", WIDTHS)
def test_subgroups_of_other_sizes(width: int) -> None:
    device = next((i for i in device_infos() if "llvmpipe" in i.name), None)
    if device is None:
        pytest.skip("lavapipe is not present: run `bash tools/setup.sh --drivers`")
    command = [sys.executable, "-m", "vkbackend.tools.verify", "-dev", str(device.index), "--json"]
    env = os.environ | {"LP_NATIVE_VECTOR_WIDTH": str(width)}
    done = subprocess.run(
        [*command, "-c", "|".join(CASES)],
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=800,
    )
    report = json.loads(done.stdout)
    assert f"{width} bits" in report["devices"][0]["name"], report["devices"]
    assert not [row["failures"] for row in report["results"] if row["failures"]]
    ran = {row["shader"].partition(".")[0] for row in report["results"] if row["cases"]}
    assert ran == {"mat_lane", "mat_lane_id", "mat_wave"} and not done.returncode, ran
