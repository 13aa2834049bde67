from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, ClassVar

import numpy as np

from vkbackend import ops, shaderlib, twins
from vkbackend.formats import block_of
from vkbackend.ops import Recorder
from vkbackend.ops.moe import GATINGS, UNNORMED, Gating
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor, Views, operand, output, uniform, weights

SOFTMAX, UNSCALED = Gating(), Gating(norm_w=False)


@dataclass(frozen=True)
class MoeLogits(Case):
    """Magnitudes differ so much that another order of summation or a fused multiply-add changes the result.
    If `near` is set, all experts have equal weights, but one bit is inverted in each expert."""

    tolerance: ClassVar[float] = 0.0
    n_embd: int = 64
    n_experts: int = 8
    rows: int = 1
    near: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        w = rng.uniform(-1, 1, (self.n_experts, self.n_embd)).astype(np.float32)
        if self.near:
            w[:] = w[0]
            changed = rng.integers(0, self.n_embd, self.n_experts)
            w.view(np.uint32)[np.arange(self.n_experts), changed] ^= 1
        shape = (self.rows, self.n_embd)
        h = (np.exp2(rng.uniform(-12, 8, shape)) * rng.choice([-1, 1], shape)).astype(np.float32)
        tensors = {
            "h": Tensor(shape, "f32", h),
            "w_norm": uniform(rng, self.n_embd),
            "w": Tensor(w.shape, "f32", w),
            "logits": output(self.rows, self.n_experts),
        }

        def record(r: Recorder, v: Views) -> None:
            r.moe_logits(v["h"], v["w_norm"], v["w"], v["logits"])

        return Setup(tensors, record)


