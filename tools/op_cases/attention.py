from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from vkbackend import ops
from vkbackend.formats import block_of
from vkbackend.limits import Limits
from vkbackend.ops import Recorder
from vkbackend.recording import Dispatch
from vkbackend.step import Mix
from vkbackend.tools.op_cases.setup import (
    Case,
    RunSpec,
    Setup,
    Tensor,
    Views,
    cache,
    cell_table,
    n_rows_of,
    output,
    split_parts,
    step_of,
    uniform,
)


@dataclass(frozen=True)
class AttnDecode(Case):
    """Cache cells are scattered, and the last row belongs to no run. If `n_splits` is None, the op combines
    its splits. With `run_rows` above 1, a workgroup computes several rows of a run. With `most`,
    only runs of one row decode."""

    tolerance: ClassVar[float] = 1e-9
    runs: tuple[RunSpec, ...] = ((0, 0, 1),)
    n_heads: int = 2
    n_kv: int = 1
    head_k: int = 16
    head_v: int = 16
    n_splits: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    group: int | None = None
    q_first: int = 0
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    ring: int | None = None
    run_rows: int = 1
    first: int = 0
    slopes: bool = False
    most: int = 0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = n_rows_of(self.runs) + 1
        tensors = _attention_tensors(self, rng, rows)
        splits = (self.n_splits, self.head_v + 2) if self.n_splits else (self.head_v,)
        tensors["y"] = output(rows, self.n_heads, *splits)
        if self.sinks:
            tensors["sinks"] = uniform(rng, self.n_heads, span=8.0)
        if self.slopes:
            tensors["slopes"] = uniform(rng, self.n_heads)

        def record(r: Recorder, v: Views) -> None:
            args = [v[name] for name in ("q", "k", "v", "cells", "y", "step")]
            attend = r.attn_decode_coop if self.needs else r.attn_decode
            given = {"run_rows": self.run_rows, "first": self.first, **_attention_options(self)}
            given |= {"most": self.most} if self.most else {}
            attend(*args, sinks=v.get("sinks"), slopes=v.get("slopes"), **given)

        return Setup(tensors, record, step_of(rng, self.runs, mix=Mix.BOTH if self.most else Mix.DECODE))

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return split_parts(array, self.head_v) if self.n_splits else {name: array}


@dataclass(frozen=True)
class AttnDecodeCoop(AttnDecode):
    """AttnPrefillCoop's docstring derives the rounding errors. With one split, an error of the largest score
    changes all sums."""

    tolerance: ClassVar[float] = 4e-6

    @property
    def needs(self) -> tuple[str, ...]:
        return ops.OPS["attn_decode_coop"].needs

    def fits(self, limits: Limits) -> bool:
        group = self.group or self.n_heads // self.n_kv
        return ops.tile_of_units(limits, group, self.head_k, self.head_v, "attn_decode_coop") is not None


