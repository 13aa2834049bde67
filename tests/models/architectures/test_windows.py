"""Layers with windows store K and V in rings of cells, and some layers share caches. The logits equal the
logits of float64 numpy with a complete mask."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, nmse, wide
from llama_float64 import forward
from prefills import opened
from safetensors.numpy import load_file
from scheduling import finish
from tiny_models import Tiny, write_tiny

from vkbackend.errors import InvalidArgument, StateError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.policy import Attention, FeedForward, Layer
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.decoder import linear
from vkbackend.models.architectures.llama import Model as Llama
from vkbackend.models.architectures.memory_specs import KVSpec, LayerCache
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner import loading, saved_state
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement.cache_plan import blocks_of_owners
from vkbackend.models.placement.layout import largest_cache, sizes
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.recording import Dispatch
from vkbackend.step import Run

WINDOW, UBATCH = 20, 16  # 20 + 16 - 1 = 35 cells need a ring of two blocks
WINDOWS = (WINDOW, 0, WINDOW, WINDOW)
OWNERS = (0, 1, 2, 0)
TINY = Tiny("llama")
N = 150
TOKENS = np.random.default_rng(11).integers(0, TINY.n_vocab, N).tolist()


class Windowed(Llama):
    def kv(self, il: int) -> KVSpec:
        owner = None if OWNERS[il] == il else OWNERS[il]
        return replace(super().kv(il), window=WINDOWS[il], owner=owner)

    def attention(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        if not cache.shared:
            return super().attention(x, w, cache, il)
        c = self.config.layers[il]
        shape = {
            "heads": c.n_head,
            "kv_heads": c.n_head_kv,
            "head_dim_k": c.head_dim,
            "head_dim_v": c.head_dim,
        }
        q = self.rotate(linear(x, w, "attn_q"), w, "attn_q", il)
        a = ops.attention(q, cache.k, cache.v, cache.cells, scale=c.scale, window=cache.window, **shape)
        return linear(a, w, "attn_output")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("windows") / "tiny.gguf", TINY)


@pytest.fixture(scope="module")
def want(path: Path) -> np.ndarray:
    return forward(path, TOKENS, windows=WINDOWS, owners=OWNERS)


@pytest.fixture(autouse=True)
def windowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_model", lambda gguf, *_: Windowed(gguf))


def windowed_runner(path: Path, devices: list[str], **options: Any) -> AbstractContextManager[Runner]:
    return opened(path, devices, **{"n_ctx": N, "n_ubatch": UBATCH, "n_slots": 2} | options)


def feed(runner: Runner, first: int, last: int, slot: int = 0, tokens: list[int] = TOKENS) -> np.ndarray:
    rows = []
    for at in range(first, last, runner.n_ubatch):
        n = min(runner.n_ubatch, last - at)
        rows.append(runner.step(tokens[at : at + n], [Run(slot, 0, n, at)], range(n)).copy())
    return np.concatenate(rows)


SETS = [
    wide(pytest.param(["numpy"], 1e-9, id="numpy")),
    wide(pytest.param(["numpy"] * 3, 1e-9, id="3 x numpy")),
    *(pytest.param(*p.values, 1e-6, id=p.id, marks=p.marks) for p in DEVICE_SETS if p.id == "0,0"),
    *(wide(pytest.param(*p.values, 1e-6, id=p.id, marks=p.marks)) for p in DEVICE_SETS if p.id == "0,1"),
]


@pytest.mark.parametrize(("devices", "bound"), SETS)
def test_rings_equal_a_full_mask(path: Path, want: np.ndarray, devices: list[str], bound: float) -> None:
    other = TOKENS[::-1]
    other_want = forward(path, other[:90], windows=WINDOWS, owners=OWNERS)
    with windowed_runner(path, devices) as runner:
        assert {t.capacity for t in runner.kv.tables.values()} == {64, 160}
        parts, others = [feed(runner, 0, 83)], [feed(runner, 0, 70, slot=1, tokens=other)]
        for i in range(10):
            a, b = 83 + 2 * i, 70 + i
            runs = [Run(1, 0, 1, b), Run(0, 1, 2, a)]
            logits = runner.step([other[b], *TOKENS[a : a + 2]], runs, range(3))
            others.append(logits[:1].copy())
            parts.append(logits[1:].copy())
        parts += [feed(runner, at, at + 1) for at in range(103, 128)]
        others.append(feed(runner, 80, 90, slot=1, tokens=other))
        parts.append(feed(runner, 128, N))
    assert nmse(np.concatenate(parts), want) <= bound
    assert nmse(np.concatenate(others), other_want) <= bound


@pytest.mark.parametrize("options", [{"split_mode": "layer"}, {"tensor_split": [1, 3]}, {"n_gpu_layers": 2}])
def test_a_shared_cache_under_every_split(path: Path, want: np.ndarray, options: dict[str, Any]) -> None:
    with windowed_runner(path, ["numpy"] * 2, **options) as runner:
        plans = runner.layout.plans
        assert plans[3].ranges["heads"] == plans[0].ranges["heads"]
        assert nmse(feed(runner, 0, 60), want[:60]) <= 1e-9


def test_sizes_of_rings_and_shared_caches(path: Path) -> None:
    with windowed_runner(path, ["numpy"] * 2) as runner:
        cell = 2 * 2 * 16 * 4  # K and V have two heads of 16 floats.
        # Each slot has cells for two layers with windows and one layer without a window. The layer that
        # shares a cache has no cells.
        cells = 2 * (96 + 160 + 96)
        assert sum(s["kv"] for s in sizes(runner.layout)) == cell * cells
        tables = 2 * 2 * 2 * 4 * 160 // 32
        held = sum(b["kv"] for b in runner.memory())
        assert cell * cells + tables <= held <= cell * cells + tables + 2 * 8 * 256  # each array is padded
        assert largest_cache(runner.layout, 0) == 2 * 160 * 16 * 4


def test_a_window_of_the_context_needs_no_ring(path: Path) -> None:
    with windowed_runner(path, ["numpy"], n_ctx=30) as runner:
        assert [t.capacity for t in runner.kv.tables.values()] == [32]
        assert runner.resumable(30) == 0


def test_splits_of_many_keys_are_joined(path: Path, want: np.ndarray) -> None:
    with windowed_runner(path, ["numpy"], n_ctx=256) as runner:
        feed(runner, 0, 144)
        got = np.concatenate([feed(runner, at, at + 1) for at in range(144, N)])
        commands = runner.mesh.recorded_step(StepKind.of_run(1, 1)).executables[0].recording.accesses()
        joined = [c.label for c in commands if isinstance(c, Dispatch) and c.op == "attn_combine"]
    assert joined == ["blk.1.attention"]
    assert nmse(got, want[144:]) <= 1e-9


# ---- prefixes ----


def generate(engine: Engine, tokens: list[int], slot: int, n: int) -> tuple[list[int], int]:
    events = finish(engine, [Generate(1, tuple(tokens), n, SamplingParams(temperature=0), slot=slot)])[1]
    assert events[-1].timings is not None
    return [e.token for e in events if e.token is not None], events[-1].timings.prompt_n


def test_a_prefix_is_reused_if_its_windows_are_stored(path: Path) -> None:
    """A window of 20 tokens has a ring of two blocks of 32 cells, which after 108 positions holds positions
    64 to 107. So a request can continue in this slot from position 83 or later."""
    with windowed_runner(path, ["numpy"], n_slots=1, prefix_cache=False) as runner:
        whole = Engine(runner)
        prompts = {common: [*TOKENS[:common], 5, 6, 7] for common in (62, 70, 90)}
        want = {common: generate(whole, prompt, 0, 6)[0] for common, prompt in prompts.items()}
    with windowed_runner(path, ["numpy"]) as runner:
        engine = Engine(runner)
        _, ran = generate(engine, TOKENS[:100], 0, 9)
        assert ran == 100 and engine.cache.resumable(0) == 83
        for common, reused in ((90, 90), (70, 64), (62, 32)):
            generate(engine, TOKENS[:100], 0, 9)
            got, ran = generate(engine, prompts[common], 0, 6)
            assert ran == len(prompts[common]) - reused
            assert got == want[common]


# ---- states ----


def test_a_saved_ring_continues_on_other_devices(path: Path, want: np.ndarray, tmp_path: Path) -> None:
    with windowed_runner(path, ["numpy"] * 2) as runner:
        feed(runner, 0, 100)
        content = SlotContent(TOKENS[:100], 100, runner.resumable(100))
        with pytest.raises(InvalidArgument, match=r"sliding window.*at least 55"):
            saved_state.save(runner, tmp_path / "a", 0, content, 0, 54)
        saved_state.save(runner, tmp_path / "a", 0, content, 0, None)
    stored = load_file(tmp_path / "a")
    assert "cache_k_l3" not in stored and stored["cache_k_l1"].shape == (100, 2, 16)
    assert stored["cache_k_l0"].shape == (64, 2, 16)
    for ubatch in (4, 64):
        with windowed_runner(path, ["numpy"] * 3, n_ubatch=ubatch) as runner:
            loaded = SlotContent()
            saved_state.load(runner, tmp_path / "a", 1, loaded)
            assert loaded.resumable == {4: 100 - 32 + 19, 64: 55}[ubatch]
            assert nmse(feed(runner, 100, N, slot=1), want[100:]) <= 1e-9


def test_a_saved_state_in_parts(path: Path, want: np.ndarray, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with windowed_runner(path, ["numpy"]) as runner:
        feed(runner, 0, 110)
        saved_state.save(runner, first, 0, SlotContent(TOKENS[:80], 80, runner.resumable(80)), 0, None)
    with windowed_runner(path, ["numpy"]) as runner:
        feed(runner, 0, 110)
        saved_state.save(runner, second, 0, SlotContent(TOKENS[:110], 110, runner.resumable(110)), 80, 85)
    with windowed_runner(path, ["numpy"]) as runner:
        content = SlotContent()
        saved_state.load(runner, first, 0, content)
        saved_state.load(runner, second, 0, content)
        assert nmse(feed(runner, 85, N), want[85:]) <= 1e-9
        gone = SlotContent(TOKENS, N, runner.resumable(N))
        with pytest.raises(StateError, match="sliding window"):
            saved_state.load(runner, second, 0, gone)
        assert gone == SlotContent(TOKENS, N, runner.resumable(N))


def test_a_cache_of_other_heads_is_refused() -> None:
    layers = [Layer(Attention(n_head, 2, 16, 16), FeedForward(64)) for n_head in (4, 8)]
    specs = [KVSpec(2, 16, 16), KVSpec(2, 16, 16, owner=0)]
    with pytest.raises(UnsupportedModel, match="layer 1 reads the cache of layer 0"):
        blocks_of_owners(layers, specs)
