"""The op set: one function per op that records a dispatch of it; `OPS` (opspec.py) is their table.

A function checks shapes (assertions: a wrong shape is our bug), picks the variant, specialization constants
and grid, and appends a `Dispatch`. Activations are contiguous f32 rows. Knows no model and no second device.
One function per op makes the file long.
"""

from __future__ import annotations

import math

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops_moe import COLUMNS as COLUMNS
from vkbackend.ops_moe import ROWS as ROWS
from vkbackend.ops_moe import mat_vec_id as mat_vec_id
from vkbackend.ops_moe import moe_logits as moe_logits
from vkbackend.ops_moe import moe_sum as moe_sum
from vkbackend.ops_moe import moe_topk as moe_topk
from vkbackend.opspec import OPS as OPS
from vkbackend.opspec import floor_pow2, fold, record, rows_of
from vkbackend.recording import Recording

CELL_BLOCK = 32  # positions per entry of a cell table, as in shaders/lib/step.glsl
TOKENS, OUTPUTS = 0, 1  # what embed gathers by: the tokens of the rows, or the output rows
NO_OWN = 0xFFFFFFFF  # add_partials: this device has no partial of its own
MAX_VEC_ROWS = 8  # rows of x up to which mat_vec serves
MAX_HEAD = 576
MAX_SLOTS = 32  # partials of one sum: a bit each in a push constant


