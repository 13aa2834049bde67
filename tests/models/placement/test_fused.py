"""Fused weights are separated on load. Each part of a fused weight is split over devices, and an export joins
the parts again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from device_sets import only, product
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from runners import load_runner
from tiny_models import Tiny, tensors, write_tiny

from vkbackend.errors import GGUFError
from vkbackend.formats import block_of, row_nbytes
from vkbackend.meta.load import load_weights
from vkbackend.meta.slices import Load
from vkbackend.meta.split import MIRRORED, Ranges, State, split, split_experts
from vkbackend.models.architectures.weight_specs import MATRIX_TYPES, WeightSpec, fused
from vkbackend.models.export import joined, write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Run
from vkbackend.twins.device import NumpyDevice

TOKENS = np.random.default_rng(5).integers(0, 128, 20).tolist()
SPLITS = [(1, None), (2, (3, 1)), (3, None), (3, (1, 0, 1))]


class Parts:
    def __init__(self, raw: np.ndarray, specs: list[WeightSpec]) -> None:
        self.raw, self.specs = raw, {spec.name: spec for spec in specs}

    def data(self, name: str) -> np.ndarray:
        part = self.specs[name].part
        assert part
        return part.cut(self.raw)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[WeightSpec], str, list[State], int]:
    """Draw the parts of a fused vector, matrix or stack of experts. The parts are mirrored, or split on any
    axis."""
    dtype, n = draw(st.sampled_from(MATRIX_TYPES)), draw(st.integers(1, 4))
    block, ndim, repeat = block_of(dtype)[0], draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if ndim == 1:
        dtype, block, repeat = "f32", 1, 1
    n_in = block * draw(st.integers(1, 3))
    specs, states, segments = [], [], []
    for i, count in enumerate(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))):
        shape = [(count,), (repeat * count, n_in), (repeat, count, n_in)][ndim - 1]
        cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if ndim == 2 and count > 1 else []
        segments.append(tuple(e - b for b, e in pairwise([0, *cuts, count])) if cuts else ())
        specs.append(WeightSpec(f"part{i}", shape))
        axis = draw(st.integers(0, min(1, ndim - 1)))
        unit = block if axis else 1
        units = (n_in // block) if axis else (shape[-2] if ndim > 1 else count)

        def tiling(units: int = units, unit: int = unit) -> Ranges:
            cuts = sorted(draw(st.lists(st.integers(0, units), min_size=n - 1, max_size=n - 1)))
            return tuple((b * unit, e * unit) for b, e in zip([0, *cuts], [*cuts, units], strict=True))

        if draw(st.booleans()):
            states.append(MIRRORED)
        elif ndim == 3:
            states.append(split_experts(axis + 1, [tiling() for _ in range(repeat)]))
        else:
            states.append(split(axis, tiling()))
    parts = [
        replace(spec, part=replace(spec.part, segments=cut))  # type: ignore[type-var]
        for spec, cut in zip(fused("w", specs, repeat), segments, strict=True)
    ]
    return parts, dtype, states, n


@settings(max_examples=examples(100), deadline=None)
@given(layouts())
def test_split_then_join_is_the_identity(case: tuple[list[WeightSpec], str, list[State], int]) -> None:
    specs, dtype, states, n = case
    nbytes = sum(
        int(np.prod(spec.shape[:-1], dtype=int)) * row_nbytes(dtype, spec.shape[-1]) for spec in specs
    )
    raw = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    devices = [NumpyDevice(f"numpy.{d}") for d in range(n)]
    loads = [Load(spec.name, spec.shape, dtype, state) for spec, state in zip(specs, states, strict=True)]
    weights, _pages = load_weights(devices, loads, Parts(raw, specs))
    back = joined(devices, [(spec.part, weights[spec.name]) for spec in reversed(specs) if spec.part])
    assert np.array_equal(np.concatenate([piece.reshape(-1) for piece in back]), raw)


def fused_copy(tiny: Tiny) -> dict[str, np.ndarray | None]:
    separate, change = dict(tensors(tiny)), {}
    for il in range(tiny.n_layer):
        for names, tensor in (
            (("attn_q", "attn_k", "attn_v"), "attn_qkv"),
            (("ffn_gate", "ffn_up"), "ffn_up"),
        ):
            for kind in ("weight", "bias"):
                parts = [f"blk.{il}.{name}.{kind}" for name in names]
                if parts[0] in separate:
                    change |= dict.fromkeys(parts)
                    change[f"blk.{il}.{tensor}.{kind}"] = np.concatenate([separate[name] for name in parts])
    return change


TINY = [Tiny("llama", "Q8_0"), Tiny("qwen3")]


@pytest.mark.parametrize(
    ("tiny", "n", "shares"),
    only(
        product(TINY, [pytest.param(*split, id=f"{split[0]}-{split[1]}") for split in SPLITS]),
        f"{TINY[0]}-2-(3, 1)",
        f"{TINY[1]}-3-(1, 0, 1)",
    ),
)
def test_a_fused_file_equals_the_separate_file(
    tmp_path: Path, tiny: Tiny, n: int, shares: tuple[int, ...] | None
) -> None:
    paths = [
        write_tiny(tmp_path / "separate.gguf", tiny),
        write_tiny(tmp_path / "fused.gguf", tiny, fused_copy(tiny)),
    ]
    logits = []
    for path in paths:
        runner = load_runner(path, devices=["numpy"] * n, tensor_split=shares, n_ctx=64, n_ubatch=32)
        try:
            logits.append(runner.step(TOKENS, [Run(0, 0, len(TOKENS), 0)], range(len(TOKENS))).copy())
            with GGUF.open(path) as source:
                out = tmp_path / "out.gguf"
                write_gguf(out, source, runner.mesh.devices, runner.mesh.weights, runner.model.weights())
                assert out.read_bytes() == path.read_bytes()
        finally:
            runner.close()
    assert np.array_equal(*logits)


def test_a_fused_tensor_with_wrong_rows_is_refused(tmp_path: Path) -> None:
    tiny = Tiny("llama")
    change = fused_copy(tiny)
    change["blk.1.attn_qkv.weight"] = np.ones((191, 64), np.float32)
    path = write_tiny(tmp_path / "model.gguf", tiny, change)
    with pytest.raises(GGUFError, match=r"'blk.1.attn_q.weight' is missing"):
        load_runner(path, devices=["numpy"])


def test_a_pattern_matches_the_fused_tensors_name(tmp_path: Path) -> None:
    tiny = Tiny("llama")
    path = write_tiny(tmp_path / "model.gguf", tiny, fused_copy(tiny))
    runner = load_runner(path, devices=["numpy"] * 2, override_tensor=(("0.attn_qkv", "1"),))
    try:
        for name in ("attn_q", "attn_k", "attn_v"):
            pieces = runner.mesh.weights[f"blk.0.{name}.weight"].pieces
            assert [len(of_device) for of_device in pieces] == [0, 1]
    finally:
        runner.close()
