"""A step with more rows than the uniform block could hold produces the same logits as several smaller
steps."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse, wide
from material import DATA
from runners import load_runner

from vkbackend.buffer import Buffer, Home, View
from vkbackend.limits import Limits
from vkbackend.meta import graph
from vkbackend.meta.ops import matrix
from vkbackend.meta.ops.groups import tiles_in_parts
from vkbackend.meta.ops.matrix import n_parts
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.fit import ON_DEVICE, Budget
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.memory_report import allocations
from vkbackend.models.placement.step_rows import chosen_rows
from vkbackend.models.placement.traced_steps import (
    fitting_steps,
    most_rows,
    recordings_of,
    step_shape,
    token_recordings,
)
from vkbackend.ops import Groups, tile_count, tile_size
from vkbackend.recording import SLOW, SUBMISSION_S, Cut, Dispatch, Pace, cut_long, seconds_of
from vkbackend.step import MAX_ROWS, Run
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.simulated import LIMITS, Hollow
from vkbackend.twins.device import NullDevice
from vkbackend.twins.moe import moe_group

MODEL = DATA / "stories-narrow-F16.gguf"


DEVICES = [pytest.param(["0"], id="0"), *(wide(pytest.param(d.split(","), id=d)) for d in ("0,1", "0,0,1"))]


@pytest.mark.runtimes(wide=True)
@pytest.mark.parametrize("devices", DEVICES)
def test_one_large_step_equals_small_steps(devices: list[str]) -> None:
    large_equals_small(MODEL, devices)


@pytest.mark.parametrize("place", ["numpy", pytest.param("0", marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("name", "op", "weight"),
    [("narrow-F16", "mat_mul", "blk.0.ffn_up"), ("moe8x-Q4_0", "mat_mul_id", "blk.0.ffn_up_exps")],
)
def test_divided_products(
    models: Path, name: str, op: str, weight: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Software devices do not divide products, so lavapipe runs the portable ops of a GPU, which is slow."""
    monkeypatch.setenv("VKBACKEND_FLOOR", "1")
    monkeypatch.setattr(matrix, "LONG_ROWS", 48)
    path = models / f"stories-{name}.gguf"
    assert large_equals_small(path, [place], (50, 46), (96, 32), f"{weight}.weight") == [op, op]


def large_equals_small(
    path: Path,
    devices: list[str],
    sizes: tuple[int, int] = (400, 368),
    rows: tuple[int, int] = (768, 128),
    weight: str = "",
) -> list[str]:
    """Two sequences share the step. Attention adds keys in blocks of 32 in both cases, so only the
    matrix products may differ in rounding. Return the ops that multiply by `weight` in the large step."""
    n, m = sizes
    tokens = np.random.default_rng(7).integers(3, 500, n + m).tolist()
    last, ops = {}, []
    for n_ubatch in rows:
        options: dict[str, Any] = {"n_ctx": n + 20, "n_slots": 2, "n_ubatch": n_ubatch, "reduce_type": "f32"}
        with closing(load_runner(path, devices=devices, **options)) as runner:
            assert runner.n_ubatch == n_ubatch
            if n_ubatch > n:
                runs = [Run(1, 0, m, 0), Run(0, m, n, 0)]
                logits = [runner.step(tokens[n:] + tokens[:n], runs, [m - 1, n + m - 1]).copy()]
                [step] = [step for kind, step in runner.mesh.steps.by_kind.items() if kind.n_rows == n_ubatch]
                commands = step.executables[0].recording.commands
                ops = [c.op for c in commands if isinstance(c, Dispatch) and c.label == weight]
            else:
                logits = []
                for slot, begin, size in ((1, n, m), (0, 0, n)):
                    for at in range(0, size, n_ubatch):
                        part = tokens[begin + at : begin + min(at + n_ubatch, size)]
                        out = runner.step(part, [Run(slot, 0, len(part), at)], [len(part) - 1])
                    logits.append(out.copy())
            logits.append(runner.step([5, 6], [Run(1, 0, 1, m), Run(0, 1, 1, n)], [0, 1]).copy())
            last[n_ubatch] = np.concatenate(logits)
    large, small = (last[n_ubatch] for n_ubatch in rows)
    assert nmse(large, small) < 1e-10
    return ops


