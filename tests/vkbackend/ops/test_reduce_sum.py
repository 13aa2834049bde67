"""A test shader calls `reduce_sum` (shaders/lib/reduce.glsl) repeatedly, which no op does yet."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import some

from vkbackend import shaderlib
from vkbackend.buffer import Home, View
from vkbackend.ops.table import OPS
from vkbackend.recording import Dispatch, Recording
from vkbackend.vulkan import program

pytestmark = pytest.mark.native
N_SUMS = 5
SOURCE = f"""#version 450
#extension GL_GOOGLE_include_directive : require
#include "lib/types.glsl"
#include "lib/reduce.glsl"
layout(push_constant) uniform Push {{ uint x_off, y_off; }};
layout(set = 0, binding = 0) readonly buffer X {{ float x[]; }};
layout(set = 0, binding = 1) writeonly buffer Y {{ float y[]; }};
void main() {{
    const uint i = gl_LocalInvocationID.x;
    for (uint n = 0; n < {N_SUMS}; ++n) y[y_off + LOCAL * n + i] = reduce_sum(x[x_off + LOCAL * n + i]);
}}
"""


@pytest.mark.parametrize("local", some([32, 1, 128], 3))
def test_sums_one_after_another(
    device: Any, local: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some invocations start the next sum while other invocations still read the previous sum."""
    compiler = next(iter(shaderlib.compilers()), None)
    if compiler is None:
        pytest.skip(f"no {shaderlib.COMPILER} is here")
    source, out = tmp_path / "sums.comp", tmp_path / "sums.spv"
    source.write_text(SOURCE, encoding="utf-8")
    command = [*compiler.command, "-V", "--target-env", shaderlib.TARGET, f"-I{shaderlib.shaders_dir()}"]
    subprocess.run([*command, "-o", str(out), str(source)], check=True, capture_output=True)
    code = out.read_bytes()
    monkeypatch.setitem(shaderlib.manifest(), "sums", {"f32": {}})
    monkeypatch.setitem(OPS, "sums", OPS["scale"])
    monkeypatch.setattr(program.shaderlib, "spirv", lambda op, variant: code)

    shape = N_SUMS, local
    x, y = (View(device.buffer(4 * N_SUMS * local, Home.SCRATCH, name), 0, shape) for name in "xy")
    values = np.random.default_rng(local).integers(-1000, 1000, shape).astype(np.float32)
    device.write(x, values)
    recording = Recording("sums")
    recording.dispatch(Dispatch("sums", "f32", (x, y), (1,), (), (("LOCAL", local),), (1, 1, 1)))
    device.run(recording)
    got = device.read(y)[: 4 * N_SUMS * local].view(np.float32).reshape(shape)
    for view in (x, y):
        device.free(view.buffer)
    assert np.array_equal(got, np.broadcast_to(values.sum(axis=1, keepdims=True), shape))