def _elementwise(rec: Recording, limits: Limits, op: str, a: View, b: View, y: View, label: str) -> None:
    n = math.prod(y.shape)
    assert rows_of(a, 1) == rows_of(b, 1) == rows_of(y, 1) == n, (op, a.shape, b.shape, y.shape)
    groups = (*fold(limits, -(-n // 128)), 1)
    record(rec, op, "f32", (a, b, y), {"n": n}, {"LOCAL": 128}, groups, label=label, flops=n)


# ---- rows in, rows out ----


def embed(
    rec: Recording,
    limits: Limits,
    w: View,
    y: View,
    step: View,
    *,
    ids: int = TOKENS,
    first: int = 0,
    label: str = "",
) -> None:
    """y[r] = w[id(r)]: id is the row's token (ids=TOKENS) or the row index of output r (ids=OUTPUTS).

    w [n_vocab, n_embd] of any weight type, y [n_rows, n_embd]; zeros for rows without an id in the table.
    A table that exceeds one binding comes in pieces, in order: w then holds the rows from `first` on.
    """
    n_vocab, n_embd = w.shape
    n_rows = rows_of(y, n_embd)
    push: dict[str, int | float] = {
        "n_embd": n_embd,
        "n_vocab": n_vocab,
        "n_rows": n_rows,
        "ids": ids,
        "first": first,
    }
    groups = (*fold(limits, -(-n_embd // (4 * 64))), n_rows)
    record(rec, "embed", w.dtype, (w, y), push, {"LOCAL": 64}, groups, step, label)


def rms_norm(
    rec: Recording, limits: Limits, x: View, w: View | None, y: View, *, eps: float, label: str = ""
) -> None:
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis of x; w [n] or None for no weight."""
    n = x.shape[-1]
    n_rows = rows_of(x, n)
    assert rows_of(y, n) == n_rows and (w is None or (w.shape == (n,) and w.dtype == "f32")), (x, w, y)
    local = 32 if n <= 256 else 128
    record(
        rec,
        "rms_norm",
        "f32",
        (x, x if w is None else w, y),
        {"n": n, "n_rows": n_rows, "eps": eps},
        {"LOCAL": local, "HAS_W": int(w is not None)},
        (*fold(limits, n_rows), 1),
        label=label,
        flops=4 * n * n_rows,
    )


def mat(
    rec: Recording, limits: Limits, w: View, x: View, y: View, *, y_stride: int | None = None, label: str = ""
) -> None:
    """y[r, i] = sum over k of w[i, k] * x[r, k]: mat_vec for up to 8 rows of x, mat_mul above."""
    op = mat_vec if rows_of(x, w.shape[1]) <= MAX_VEC_ROWS else mat_mul
    op(rec, limits, w, x, y, y_stride=y_stride, label=label)


def mat_vec(
    rec: Recording, limits: Limits, w: View, x: View, y: View, *, y_stride: int | None = None, label: str = ""
) -> None:
    """w [n, k] of any weight type times 1..8 rows x [n_rows, k].

    Row r of y starts at element r * y_stride (default n), so a slice of a wider row can be written.
    """
    push, n_rows = _mat_push(limits, w, x, y, y_stride)
    assert 1 <= n_rows <= MAX_VEC_ROWS, f"mat_vec serves 1..{MAX_VEC_ROWS} rows, got {n_rows}"
    n, k = w.shape
    if limits.is_cpu:  # one invocation is a SIMD lane: a row each needs neither barriers nor shared memory
        local, tpr = 32, 1
    else:  # at least two rounds of 4 elements for each thread of a row
        local, tpr = 128, min(64, max(4, floor_pow2(k // 8)))
    consts = {"LOCAL": local, "TPR": tpr, "N": n_rows}
    groups = (*fold(limits, -(-n // (local // tpr))), 1)
    record(rec, "mat_vec", w.dtype, (w, x, y), push, consts, groups, label=label, flops=2 * n * k * n_rows)


def mat_mul(
    rec: Recording, limits: Limits, w: View, x: View, y: View, *, y_stride: int | None = None, label: str = ""
) -> None:
    """As mat_vec for any number of rows, in tiles of 64 rows of w by 16 or 32 rows of x."""
    push, n_rows = _mat_push(limits, w, x, y, y_stride)
    n, k = w.shape
    rn = 2 if n_rows <= 16 else 4
    groups = (*fold(limits, -(-n // 64)), -(-n_rows // (8 * rn)))
    consts = {"LOCAL": 128, "RN": rn}
    record(rec, "mat_mul", w.dtype, (w, x, y), push, consts, groups, label=label, flops=2 * n * k * n_rows)


def _mat_push(
    limits: Limits, w: View, x: View, y: View, y_stride: int | None
) -> tuple[dict[str, int | float], int]:
    n, k = w.shape
    n_rows = rows_of(x, k)
    y_stride = n if y_stride is None else y_stride
    assert w.nbytes <= limits.max_storage_range, f"{w!r} exceeds one binding: split it by rows"
    assert y_stride >= n and rows_of(y, 1) >= (n_rows - 1) * y_stride + n, (
        w.shape,
        x.shape,
        y.shape,
        y_stride,
    )
    return {"k": k, "n": n, "n_rows": n_rows, "y_stride": y_stride}, n_rows


# ---- attention ----


def rope(
    rec: Recording, limits: Limits, x: View, cos_sin: View, y: View, *, half_split: bool, label: str = ""
) -> None:
    """Rotate x [n_rows, n_heads, head_dim] by cos_sin [>= n_rows, n_rot / 2, 2]; dims >= n_rot are copied.

    Pairs are (2i, 2i + 1), or with half_split (i, i + n_rot / 2). y may be x.
    """
    n_rows, n_heads, head_dim = x.shape
    n_rot = 2 * cos_sin.shape[-2]
    assert n_rot <= head_dim and head_dim % 2 == 0 and cos_sin.shape[0] >= n_rows, (x.shape, cos_sin.shape)
    assert rows_of(y, head_dim) == n_rows * n_heads, (x.shape, y.shape)
    record(
        rec,
        "rope",
        "f32",
        (x, cos_sin, y),
        {"n_heads": n_heads, "head_dim": head_dim, "n_rot": n_rot, "n_rows": n_rows},
        {"LOCAL": 64, "HALF_SPLIT": int(half_split)},
        (*fold(limits, -(-n_heads * head_dim // 128)), n_rows),
        label=label,
        flops=3 * math.prod(x.shape),
    )


def kv_store(
    rec: Recording, limits: Limits, x: View, cells: View, cache: View, step: View, *, label: str = ""
) -> None:
    """cache[cell of row r] = x[r] for the rows of the step.

    x [n_rows, width], cache [n_cells, width] f16 or f32 and width even; cells u32 [n_slots, blocks_per_slot]:
    position p of slot s lives in cell cells[s, p / 32] * 32 + p % 32.
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
    label: str = "",
) -> None:
    """Each row's heads attend to positions 0..pos of the row's slot; follow with attn_combine.

    q [n_rows, n_heads, head_k]; k [n_cells, n_kv * head_k] and v [n_cells, n_kv * head_v], f16 or f32 each;
    part f32 [n_rows, n_heads, n_splits, head_v + 2] holds (sum of p * v, max, sum of p) per split. Head h
    reads kv head (q_first + h) / group (Ainslie et al. 2023); the default group is n_heads / n_kv, another
    serves a device whose q heads are not whole groups.
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
        {**push, "n_splits": n_splits, "scale": scale},
        {"LOCAL": local, "HEAD_K": head_k, "HEAD_V": head_v},
        (n_heads, n_splits, n_rows),
        step,
        label,
        flops=2 * n_rows * n_heads * cells.shape[1] * CELL_BLOCK * (head_k + head_v),
    )


def attn_combine(rec: Recording, limits: Limits, part: View, y: View, *, label: str = "") -> None:
    """y [n_rows, n_heads, head_v] from the splits that attn_decode left in part."""
    n_rows, n_heads, n_splits, head_v = *part.shape[:3], part.shape[3] - 2
    assert rows_of(y, head_v) == n_rows * n_heads, (part.shape, y.shape)
    push: dict[str, int | float] = {"n_heads": n_heads, "n_rows": n_rows, "n_splits": n_splits}
    local = 32 if limits.is_cpu else 64
    groups = (n_heads, 1, n_rows)
    record(
        rec, "attn_combine", "f32", (part, y), push, {"LOCAL": local, "HEAD_V": head_v}, groups, label=label
    )


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
    label: str = "",
) -> None:
    """Causal attention of the step's runs; shapes as attn_decode, y [n_rows, n_heads, head_v]."""
    n_rows, n_heads, head_v = y.shape
    push, head_k = _attn_push(q, k, v, cells, head_v, group, q_first)
    assert q.shape[:2] == (n_rows, n_heads), (q.shape, y.shape)
    tq = (
        16 if head_k <= 128 else 8 if head_k <= 320 else 4
    )  # the q tile takes at most 10 KiB of shared memory
    n_tiles = -(-n_rows // tq) + min(cells.shape[0], n_rows)  # every run may end in a broken tile
    local = 32 if limits.is_cpu else 128  # 1 to 4 times CELL_BLOCK
    record(
        rec,
        "attn_prefill",
        f"{k.dtype}-{v.dtype}",
        (q, k, v, cells, y),
        {**push, "scale": scale},
        {"LOCAL": local, "HEAD_K": head_k, "HEAD_V": head_v, "TQ": tq},
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


# ---- elementwise and reduce tail ----


def silu_mul(rec: Recording, limits: Limits, gate: View, up: View, y: View, *, label: str = "") -> None:
    """y = gate * sigmoid(gate) * up, any equal sizes; y may be gate or up."""
    _elementwise(rec, limits, "silu_mul", gate, up, y, label)


def add(rec: Recording, limits: Limits, a: View, b: View, y: View, *, label: str = "") -> None:
    """y = a + b, any equal sizes; y may be a or b."""
    _elementwise(rec, limits, "add", a, b, y, label)


def add_bias(rec: Recording, limits: Limits, x: View, b: View, y: View, *, label: str = "") -> None:
    """y = x + b for every row of x [n_rows, n]; b f32 [n]; y may be x."""
    n = x.shape[-1]
    n_rows = rows_of(x, n)
    assert b.shape == (n,) and b.dtype == "f32" and rows_of(y, n) == n_rows, (x, b, y)
    groups = (*fold(limits, -(-n * n_rows // 128)), 1)
    push: dict[str, int | float] = {"n": n, "n_rows": n_rows}
    record(rec, "add_bias", "f32", (x, b, y), push, {"LOCAL": 128}, groups, label=label, flops=n * n_rows)


def pack_bf16(rec: Recording, limits: Limits, x: View, y: View, *, label: str = "") -> None:
    """y u32 [ceil(n / 2)] = x (n elements of any shape) as bfloat16 pairs, nearest, ties to even.

    The first of a pair is the low half; NaN stays NaN; the last half of an odd n is zero.
    """
    n = rows_of(x, 1)
    n_words = -(-n // 2)
    assert y.dtype == "u32" and math.prod(y.shape) == n_words, (x, y)
    groups = (*fold(limits, -(-n_words // 128)), 1)
    record(rec, "pack_bf16", "f32", (x, y), {"n": n}, {"LOCAL": 128}, groups, label=label, flops=n)


def add_partials(
    rec: Recording,
    limits: Limits,
    residual: View | None,
    own: View | None,
    slots: View,
    w: View | None,
    h: View,
    y: View | None,
    *,
    own_index: int | None,
    writers: int,
    eps: float = 0.0,
    wire: str = "f32",
    slot_stride: int | None = None,
    label: str = "",
) -> None:
    """h = residual + sum of the writers' partials in slot order; y = rms_norm(h) * w where w and y are given.

    h, residual, own, y [n_rows, n]; slots [n_slots, slot_stride in words], a slot begins with its partial:
    n_rows * n floats, or with wire="bf16" that many bfloat16 in pairs (pack_bf16); bit s of `writers` is set
    where slot s takes part; slot own_index is read from `own`, f32 in either case and rounded to the wire.
    h may be residual. With `slot_stride` slots is flat and ends with the last slot's partial.
    """
    n = h.shape[-1]
    n_rows = rows_of(h, n)
    assert wire in ("f32", "bf16") and slots.dtype in ("f32", "u32"), (wire, slots)
    n_words = n_rows * n if wire == "f32" else -(-n_rows * n // 2)
    if slot_stride is None:
        n_slots, slot_stride = slots.shape
    else:
        n_slots = 1 + (slots.shape[0] - n_words) // slot_stride
    assert n_slots <= MAX_SLOTS and slot_stride >= n_words and writers < 1 << n_slots, (slots, h, writers)
    assert (w is None) == (y is None) and (own is None) == (own_index is None), (w, y, own, own_index)
    assert all(other is None or rows_of(other, n) == n_rows for other in (residual, own, y)), (
        residual,
        own,
        h,
        y,
    )
    record(
        rec,
        "add_partials",
        "f32",
        (residual or slots, own or slots, slots, w or slots, h, y or h),
        {
            "n": n,
            "n_rows": n_rows,
            "n_slots": n_slots,
            "own_index": NO_OWN if own_index is None else own_index,
            "slot_stride": slot_stride,
            "writers": writers,
            "eps": eps,
        },
        {
            "LOCAL": 32 if n <= 256 else 128,
            "HAS_RESIDUAL": int(residual is not None),
            "HAS_NORM": int(y is not None),
            "WIRE": int(wire == "bf16"),
        },
        (*fold(limits, n_rows), 1),
        label=label,
        flops=(n_slots + 5) * n * n_rows,
    )
