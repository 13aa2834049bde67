"""Ops of the KV cache and attention over it. Cells are addressed through a table, so that a slot's positions
may lie anywhere.
"""

from __future__ import annotations

import math

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.opspec import fold, record, rows_of
from vkbackend.recording import Recording

CELL_BLOCK = 32  # positions per entry of a cell table, as in shaders/lib/step.glsl
MAX_HEAD = 576


def kv_store(
    rec: Recording, limits: Limits, x: View, cells: View, cache: View, step: View, *, label: str = ""
) -> None:
    """cache[cell of row r] = x[r] for the rows of the step.

    x [n_rows, width], cache [n_cells, width] f16 or f32 and width even; cells u32 [n_slots, blocks_per_slot]:
    position p of slot s lives in cell cells[s, p / 32 % blocks_per_slot] * 32 + p % 32.
    """
    width = math.prod(cache.shape[1:])
    n_rows = rows_of(x, width)
    assert width % 2 == 0 and cells.dtype == "u32" and cache.shape[0] % CELL_BLOCK == 0, (x, cells, cache)
    push: dict[str, int | float] = {"width": width, "n_rows": n_rows, "blocks_per_slot": cells.shape[1]}
    groups = (*fold(limits, -(-width // 128)), n_rows)
    record(rec, "kv_store", cache.dtype, (x, cells, cache), push, {"LOCAL": 64}, groups, step, label)


def attn_splits(limits: Limits, n_rows: int, n_heads: int, blocks_per_slot: int) -> int:
    """Splits of the keys for attn_decode: enough workgroups to fill a GPU, at least 4 blocks of keys each."""
    wanted = 1 if limits.is_cpu else -(-256 // (n_rows * n_heads))
    return max(1, min(wanted, blocks_per_slot // 4, 32))


def attn_decode(
    rec: Recording,
    limits: Limits,
    q: View,
    k: View,
    v: View,
    cells: View,
    part: View,
    step: View,
    *,
    scale: float,
    group: int | None = None,
    q_first: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    label: str = "",
) -> None:
    """Each row's heads attend to positions 0..pos of the row's slot; follow with attn_combine.

    q [n_rows, n_heads, head_k]; k [n_cells, n_kv * head_k] and v [n_cells, n_kv * head_v], f16 or f32 each;
    part f32 [n_rows, n_heads, n_splits, head_v + 2] holds (sum of p * v, max, sum of p) per split. Head h
    reads kv head (q_first + h) / group (Ainslie et al. 2023); the default group is n_heads / n_kv, another
    serves a device whose q heads are not whole groups. With `window` a row sees that many positions, its own
    the last; with `softcap` c a score s becomes c * tanh(s / c).
    """
    n_rows, n_heads, n_splits, head_v = *part.shape[:3], part.shape[3] - 2
    push, head_k = _attn_push(q, k, v, cells, head_v, group, q_first)
    assert q.shape[:2] == (n_rows, n_heads) and part.dtype == "f32", (q.shape, part.shape)
    local = 32 if limits.is_cpu else 128  # a multiple of CELL_BLOCK
    record(
        rec,
        "attn_decode",
        f"{k.dtype}-{v.dtype}",
        (q, k, v, cells, part),
        {**push, "n_splits": n_splits, "window": window, "scale": scale, "softcap": softcap},
        {"LOCAL": local, "HEAD_K": head_k, "HEAD_V": head_v},
        (n_heads, n_splits, n_rows),
        step,
        label,
        flops=2 * n_rows * n_heads * cells.shape[1] * CELL_BLOCK * (head_k + head_v),
    )


def attn_combine(
    rec: Recording, limits: Limits, part: View, y: View, *, sinks: View | None = None, label: str = ""
) -> None:
    """y [n_rows, n_heads, head_v] from the splits that attn_decode left in part; `sinks` as attn_prefill."""
    n_rows, n_heads, n_splits, head_v = *part.shape[:3], part.shape[3] - 2
    assert rows_of(y, head_v) == n_rows * n_heads, (part.shape, y.shape)
    _check_sinks(sinks, n_heads)
    record(
        rec,
        "attn_combine",
        "f32",
        (part, sinks or part, y),
        {"n_heads": n_heads, "n_rows": n_rows, "n_splits": n_splits},
        {"LOCAL": 32 if limits.is_cpu else 64, "HEAD_V": head_v, "HAS_SINKS": int(sinks is not None)},
        (n_heads, 1, n_rows),
        label=label,
    )


def _check_sinks(sinks: View | None, n_heads: int) -> None:
    assert sinks is None or (sinks.dtype == "f32" and sinks.shape == (n_heads,)), (sinks, n_heads)


def attn_prefill(
    rec: Recording,
    limits: Limits,
    q: View,
    k: View,
    v: View,
    cells: View,
    y: View,
    step: View,
    *,
    scale: float,
    group: int | None = None,
    q_first: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    sinks: View | None = None,
    label: str = "",
) -> None:
    """Causal attention of the step's runs; shapes and options as attn_decode, y [n_rows, n_heads, head_v].

    `sinks` f32 [n_heads]: one more logit per head, in the denominator of its softmax alone.
    """
    n_rows, n_heads, head_v = y.shape
    push, head_k = _attn_push(q, k, v, cells, head_v, group, q_first)
    assert q.shape[:2] == (n_rows, n_heads), (q.shape, y.shape)
    _check_sinks(sinks, n_heads)
    tq = (
        16 if head_k <= 128 else 8 if head_k <= 320 else 4
    )  # the q tile takes at most 10 KiB of shared memory
    n_tiles = -(-n_rows // tq) + min(cells.shape[0], n_rows)  # every run may end in a broken tile
    local = 32 if limits.is_cpu else 128  # 1 to 4 times CELL_BLOCK
    record(
        rec,
        "attn_prefill",
        f"{k.dtype}-{v.dtype}",
        (q, k, v, cells, sinks or q, y),
        {**push, "window": window, "scale": scale, "softcap": softcap},
        {"LOCAL": local, "HEAD_K": head_k, "HEAD_V": head_v, "TQ": tq, "HAS_SINKS": int(sinks is not None)},
        (n_tiles, n_heads, 1),
        step,
        label,
        flops=2 * n_rows * n_heads * cells.shape[1] * CELL_BLOCK * (head_k + head_v),
    )


def _attn_push(
    q: View, k: View, v: View, cells: View, head_v: int, group: int | None, q_first: int
) -> tuple[dict[str, int | float], int]:
    n_rows, n_heads, head_k = q.shape
    n_kv = math.prod(k.shape[1:]) // head_k
    assert head_k % 8 == 0 and head_v % 8 == 0 and max(head_k, head_v) <= MAX_HEAD, (head_k, head_v)
    assert math.prod(k.shape[1:]) == n_kv * head_k and math.prod(v.shape[1:]) == n_kv * head_v, (k, v)
    if group is None:
        assert n_heads % n_kv == 0, f"{n_heads} q heads are not whole groups of {n_kv} kv heads"
        group = n_heads // n_kv
    assert 0 <= q_first < group and (q_first + n_heads - 1) // group < n_kv, (q_first, group, n_heads, n_kv)
    assert k.shape[0] == v.shape[0] and k.shape[0] % CELL_BLOCK == 0 and cells.dtype == "u32", (k, v, cells)
    push: dict[str, int | float] = {"n_heads": n_heads, "n_kv": n_kv, "group": group, "q_first": q_first}
    return {**push, "n_rows": n_rows, "blocks_per_slot": cells.shape[1]}, head_k