@dataclass(frozen=True)
class AttnPrefill(Case):
    """Cache cells are scattered, and `pad` rows belong to no run. If `both` is set, attn_decode first
    computes the leading runs, which have one row. It must not write later rows. The heads are divided among
    `n_parts` dispatches."""

    tolerance: ClassVar[float] = 1e-9
    runs: tuple[RunSpec, ...] = ((0, 0, 5),)
    n_heads: int = 2
    n_kv: int = 1
    head_k: int = 16
    head_v: int = 16
    pad: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    group: int | None = None
    q_first: int = 0
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    ring: int | None = None
    both: bool = False
    n_parts: int = 1
    causal: bool = True
    slopes: bool = False
    later: int = 0  # Number of positions of each text after its run.
    begins: tuple[int, ...] = ()  # of the runs' windows
    sees_all: bool = False
    ends: tuple[int, ...] = ()  # of the runs, or 0
    most: int = 0

    @property
    def n_rows(self) -> int:
        return n_rows_of(self.runs) + self.pad

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = self.n_rows
        tensors = _attention_tensors(self, rng, rows)
        tensors["y"] = output(rows, self.n_heads, self.head_v)
        if self.sinks:
            tensors["sinks"] = uniform(rng, self.n_heads, span=8.0)
        if self.slopes:
            tensors["slopes"] = uniform(rng, self.n_heads)

        def record(r: Recorder, v: Views) -> None:
            q, k, c, cells, y, step = (v[name] for name in ("q", "k", "v", "cells", "y", "step"))
            how: dict[str, Any] = {"sinks": v.get("sinks"), **_attention_options(self)}
            if self.both:
                n = min(rows, len(self.runs) + 1)
                r.attn_decode(q.rows(0, n), k, c, cells, y.rows(0, n), step, **how)
            attend = r.attn_prefill_coop if self.needs else r.attn_prefill
            how |= {
                "causal": self.causal,
                "sees_end": bool(self.ends),
                "n_runs": len(self.runs) if self.begins else 0,
                "sees_all": self.sees_all,
            }
            if self.needs:
                how["most"] = self.most
            attend(q, k, c, cells, y, step, slopes=v.get("slopes"), **how)
            whole = r.recording.commands.pop()
            assert isinstance(whole, Dispatch)
            r.recording.commands += whole.parts(self.n_parts)

        mix, later = Mix.BOTH if self.both else Mix.PREFILL, None if self.causal else self.later
        reach: dict[str, Any] = {"begins": self.begins, "ends": self.ends}
        return Setup(tensors, record, step_of(rng, self.runs, mix=mix, later=later, **reach))


@dataclass(frozen=True)
class AttnPrefillCoop(AttnPrefill):
    """Rounding to F16 has a relative error u of 2^-11. Scores of about +-10 have an error of 10 u /
    sqrt(head_k), probabilities an error of u. The result's NMSE is 1e-7."""

    tolerance: ClassVar[float] = 1e-6

    @property
    def needs(self) -> tuple[str, ...]:
        return ops.OPS["attn_prefill_coop"].needs

    def fits(self, limits: Limits) -> bool:
        return ops.tile_of_units(limits, self.n_rows, self.head_k, self.head_v) is not None


def _attention_options(case: AttnDecode | AttnPrefill) -> dict[str, Any]:
    how = {name: getattr(case, name) for name in ("group", "q_first", "window", "chunk", "softcap")}
    return {"scale": case.head_k**-0.5, **how}


def _attention_tensors(
    case: AttnDecode | AttnPrefill, rng: np.random.Generator, rows: int
) -> dict[str, Tensor]:
    later = getattr(case, "later", 0)
    ends = getattr(case, "ends", ()) or (0,) * len(case.runs)
    held = tuple((s, at, max(n + later, end - at)) for (s, at, n), end in zip(case.runs, ends, strict=True))
    cells, n_cells = cell_table(rng, held, case.ring)
    stored, align = (held, case.window), 16 if case.needs else 4
    return {
        "q": uniform(
            rng, rows, case.n_heads, case.head_k, span=8.0
        ),  # Scores of about +-10 make the running maximum change.
        # Matrix units read caches 16 bytes at a time.
        "k": replace(cache(rng, case.type_k, cells, n_cells, case.n_kv * case.head_k, *stored), align=align),
        "v": replace(cache(rng, case.type_v, cells, n_cells, case.n_kv * case.head_v, *stored), align=align),
        "cells": cells,
    }


@dataclass(frozen=True)
class AttnCombine(Case):
    rows: int = 2
    n_heads: int = 3
    n_splits: int = 4
    head_v: int = 16
    sinks: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        part = rng.uniform(-1, 1, (self.rows, self.n_heads, self.n_splits, self.head_v + 2)).astype(
            np.float32
        )
        part[..., -2] = rng.uniform(-200, 200, part.shape[:-1])
        part[0, 0, 0, -2] = 200  # With this maximum, the sinks do not make every output underflow.
        part[..., -1] = rng.uniform(1, 50, part.shape[:-1])
        for empty in (part[:, :, 1:][:, :, -1:], part[self.rows - 1 :] if self.rows > 1 else part[:0]):
            empty[...] = 0
            empty[..., -2] = -1e30
        tensors = {"part": Tensor(part.shape, "f32", part), "y": output(self.rows, self.n_heads, self.head_v)}
        if self.sinks:
            tensors["sinks"] = uniform(rng, self.n_heads, span=200.0)
        return Setup(
            tensors,
            lambda r, v: r.attn_combine(v["part"], v["y"], sinks=v.get("sinks")),
        )


