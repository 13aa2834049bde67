"""Attention ops over the paged KV cache (kv_cache.py)."""

from __future__ import annotations

import math
from typing import Required, TypedDict, Unpack

from vkbackend.buffer import View
from vkbackend.formats import block_of
from vkbackend.ops.attention_tiles import (
    CELL_BLOCK,
    MAX_SPLITS,
    Tile,
    rows_cut,
    tile_of_rows,
    tile_of_units,
    units_cut,
)
from vkbackend.ops.kv_cache import CACHE_TYPES
from vkbackend.ops.spec import SPECS
from vkbackend.ops.target import Target, rows_of
from vkbackend.recording import FIRST_HEAD

MAX_HEAD = 576
SEES_END, SEES_ALL = 2, 3  # values of `causal` (shaders/lib/query_tiles.glsl)


class AttentionKeywords(TypedDict, total=False):
    """Keywords that `attn_decode` explains."""

    scale: Required[float]
    group: int | None
    q_first: int
    window: int
    chunk: int
    softcap: float
    sinks: View | None
    slopes: View | None


class RunKeywords(AttentionKeywords, total=False):
    """Keywords that `attn_prefill` explains."""

    causal: bool
    sees_end: bool
    sees_all: bool
    n_runs: int


def _check_per_head(values: View | None, n_heads: int) -> None:
    assert values is None or (values.dtype == "f32" and values.shape == (n_heads,)), (values, n_heads)


def check_aligned(*caches: View) -> None:
    """Shaders for matrix units read 16 bytes at once, so F16 caches must begin at multiples of 16 bytes."""
    for cache in caches:
        assert cache.dtype != "f16" or cache.offset % 16 == 0, cache


def _group(q: View, k: View) -> int:
    n_heads, n_kv = q.shape[1], math.prod(k.shape[1:]) // q.shape[2]
    assert n_heads % n_kv == 0, f"{n_heads} q heads are not a multiple of {n_kv} KV heads"
    return n_heads // n_kv


def attn_push(
    q: View, k: View, v: View, cells: View, head_v: int, group: int, q_first: int
) -> tuple[dict[str, int | float], int, dict[str, int]]:
    """Check the views. Return (push constants, head_k, specialization constants of the cache types)."""
    n_rows, n_heads, head_k = q.shape
    n_kv = math.prod(k.shape[1:]) // head_k
    assert head_k % 8 == 0 and head_v % 8 == 0 and max(head_k, head_v) <= MAX_HEAD, (head_k, head_v)
    assert math.prod(k.shape[1:]) == n_kv * head_k and math.prod(v.shape[1:]) == n_kv * head_v, (k, v)
    assert 0 <= q_first < group and (q_first + n_heads - 1) // group < n_kv, (q_first, group, n_heads, n_kv)
    assert k.shape[0] == v.shape[0] and k.shape[0] % CELL_BLOCK == 0 and cells.dtype == "u32", (k, v, cells)
    push: dict[str, int | float] = {"n_heads": n_heads, "n_kv": n_kv, "group": group, "q_first": q_first}
    types = {"K_TYPE": CACHE_TYPES.index(k.dtype), "V_TYPE": CACHE_TYPES.index(v.dtype)}
    for head, cache in ((head_k, k), (head_v, v)):
        assert head % block_of(cache.dtype)[0] == 0, (
            f"heads of {head} are not a multiple of the {cache.dtype} block"
        )
    return {**push, "n_rows": n_rows, "blocks_per_slot": cells.shape[1]}, head_k, types


