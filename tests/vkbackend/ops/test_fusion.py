"""Fused dispatches compute the same results as separate ops, and never remove a value that another command
reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import covering, nmse, wide
from oracles.fixture import write
from oracles.fixtures import build
from runners import load_runner

from vkbackend import ops
from vkbackend.buffer import ALIGN, Buffer, Home, View, Virtual
from vkbackend.hazards import check
from vkbackend.limits import Limits
from vkbackend.meta.step_kind import StepKind
from vkbackend.ops import MATRIX_OPS, OPS, Recorder
from vkbackend.ops.fusion import fuse
from vkbackend.recording import Dispatch, Recording
from vkbackend.step import Run, step_words
from vkbackend.tools.studies import bench_fusing

TOKENS = np.random.default_rng(3).integers(0, 128, 11).tolist()
LIMITS = Limits()


def logits_and_ops(path: Path, n: int, **options: Any) -> tuple[np.ndarray, list[str]]:
    settings = {"n_ctx": 32, "n_ubatch": 16, "reduce_type": "f32"} | options
    runner = load_runner(path, devices=["numpy"] * n, **settings)
    try:
        first = runner.step(TOKENS[:-1], [Run(0, 0, 10, 0)], [9]).copy()
        second = runner.step(TOKENS[-1:], [Run(0, 0, 1, 10)], [0]).copy()
        recording = runner.mesh.recorded_step(StepKind.of_run(1, 1)).executables[0].recording
        assert all(hazard.kind == "in-place" for hazard in check(recording))
        return np.concatenate([first, second]), [
            c.op for c in recording.accesses() if isinstance(c, Dispatch)
        ]
    finally:
        runner.close()


# The models use both RoPE pairings, norms of q and k, unweighted norms of v, k used as v, biases, sinks,
# experts, and a delta net with partial rotation.
@pytest.mark.parametrize(
    ("name", "n"),
    [
        p if p.values[0] != "gemma3" else wide(p)  # gemma4 has all fusions of this model, and more
        for p in covering(["llama", "gemma3", "gemma4", "gpt-oss", "qwen2", "qwen3moe", "qwen3next"], [1, 2])
    ],
)
def test_fused_ops_equal_separate_ops(
    name: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(build(name), tmp_path / "model.gguf")
    fused, few = logits_and_ops(path, n, type_k="f32", type_v="f32")
    monkeypatch.setenv("VKBACKEND_FUSE", "0")
    plain, many = logits_and_ops(path, n, type_k="f32", type_v="f32")
    assert nmse(fused, plain) <= 1e-12
    assert few.count("rms_norm") + few.count("rope") < many.count("rms_norm") + many.count("rope")
    assert few.count("kv_store") == many.count("kv_store")


# ---- not fused ----


def scratch(*shape: int) -> View:
    return View(Virtual(4 * int(np.prod(shape)), "value"), 0, shape)


def stored(nbytes: int, *shape: int, dtype: str = "f32") -> View:
    return View(Buffer(nbytes, Home.KV, "kept"), 0, shape, dtype)


class Chain:
    def __init__(self, dtype: str = "f16", w: bool = True) -> None:
        self.rec = Recording("chain")
        self.on = Recorder(self.rec, LIMITS)
        self.x, self.normed, self.turned = (scratch(3, 16) for _ in range(3))
        self.w = stored(32, 8) if w else None
        self.cos_sin, self.cells = stored(1 << 10, 3, 4, 2), stored(256, 1, 2, dtype="u32")
        self.cache, self.step = (
            stored(1 << 14, 64, 32, dtype=dtype),
            stored(4 * step_words(3), step_words(3), dtype="u32"),
        )
        self.cache = replace(self.cache, shape=(64, 16))
        self.rec.dispatch(Dispatch("copy_words", "f32", (self.cos_sin, self.x), (1,), (), (), (1, 1, 1)))

    def norm(self) -> None:
        heads = self.x.reshape(6, 8), self.w, self.normed.reshape(6, 8)
        self.on.rms_norm(*heads, eps=1e-5)

    def rope(self) -> None:
        x, y = self.normed.reshape(3, 2, 8), self.turned.reshape(3, 2, 8)
        self.on.rope(x, self.cos_sin, y, half_split=True)

    def store(self, x: View | None = None) -> None:
        self.on.kv_store(x or self.turned, self.cells, self.cache, self.step)

    def fused(self) -> list[Dispatch]:
        return [c for c in list(fuse(self.rec, LIMITS).accesses())[1:] if isinstance(c, Dispatch)]


def ops_of(dispatches: list[Dispatch]) -> list[str]:
    return [d.op for d in dispatches]


@pytest.mark.parametrize("w", [True, False])
def test_norm_rope_and_store_are_fused(w: bool) -> None:
    chain = Chain(w=w)
    chain.norm()
    chain.rope()
    chain.store()
    [dispatch] = chain.fused()
    named = dict(zip(OPS[dispatch.op].arg_names, dispatch.args, strict=True))
    assert (
        dispatch.op == "kv_store"
        and named["x"].buffer is chain.x.buffer
        and named["cos_sin"] == chain.cos_sin
    )
    assert dict(dispatch.consts)["NORM"] == (2 if w else 1) and dict(dispatch.push)["half_split"] == 1
    assert (
        dict(dispatch.push)["eps"] == 1e-5
        and dict(dispatch.push)["n_rot"] == dict(dispatch.push)["head_dim"] == 8
    )


def test_quantized_store_is_not_fused() -> None:
    chain = Chain()
    chain.cache = replace(chain.cache, dtype="q8_0", shape=(64, 32))
    chain.x, chain.normed, chain.turned = (scratch(3, 32) for _ in range(3))
    chain.on.rope(chain.x.reshape(3, 4, 8), chain.cos_sin, chain.turned, half_split=False)
    chain.store()
    assert ops_of(chain.fused()) == ["rope", "kv_store"]


def test_value_with_other_readers_is_not_fused() -> None:
    chain = Chain()
    chain.norm()
    chain.rope()
    chain.store()
    chain.store(chain.normed)
    assert ops_of(chain.fused()) == ["rms_norm", "kv_store", "kv_store"]


def test_only_scratch_written_by_dispatches_is_fused() -> None:
    chain = Chain()
    chain.normed = stored(192, 3, 16)
    chain.norm()
    chain.rope()
    assert ops_of(chain.fused()) == ["rms_norm", "rope"]
    chain = Chain()
    chain.rec.copy(chain.x, chain.normed)
    chain.rope()
    assert ops_of(chain.fused()) == ["rope"]


def test_heads_are_normed_and_rotated_only_once() -> None:
    norm, cos_sin = ops.HeadNorm(None, 1e-5), Chain().cos_sin
    chain = Chain()
    chain.norm()
    x, y = chain.normed.reshape(3, 2, 8), chain.turned.reshape(3, 2, 8)
    chain.on.rope(x, cos_sin, y, half_split=True, norm=norm)
    assert ops_of(chain.fused()) == ["rms_norm", "rope"]
    for how in ({"norm": norm}, {"rotation": ops.Rotation(cos_sin, half_split=True)}):
        chain = Chain()
        chain.rope()
        store: tuple[View, ...] = chain.turned, chain.cells, chain.cache, chain.step
        chain.on.kv_store(*store, head_dim=8, **how)  # type: ignore[arg-type]
        assert ops_of(chain.fused()) == ["rope", "kv_store"]


def test_overwritten_inputs_prevent_fusion() -> None:
    chain = Chain()
    chain.norm()
    chain.on.scale(chain.w or chain.x, View(chain.x.buffer, 0, (8,)), c=2.0)
    chain.rope()
    assert ops_of(chain.fused()) == ["rms_norm", "scale", "rope"]


def test_nothing_is_fused_across_an_exchange() -> None:
    chain = Chain()
    chain.norm()
    chain.rec.exchange("meet")
    chain.rope()
    assert ops_of(chain.fused()) == ["rms_norm", "rope"]


def test_norm_wider_than_a_head_is_not_fused() -> None:
    chain = Chain()
    chain.on.rms_norm(chain.x, None, chain.normed, eps=1e-5)
    chain.rope()
    assert ops_of(chain.fused()) == ["rms_norm", "rope"]


@pytest.mark.parametrize("read_before", [False, True])
def test_add_and_norm_are_fused(read_before: bool) -> None:
    chain = Chain()
    a, b, y, z = stored(192, 3, 16), stored(192, 3, 16), scratch(3, 16), scratch(3, 16)
    chain.on.add(a, b, chain.normed)
    if read_before:
        chain.on.scale(chain.normed, z, c=2.0)
    chain.on.rms_norm(chain.normed, stored(64, 16), y, eps=1e-5)
    chain.on.add(chain.normed, y, z)
    want = ["add", "scale", "rms_norm", "add"] if read_before else ["add_partials", "add"]
    assert ops_of(chain.fused()) == want


def test_gate_and_up_are_fused() -> None:
    x, (gate, up, y) = stored(256, 2, 32), (scratch(2, 8) for _ in range(3))
    matrices = stored(4096, 24, 32)
    for first in (16, 8):
        on = Recorder(Recording("products"), LIMITS)
        for out, at in ((gate, 8), (up, first + 8 if first == 8 else 0)):
            MATRIX_OPS["mat_vec"](on, matrices.rows(at, at + 8), x, out)
        on.glu(gate, up, y, act="gelu")
        dispatches = [c for c in fuse(on.recording, LIMITS).accesses() if isinstance(c, Dispatch)]
        assert ops_of(dispatches) == (["mat_vec"] if first == 8 else ["mat_vec", "mat_vec", "glu"])
    named = dict(dispatches[0].push)
    assert named["up_at"] == 8 * 32 and named["act"] == 3 and dispatches[0].args[0].nbytes == 4 * 16 * 32
    assert ops_of([c for c in fuse(on.recording, replace(LIMITS, is_cpu=True)).accesses()]) == [
        "mat_vec",
        "mat_vec",
        "glu",
    ]  # type: ignore[misc]


@pytest.mark.parametrize(("limit", "fused"), [(3072 + ALIGN, True), (3071 + ALIGN, False)])
def test_gate_and_up_must_fit_one_binding(limit: int, fused: bool) -> None:
    matrices = stored(4096, 32, 32)
    limits = replace(LIMITS, max_storage_range=limit, is_cpu=True, features=frozenset(OPS["mat_lane"].needs))
    on = Recorder(Recording("products"), limits)
    x, (gate, up, y) = stored(256, 2, 32), (scratch(2, 8) for _ in range(3))
    MATRIX_OPS["mat_lane"](on, matrices.rows(8, 16), x, gate)
    MATRIX_OPS["mat_lane"](on, matrices.rows(24, 32), x, up)
    on.glu(gate, up, y)
    names = ops_of(list(fuse(on.recording, limits).accesses()))  # type: ignore[arg-type]
    assert names == (["mat_lane"] if fused else ["mat_lane", "mat_lane", "glu"])


@pytest.mark.parametrize("difference", ["bias", "stride", "gated", "x", "buffer", "type"])
def test_different_products_are_not_fused(difference: str) -> None:
    x, other, matrices = stored(256, 2, 32), stored(256, 2, 32), stored(4096, 32, 32)
    n = 17 if difference == "stride" else 16
    gate, up, y = (scratch(n) for _ in range(3))
    options: dict[str, dict[str, Any]] = {"bias": {"bias": stored(32, 8)}, "stride": {"y_stride": 9}}
    how = options.get(difference, {})
    how |= {"up": matrices.rows(8, 16), "act": "silu"} if difference == "gated" else {}
    on = Recorder(Recording("products"), LIMITS)
    MATRIX_OPS["mat_vec"](on, matrices.rows(0, 8), x, gate, **how)
    how = {"y_stride": 9} if difference == "stride" else {}
    how |= {"up": matrices.rows(24, 32), "act": "silu"} if difference == "gated" else {}
    w = stored(1024, 8, 32) if difference == "buffer" else matrices.rows(16, 24)
    w = replace(w, dtype="q8_0") if difference == "type" else w
    MATRIX_OPS["mat_vec"](on, w, other if difference == "x" else x, up, **how)
    on.glu(gate, up, y)
    assert ops_of(list(fuse(on.recording, LIMITS).accesses())) == ["mat_vec", "mat_vec", "glu"]  # type: ignore[arg-type]


@pytest.mark.parametrize("read", [False, True])
def test_norm_and_quantization_are_fused(read: bool) -> None:
    """The fused op runs at the norm's position, so a command between norm and quantization may read the
    residual."""
    on, part, h, y = Recorder(Recording("q8"), LIMITS), stored(256, 64), scratch(2, 32), scratch(2, 32)
    out, z = replace(scratch(2, 40), shape=(2, 32), dtype="q8"), scratch(2, 32)
    how: dict[str, Any] = {"own_index": None, "writers": 1, "slot_stride": 64}
    on.add_partials(stored(256, 2, 32), None, part, stored(128, 32), h, y, **how)
    on.scale(h, z, c=2.0)
    on.quantize_q8(y, out)
    if read:
        on.scale(y, z, c=2.0)
    dispatches = [c for c in fuse(on.recording, LIMITS).accesses() if isinstance(c, Dispatch)]
    if read:
        assert ops_of(dispatches) == ["add_partials", "scale", "quantize_q8", "scale"]
    else:
        assert ops_of(dispatches) == ["add_partials", "scale"]
        assert dispatches[0].variant == "q8" and dispatches[0].args[-1] == out and dispatches[0].args[-2] == h


def test_bench_fusing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(build("qwen3"), tmp_path / "model.gguf")
    monkeypatch.setattr("sys.argv", ["bench_fusing", "-m", str(path), "-dev", "numpy", "-r", "1"])
    assert bench_fusing.main() == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    rows = {
        name: list(map(int, values))
        for name, *values in lines
        if name in bench_fusing.WAYS and len(values) == 7
    }
    fused, plain = rows["fused"], rows["one by one"]
    assert (fused[4:6], plain[4:6]) == ([12, 8], [17, 13]) and fused[3] <= plain[3] + 1