_RUNS = ((2, 30, 3), (0, 0, 1), (3, 95, 2))
_WINDOWS = ((0, 0, 5), (0, 5, 36), (0, 41, 17), (0, 58, 32))  # of an encoder's picture
_PICTURES = ((0, 12, 40), (1, 0, 9), (2, 33, 1), (3, 5, 20))
_DRAFTS = ((2, 27, 8), (0, 0, 3), (3, 94, 1), (1, 60, 6))  # runs that cross borders of cache blocks
_HEADS = (40, 64, 80, 96, 128, 192, 256, 320, 512, 576)
_KEYS, _GROUPS = (1, 31, 113, 512), (1, 4, 8, 12)


def _together(attend: type[AttnDecode]) -> list[Case]:
    """Return cases in which a workgroup computes several rows: 2, 4 or 8."""
    return [
        attend(_DRAFTS, 2, 2, 64, 64, 3, run_rows=8),
        attend(_DRAFTS, 4, 2, 32, 96, None, "q8_0", "q4_0", sinks=True, run_rows=5),
        attend(_DRAFTS, 8, 2, 128, 64, None, "bf16", "q8_0", softcap=4.0, run_rows=8),
        attend(_DRAFTS, 5, 2, 32, 32, 2, "q4_0", "f32", group=4, q_first=2, run_rows=8),
        attend(_DRAFTS, 3, 1, 80, 48, 2, "f32", "f16", window=5, run_rows=3),
        *([AttnDecode(_DRAFTS, 6, 3, 64, 64, 2, run_rows=8, slopes=True)] if attend is AttnDecode else []),
        attend(((1, 300, 7), (0, 62, 4)), 4, 2, 16, 16, 3, window=65, ring=3, run_rows=8),
        attend(((1, 300, 3), (0, 60, 8)), 4, 4, 16, 32, 3, chunk=63, sinks=False, run_rows=8),
    ]