@dataclass(frozen=True)
class MoeTopk(Case):
    """Logits have `values` different values, with zeros of both signs. If `nan` is set, every second logit in
    row 0 and all logits in the last row are NaN."""

    exact: ClassVar[tuple[str, ...]] = ("ids", "weights")
    any_nan: ClassVar[bool] = True
    n_experts: int = 8
    n_used: int = 2
    rows: int = 3
    n_embd: int = 64
    values: int = 1 << 20
    gating: Gating = SOFTMAX
    bias: bool = False
    select: bool = False
    gain: bool = False
    nan: bool = False
    eps: float = 1e-6
    given: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        shape = (self.rows, self.n_experts)
        logits = (rng.integers(0, self.values, shape) - self.values // 2) * (8 / self.values)
        logits = logits.astype(np.float32)
        logits[(logits == 0) & (rng.random(shape) < 0.5)] = -0.0
        if self.nan:
            logits[0, ::2] = np.nan
            logits[-1] = np.nan
        tensors = {
            "logits": Tensor(shape, "f32", logits),
            "h": uniform(rng, self.rows, self.n_embd, span=3.0),
            "ids": output(self.rows, self.n_used, dtype="u32"),
            "weights": output(self.rows, self.n_used),
        }
        vectors = [name for name in ("bias", "select", "gain") if getattr(self, name)]
        tensors |= {name: uniform(rng, self.n_experts) for name in vectors}
        if self.given:
            vectors.append("given")
            ids = np.stack([rng.permutation(self.n_experts)[: self.n_used] for _ in range(self.rows)])
            tensors["given"] = Tensor(ids.shape, "f32", ids.astype(np.float32))

        def record(r: Recorder, v: Views) -> None:
            optional = {name: v[name] for name in vectors}
            args = v["logits"], v["h"], v["ids"], v["weights"]
            r.moe_topk(*args, self.gating, eps=self.eps, **optional)

        return Setup(tensors, record)


@dataclass(frozen=True)
class MatVecId(Case):
    """Expert i has `widths[i]` columns, and the experts are in `pieces` bindings. Rows of x or y have room
    for the widest expert plus `pad` values. Unused values of x are NaN, and unused values of y must stay
    NaN."""

    op: ClassVar[ops.ExpertsOp] = ops.EXPERTS_OPS["mat_vec_id"]
    tolerance: ClassVar[float] = 1e-9
    type: str = "f32"
    axis: int = ops.ROWS
    side: int = 64
    widths: tuple[int, ...] = (32, 32, 32)
    rows: int = 1
    used: int = 2
    x_per_used: bool = False
    pad: int = 0
    pieces: int = 1
    tile: int = 0  # Pairs per tile. If 0, pairs are not sorted by expert.
    span: float = 1.0

    @property
    def needs(self) -> tuple[str, ...]:
        return self.op.needs

    def setup(self, rng: np.random.Generator) -> Setup:
        n_experts = len(self.widths)
        starts = np.concatenate([[0], np.cumsum(self.widths)]).astype(np.uint32)
        ids = np.stack([rng.permutation(n_experts)[: self.used] for _ in range(self.rows)]).astype(np.uint32)
        ragged = max(self.widths) + self.pad
        x_stride, y_stride = (self.side, ragged) if self.axis == ops.ROWS else (ragged, self.side)
        x = rng.uniform(-self.span, self.span, (self.rows, self.used, x_stride)).astype(np.float32)
        if not self.x_per_used:
            x = x[:, 0]
        if self.axis == ops.COLUMNS and self.x_per_used:
            x[np.arange(ragged) >= np.array(self.widths)[ids][..., None]] = np.nan
        tensors = {
            "x": operand(x, self.op.x_type),
            "ids": Tensor(ids.shape, "u32", ids),
            "starts": Tensor(starts.shape, "u32", starts),
            "y": output(self.rows, self.used, y_stride),
        }
        bounds = np.linspace(0, n_experts, self.pieces + 1).astype(int).tolist()
        for i, (first, end) in enumerate(pairwise(bounds)):
            columns = int(starts[end] - starts[first])
            shape = (columns, self.side) if self.axis == ops.ROWS else (self.side, columns)
            tensors[f"w{i}"] = weights(rng, self.type, *shape)

        if self.tile:
            tensors |= _grouped(ids.reshape(-1), n_experts, self.tile)

        def record(r: Recorder, v: Views) -> None:
            for i, (first, end) in enumerate(pairwise(bounds)):
                count = end - first if self.pieces > 1 else None
                where: dict[str, Any] = {"axis": self.axis, "first": first, "count": count}
                pairs = ops.Groups(v["order"], v["tiles"], self.tile) if self.tile else v["ids"]
                self.op(r, v[f"w{i}"], v["x"], pairs, v["starts"], v["y"], **where)

        return Setup(tensors, record)


def _grouped(ids: np.ndarray, n_experts: int, tile: int) -> dict[str, Tensor]:
    n_tiles = ops.tile_count(len(ids), n_experts, tile)
    order, tiles = np.zeros(len(ids), np.uint32), np.zeros((n_tiles, 3), np.uint32)
    twins.moe.moe_group(ids, order, tiles, n_pairs=len(ids), n_experts=n_experts, tile=tile, n_tiles=n_tiles)
    return {"order": Tensor(order.shape, "u32", order), "tiles": Tensor(tiles.shape, "u32", tiles)}


@dataclass(frozen=True)
class MatMulId(MatVecId):
    op = ops.EXPERTS_OPS["mat_mul_id"]
    tile: int = 16


@dataclass(frozen=True)
class MatMulIdCoop(MatVecId):
    """If `axis` is COLUMNS, all widths must be equal, and `pad` must be 0."""

    op = ops.EXPERTS_OPS["mat_mul_id_coop"]
    tolerance = 1e-6
    tile: int = 32


@dataclass(frozen=True)
class MatLaneId(MatVecId):
    """A tile has `tile` pairs (row, expert). If `tile` is 0, the op computes each pair alone."""

    op = ops.EXPERTS_OPS["mat_lane_id"]
    tile: int = 8


def some_of(kind: str) -> list[Case]:
    block = block_of(kind)[0]
    side, widths = 3 * block if block > 1 else 31, (3, 0, 2)
    return [
        MatVecId(kind, side=side, widths=widths, used=3),
        MatMulId(kind, side=side, widths=widths, rows=3),
        MatLaneId(kind, side=side, widths=widths, rows=3, tile=2),
    ]


def some_of_gpus(kind: str) -> list[Case]:
    block = block_of(kind)[0]
    side, width = 3 * block if block > 1 else 31, max(block, 5)
    down: dict[str, Any] = {"axis": ops.COLUMNS, "x_per_used": True}
    return [
        MatMulIdCoop(kind, side=side, widths=(3, 0, 2), rows=3),
        MatMulIdCoop(kind, side=7, widths=(width,) * 3, rows=3, **down),
    ]


def bench(kind: str) -> list[Case]:
    widths = (512,) * 8
    cases: list[Case] = [MatVecId(kind, side=1024, widths=widths, rows=rows) for rows in (1, 64)]
    cases += [MatMulId(kind, side=1024, widths=widths, rows=64)]
    cases += [MatMulIdCoop(kind, side=1024, widths=widths, rows=64)]
    return [
        *cases,
        *(MatLaneId(kind, side=1024, widths=widths, rows=r, tile=t) for r, t in ((1, 0), (64, 8))),
    ]


def quick() -> list[Case]:
    down: dict[str, Any] = {"axis": ops.COLUMNS, "x_per_used": True}
    return [
        MoeLogits(1, 1),
        MoeLogits(31, 5, 3),
        MoeLogits(2051, 60, 2),
        MoeLogits(288, 8, 9, near=True),
        MoeTopk(),
        MoeTopk(8, 2, gating=Gating(norm_w=False), eps=UNNORMED),
        MoeTopk(1, 1, rows=2, gating=UNSCALED),
        MoeTopk(31, 8, n_embd=31, values=3, gating=Gating(scale=2.5, logit_scale=0.25), gain=True),
        MoeTopk(128, 8, n_embd=257, values=16, gating=UNSCALED, nan=True),
        MoeTopk(1023, 32, rows=2),
        MoeTopk(512, 10, 2, gating=Gating("sigmoid", n_group=8, n_group_used=3, scale=2.5), select=True),
        MoeTopk(288, 8, gating=Gating("sigmoid"), select=True, values=4),
        MoeTopk(160, 8, gating=Gating("sigmoid", norm_w=False), nan=True),
        MoeTopk(32, 4, gating=Gating("softmax_weight"), bias=True, nan=True),
        MoeTopk(16, 2, rows=9, values=401, gating=Gating("sparse_mixer"), bias=True),
        MoeTopk(256, 6, rows=9, gating=Gating("root_softplus", scale=1.5), select=True),
        MoeTopk(40, 6, rows=5, gating=Gating("root_softplus", scale=1.5), given=True, nan=True),
        MoeTopk(8, 2, rows=5, gating=Gating(norm_w=False, softcap=3.0)),
        MoeTopk(12, 5, rows=3, gating=Gating(scale=0.05, per_id=3)),
        MatVecId("f32", side=7, widths=(3, 0, 5, 1, 4), rows=3),
        MatVecId("f16", side=33, widths=(5, 3, 1), rows=9, used=3, pad=2, x_per_used=True),
        MatVecId("q8_0", side=96, widths=(17, 32, 0, 40), rows=2, pieces=2),
        MatVecId("q4_0", side=32, widths=(127, 1), used=1),
        MatVecId("f32", side=5, widths=(9, 0, 2, 4, 1), rows=3, used=3, pieces=2, **down),
        MatVecId("f16", side=3, widths=(9, 3, 6), rows=2, used=3, pad=1, **down),
        MatVecId("q8_0", side=33, widths=(32, 0, 96, 64), rows=2, used=4, pieces=2, **down),
        MatVecId("q4_0", side=65, widths=(64, 32, 128), used=1, **down),
        MatMulId("f16", side=33, widths=(5, 3, 1), rows=40, used=2, pad=2),
        MatMulId("q8_0", side=65, widths=(32, 0, 96, 64), rows=9, used=4, pieces=2, tile=24, **down),
        MatMulId("q4_0", side=96, widths=(67, 3), rows=70, used=1, tile=32),
        MatMulIdCoop("f16", side=33, widths=(5, 3, 1), rows=40, used=2, pad=2, tile=16),
        MatMulIdCoop("q8_0", side=65, widths=(32,) * 4, rows=9, used=4, pieces=2, **down),
        MatMulIdCoop("q4_0", side=96, widths=(67, 3), rows=70, used=1, span=1e6),
        MatLaneId("f32", side=7, widths=(3, 0, 5, 1, 40), rows=3, pieces=2, tile=0),
        MatLaneId("f16", side=67, widths=(5, 3, 1), rows=21, used=2, pad=2, x_per_used=True),
        MatLaneId("q8_0", side=33, widths=(32, 0, 96, 64), rows=9, used=4, pieces=2, **down),
        MatLaneId("q4_0", side=65, widths=(64, 32, 128), used=1, tile=0, **down),
    ]


def wide() -> list[Case]:
    cases: list[Case] = []
    for experts in (8, 60, 128, 512, 1024):
        cases += [MoeLogits(2048, experts, rows, near) for rows in (1, 4, 17) for near in (False, True)]
        cases += [MoeTopk(experts, used, 5, values=v) for used in (1, 4, 8) for v in (2, 50, 1 << 20)]
    for experts, used in (
        (8, 4),
        (31, 8),
        (32, 8),
        (71, 8),
        (128, 32),
        (160, 32),
        (256, 6),
        (288, 8),
        (512, 10),
    ):
        for kind, select, bias, norm_w in product(GATINGS, (False, True), (False, True), (False, True)):
            gating = Gating(kind, norm_w, 2.5)
            for values in (3, 1 << 20):
                cases.append(MoeTopk(experts, used, 9, 257, values, gating, bias, select, gain=bias))
    for groups, used_groups in ((2, 1), (4, 2), (8, 3), (16, 15), (64, 9)):
        gating = Gating("sigmoid", n_group=groups, n_group_used=used_groups)
        cases += [
            MoeTopk(256, 4, 9, values=v, gating=gating, select=s) for v in (5, 1 << 20) for s in (False, True)
        ]
    for kind in shaderlib.weight_types():
        unit, side, counts = 32, 288, [(12,) * 8, (11, 12, 13, 0), tuple(range(1, 20))]
        if (block := block_of(kind)[0]) > unit:
            unit, side, counts = block, 3 * block, [(2,) * 8, (1, 0, 3, 2)]
        for rows in (1, 2, 40):
            for widths in (tuple(unit * n for n in count) for count in counts):
                gate = MatVecId(kind, ops.ROWS, side, widths, rows, 4)
                for case in (MatMulId, MatLaneId):
                    cases += [case(kind, ops.ROWS, side, widths, rows, 4)]
                    cases += [case(kind, ops.COLUMNS, 33, widths, rows, 4, x_per_used=True, pieces=2)]
                cases += [gate, MatVecId(kind, ops.COLUMNS, 33, widths, rows, 4, x_per_used=True, pieces=2)]
    return cases
