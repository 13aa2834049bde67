"""Lists of cases. Quick cases always run, wide cases only on request. A case's name is its repr."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from vkbackend import ops, shaderlib
from vkbackend.errors import InvalidArgument
from vkbackend.formats import block_of
from vkbackend.ops.elementwise import ACTS
from vkbackend.step import MAX_ROWS
from vkbackend.tools.op_cases import (
    attention,
    caches,
    chosen,
    expert_cache,
    half,
    heads,
    indexer,
    kept_rows,
    low_rank,
    moe,
    moe_rows,
    recurrent,
    rwkv,
    state_space,
    streams,
)
from vkbackend.tools.op_cases import field as op_cases_field
from vkbackend.tools.op_cases import matrix as op_cases_matrix
from vkbackend.tools.op_cases import quantized as op_cases_quantized
from vkbackend.tools.op_cases.reduces import AddPartials, PackBf16, PackHalves
from vkbackend.tools.op_cases.rows import (
    Add,
    AddBias,
    Clamp,
    Columns,
    CopyWords,
    Embed,
    Glu,
    LayerNorm,
    LogSumExp,
    MulVector,
    PoolRows,
    RmsNorm,
    Rope,
    Scale,
    Softcap,
    TopK,
    Xielu,
)
from vkbackend.tools.op_cases.setup import (
    Case,
)


@dataclass
class _Sweep:
    quick: list[Case] = field(default_factory=list)
    wide: list[Case] = field(default_factory=list)


def _cases() -> _Sweep:
    s = _Sweep()
    s.quick += [
        Embed("f32", n_embd=7),
        Embed("f16", n_embd=33),
        Embed("q8_0", n_embd=2048),
        Embed("q4_0", n_embd=32),
        Embed("q8_0", n_embd=96, pieces=3),
        Embed("f32", n_embd=576, n_vocab=MAX_ROWS, ids=ops.OUTPUTS),
        Embed("f16", n_embd=65, n_vocab=7, ids=ops.POSITIONS, pieces=2),
        Embed("f32", n_embd=20, n_vocab=2, ids=ops.TYPES),
    ]
    s.quick += [RmsNorm(n, rows) for n, rows in ((1, 1), (31, 5), (256, 3), (257, 2), (4096, 2))]
    s.quick += [
        RmsNorm(128, 40, has_w=False),
        RmsNorm(32, 2, has_w=False, out="q8"),
        RmsNorm(544, 3, out="q8"),
    ]
    s.quick += op_cases_matrix.quick()
    s.quick += [
        Rope(1, 2, 2, 1),
        Rope(3, 64, 64, 7),
        Rope(3, 80, 32, 5, half_split=True),
        Rope(2, 128, 128, 2, half_split=True, in_place=True),
        Rope(5, 24, 8, 1, in_place=True),
        Rope(5, 24, 8, 3, norm="weighted"),
        Rope(3, 80, 64, 5, half_split=True, n_parts=2),
        Rope(2, 24, 24, 3, half_split=True, in_place=True, norm="weighted", n_parts=3),
        Rope(2, 288, 288, 2, half_split=True, in_place=True, norm="plain"),
    ]
    s.quick += [Glu(act, 257, 12.0) for act in ACTS]
    s.quick += [
        Glu("silu", 1),
        Glu("silu", 640, 120.0),
        Glu("gelu", 640, 120.0),
        Glu("relu2_alone", 640),
        Glu("gelu_erf_alone", 640, 40.0),
        Glu("gelu_quick_alone", 640, 120.0),
        Add(1),
        Add(1031),
    ]
    s.quick += [TopK(1, k=1), TopK(200, k=7, chunk=64, values=9), TopK(130, 3, k=64, chunk=130, nan=True)]
    s.quick += [LayerNorm(1, has_b=False), LayerNorm(257, 3), LayerNorm(2048, 2, has_b=False, mean=0.0)]
    s.wide += [LayerNorm(n, 3) for n in (31, 32, 33, 4096, 8192)]
    s.quick += [TopK(96, k=7, chunk=96, mapped=True, values=30), TopK(33, 3, k=40, chunk=33, allowed=0.5)]
    s.quick += [TopK(1031, 3, k=7, chunk=64, allowed=0.1), TopK(32, k=5, chunk=32, allowed=0.0, nan=True)]
    s.quick += [LogSumExp(1, chunk=1), LogSumExp(257, 3, chunk=64), LogSumExp(1031, 5, 500, 300.0)]
    s.wide += [
        TopK(1031, 5, k=k, chunk=c, values=v) for k in (1, 7, 64) for c in (64, 1031) for v in (3, 9999)
    ]
    s.quick += [
        Scale(1),
        Scale(1031),
        Scale(33, c=0.0),
        Softcap(1031),
        Xielu(1),
        Xielu(1031),
        CopyWords(1),
        CopyWords(129),
        CopyWords(40_001),
    ]
    s.quick += [
        AddPartials(),
        AddPartials(288, 3, own=1, out="q8"),
        AddPartials(2048, 3, n_slots=5, own=2, writers=0b10110, in_place=True),
        AddPartials(257, 2, n_slots=3, own=None, writers=0b101),
        AddPartials(31, 2, n_slots=2, own=1, writers=0b01, residual=False),
        AddPartials(64, 4, n_slots=1, own=0, writers=0, norm=False),
        AddPartials(257, 3, n_slots=4, own=2, writers=0b1101, wire="bf16"),
        AddPartials(31, 1, n_slots=2, own=None, writers=0b11, norm=False, wire="bf16"),
        AddPartials(257, 3, n_slots=4, own=2, writers=0b1101, wire="f16"),
        AddPartials(1, 1, n_slots=2, own=0, writers=0b11, norm=False, wire="f16"),
        AddPartials(127, 3, n_slots=2, own=None, writers=0b11, norm=False, wire="f16"),
        AddPartials(512, 2, own=1, out="q8", wire="f16"),
    ]
    s.quick += [PoolRows(1, 1, 1), PoolRows(257, 5, 9), PoolRows(64, 3, 16)]
    s.quick += [Columns(1, 1), Columns(31, 127, 96, 5), Columns(64, 192, 64, 3)]
    s.quick += [MulVector(1), MulVector(257, 5), Clamp(1), Clamp(1031)]
    s.quick += [AddBias(1), AddBias(257, 5), PackBf16(1), PackBf16(12), PackBf16(1031)]
    s.quick += [PackHalves(n, n != 2) for n in (1, 2, 127, 128, 129, 1031)]
    s.quick += [*caches.quick(), *attention.quick(), *indexer.quick(), *chosen.quick()]
    s.wide += [*attention.wide(), *indexer.wide(), *chosen.wide()]
    s.quick += [
        *moe.quick(),
        *moe_rows.quick(),
        *recurrent.quick(),
        *heads.quick(),
        *state_space.quick(),
        *streams.quick(),
    ]
    s.quick += rwkv.quick()
    s.quick += [*expert_cache.quick(), *kept_rows.quick(), *low_rank.quick()]
    s.quick += [*op_cases_quantized.quick(), *half.quick()]
    s.wide += [
        *moe.wide(),
        *moe_rows.wide(),
        *recurrent.wide(),
        *low_rank.wide(),
        *state_space.wide(),
        *streams.wide(),
    ]
    s.wide += [*rwkv.wide(), *op_cases_quantized.wide()]
    s.wide += op_cases_field.wide()
    s.wide += [RmsNorm(n, 3) for n in (64, 128, 256, 768, 1536, 8192)]
    s.wide += [
        Rope(2, 80, 20, 9),
        Rope(3, 128, 32, 9, half_split=True),
        Rope(8, 256, 64, 512, half_split=True),
    ]
    s.wide += [Rope(8, 256, 256, 512, half_split=True), Rope(8, 512, 128, 512, half_split=True)]
    s.wide += [TopK(2**i + j, k=min(40, 2**i - 1), chunk=2**i) for i in (4, 7, 10, 12) for j in (-1, 0)]
    s.wide += [Embed(kind, 256, 80_000) for kind in ("f32", "q4_0", "q6_k")]
    for kind in shaderlib.weight_types():
        block = block_of(kind)[0]
        k = 288 if 288 % block == 0 else 3 * block
        s.wide += [Embed(kind, k, pieces=3), Embed(kind, 11 * block, 31), Embed(kind, 4096, rows=1, used=1)]
        s.wide += [*op_cases_matrix.wide(kind), *half.wide(kind)]
    return s


def _format_cases() -> _Sweep:
    """Rows have three blocks, so they begin at every alignment."""
    s = _Sweep()
    for kind in shaderlib.weight_types():
        block = block_of(kind)[0]
        k = 3 * block if block > 1 else 31
        s.quick += [
            Embed(kind, k),
            *op_cases_matrix.some_of(kind, k),
            heads.case_of(kind, k),
            *op_cases_quantized.cases_of(kind),
            *moe.some_of(kind),
        ]
        s.wide += [*op_cases_matrix.some_of_gpus(kind, k), *half.some_of_gpus(kind, k)]
        s.wide += [*op_cases_quantized.tiled_cases_of(kind), *moe.some_of_gpus(kind)]
    return s


def _bench_cases() -> list[Case]:
    cases: list[Case] = []
    for kind in shaderlib.weight_types():
        cases += [*op_cases_matrix.bench(kind), *half.bench(kind)]
        cases += [*op_cases_quantized.bench(kind), *moe.bench(kind)]
    cases += [op_cases_quantized.QuantizeQ8(k, rows) for k, rows in ((1024, 1), (4096, 1), (1024, 128))]
    return [*cases, *caches.bench(), *attention.bench(), *indexer.bench(), *chosen.bench()]


_QUICK_FORMATS, _WIDE_FORMATS = _format_cases().quick, _format_cases().wide
FORMAT_CASES: list[Case] = [*_QUICK_FORMATS, *_WIDE_FORMATS]
CASES: list[Case] = [*_cases().quick, *_QUICK_FORMATS]
BENCH_CASES: list[Case] = _bench_cases()
_SWEPT = dict.fromkeys([*CASES, *_cases().wide, *_WIDE_FORMATS])
WIDE_CASES: list[Case] = list(_SWEPT)[len(CASES) :]


def cases_named(pattern: str, shapes: str) -> list[Case]:
    """Raises InvalidArgument if the pattern is invalid or matches no case."""
    cases = [*(CASES if shapes != "real" else ()), *(BENCH_CASES if shapes != "tests" else ())]
    try:
        matches = [case for case in cases if re.search(pattern, repr(case))]
    except re.error as error:
        raise InvalidArgument(f"--case {pattern!r} is not a regular expression: {error}") from None
    if not matches:
        if shapes == "real" and any(re.search(pattern, repr(case)) for case in CASES):
            raise InvalidArgument(
                f"--case {pattern!r} matches small cases only; time them with --shapes tests"
            )
        names = sorted({type(case).__name__ for case in cases})
        raise InvalidArgument(f"--case {pattern!r} matches none of {len(cases)} cases of {', '.join(names)}")
    return matches
