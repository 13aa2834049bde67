"""Ops of the paged KV cache, and the norm and rotation of heads. The table `cells` maps each slot's positions
to cells."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vkbackend.buffer import View
from vkbackend.formats import block_of
from vkbackend.ops.attention_tiles import CELL_BLOCK, cells_per_block
from vkbackend.ops.target import Target, rows_of

# in the order of shaders/lib/cache_types.glsl
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An RMS norm of each head. The weight `w` is f32 [head_dim] or None."""

    w: View | None
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of each head's first n_rot dimensions. `cos_sin` is f32 [>= n_rows, n_rot / 2, 2]. The pairs are
    (2i, 2i + 1), or (i, i + n_rot / 2) if `half_split`."""

    cos_sin: View
    half_split: bool

    @property
    def n_rot(self) -> int:
        return 2 * self.cos_sin.shape[-2]


def _norm_args(norm: HeadNorm | None, head_dim: int, x: View) -> tuple[View, int, float]:
    """Return the shader's (w, NORM, eps), with a placeholder for a missing w."""
    if not norm:
        return x, 0, 0.0
    assert norm.w is None or (norm.w.shape == (head_dim,) and norm.w.dtype == "f32"), (x, norm)
    return norm.w or x, 2 if norm.w else 1, norm.eps


def _norm_local(head_dim: int) -> int:
    return 32 if head_dim <= 256 else 128  # as in rms_norm