def quick() -> list[Case]:
    return [
        AttnDecode(((0, 0, 1),), 1, 1, 8, 8),
        AttnDecode(_RUNS, 6, 2, 64, 64, n_splits=3),
        AttnDecode(((1, 300, 1),), 4, 1, 128, 128, n_splits=4),
        AttnDecode(((0, 63, 2),), 2, 2, 80, 40, 2, "f32", "f32"),
        AttnDecode(((0, 40, 1),), 1, 1, 576, 512, None, "f16", "f32"),
        AttnDecode(((0, 70, 1),), 2, 1, 16, 24, 2, "f32", "f16"),
        AttnDecode(_RUNS, 4, 2, 32, 96, None, "q8_0", "q4_0", sinks=True),
        AttnDecode(_RUNS, 12, 1, 32, 32, None, "bf16", "q8_0", softcap=4.0),
        AttnDecode(_RUNS, 5, 2, 32, 32, None, "q4_0", "bf16", group=4, q_first=2),
        AttnDecode(_RUNS, 6, 3, 32, 32, None, "q5_0", "q5_1"),
        AttnDecode(_RUNS, 4, 2, 64, 128, 2, "q4_1", "iq4_nl"),
        AttnDecode(_RUNS, 5, 3, 8, 8, n_splits=2, group=3, q_first=2),
        AttnDecode(_RUNS, 4, 2, 64, 64, n_splits=2, window=5, softcap=4.0),
        AttnDecode(((1, 300, 1),), 2, 1, 16, 16, n_splits=3, window=65, ring=3),
        AttnDecode(((1, 300, 1), (0, 63, 1)), 2, 1, 16, 16, n_splits=3, chunk=64),
        AttnDecode(((0, 1, 3), (1, 70, 1)), 4, 2, 32, 32, first=1),
        AttnDecode(((1, 40, 1), (0, 90, 2)), 2, 1, 64, 64, n_splits=3, first=20),
        AttnDecode(_RUNS, 5, 2, 40, 40, 3, group=4, q_first=2, softcap=4.0, slopes=True),
        AttnDecode(((1, 300, 1),), 3, 3, 64, 64, None, "q8_0", "q8_0", window=70, slopes=True),
        AttnDecodeCoop(_RUNS, 8, 2, 64, 64, n_splits=3),
        AttnDecodeCoop(((1, 300, 1),), 8, 1, 128, 128, n_splits=4),
        AttnDecodeCoop(((1, 300, 1),), 16, 2, 128, 128, 4, "q8_0", "q8_0"),
        AttnDecodeCoop(_RUNS, 20, 1, 64, 64, None, "q8_0", "f16", sinks=True),
        AttnDecodeCoop(_RUNS, 8, 2, 32, 96, None, "q8_0", "q4_0", sinks=True),
        AttnDecodeCoop(_RUNS, 4, 1, 128, 64, None, "f32", "bf16", softcap=4.0),
        AttnDecodeCoop(_RUNS, 5, 2, 32, 32, None, "q4_0", "f16", group=4, q_first=2),
        AttnDecodeCoop(_RUNS, 9, 3, 64, 16, 2, "bf16", "f32", group=5, q_first=3),
        AttnDecodeCoop(_RUNS, 8, 2, 64, 64, 2, "q5_1", "iq4_nl"),
        AttnDecodeCoop(_RUNS, 4, 1, 64, 64, 2, "f16", "q8_0", window=5, softcap=4.0),
        AttnDecodeCoop(((1, 300, 1),), 4, 1, 16, 16, n_splits=3, window=65, ring=3),
        AttnDecodeCoop(((1, 300, 1), (0, 63, 1)), 4, 1, 16, 16, n_splits=3, chunk=64),
        AttnDecodeCoop(((0, 1, 3), (1, 70, 1)), 4, 1, 64, 64, 2, first=1),
        AttnDecodeCoop(((1, 70, 1), (0, 3, 2)), 20, 1, 576, 512, 2),
        AttnDecodeCoop(_RUNS, 5, 1, 288, 256, None, "q8_0", "q4_0", sinks=True),
        AttnDecodeCoop(((1, 25, 1), (0, 60, 1), (3, 9, 1), (2, 3, 4)), 4, 1, 32, 32, 2, most=26),
        AttnDecodeCoop(_DRAFTS, 8, 2, 512, 512, None, "f32", "f16", window=40, softcap=4.0, run_rows=8),
        *_together(AttnDecode),
        *_together(AttnDecodeCoop),
        AttnCombine(),
        AttnCombine(3, 2, 1, 64, sinks=True),
        AttnCombine(2, 1, 31, 576),
        AttnCombine(1, 2, 64, 40),
        AttnPrefill(((0, 0, 1),), 1, 1, 8, 8),
        AttnPrefill(((1, 0, 17), *_RUNS[:2], (3, 40, 33)), 4, 2, 64, 64, pad=10),
        AttnPrefill(((0, 5, 70),), 3, 1, 128, 128),
        AttnPrefill(((0, 0, 9),), 1, 1, 576, 512, 1, "f16", "f32"),
        AttnPrefill(((0, 60, 9),), 2, 2, 80, 40, 7, "f32", "f32"),
        AttnPrefill(((0, 60, 9),), 2, 1, 32, 96, 7, "q8_0", "q4_0"),
        AttnPrefill(((0, 30, 9),), 2, 1, 32, 32, 7, "bf16", "q8_0"),
        AttnPrefill(((0, 30, 9),), 2, 1, 32, 32, 7, "q4_0", "bf16"),
        AttnPrefill(((0, 30, 9),), 3, 3, 32, 96, 7, "q5_0", "iq4_nl"),
        AttnPrefill(((0, 30, 9),), 2, 2, 64, 64, 7, "q5_1", "q4_1"),
        AttnPrefill(((0, 31, 10),), 2, 1, 256, 256, 0, "f32", "f16"),
        AttnPrefill(_RUNS, 7, 3, 8, 8, group=4, q_first=3),
        AttnPrefill(((0, 33, 40), *_RUNS[:1]), 2, 1, 64, 64, window=20, softcap=4.0, sinks=True),
        AttnPrefill(((0, 133, 40), (1, 60, 11)), 2, 2, 16, 16, window=25, ring=2),
        AttnPrefill(((0, 133, 40), (1, 60, 11)), 2, 2, 16, 16, window=25, chunk=25, ring=2),
        AttnPrefill(((2, 30, 1), (0, 0, 1), (3, 95, 21), (1, 4, 1)), 4, 2, 64, 64, 3, sinks=True, both=True),
        AttnPrefill(((1, 64, 1), (0, 31, 10)), 2, 1, 16, 24, 1, "f32", "f16", window=20, both=True),
        AttnPrefill(_RUNS, 7, 3, 8, 8, 3, group=4, q_first=3, sinks=True, n_parts=3),
        AttnPrefill(((1, 64, 1), (0, 31, 10)), 2, 1, 16, 24, 1, both=True, n_parts=9),
        AttnPrefill(((2, 0, 1), (0, 0, 37), (1, 0, 70)), 3, 1, 32, 32, 5, causal=False),
        AttnPrefill(((0, 0, 90), (1, 0, 7)), 2, 2, 64, 64, window=21, causal=False),
        AttnPrefill(((0, 0, 41),), 3, 3, 24, 24, 1, causal=False, slopes=True, n_parts=2),
        AttnPrefill(((0, 40, 9), (1, 0, 3)), 2, 1, 32, 32, 2, causal=False, later=33),
        AttnPrefill(_WINDOWS, 2, 2, 72, 72, 3, "f32", "f32", causal=False, begins=(0, 5, 41, 58)),
        AttnPrefill(_WINDOWS, 2, 2, 16, 16, 3, "f32", "f32", begins=(0, 5, 41, 58), sees_all=True),
        AttnPrefill(_PICTURES, 2, 1, 32, 32, 2, ends=(52, 0, 0, 34)),
        AttnPrefill(_PICTURES, 2, 1, 32, 32, 2, ends=(52, 0, 0, 34), window=20, n_parts=2),
        AttnPrefill(((2, 40, 1), (0, 21, 30)), 2, 1, 32, 32, ends=(0, 60), both=True),
        AttnPrefillCoop(_WINDOWS, 2, 2, 64, 64, 3, "f32", "f32", causal=False, begins=(0, 5, 41, 58)),
        AttnPrefillCoop(_PICTURES, 2, 1, 32, 32, 2, ends=(52, 0, 0, 34), window=20),
        AttnPrefillCoop(((0, 0, 1),), 1, 1, 16, 16),
        AttnPrefillCoop(((2, 0, 1), (0, 0, 37), (1, 0, 70)), 3, 1, 32, 32, 5, causal=False, slopes=True),
        AttnPrefillCoop(((0, 0, 90), (1, 0, 7)), 2, 2, 64, 64, window=21, causal=False),
        AttnPrefillCoop(((1, 0, 17), *_RUNS[:2], (3, 40, 33)), 4, 2, 64, 64, pad=10),
        AttnPrefillCoop(((0, 5, 70),), 3, 1, 128, 128),
        AttnPrefillCoop(((0, 60, 9),), 2, 1, 32, 96, 7, "q8_0", "q4_0"),
        AttnPrefillCoop(((2, 30, 9), (0, 0, 4), (1, 90, 5)), 2, 1, 32, 32, 2, most=35),
        AttnPrefillCoop(((0, 31, 40),), 2, 1, 256, 64, 0, "f32", "bf16"),
        AttnPrefillCoop(((0, 31, 40),), 2, 1, 64, 64, 0, "q5_0", "q4_1"),
        AttnPrefillCoop(_RUNS, 7, 3, 32, 16, group=4, q_first=3),
        AttnPrefillCoop(((0, 33, 40), *_RUNS[:1]), 2, 1, 64, 64, window=20, softcap=4.0, sinks=True),
        AttnPrefillCoop(((0, 133, 40), (1, 60, 11)), 2, 2, 16, 16, window=25, ring=2),
        AttnPrefillCoop(((0, 133, 40), (1, 60, 11)), 2, 2, 16, 16, window=25, chunk=25, ring=2),
        AttnPrefillCoop(((2, 30, 1), (0, 0, 1), (3, 95, 21)), 4, 2, 64, 64, 3, sinks=True, both=True),
        AttnPrefillCoop(((0, 31, 40), *_RUNS[:1]), 3, 1, 576, 512, 2),
        AttnPrefillCoop(((0, 60, 9), (1, 0, 37)), 2, 1, 320, 256, 3, "q8_0", "q8_0", sinks=True),
        AttnPrefillCoop(_WINDOWS, 2, 2, 512, 512, 3, "q4_0", "f32", causal=False, begins=(0, 5, 41, 58)),
        AttnPrefillCoop(_RUNS, 7, 3, 32, 16, 3, group=4, q_first=3, sinks=True, n_parts=3),
    ]


