"""Wide cases with shapes from llama.cpp's test-backend-ops and from published models. These cases of
llama.cpp are omitted: batched matrix products, permuted views, softmax and triangular solves as single ops,
head sizes that are not multiples of 8, and more than 32 experts per token. Cases of several gigabytes have
fewer experts or rows.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from vkbackend import ops, shaderlib
from vkbackend.ops.moe import GATINGS, Gating
from vkbackend.tools.op_cases.attention import AttnDecode, AttnPrefill
from vkbackend.tools.op_cases.caches import KvStore
from vkbackend.tools.op_cases.matrix import MatLane, MatMul, MatVec, MatWave
from vkbackend.tools.op_cases.moe import MatLaneId, MatMulId, MatVecId, MoeTopk
from vkbackend.tools.op_cases.moe_rows import AddId
from vkbackend.tools.op_cases.recurrent import DeltaNet, DeltaScan, SsmConv
from vkbackend.tools.op_cases.setup import Case

TOPK = (  # experts, experts used
    (8, 4), (31, 8), (32, 8), (40, 8), (71, 8), (128, 32), (129, 32), (160, 32), (256, 6), (288, 8)
)  # fmt: skip


class Equal(tuple[int, ...]):
    """Widths of equal experts, with a short repr."""

    def __repr__(self) -> str:
        return f"({self[0]},) * {len(self)}"


def matrices() -> list[Case]:
    cases: list[Case] = []
    for kind in shaderlib.weight_types():
        cases += [MatVec(kind, 16, 256, rows) for rows in range(1, 9)]
        cases += [MatMul(kind, 16, 256, 9), MatVec(kind, 16, 4096), MatVec(kind, 16, 4096, 8)]
        cases += [MatLane(kind, 16, 256, 9), MatWave(kind, 16, 4096, 8)]
    for kind in ("q4_k", "q5_k"):
        cases += [MatVec(kind, 4096, 1024, rows) for rows in (1, 2, 4, 7, 8)]
        cases += [MatVec(kind, 1023, 4096, rows) for rows in (1, 8)]
    cases += [MatVec("q4_k", n, 1024, 2) for n in (6271, 6272, 6273)]
    cases += [MatMul(kind, 2880, 2880, 32) for kind in ("q4_0", "q8_0", "mxfp4")]  # gpt-oss
    cases += [MatVec("f16", 1, 2048, rows) for rows in (1, 7, 8)]
    cases += [MatMul("f16", 1, 2048, rows) for rows in (9, 16, 127, 128, 511, 512)]
    cases += [MatMul(kind, 31, 2051, 509) for kind in ("f16", "f32")] + [MatMul("q8_0", 32, 2112, 509)]
    cases += [MatMul("f16", n + m, 256, 17) for n in (1056, 128) for m in (1, 3, 31)]
    return [*cases, MatMul("f32", 576, 576, 512), MatMul("f32", 1, 8192, 512), MatMul("f32", 6, 5120, 128)]


def experts() -> list[Case]:
    cases: list[Case] = []
    for n_expert, used, rows in product((4, 8), (1, 2, 4), (1, 4, 5, 17, 32, 129)):
        shape: Any = ("f16", ops.ROWS, 256, Equal((512,) * n_expert), rows, used)
        cases += [MatVecId(*shape)] if rows < 17 else [MatMulId(*shape)]
    for kind in shaderlib.weight_types():
        cases += [
            MatVecId(kind, ops.ROWS, 256, Equal((512,) * 4), 1),
            MatMulId(kind, ops.ROWS, 256, Equal((512,) * 4), 32),
        ]
    for kind, rows in product(("q4_k", "iq2_xs", "f16"), (1, 15, 16, 17, 31, 32, 33, 47, 48, 49)):
        for case in (MatMulId, MatLaneId):
            cases.append(case(kind, ops.ROWS, 256, Equal((256,) * 4), rows, 4))
    for rows in (1, 5, 64, 300):
        for kind, side, n, n_expert in (("iq3_s", 512, 128, 512), ("q4_0", 128, 256, 1024)):
            cases.append(MatMulId(kind, ops.ROWS, side, Equal((n,) * n_expert), rows, 10))
    cases += [MatMulId("f16", ops.ROWS, k, (8,), 16, 1) for k in (1, 63, 65)]
    cases.append(MatMulId("mxfp4", ops.ROWS, 2880, Equal((2880,) * 8), 8, 2, pieces=2))  # gpt-oss
    qwen3_30b = Equal((768,) * 128)
    cases += [MatVecId("q4_0", ops.ROWS, 2048, qwen3_30b, rows, 8) for rows in (1, 4)]
    for rows in (16, 32, 64):  # above F16's maximum
        cases.append(MatMulId("q4_k", ops.ROWS, 2048, Equal((512,) * 16), rows, 4, span=1e5))
        cases.append(MatMulId("q8_0", ops.ROWS, 2048, Equal((512,) * 8), rows, 2, span=1e5))
        cases.append(MatLaneId("q8_0", ops.ROWS, 2048, Equal((512,) * 8), rows, 2, span=1e5))
    cases += [
        AddId(Equal((n,) * n_expert), used, rows, ragged)
        for n, n_expert, used, rows in product((32, 129), (4, 8), (1, 2, 4), (1, 32, 129))
        for ragged in (False, True)
    ]
    for n_expert, used in TOPK:
        for kind, select, norm_w, rows in product(GATINGS, (False, True), (False, True), (1, 22)):
            cases.append(MoeTopk(n_expert, used, rows, 257, gating=Gating(kind, norm_w, 1.5), select=select))
    return cases


def attention() -> list[Case]:
    cases: list[Case] = [KvStore(kind, 96, 9, ((0, 0, 9),)) for kind in ops.CACHE_TYPES]
    for i, (head_k, head_v) in enumerate(
        ((72, 72), (192, 128), (320, 256), (576, 512), (128, 128), (64, 64))
    ):
        kind = "f16" if head_k % 32 else ops.CACHE_TYPES[i % len(ops.CACHE_TYPES)]
        how: dict[str, Any] = {"softcap": 10.0 if head_k == 128 else 0.0, "sinks": i % 2 == 1}
        for group in (16, 20, 32) if head_k <= 128 else (4,):
            shape = group, 1, head_k, head_v
            decode = ((0, 1023, 1), (2, 511, 1), (1, 112, 1))
            cases.append(AttnDecode(decode, *shape, None, kind, kind, **how))
            prefill = ((1, 437, 75 if head_k <= 128 else 3), (0, 109, 3), (2, 0, 1))
            cases.append(AttnPrefill(prefill, *shape, 2, kind, kind, **how))
    return cases


def recurrent() -> list[Case]:
    cases: list[Case] = []
    for width, d_conv, n_seqs in product((1024, 1536, 2048), (3, 4, 9), (1, 4)):
        for rows in (1, d_conv + 1, 64):
            runs = tuple((3 * (i % 2), rows, 2 * i, 2 * i + i % 2) for i in range(n_seqs))
            cases.append(SsmConv(width, d_conv, runs, 0))
    cases += [SsmConv(3328, 4, ((9, 512, 0, 0),), 0), SsmConv(8192, 4, ((9, 256, 0, 1),), 0)]
    shapes = [(32, 128, 1, 1, 1), (32, 16, 1, 1, 1), (16, 64, 1, 2, 1), (4, 64, 4, 1, 1), (4, 64, 4, 2, 1)]
    shapes += [(8, 32, 4, 2, 2), *((4, 64, rows, 1, 1) for rows in (33, 64, 65, 100, 127, 200, 256))]
    for (n_k, size, rows, n_seqs, repeat), kda in product(shapes, (False, True)):
        runs = tuple((5, rows, 2 * i, 2 * i + 1) for i in range(n_seqs))
        shape: Any = (n_k, size, repeat, runs, 0, kda, True, 0, -20.0 if rows < 50 else -2.0)
        cases += [DeltaNet(*shape), DeltaScan(*shape)]
    return cases


def wide() -> list[Case]:
    return [*matrices(), *experts(), *attention(), *recurrent()]