class AttentionOps(Target):
    def attn_decode(
        self,
        q: View,
        k: View,
        v: View,
        cells: View,
        part: View,
        step: View,
        *,
        run_rows: int = 1,
        first: int = 0,
        **how: Unpack[AttentionKeywords],
    ) -> None:
        """Compute attention of each row to positions `first`..pos of its slot, where pos is the row's
        position.

        Shapes: q [n_rows, n_heads, head_k], k [n_cells, n_kv * head_k], v [n_cells, n_kv * head_v]. The
        caches `k` and `v` have types in CACHE_TYPES. `part` f32 [n_rows, n_heads, head_v] is the result. If
        the keys are split, `part` is [n_rows, n_heads, n_splits, head_v + 2] for attn_combine. A split holds
        (sum of p * v, maximum score, sum of p) with p = exp(score - maximum).

        Head h reads KV head (q_first + h) / group (Ainslie et al. 2023). The default of `group` is n_heads /
        n_kv. A device that has only some q heads of a group must pass `group`. If `window` is set, a row
        attends to the last `window` positions, including its own. If `chunk` is set, a row attends only
        within its chunk of `chunk` positions (Llama 4). With `softcap` c, a score s becomes c * tanh(s / c).
        `sinks` f32 [n_heads] adds a logit per head to the softmax's denominator. If the keys are split, pass
        `sinks` to attn_combine. `slopes` f32 [n_heads] subtract slope * distance from each score (ALiBi;
        Press et al. 2022).

        `first` is less than CELL_BLOCK, and all rows are at positions from `first` on.

        `run_rows` is at least the largest number of rows of a run. If it is above 1, a workgroup reads K and
        V once for several rows. The result has the same bits for any `run_rows`.
        """
        group = how.get("group") or _group(q, k)
        cut = rows_cut(self.limits, q.shape[2], group, run_rows)
        consts = {"LOCAL": cut.local, "HEADS": cut.heads, "BATCH": cut.batch, "ROWS": cut.rows}
        consts |= {"FIRST": first, "HAS_SLOPES": int(how.get("slopes") is not None)}
        self._attend_rows("attn_decode", "f32", (q, k, v, cells, part, step), cut.tiles, consts, **how)

    def attn_decode_coop(
        self,
        q: View,
        k: View,
        v: View,
        cells: View,
        part: View,
        step: View,
        *,
        run_rows: int = 1,
        first: int = 0,
        most: int = 0,
        **how: Unpack[AttentionKeywords],
    ) -> None:
        """Compute attn_decode on matrix units, without slopes. `q`, `k`, `v` and probabilities are rounded to
        F16. The q heads of a KV head are the rows of a matrix. With `most`, only decoding rows at positions
        below `most` are written, and `run_rows` is 1."""
        assert not most or run_rows == 1, (most, run_rows)
        assert how.get("slopes") is None, "attn_decode has slopes"
        group = how.get("group") or _group(q, k)
        head_v = part.shape[-1] - 2 * (len(part.shape) > 3)
        cut = units_cut(self.limits, group, q.shape[2], head_v, run_rows)
        assert cut, f"matrices of {self.limits.matrix_units} do not divide heads of {q.shape[2]}, {head_v}"
        check_aligned(k, v)
        tile, rows = cut
        consts = {**tile.consts, "HAS_SOFTCAP": int(how.get("softcap", 0.0) > 0), "ROWS": rows}
        consts |= {"FIRST": first, "MOST": most}
        variant, tiles = self.limits.matrix_units.api, -(-group // (tile.rows // rows))
        views = (q, k, v, cells, part, step)
        self._attend_rows("attn_decode_coop", variant, views, tiles, consts, **how)

    def _attend_rows(
        self,
        op: str,
        variant: str,
        views: tuple[View, ...],
        tiles: int,
        consts: dict[str, int],
        *,
        scale: float,
        group: int | None = None,
        q_first: int = 0,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: View | None = None,
        slopes: View | None = None,
    ) -> None:
        q, k, v, cells, part, step = views
        assert consts["FIRST"] < CELL_BLOCK, consts
        final = len(part.shape) == 3
        n_rows, n_heads, n_splits, head_v = (
            (*part.shape[:2], 1, part.shape[2]) if final else (*part.shape[:3], part.shape[3] - 2)
        )
        push, head_k, types = attn_push(q, k, v, cells, head_v, group or _group(q, k), q_first)
        assert q.shape[:2] == (n_rows, n_heads) and part.dtype == "f32", (q.shape, part.shape)
        assert sinks is None or final, "sinks go to attn_combine"
        _check_per_head(sinks, n_heads)
        _check_per_head(slopes, n_heads)
        push |= {"n_splits": n_splits, "window": window, "chunk": chunk, "scale": scale, "softcap": softcap}
        consts = {**consts, "HEAD_K": head_k, "HEAD_V": head_v, **types}
        consts |= {"FINAL": int(final), "HAS_SINKS": int(sinks is not None)}
        self.record(
            op,
            variant,
            (q, k, v, cells, sinks or q, slopes or q, part),
            push,
            {name: consts[name] for name in SPECS[op].consts},
            (n_rows, int(push["n_kv"]) * tiles, n_splits),
            step,
            flops=2 * n_rows * n_heads * cells.shape[1] * CELL_BLOCK * (head_k + head_v),
        )

    def attn_combine(self, part: View, y: View, *, sinks: View | None = None) -> None:
        """Combine the splits that attn_decode wrote to `part` into y [n_rows, n_heads, head_v]."""
        n_rows, n_heads, n_splits, head_v = *part.shape[:3], part.shape[3] - 2
        assert rows_of(y, head_v) == n_rows * n_heads, (part.shape, y.shape)
        assert 1 <= n_splits <= MAX_SPLITS, part.shape
        _check_per_head(sinks, n_heads)
        self.record(
            "attn_combine",
            "f32",
            (part, sinks or part, y),
            {"n_heads": n_heads, "n_rows": n_rows, "n_splits": n_splits},
            {
                "LOCAL": 32 if self.limits.is_cpu else 64,
                "HEAD_V": head_v,
                "HAS_SINKS": int(sinks is not None),
                "MAX_SPLITS": -(-n_splits // 8) * 8,
            },
            (n_heads, 1, n_rows),
        )

    def attn_prefill(
        self, q: View, k: View, v: View, cells: View, y: View, step: View, **how: Unpack[RunKeywords]
    ) -> None:
        """Compute attention of the step's runs. `y` is [n_rows, n_heads, head_v]. For other arguments, see
        attn_decode. If `causal` is False, a row also attends to later rows of its run; a window then covers
        window / 2 positions on each side. If `sees_end`, a row attends to later rows only in a run that
        states an end (step.Run). If `sees_all`, a row attends to all of the step's rows, which are positions
        0, 1, 2, ... of one slot. `n_runs` is the maximum number of runs of a step (0: one per slot)."""
        tile = tile_of_rows(self.limits, q.shape[2], quantized=block_of(k.dtype)[0] > 1)
        self._attend_runs("attn_prefill", "f32", (q, k, v, cells, y, step), tile, **how)

    def attn_prefill_coop(
        self,
        q: View,
        k: View,
        v: View,
        cells: View,
        y: View,
        step: View,
        *,
        most: int = 0,
        **how: Unpack[RunKeywords],
    ) -> None:
        """Compute attn_prefill on matrix units. Values are rounded as in attn_decode_coop. Rows at positions
        from `most` on do not change (0: all rows are written)."""
        tile = tile_of_units(self.limits, q.shape[0], q.shape[2], y.shape[2])
        assert tile, (
            f"matrices of {self.limits.matrix_units} do not divide heads of {q.shape[2]}, {y.shape[2]}"
        )
        check_aligned(k, v)
        variant, tile = self.limits.matrix_units.api, tile._replace(last={"MOST": most})
        self._attend_runs("attn_prefill_coop", variant, (q, k, v, cells, y, step), tile, **how)

    def _attend_runs(
        self,
        op: str,
        variant: str,
        views: tuple[View, ...],
        tile: Tile,
        *,
        scale: float,
        group: int | None = None,
        q_first: int = 0,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: View | None = None,
        causal: bool = True,
        sees_end: bool = False,
        sees_all: bool = False,
        n_runs: int = 0,
        slopes: View | None = None,
    ) -> None:
        q, k, v, cells, y, step = views
        assert causal or not sees_end, "sees_end is for causal attention"
        assert not (sees_all and (sees_end or window or chunk)), (sees_end, window, chunk)
        n_rows, n_heads, head_v = y.shape
        push, head_k, types = attn_push(q, k, v, cells, head_v, group or _group(q, k), q_first)
        assert q.shape[:2] == (n_rows, n_heads), (q.shape, y.shape)
        _check_per_head(sinks, n_heads)
        _check_per_head(slopes, n_heads)
        push |= {
            "window": window,
            "chunk": chunk,
            FIRST_HEAD: 0,
            "causal": SEES_ALL if sees_all else SEES_END if sees_end else int(causal),
        }
        push |= {"scale": scale, "softcap": softcap}
        consts = {**tile.consts, **tile.last, "HEAD_K": head_k, "HEAD_V": head_v, **types}
        consts |= {"HAS_SINKS": int(sinks is not None), "HAS_SLOPES": int(slopes is not None)}
        consts["HAS_SOFTCAP"] = int(softcap > 0)
        # the last tile of each run may be incomplete
        n_tiles = -(-n_rows // tile.rows) + min(n_runs or cells.shape[0], n_rows)
        self.record(
            op,
            variant,
            (q, k, v, cells, sinks or q, slopes or q, y),
            push,
            {name: consts[name] for name in SPECS[op].consts},
            (n_tiles, n_heads, 1),
            step,
            flops=2 * n_rows * n_heads * cells.shape[1] * CELL_BLOCK * (head_k + head_v),
        )