@pytest.mark.no_vulkan
@pytest.mark.parametrize("routed", ["evenly", "to one expert"])
def test_a_part_of_a_product_takes_no_longer_than_a_step_of_512_rows(routed: str) -> None:
    """A tile has at most 32 pairs, so a dispatch of a few tiles takes a bounded time for any routing."""
    n_used, n_experts = 4, 128
    of_512 = np.bincount(chosen_experts(routed, 512, n_used, n_experts), minlength=n_experts)
    for n_rows in (1024, 2048, 4096):
        ids = chosen_experts(routed, n_rows, n_used, n_experts)
        tile = tile_size(LIMITS, n_rows, n_used, n_experts)
        n_tiles = tile_count(ids.size, n_experts, tile)
        order, tiles = np.zeros(ids.size, np.uint32), np.zeros((n_tiles, 3), np.uint32)
        moe_group(ids, order, tiles, n_pairs=ids.size, n_experts=n_experts, tile=tile, n_tiles=n_tiles)
        view = View(Buffer(tiles.nbytes, Home.SCRATCH, "tiles"), 0, tiles.shape, "u32")
        parts = tiles_in_parts(Groups(view, view, tile), n_parts(Paced(LIMITS), 0, n_rows, 0))
        assert len(parts) == n_rows // 512
        at = [part.tiles.offset // 12 for part in parts] + [n_tiles]
        used = [np.count_nonzero(tiles[a:b, 2]) for a, b in pairwise(at)]
        assert sum(tiles[:, 2]) == ids.size
        assert max(used) <= sum(-(-of_512 // tile)) + n_experts // len(parts) + 1


def chosen_experts(routed: str, n_rows: int, n_used: int, n_experts: int) -> np.ndarray:
    rng = np.random.default_rng(n_rows)
    if routed == "evenly":
        return rng.permuted(np.tile(np.arange(n_experts), (n_rows, 1)), axis=1)[:, :n_used].reshape(-1)
    return np.tile(np.arange(n_used), n_rows)


@pytest.mark.no_vulkan
def test_a_token_has_the_same_dispatches_for_every_largest_step() -> None:
    model, types, devices, options = mixture(n_ctx=4096, override_tensor=["exps=CPU"])
    layout, limits = lay_out(model, types, 1, options), [devices[0].limits]
    forms = []
    for n in (512, MAX_ROWS):
        shape = step_shape(model, layout, options, n)
        [recording] = token_recordings(model, layout, options, limits, shape)
        forms.append(
            [
                (c.op, c.variant, c.push, c.consts, c.groups, [(v.shape, v.dtype) for v in c.args])
                for c in recording.commands
                if isinstance(c, Dispatch)
            ]
        )
    assert forms[0] == forms[1] and len(forms[0]) > 30


@pytest.mark.no_vulkan
def test_software_devices_do_not_divide_products() -> None:
    """Software devices have no watchdog, and a divided gate and up would not be fused."""
    cpu = Paced(replace(LIMITS, is_cpu=True))
    assert n_parts(cpu, 0, MAX_ROWS, 1 << 50) == 1 < n_parts(Paced(LIMITS), 0, MAX_ROWS, 0)


@pytest.mark.no_vulkan
@pytest.mark.parametrize("n_rows", [512, 2048])
@pytest.mark.parametrize("speed", [SLOW, Pace(100e9, 10e9)], ids=["unknown", "400 GB/s"])
def test_no_dispatch_of_a_large_layer_takes_longer_than_a_submission(
    n_rows: int, speed: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a layer of 70B, up and gate together take 0.48 TFLOP for 512 rows, and 1.9 TFLOP for 2,048 rows."""
    monkeypatch.setattr(graph, "pace_of", lambda device: speed)
    options = Options.of("llama-70b", devices=["0"], tensor_split=[1], n_ctx=4096, n_ubatch=n_rows)
    gguf = Hollow("llama-70b:q4_k")
    model, types = load_model(gguf), {key: info.type for key, info in gguf.tensors.items()}
    types.setdefault("output.weight", "f16")
    layout = lay_out(model, types, 1, options)
    shape = step_shape(model, layout, options, n_rows)
    assert shape.n_rows == n_rows
    kind = StepKind.of_run(n_rows, 1)
    [recording] = recordings_of(kind, model, layout, options, [LIMITS], shape)
    cut = cut_long(recording, speed)
    products = [c for c in cut.commands if isinstance(c, Dispatch) and c.op.startswith("mat_")]
    assert sum(c.flops for c in products) > 2 * n_rows * 3 * 8192 * 28672
    spent = 0.0
    for command in cut.commands:
        spent = 0.0 if isinstance(command, Cut) else spent + seconds_of(command, speed)
        assert spent <= SUBMISSION_S, command


class Paced:
    """A graph of one device of unknown speed."""

    def __init__(self, limits: Limits) -> None:
        self.devices = [NullDevice("null", limits)]

    def pace(self, d: int) -> Pace:
        return SLOW


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
    shape = synthetic._mixture(8, 2, 64, **synthetic._dense(3, 256, 8, 4, 32, 768))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic.SHAPES, "mixture", ("qwen3moe", 4096, False, shape))
        gguf = Hollow("mixture:f16")
    types = {key: info.type for key, info in gguf.tensors.items()}
    types.setdefault("output.weight", "f16")
    wanted = Options.of("mixture", devices=["0"], tensor_split=[1], **options)
    return load_model(gguf), types, [NullDevice("null", LIMITS)], wanted