class CacheOps(Target):
    def rope(
        self,
        x: View,
        cos_sin: View,
        y: View,
        *,
        half_split: bool,
        norm: HeadNorm | None = None,
        parts: int = 1,
    ) -> None:
        """Apply `norm`, if given, and RoPE to x [n_rows, n_heads, head_dim]. Dimensions from n_rot on are
        copied. The first n_rot dimensions consist of `parts` equal parts. The elements of a pair are in the
        same part, and cos_sin lists the pairs by part. `y` may be `x`."""
        n_rows, n_heads, head_dim = x.shape
        n_rot = Rotation(cos_sin, half_split).n_rot
        assert n_rot <= head_dim and head_dim % 2 == 0 and cos_sin.shape[0] >= n_rows, (
            x.shape,
            cos_sin.shape,
        )
        assert rows_of(y, head_dim) == n_rows * n_heads and n_rot % (2 * parts) == 0, (x.shape, y.shape)
        w, kind, eps = _norm_args(norm, head_dim, x)
        push: dict[str, int | float] = {"n_heads": n_heads, "head_dim": head_dim, "n_rot": n_rot}
        push |= {"n_rows": n_rows, "eps": eps}
        local = _norm_local(head_dim) if norm else 64
        consts = {"LOCAL": local, "HALF_SPLIT": int(half_split), "NORM": kind, "PARTS": parts}
        groups = (*self.fold(n_heads if norm else -(-n_heads * head_dim // 128)), n_rows)
        args, flops = (x, w, cos_sin, y), (7 if norm else 3) * math.prod(x.shape)
        self.record("rope", "f32", args, push, consts, groups, flops=flops)

    def hadamard(self, x: View, y: View) -> None:
        """Multiply blocks of 32 elements of each head by the orthonormal Hadamard matrix, which is its own
        inverse.

        The shapes are x [n_rows, n_heads, head] and y [n_rows, n_heads, head_out]. If `head` is not a
        multiple of 32, the last block is padded with zeros. `y` may contain or omit the padding. The product
        is then quantized with a smaller error, because it has fewer outliers (Ashkboos et al. 2024,
        arXiv:2404.00456).
        """
        (n_rows, n_heads, head), head_out = x.shape, y.shape[-1]
        assert y.shape == (n_rows, n_heads, head_out) and head % 4 == head_out % 4 == 0, (x.shape, y.shape)
        assert -(-head // 32) == -(-head_out // 32), (head, head_out)
        n = n_rows * n_heads
        push: dict[str, int | float] = {"head": head, "head_out": head_out, "n_heads": n}
        groups = (*self.fold(-(-n * -(-head // 32) * 8 // 128)), 1)
        flops = n * head * 33
        self.record("hadamard", "f32", (x, y), push, {"LOCAL": 128}, groups, flops=flops)

    def kv_store(
        self,
        x: View,
        cells: View,
        cache: View,
        step: View,
        *,
        head_dim: int = 0,
        norm: HeadNorm | None = None,
        rotation: Rotation | None = None,
        block: int = 1,
        first: int = 0,
    ) -> None:
        """Write row r of `x` to its cell of `cache`, after an optional norm and rotation of the row's heads.

        `x` is [n_rows, width]. `cache` is [n_cells, width] of a type in CACHE_TYPES. The width is even and a
        multiple of the type's block size. `cells` is u32 [n_slots, blocks_per_slot]. Position p of slot s is
        in cell cells[s, p / 32 % blocks_per_slot] * 32 + p % 32. Quantized caches allow no norm or rotation.
        If `block` is above 1, only rows at the last position of a block of `block` positions are written. The
        cell is `first` + cells[s, p / 32 % blocks_per_slot] * cells_per_block(block) + p % 32 / block.
        A quantized block becomes NaN if one of its values is not finite.
        """
        width, unit = math.prod(cache.shape[1:]), 2 * block_of(cache.dtype)[0]  # elements per thread
        n_rows = rows_of(x, width)
        assert width % 2 == 0 and cells.dtype == "u32", (x, cells, cache)
        assert cache.shape[0] % 2 == first % 2 == 0, (cache, first)
        assert not (norm or rotation) or (head_dim and width % head_dim == 0), (x, head_dim)
        assert not (norm or rotation) or unit == 2, (
            f"heads are normed and rotated for pairs, not for {cache!r}"
        )
        w, kind, eps = _norm_args(norm, head_dim, x)
        push: dict[str, int | float] = {"width": width, "n_rows": n_rows, "blocks_per_slot": cells.shape[1]}
        push |= {"head_dim": head_dim or width, "n_rot": 0, "half_split": 0}
        push |= {
            "block_size": block,
            "cells_per_block": cells_per_block(block),
            "first_cell": first,
            "eps": eps,
        }
        if rotation:
            assert rotation.n_rot <= head_dim and rotation.cos_sin.shape[0] >= n_rows, (x, rotation)
            push |= {"n_rot": rotation.n_rot, "half_split": int(rotation.half_split)}
        local = _norm_local(head_dim) if norm else 64
        consts = {"LOCAL": local, "TYPE": CACHE_TYPES.index(cache.dtype), "NORM": kind}
        consts["BLOCKS"] = int(block > 1 or first > 0)
        groups = (*self.fold(width // head_dim if norm else -(-width // (64 * unit))), n_rows)
        args = x, w, rotation.cos_sin if rotation else x, cells, cache
        self.record("kv_store", "f32", args, push, consts, groups, step)

    def kv_load(
        self,
        cache: View,
        cells: View,
        y: View,
        step: View,
        *,
        head_dim: int,
        rotation: Rotation | None = None,
    ) -> None:
        """Read a cell of `cache` to row r of `y` f32 [n_rows, width], and rotate the row's heads.

        StepParams' token of row r is the position to read. If kv_store then writes the row at row r's
        position, the two ops have moved a cell to another position. `head_dim` is a multiple of 4.
        """
        width = math.prod(cache.shape[1:])
        n_rows = rows_of(y, width)
        assert cells.dtype == "u32" and cache.shape[0] % CELL_BLOCK == 0, (cells, cache)
        assert width % head_dim == 0 and head_dim % 4 == 0 and width % block_of(cache.dtype)[0] == 0, cache
        push: dict[str, int | float] = {"width": width, "n_rows": n_rows, "blocks_per_slot": cells.shape[1]}
        push |= {"head_dim": head_dim, "n_rot": 0, "half_split": 0}
        if rotation:
            assert rotation.n_rot <= head_dim and rotation.cos_sin.shape[0] >= n_rows, (y, rotation)
            push |= {"n_rot": rotation.n_rot, "half_split": int(rotation.half_split)}
        consts = {"LOCAL": 64, "TYPE": CACHE_TYPES.index(cache.dtype)}
        # Without rotation, cos_sin is a placeholder.
        args = cache, cells, rotation.cos_sin if rotation else cells, y
        self.record("kv_load", "f32", args, push, consts, (*self.fold(-(-width // 256)), n_rows), step)