def wide() -> list[Case]:
    """Combine every head size with every number of keys, and vary the other options from case to case. Add
    every pair of cache types at head size 32."""
    cases: list[Case] = []
    for i, head in enumerate(_HEADS):
        types = [t for t in ops.CACHE_TYPES if head % block_of(t)[0] == 0]
        for j, keys in enumerate(_KEYS):
            n = i + 3 * j
            group = _GROUPS[(i + j) % 4]
            kinds = types[n % len(types)], types[(n // 2) % len(types)]
            how: dict[str, Any] = {"window": (0, 50)[n % 2], "softcap": (0.0, 0.0, 5.0)[n % 3]}
            shape = 2 * group, 2, head, head
            n_splits = (None, 1, 3)[j % 3]
            sinks = n % 2 == 1
            rows = ((1, keys - 1, 1),) if j % 2 else ((0, keys - 1, 3), (1, keys - 1, 1))
            decode_sinks = sinks and n_splits is None
            for decode in (AttnDecode, AttnDecodeCoop)[: 1 + (head % 16 == 0)]:
                cases.append(decode(rows, *shape, n_splits, *kinds, **how, sinks=decode_sinks))
            runs = ((1, keys - 1, 32 if head <= 256 else 3), (0, 0, 2))
            for op in (AttnPrefill, AttnPrefillCoop)[: 1 + (head % 16 == 0)]:
                cases.append(op(runs, *shape, j, *kinds, **how, sinks=sinks))
    for type_k in ops.CACHE_TYPES:
        for type_v in ops.CACHE_TYPES:
            cases.append(AttnDecode(_RUNS, 4, 2, 32, 32, None, type_k, type_v))
            cases.append(AttnPrefill(_RUNS, 4, 2, 32, 32, 1, type_k, type_v))
    return cases


def bench() -> list[Case]:
    """Return the attention ops of an 8B model's layer at 4,096 positions."""
    cases: list[Case] = [
        AttnDecode(((0, 4095, 1),), 32, 8, 128, 128, None, kind, kind) for kind in ops.CACHE_TYPES[4:]
    ]
    for kind in ("f16", "q8_0"):
        for heads in (32, 64):
            for attend in (AttnDecode, AttnDecodeCoop):
                cases.append(attend(((0, 4095, 1),), heads, 8, 128, 128, None, kind, kind))
        for attend in (AttnDecode, AttnDecodeCoop):
            eight = attend(((0, 4080, 8),), 32, 8, 128, 128, None, kind, kind)
            cases += [eight, replace(eight, run_rows=8)]
        cases += [
            replace(AttnDecode(((0, 4080, 8),), 8, 8, 128, 128, None, kind, kind), run_rows=n) for n in (1, 8)
        ]
        for op in (AttnPrefill, AttnPrefillCoop):
            cases.append(op(((0, 3968, 128),), 32, 8, 128, 128, 0, kind, kind))
    for heads, n_kv, head_k, head_v in ((128, 1, 576, 512), (16, 2, 512, 512)):  # DeepSeek V3, Gemma 4
        for attend in (AttnDecode, AttnDecodeCoop):
            cases.append(attend(((0, 4095, 1),), heads, n_kv, head_k, head_v))
        for op in (AttnPrefill, AttnPrefillCoop):
            cases.append(op(((0, 3968, 128),), heads, n_kv, head_k, head_v))
    return cases
