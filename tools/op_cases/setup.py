"""`Setup` holds the tensors of an op case and records the ops. `Placed` puts the tensors into one buffer,
with guard words between them and NaN in every output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend import ops, twins
from vkbackend.buffer import Buffer, Home, View, aligned
from vkbackend.formats import block_of, dequantize, quantize, row_nbytes
from vkbackend.limits import Limits
from vkbackend.ops.attention_tiles import cells_per_block
from vkbackend.recording import Recording
from vkbackend.rope import RopeTable
from vkbackend.runtime import Device
from vkbackend.step import Mix, Run, StepParams, step_words

Q8_FLIP = 1e-5  # NMSE (normalized mean squared error) if one code in 64 is rounded in the other direction.
MORE_ROWS = 64  # Number of rows after a step's last row. Dispatches may have rows outside all runs.
GUARD_WORDS = 37  # Odd, so views start at every word alignment.
CELL_BLOCK = ops.CELL_BLOCK

Views = dict[str, View]
RunSpec = tuple[int, int, int]  # a run: slot, first position, number of rows


@dataclass
class Tensor:
    """An array whose offset is a multiple of `align` bytes. If `raw` is None, the array is filled with
    NaN."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    raw: np.ndarray | None = None
    written: bool = False
    align: int = 4


@dataclass
class Setup:
    tensors: dict[str, Tensor]
    record: Callable[[ops.Recorder, Views], None]
    step: StepParams | None = None


