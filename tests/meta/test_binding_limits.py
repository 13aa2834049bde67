"""Offsets, counts and push constants fit in 32 bits, even for contexts of 128k tokens."""

from __future__ import annotations

import math

import pytest
from device_sets import covering, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend import shaderlib
from vkbackend.buffer import ALIGN, Buffer, Home, View
from vkbackend.formats import block_of, row_nbytes
from vkbackend.meta.slices import Load, expert_pieces, piece_nbytes, piece_shapes, rows_in_pieces
from vkbackend.meta.split import MIRRORED, split_experts
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.ops import Recorder
from vkbackend.recording import Recording
from vkbackend.tools.measure.simulated import BINDING_NBYTES, LIMITS, Hollow, SimulatedDevice

pytestmark = pytest.mark.no_vulkan
DEVICE = SimulatedDevice(0, 1 << 40)
WORD = 1 << 32
TYPES = st.sampled_from(shaderlib.weight_types())


def reach(shape: tuple[int, ...], dtype: str) -> int:
    """Return the largest distance in bytes from the aligned start of a view's binding to the view's end."""
    return ALIGN - 4 + math.prod(shape[:-1]) * row_nbytes(dtype, shape[-1])


@settings(max_examples=examples(200), deadline=None)
@given(TYPES, st.integers(1, 1 << 21), st.integers(1, 512))
def test_pieces_of_a_matrix_are_within_32_bits(dtype: str, n: int, blocks: int) -> None:
    k = blocks * block_of(dtype)[0]
    pieces = piece_shapes(Load("w", (n, k), dtype, MIRRORED), 0, piece_nbytes(DEVICE))
    assert sum(shape[0] for _, shape in pieces) == n
    assert [first for first, _ in pieces] == [sum(s[0] for _, s in pieces[:i]) for i in range(len(pieces))]
    for _, shape in pieces:
        assert reach(shape, dtype) <= BINDING_NBYTES < WORD
    for _, shape in rows_in_pieces(Load("w", (n, k), dtype, MIRRORED), piece_nbytes(DEVICE)):
        assert reach(shape, dtype) <= BINDING_NBYTES


@settings(max_examples=examples(100), deadline=None)
@given(TYPES, st.integers(1, 512), st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 2]))
def test_pieces_of_experts_are_within_32_bits(
    dtype: str, n_expert: int, n: int, blocks: int, axis: int
) -> None:
    """The weight has up to 512 experts of 16,384 by 16,384 elements, too many for one binding."""
    k = blocks * block_of(dtype)[0]
    shape = (n_expert, 256 * n, k)
    state = split_experts(axis, [((0, shape[axis]),)] * n_expert)
    pieces = expert_pieces(Load("w", shape, dtype, state), 0, piece_nbytes(DEVICE))
    assert sum(count for _, count, _ in pieces) == n_expert
    assert all(reach(piece, dtype) <= BINDING_NBYTES for _, _, piece in pieces)


CARDS, DEPTH = (1, 4), 1 << 17


@pytest.mark.parametrize(
    ("name", "n"), covering([wide(pytest.param("llama-70b", id="llama-70b")), "qwen3-235b-a22b"], CARDS)
)
def test_long_contexts_are_recorded(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record steps with four slots of 128k tokens. Every dispatch asserts that its push constants and groups
    are within the limits."""
    monkeypatch.setenv("VKBACKEND_CACHE", "off")
    devices = [SimulatedDevice(i, 1 << 40) for i in range(n)]
    options = Options.of(
        name,
        devices=["0"] * n,
        tensor_split=[1] * n,
        n_ctx=DEPTH,
        n_slots=4,
        n_ubatch=512,
        use_mmap=False,
    )
    runner = Runner(options, Hollow(f"{name}:Q4_K", 2, 4096), devices=devices)
    try:
        for rows in (1, 4, 512):
            runner.mesh.recorded_step(StepKind.of_run(rows, 1))
        assert 1 << 29 <= sum(device.largest for device in devices) < n * WORD
    finally:
        runner.close()


def test_a_number_that_would_wrap_is_refused() -> None:
    recorder = Recorder(Recording("x"), LIMITS)
    view = View(Buffer(256, Home.SCRATCH, "x"), 0, (4,))
    with pytest.raises(AssertionError, match="copy_words"):
        recorder.record("copy_words", "f32", (view, view), {"n": WORD}, {"LOCAL": 64}, (1, 1, 1))
    with pytest.raises(AssertionError, match="65536"):
        recorder.record("copy_words", "f32", (view, view), {"n": 1}, {"LOCAL": 64}, (65_536, 1, 1))
