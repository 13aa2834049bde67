"""A step of more rows than the uniform block could hold gives the logits of several smaller steps."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from device_sets import nmse, wide
from material import DATA
from runners import load_runner

from vkbackend.models.architectures.registry import load_model
from vkbackend.models.options import Options
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.traced_steps import SURE_ROWS, fitting_steps, most_rows
from vkbackend.step import MAX_ROWS, Run
from vkbackend.tools.measure.simulated import LIMITS, Hollow

MODEL = DATA / "stories-narrow-F16.gguf"
N = 1100


DEVICES = [pytest.param(["0"], id="0"), *(wide(pytest.param(d.split(","), id=d)) for d in ("0,1", "0,0,1"))]


@pytest.mark.parametrize("devices", DEVICES)
def test_one_large_step_equals_small_steps(devices: list[str]) -> None:
    """Two sequences share the step. Attention adds keys in blocks of 32 in both cases, so only the
    matrix products may differ in rounding."""
    tokens = np.random.default_rng(7).integers(3, 500, 2 * N).tolist()
    last = {}
    for n_ubatch in (2048, 256):
        options: dict[str, Any] = {"n_ctx": N + 20, "n_slots": 2, "n_ubatch": n_ubatch, "reduce_type": "f32"}
        with closing(load_runner(MODEL, devices=devices, **options)) as runner:
            assert runner.n_ubatch == n_ubatch
            if n_ubatch > N:
                runs = [Run(1, 0, 948, 0), Run(0, 948, N, 0)]
                logits = [runner.step(tokens[N : N + 948] + tokens[:N], runs, [947, 2047]).copy()]
                assert max(kind.n_rows for kind in runner.mesh.steps.by_kind) == 2048
            else:
                logits = []
                for slot, begin, n in ((1, N, 948), (0, 0, N)):
                    for at in range(0, n, n_ubatch):
                        rows = tokens[begin + at : begin + min(at + n_ubatch, n)]
                        out = runner.step(rows, [Run(slot, 0, len(rows), at)], [len(rows) - 1])
                    logits.append(out.copy())
            logits.append(runner.step([5, 6], [Run(1, 0, 1, 948), Run(0, 1, 1, N)], [0, 1]).copy())
            last[n_ubatch] = np.concatenate(logits)
    assert nmse(last[2048], last[256]) < 1e-10


@pytest.mark.no_vulkan
def test_a_step_binds_no_more_than_the_device_can() -> None:
    options = Options.of("llama-8b", devices=["0"], n_ctx=8192, n_ubatch=MAX_ROWS)
    gguf = Hollow("llama-8b:f16")
    model, types = load_model(gguf), {key: info.type for key, info in gguf.tensors.items()}
    types.setdefault("output.weight", "f16")
    layout = lay_out(model, types, 1, options)
    largest = {}
    for limit in (1 << 27, 1 << 32):
        limits = [replace(LIMITS, max_storage_range=limit)]
        shape, sizes = fitting_steps(model, layout, options, limits, MAX_ROWS)
        assert sizes.largest[0] <= limit
        largest[limit] = shape.n_rows
    assert largest[1 << 32] == MAX_ROWS > largest[1 << 27] >= SURE_ROWS


@pytest.mark.no_vulkan
def test_pairs_of_rows_and_experts_fit_the_grid() -> None:
    model = load_model(Hollow("qwen3-30b-a3b:f16"))
    assert most_rows(model) == MAX_ROWS
    model.n_used = 32
    assert most_rows(model) * 32 <= 65_535 < 2 * most_rows(model) * 32
