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

from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.fit import ON_DEVICE, Budget
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.memory_report import allocations
from vkbackend.models.placement.step_rows import chosen_rows
from vkbackend.models.placement.traced_steps import fitting_steps, most_rows
from vkbackend.step import MAX_ROWS, Run
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.simulated import LIMITS, Hollow
from vkbackend.twins.device import NullDevice

MODEL = DATA / "stories-narrow-F16.gguf"
N, M = 400, 368


DEVICES = [pytest.param(["0"], id="0"), *(wide(pytest.param(d.split(","), id=d)) for d in ("0,1", "0,0,1"))]


@pytest.mark.runtimes
@pytest.mark.parametrize("devices", DEVICES)
def test_one_large_step_equals_small_steps(devices: list[str]) -> None:
    """Two sequences share the step. Attention adds keys in blocks of 32 in both cases, so only the
    matrix products may differ in rounding."""
    tokens = np.random.default_rng(7).integers(3, 500, N + M).tolist()
    last = {}
    for n_ubatch in (768, 128):
        options: dict[str, Any] = {"n_ctx": N + 20, "n_slots": 2, "n_ubatch": n_ubatch, "reduce_type": "f32"}
        with closing(load_runner(MODEL, devices=devices, **options)) as runner:
            assert runner.n_ubatch == n_ubatch
            if n_ubatch > N:
                runs = [Run(1, 0, M, 0), Run(0, M, N, 0)]
                logits = [runner.step(tokens[N:] + tokens[:N], runs, [M - 1, N + M - 1]).copy()]
                assert max(kind.n_rows for kind in runner.mesh.steps.by_kind) == 768
            else:
                logits = []
                for slot, begin, n in ((1, N, M), (0, 0, N)):
                    for at in range(0, n, n_ubatch):
                        rows = tokens[begin + at : begin + min(at + n_ubatch, n)]
                        out = runner.step(rows, [Run(slot, 0, len(rows), at)], [len(rows) - 1])
                    logits.append(out.copy())
            logits.append(runner.step([5, 6], [Run(1, 0, 1, M), Run(0, 1, 1, N)], [0, 1]).copy())
            last[n_ubatch] = np.concatenate(logits)
    assert nmse(last[768], last[128]) < 1e-10


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
    assert largest[1 << 32] == MAX_ROWS > largest[1 << 27] >= DEFAULT_ROWS


@pytest.mark.no_vulkan
def test_pairs_of_rows_and_experts_fit_the_grid() -> None:
    model = load_model(Hollow("qwen3-30b-a3b:f16"))
    assert most_rows(model) == MAX_ROWS
    model.n_used = 32
    assert most_rows(model) * 32 <= 65_535 < 2 * most_rows(model) * 32


@pytest.mark.no_vulkan
@pytest.mark.parametrize(
    ("placed", "n_ctx", "rows"),
    [
        ({}, 4096, DEFAULT_ROWS),
        ({"override_tensor": ["exps=CPU"]}, 4096, 2048),
        ({"override_tensor": ["exps=CPU"]}, 1024, 1024),
        ({"override_tensor": ["exps=CPU"]}, 256, DEFAULT_ROWS),
        ({"override_tensor": ["token_embd=CPU"]}, 4096, DEFAULT_ROWS),
        ({"n_gpu_layers": 1}, 4096, 2048),
        ({"n_gpu_layers": "auto"}, 4096, DEFAULT_ROWS),
    ],
)
def test_rows_are_chosen_by_the_weights_memory(placed: dict[str, Any], n_ctx: int, rows: int) -> None:
    model, types, devices, options = mixture(n_ctx=n_ctx, **placed)
    assert chosen_rows(model, types, devices, options, []) == rows


@pytest.mark.parametrize(("given", "rows"), [({}, 1024), ({"n_ubatch": 300}, 300)])
def test_a_runner_has_the_chosen_rows(given: dict[str, Any], rows: int) -> None:
    placed: dict[str, Any] = {"override_tensor": ["ffn=CPU"], "n_ctx": 1024} | given
    with closing(load_runner(MODEL, devices=["0"], **placed)) as runner:
        assert runner.n_ubatch == runner.options.n_ubatch == rows


@pytest.mark.no_vulkan
def test_rows_are_fewer_where_memory_is_short() -> None:
    model, types, devices, options = mixture(n_ctx=4096, override_tensor=["exps=CPU"])
    held = {}
    for n in (512, 1024, 2048):
        layout = lay_out(model, types, 1, options)
        _, steps = fitting_steps(model, layout, options, [devices[0].limits], n)
        [held[n]] = (sum(size.homes[h] for h in ON_DEVICE) for size in allocations(layout, devices, steps))
    assert held[512] < held[1024] < held[2048]
    for room, rows in ((held[2048], 2048), (held[2048] - 1, 1024), (held[1024] - 1, 512), (1, 512)):
        budgets = [Budget("card", room, (0,))]
        assert chosen_rows(model, types, devices, options, budgets) == rows


def mixture(**options: Any) -> tuple[Model, dict[str, str], list[NullDevice], Options]:
    """Return a mixture of three layers."""
    shape = synthetic._mixture(8, 2, 64, **synthetic._dense(3, 256, 8, 4, 32, 768))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic.SHAPES, "mixture", ("qwen3moe", 4096, False, shape))
        gguf = Hollow("mixture:f16")
    types = {key: info.type for key, info in gguf.tensors.items()}
    types.setdefault("output.weight", "f16")
    wanted = Options.of("mixture", devices=["0"], tensor_split=[1], **options)
    return load_model(gguf), types, [NullDevice("null", LIMITS)], wanted