class Placed:
    def __init__(self, device: Device, setup: Setup) -> None:
        self.device, self.setup = device, setup
        at = 4 * GUARD_WORDS
        places: dict[str, tuple[int, tuple[int, ...], str]] = {}
        if setup.step is not None:
            places["step"] = 0, (setup.step.words.size,), "u32"
            at += setup.step.words.nbytes
        for name, tensor in setup.tensors.items():
            at = aligned(at, 16 if tensor.dtype == "f16s" else tensor.align)  # f16s: reads of 16 bytes
            places[name] = at, tensor.shape, tensor.dtype
            rows = int(np.prod(tensor.shape[:-1]))
            at += -(-rows * row_nbytes(tensor.dtype, tensor.shape[-1]) // 4) * 4 + 4 * GUARD_WORDS
        self.buffer: Buffer = device.buffer(at, Home.SCRATCH, "case")
        self.views = {name: View(self.buffer, *place) for name, place in places.items()}
        self.whole = View(self.buffer, 0, (self.buffer.nbytes,), "u8")
        self.image = nan_words(self.buffer.nbytes // 4).view(np.uint8)
        if setup.step is not None:
            self._put("step", setup.step.words)
        for name, tensor in setup.tensors.items():
            if tensor.raw is not None:
                self._put(name, tensor.raw)
        device.write(self.whole, self.image)

    def _put(self, name: str, data: np.ndarray) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        view = self.views[name]
        assert view.nbytes - 4 < raw.size <= view.nbytes, (name, raw.size, view)
        self.image[view.offset : view.offset + raw.size] = raw

    def record(self, limits: Limits) -> Recording:
        recording = Recording("case")
        self.setup.record(ops.Recorder(recording, limits), self.views)
        return recording

    def close(self) -> None:
        self.device.free(self.buffer)


class Case:
    """`tolerance` is the largest allowed NMSE against the twin; 0 demands equal bits. Outputs in `exact` must
    have equal bits, except for the payload of NaN if `any_nan` is set: Vulkan allows any payload."""

    tolerance: ClassVar[float] = 1e-10
    exact: ClassVar[tuple[str, ...]] = ()
    any_nan: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def fits(self, limits: Limits) -> bool:
        return True

    def setup(self, rng: np.random.Generator) -> Setup:
        raise NotImplementedError

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """Split an output into parts that are compared separately, because their magnitudes differ."""
        return {name: array}


def nan_words(n: int) -> np.ndarray:
    """Return words that expose overwrites and reads of unwritten memory. Each word is NaN as F32 and as two
    F16, and differs from its neighbours."""
    return (0x7FC07C01 + np.arange(n) * 389 % 1022).astype(np.uint32)


def uniform(rng: np.random.Generator, *shape: int, span: float = 1.0) -> Tensor:
    return Tensor(shape, "f32", rng.uniform(-span, span, shape).astype(np.float32))


def cos_sin_of(rng: np.random.Generator, n_rows: int, n_rot: int) -> Tensor:
    rows = RopeTable(n_rot, 500_000.0).rows(rng.integers(0, 100_000, n_rows))
    return Tensor((n_rows, n_rot // 2, 2), "f32", rows)


# Type -> byte offsets of a block's F16 scales, and the largest |value / scale|. Other bytes are codes.
SCALES: dict[str, tuple[tuple[int, ...], float]] = {
    "q4_0": ((0,), 8), "q4_1": ((0, 2), 16), "q5_0": ((0,), 16), "q5_1": ((0, 2), 32), "q8_0": ((0,), 128),
    "q2_k": ((80, 82), 45), "q3_k": ((108,), 128), "q4_k": ((0, 2), 945), "q5_k": ((0, 2), 1953),
    "q6_k": ((208,), 4096), "iq4_nl": ((0,), 127), "iq4_xs": ((0,), 4064), "tq1_0": ((52,), 1),
    "tq2_0": ((64,), 2), "iq3_s": ((0,), 465), "iq3_xxs": ((0,), 481), "iq2_s": ((0,), 167),
    "iq2_xs": ((0,), 167), "iq2_xxs": ((0,), 167), "iq1_s": ((0,), 17),
    "q1_0": ((0,), 1), "q2_0": ((0,), 2),
}  # fmt: skip


def weights(rng: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> Tensor:
    """Return random weights of about +-`scale`. Quantized blocks contain every code."""
    if dtype in ("f32", "f16", "bf16"):
        values = rng.uniform(-scale, scale, shape).astype(np.float32)
        if dtype == "bf16":
            return Tensor(shape, dtype, (values.view(np.uint32) >> 16).astype(np.uint16))
        return Tensor(shape, dtype, values.astype(np.float16 if dtype == "f16" else np.float32))
    elements, nbytes = block_of(dtype)
    blocks = rng.integers(0, 256, (math.prod(shape) // elements, nbytes), np.uint8)
    if dtype == "mxfp4":  # values: up to 12 scales
        blocks[:, 0] = 124 + int(math.log2(scale)) - rng.integers(0, 6, len(blocks))
        return Tensor(shape, dtype, blocks)
    if dtype == "nvfp4":  # values are up to 12 times the scale, and some scales are 0 or subnormal
        most = 8 * max(0, 3 + math.floor(math.log2(scale)))
        blocks[:, :4] = rng.integers(max(0, most - 24), most + 8, (len(blocks), 4))
        blocks[::7, 0] = 0x7F  # NaN in E4M3 is read as 0
        return Tensor(shape, dtype, blocks)
    if dtype == "iq1_m":  # the F16 scale is in the high nibbles of four words
        scales = (rng.uniform(0.5, 1, len(blocks)) * scale / 17).astype("<f2").view("<u2")
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | scales >> 4 * i << 4 & 0xF0
        return Tensor(shape, dtype, blocks)
    offsets, largest = SCALES[dtype]
    for at in offsets:
        scales = (
            rng.choice([-1, 1], len(blocks)) * rng.uniform(0.5, 1, len(blocks)) * scale / largest
        ).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return Tensor(shape, dtype, blocks)


def operand(x: np.ndarray, dtype: str) -> Tensor:
    """Use the twins to convert f32 rows to a matrix op's input type."""
    k = x.shape[-1]
    if dtype == "f32":
        return Tensor(x.shape, dtype, x)
    raw = np.zeros((x.size // k, row_nbytes(dtype, k)), np.uint8)
    convert = {"q8": twins.quantized.quantize_q8, "f16s": twins.half.pack_f16}[dtype]
    convert(x, raw, k=k, n_rows=len(raw))
    return Tensor(x.shape, dtype, raw)


def output(*shape: int, dtype: str = "f32") -> Tensor:
    return Tensor(shape, dtype, written=True)


def unused_step(n_rows: int) -> StepParams:
    """Return parameters with invalid values, for at least `n_rows` rows."""
    return StepParams(np.full(step_words(n_rows + MORE_ROWS), 0x7FFFFFFF, np.uint32))


def step_of(
    rng: np.random.Generator,
    runs: tuple[RunSpec, ...],
    n_vocab: int = 1,
    outputs: tuple[int, ...] = (),
    mix: Mix = Mix.DECODE,
    later: int | None = None,
    begins: tuple[int, ...] = (),
    ends: tuple[int, ...] = (),
) -> StepParams:
    """Return a step's parameters, with invalid values in unused entries. If `later` is set, the step is an
    encoder's: each text has `later` positions after its run, and windows begin at `begins`. `ends` contains
    the end of each run's keys, also in causal steps."""
    step = unused_step(n_rows_of(runs))
    table, row = [], 0
    for i, (slot, first_pos, n_rows) in enumerate(runs):
        end = ends[i] if ends else first_pos + n_rows + (later or 0)
        table.append(Run(slot, row, n_rows, first_pos, end=end, begin=begins[i] if begins else 0))
        row += n_rows
    step.fill(rng.integers(0, n_vocab, row), table, outputs, mix, typed=later is not None, ends=bool(ends))
    return step


def cell_table(
    rng: np.random.Generator, runs: tuple[RunSpec, ...], ring: int | None = None
) -> tuple[Tensor, int]:
    """Return a table [n_slots, blocks_per_slot] of scattered blocks, and the number of cells. `ring` sets the
    blocks per slot."""
    n_slots = max(slot for slot, _, _ in runs) + 1
    blocks_per_slot = ring or max(-(-(first + n) // CELL_BLOCK) for _, first, n in runs) + 1
    n_blocks = n_slots * blocks_per_slot + 1
    table = rng.permutation(n_blocks)[: n_slots * blocks_per_slot].astype(np.uint32)
    return Tensor((n_slots, blocks_per_slot), "u32", table), n_blocks * CELL_BLOCK


def cache(
    rng: np.random.Generator,
    dtype: str,
    cells: Tensor,
    n_cells: int,
    width: int,
    runs: tuple[RunSpec, ...],
    window: int = 0,
    block: int = 1,
) -> Tensor:
    """Return a K or V cache, with NaN in cells that no run reads. A cell covers `block` positions."""
    assert cells.raw is not None
    table = cells.raw.reshape(cells.shape)
    plain = {"f16": np.float16, "f32": np.float32}.get(dtype)
    if plain:
        values = np.full((n_cells, width), np.nan, plain)
    else:
        values = np.full((n_cells, row_nbytes(dtype, width)), 0xFF, np.uint8)
    for slot, first_pos, n_rows in runs:
        at = np.arange(max(0, first_pos - window + 1) if window else 0, first_pos + n_rows)
        at = at[(at + 1) % block == 0]
        blocks = table[slot, at // CELL_BLOCK % table.shape[1]]
        rows = blocks * cells_per_block(block) + at % CELL_BLOCK // block
        assert len(set(rows.tolist())) == len(at), f"{runs} sees more than the ring of {table.shape} holds"
        stored = rng.uniform(-1, 1, (len(at), width)).astype(np.float32)
        values[rows] = stored if plain else quantize(stored, dtype)
    return Tensor((n_cells, width), dtype, values)


def n_rows_of(runs: tuple[RunSpec, ...]) -> int:
    return sum(n for _, _, n in runs)


def split_parts(array: np.ndarray, head_v: int) -> dict[str, np.ndarray]:
    """Return the sum of p * v, the maximum score and the sum of p of an attention split, by name. The maximum
    of a split without keys is not compared."""
    has_keys = array[..., head_v + 1] > 0
    return {
        "acc": array[..., :head_v],
        "max": np.where(has_keys, array[..., head_v], 0),
        "sum": array[..., head_v + 1],
    }


def as_numbers(array: np.ndarray, n: int) -> np.ndarray:
    return dequantize(array.reshape(-1), "q8", (len(array), n)) if array.dtype == np.uint8 else array
