"""After a context shift, caches hold the keys of the new positions.

A key of the first layer depends only on its token and position, so it must equal the key of the shifted
tokens. Keys of later layers must equal the old keys after float64 code rotates them to the new positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, QUICKEST, covering, nmse, wide
from oracles.fixture import N_VOCAB, write
from oracles.fixtures import FIXTURES, build
from prefills import opened, prefill

from vkbackend import LLM, twins
from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.formats import dequantize
from vkbackend.meta.gather import gather_rows, scatter_rows
from vkbackend.meta.ops.dense_attention import is_rotated
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement.cache_plan import CachePlan

TOKENS = np.random.default_rng(11).integers(0, N_VOCAB, 60).tolist()
KEEP, DISCARD = 5, 21
END = len(TOKENS) - DISCARD
# n_ubatch is at least the context, so every window's cache holds the complete context.
OPTIONS: dict[str, Any] = {"n_ctx": 64, "n_ubatch": 64, "n_slots": 2, "context_shift": True}
# Bounds on the NMSE of keys after one more rotation and rounding. The relative rounding error is 2^-12 for
# f16 and 2^-9 for bf16. Relative to a block's maximum it is about 1 / 254 for q8_0 and 1 / 16 for q4_0.
TOLERANCE = {"f32": 1e-12, "f16": 1e-7, "bf16": 1e-5, "q8_0": 1e-4, "q5_0": 5e-3, "q5_1": 5e-3}
TOLERANCE |= dict.fromkeys(("q4_0", "q4_1", "iq4_nl"), 2e-2)
QUICK = (
    "llama",
    "llama+longrope",
    "llama4",
    "gemma4+shared",
    "mistral3",
    "phi3",
    "smollm3",
    "stablelm",
    "olmo2",
)
# name -> part of the error message
REFUSED = {
    "gpt2": "position embeddings",
    "starcoder": "position embeddings",
    "hunyuan-dense": "after RoPE",
    "hunyuan-moe": "after RoPE",
    "hunyuan_vl": "after RoPE",
    "maincoder": "after RoPE",
    "deepseek2": "MLA",
    "deepseek2+heads": "MLA",
    "deepseek2+softmax": "MLA",
    "minicpm3": "MLA",
    "deepseek32": "indexer",
    "glm-dsa": "indexer",
    "glm-dsa+shared": "indexer",
    "minimax-m3": "indexer",
    "minimax-m3+all": "indexer",
    "glm5-next": "recurrent",
    "deepseek4": "indexer",
    "deepseek4+short": "indexer",
    "hy_v4": "indexer",
    "mistral4": "MLA",
    "qwen2vl": "M-RoPE",
    "qwen3vl": "M-RoPE",
    "qwen3vlmoe": "M-RoPE",
    **dict.fromkeys(
        (
            "bailingmoe3", "bailingmoe3+limits", "bailingmoe3+sections", "falcon-h1", "granitehybrid",
            "granitehybrid+dense", "jamba", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "mamba",
            "mamba+norms", "mamba2", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next",
            "qwen4exp", "rwkv7",
        ),
        "recurrent",
    ),
}  # fmt: skip
SHIFTED = [name for name in FIXTURES if name not in REFUSED]


def quick(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moved")


def model(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else write(build(name), path)


def held(runner: Runner, plan: CachePlan, slot: int, n: int) -> list[np.ndarray]:
    """Return K [n, heads, head_dim] and V of the slot's first positions, without the rotation of quantized
    caches."""
    at = runner.kv.tables[plan.ring].at(slot, np.arange(n))
    arrays, cache = [], runner.kv.own[plan.layer]
    for array in (cache.k, cache.v):
        raw = gather_rows(runner.mesh.devices, array, 0, plan.n_cells)[at]
        values = dequantize(raw.reshape(-1), array.dtype, (n, array.shape[1]))
        heads = values.reshape(n * plan.spec.n_head_kv, -1).astype(np.float64)
        if is_rotated(array):
            width = heads.shape[1]
            twins.attention.hadamard(heads.copy(), heads, head=width, head_out=width, n_heads=len(heads))
        arrays.append(heads.reshape(n, plan.spec.n_head_kv, -1)[..., : plan.spec.head_dim_k])
    return arrays


def rotated(runner: Runner, plan: CachePlan, keys: np.ndarray) -> np.ndarray:
    """Rotate keys to positions that are DISCARD lower, by complex numbers in float64."""
    rotation = runner.model.key_rotation(plan.layer)
    if rotation is None:
        return keys
    table = runner.model.ropes(runner.n_ctx)[rotation.table]
    turn = np.exp(-1j * DISCARD * table.frequencies)
    n_rot, out = table.n_rot, keys.copy()
    half = slice(0, n_rot // 2), slice(n_rot // 2, n_rot)
    first, second = half if rotation.half_split else (slice(0, n_rot, 2), slice(1, n_rot, 2))
    moved = (keys[..., first] + 1j * keys[..., second]) * turn
    out[..., first], out[..., second] = moved.real, moved.imag
    return out


def check(path: Path, devices: list[str], **options: Any) -> None:
    with opened(path, devices, **OPTIONS | options) as runner:
        kind, tokens = runner.options.type_k, [7 * token % runner.n_vocab for token in TOKENS]
        prefill(runner, tokens)
        before = {plan.layer: held(runner, plan, 0, len(TOKENS)) for plan in runner.kv.plans}
        runner.shift(0, KEEP + DISCARD, len(TOKENS), DISCARD)
        prefill(runner, tokens[:KEEP] + tokens[KEEP + DISCARD :], slot=1)
        for plan in runner.kv.plans:
            (k, v), (old_k, old_v) = held(runner, plan, 0, END), before[plan.layer]
            np.testing.assert_array_equal(k[:KEEP], old_k[:KEEP])
            np.testing.assert_array_equal(v, np.concatenate([old_v[:KEEP], old_v[KEEP + DISCARD :]]))
            want = rotated(runner, plan, old_k[KEEP + DISCARD :])
            assert nmse(k[KEEP:], want) < TOLERANCE[kind], plan.layer
            if plan.layer == 0:
                fresh = held(runner, plan, 1, END)
                assert nmse(k, fresh[0]) < TOLERANCE[kind] * 2 + 1e-10
                np.testing.assert_allclose(v, fresh[1], rtol=1e-5, atol=1e-5)
                if runner.model.key_rotation(0):  # without the rotation, keys would differ
                    assert nmse(old_k[KEEP + DISCARD :], fresh[0][KEEP:]) > 0.01


@pytest.mark.parametrize("name", quick(SHIFTED))
def test_architectures(folder: Path, name: str) -> None:
    check(model(folder, name), ["numpy"])


@pytest.mark.parametrize("devices", [p if p.id == "0,0" else wide(p) for p in DEVICE_SETS])
def test_devices(folder: Path, devices: list[str]) -> None:
    check(model(folder, "gemma4+shared"), devices)
    check(model(folder, "stablelm"), devices, n_gpu_layers=1)


ONE_OR_TWO = [pytest.param(names, id=",".join(names)) for names in (["numpy"], QUICKEST * 2)]


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        p if p.values[0] in ("f16", "q8_0", "q4_0") else wide(p)
        for p in covering(list(TOLERANCE)[1:], ONE_OR_TWO)
    ],
)
def test_cache_types(models: Path, devices: list[str], kind: str) -> None:
    check(models / "stories-wide-F16.gguf", devices, type_k=kind, type_v=kind)


def test_several_steps_and_a_short_distance(folder: Path) -> None:
    """Steps of 8 rows move 50 positions by 3. A step overwrites positions that the step has read."""
    with opened(model(folder, "llama"), ["numpy"], **OPTIONS | {"n_ubatch": 8}) as runner:
        [first, *_] = runner.kv.plans
        for at in range(0, 56, 8):
            prefill(runner, TOKENS[at : at + 8], first=at)
        old_k, old_v = held(runner, first, 0, 56)
        for _ in range(2):
            runner.shift(0, 6, 56, 3)
        k, v = held(runner, first, 0, 50)
        np.testing.assert_array_equal(v, np.concatenate([old_v[:3], old_v[9:]]))
        np.testing.assert_array_equal(k[:3], old_k[:3])


def test_logits_equal_those_of_a_cache_that_was_rotated_on_the_host(folder: Path) -> None:
    with opened(model(folder, "llama+longrope"), ["numpy"] * 2, **OPTIONS) as runner:
        for slot in (0, 1):
            prefill(runner, TOKENS, slot)
        for plan in runner.kv.plans:
            k, v = held(runner, plan, 1, len(TOKENS))
            k = np.concatenate([k[:KEEP], rotated(runner, plan, k[KEEP + DISCARD :])])
            v = np.concatenate([v[:KEEP], v[KEEP + DISCARD :]])
            cache, at = runner.kv.own[plan.layer], runner.kv.tables[plan.ring].at(1, np.arange(END))
            for array, values in ((cache.k, k), (cache.v, v)):
                rows = values.reshape(END, -1).astype(np.float32).view(np.uint8)
                scatter_rows(runner.mesh.devices, array, int(at[0]), rows)
        runner.shift(0, KEEP + DISCARD, len(TOKENS), DISCARD)
        more = TOKENS[:3]
        moved, want = (prefill(runner, more, slot, END) for slot in (0, 1))
        assert nmse(moved, want) < 1e-11


def test_a_shift_allocates_and_records_nothing(folder: Path) -> None:
    with opened(model(folder, "llama"), QUICKEST * 2, **OPTIONS) as runner:
        prefill(runner, TOKENS)
        runner.shift(0, 40, 60, 5)
        devices, steps = runner.mesh.devices, runner.mesh.steps
        before = [(d.created, dict(d.counts), dict(d.nbytes), len(steps.by_kind)) for d in devices]
        runner.shift(0, 30, 55, 7)
        assert [(d.created, dict(d.counts), dict(d.nbytes), len(steps.by_kind)) for d in devices] == before


@pytest.mark.parametrize("name", quick(REFUSED))
def test_refusals(folder: Path, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"--context-shift.*{REFUSED[name]}"):
        LLM(model(folder, name), devices=["numpy"], n_ctx=64, context_shift=True)


def test_windows_and_short_contexts_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="sliding window"):
        LLM(model(folder, "gemma3"), devices=["numpy"], n_ctx=256, n_ubatch=8, context_shift=True)
    with pytest.raises(InvalidArgument, match="at least 8 tokens"):
        LLM(model(folder, "llama"), devices=["numpy"], n_ctx=7, context_shift=True)


@pytest.mark.parametrize("devices", [["numpy"], QUICKEST * 2], ids=str)
@pytest.mark.wide
def test_the_demo_model_writes_three_contexts(devices: list[str]) -> None:
    from vkbackend.tools.flags.text import demo_model

    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    with LLM(demo_model(), devices=devices, n_ctx=64, context_shift=True, n_keep=-1) as llm:
        chunks = list(llm.stream("Once upon a time", 192, **options))
        done = llm.generate("Once upon a time", 192, **options)
        assert [c.token for c in chunks] == done.tokens and len(done.tokens) == 192
        assert done.truncated and chunks[-1].truncated and done.finish_reason == "length"
        assert (done.timings["decode_n"], llm.generate("Once", 5).truncated) == (191, False)
        stopped = llm.generate("Once upon a time", 192, stop=done.text[300:310], **options)
        assert stopped.text == done.text[: done.text.index(done.text[300:310])]
        llm.generate("Once upon a time", 192, n=2, n_discard=10, **options)
