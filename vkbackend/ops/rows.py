from __future__ import annotations

import math

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.target import Target, floor_pow2, rows_of
from vkbackend.wire import F16_BLOCK, FORMATS, wire_words

TOKENS, OUTPUTS, POSITIONS, TYPES, CHOSEN = range(5)  # Values of embed's `ids`.
NO_OWN = 0xFFFFFFFF  # The `own_index` of a device without a partial sum.
MAX_TOP_K = 64  # Candidates per row for sampling.
MAX_SLOTS = 32  # A push constant of 32 bits has a bit for each partial sum.


def _activation(y: View) -> str:
    assert y.dtype == "f32" or (y.dtype == "q8" and y.shape[-1] % 32 == 0), y
    return y.dtype


def row_consts(limits: Limits, n: int) -> tuple[int, int]:
    """Return (LOCAL, BATCH) of a shader with a workgroup per row of n elements. A thread starts BATCH reads
    at once, because a step of one row has only one workgroup, and a read takes 0.5 us, or 1 to 2 us over a
    bus."""
    if limits.is_cpu:
        return 32 if n <= 256 else 128, 1
    return max(32, min(512, floor_pow2(limits.max_invocations), floor_pow2(n // 4))), 4


def top_k_chunks(limits: Limits, n: int, k: int) -> tuple[int, int]:
    """Return top_k's elements per chunk and number of chunks for rows of n elements."""
    chunk = max(16_384 if limits.is_cpu else 4096, k)
    return chunk, -(-n // chunk)


class RowOps(Target):
    def embed(
        self,
        w: View,
        y: View,
        step: View,
        *,
        ids: int = TOKENS,
        first: int = 0,
        chosen: View | None = None,
    ) -> None:
        """Copy row id(r) of the table w to row r of y. `ids` selects id(r): the token of row r (TOKENS), the
        row index of output r (OUTPUTS), the position of row r (POSITIONS), or the type of row r (TYPES). With
        `chosen` u32 [n_rows], the id is chosen[r].

        Shapes: w [n_vocab, n_embd] of any weight type, y [n_rows, n_embd]. A row of y is zero if its id is
        not in the table. A table that exceeds one storage binding needs a dispatch per piece, in order.
        `first` is the piece's first row in the table.
        """
        n_vocab, n_embd = w.shape
        n_rows = rows_of(y, n_embd)
        push: dict[str, int | float] = {
            "n_embd": n_embd,
            "n_vocab": n_vocab,
            "n_rows": n_rows,
            "ids": ids if chosen is None else CHOSEN,
            "first": first,
        }
        assert chosen is None or (chosen.dtype == "u32" and rows_of(chosen, 1, "u32") == n_rows), (chosen, y)
        groups = (*self.fold(-(-n_embd // (4 * 64))), n_rows)
        self.record("embed", w.dtype, (w, chosen or w, y), push, {"LOCAL": 64}, groups, step)

    def rms_norm(self, x: View, w: View | None, y: View, *, eps: float) -> None:
        """Compute y = x / sqrt(mean(x^2) + eps) * w over the last axis. `w` is [n] or None. `y` may be q8."""
        n = x.shape[-1]
        n_rows = rows_of(x, n)
        assert rows_of(y, n, _activation(y)) == n_rows and (
            w is None or (w.shape == (n,) and w.dtype == "f32")
        ), (x, w, y)
        local, batch = row_consts(self.limits, n)
        self.record(
            "rms_norm",
            y.dtype,
            (x, x if w is None else w, y),
            {"n": n, "n_rows": n_rows, "eps": eps},
            {"LOCAL": local, "HAS_W": int(w is not None), "BATCH": batch},
            (*self.fold(n_rows), 1),
            flops=4 * n * n_rows,
        )

    def layer_norm(self, x: View, w: View, b: View | None, y: View, *, eps: float) -> None:
        """Compute y = (x - mean(x)) / sqrt(var(x) + eps) * w + b over the last axis (Ba et al. 2016,
        arXiv:1607.06450). `w` is [n], `b` is [n] or None."""
        n = x.shape[-1]
        n_rows = rows_of(x, n)
        assert rows_of(y, n) == n_rows and w.shape == (n,) and w.dtype == "f32", (x, w, y)
        assert b is None or (b.shape == (n,) and b.dtype == "f32"), b
        self.record(
            "layer_norm",
            "f32",
            (x, w, w if b is None else b, y),
            {"n": n, "n_rows": n_rows, "eps": eps},
            {"LOCAL": row_consts(self.limits, n)[0], "HAS_B": int(b is not None)},
            (*self.fold(n_rows), 1),
            flops=6 * n * n_rows,
        )

    def center(self, x: View, y: View) -> None:
        """Compute y = x - mean(x) over the last axis, identical bit by bit on every device. `y` may be
        `x`."""
        n = x.shape[-1]
        n_rows = rows_of(x, n)
        assert rows_of(y, n) == n_rows, (x, y)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "share": 1 / n}
        groups = (*self.fold(n_rows), 1)
        self.record("center", "f32", (x, y), push, {"LOCAL": 32}, groups, flops=2 * n * n_rows)

    def row_moments(self, x: View, y: View) -> None:
        """Write the sum and the sum of squares of each row of x [n_rows, n] to y [n_rows, 2]."""
        n_rows, n = x.shape
        assert x.dtype == "f32" and rows_of(y, 2) == n_rows, (x, y)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows}
        consts = {"LOCAL": row_consts(self.limits, n)[0]}
        self.record("row_moments", "f32", (x, y), push, consts, (*self.fold(n_rows), 1), flops=3 * n * n_rows)

    def gaussian_topk(self, x: View, moments: View, y: View, *, width: int, c: float) -> None:
        """Compute y = max(x - mean - c * deviation, 0) for rows of `width` elements (Gemma 3n, 2025). `x`
        [n_rows, n] holds some columns of the complete rows. `moments` are the row_moments of the complete
        rows. `y` may be `x`."""
        n_rows, n = x.shape
        assert rows_of(moments, 2) == rows_of(y, n) == n_rows and n <= width, (x, moments, y, width)
        push: dict[str, int | float] = {"n": n, "width": width, "n_rows": n_rows, "c": c}
        groups = (*self.fold(-(-n * n_rows // 128)), 1)
        self.record(
            "gaussian_topk", "f32", (x, moments, y), push, {"LOCAL": 128}, groups, flops=2 * n * n_rows
        )

    def pack_bf16(self, x: View, y: View) -> None:
        """Convert the n elements of x to bfloat16, rounded to nearest even. `y` is u32 [ceil(n / 2)], with
        the first of two elements in the low 16 bits. NaN remains NaN. An odd n is padded with zero."""
        n = rows_of(x, 1)
        n_words = -(-n // 2)
        assert y.dtype == "u32" and math.prod(y.shape) == n_words, (x, y)
        groups = (*self.fold(-(-n_words // 128)), 1)
        self.record("pack_bf16", "f32", (x, y), {"n": n}, {"LOCAL": 128}, groups, flops=n)

    def pack_halves(self, x: View, y: View, kept: View | None = None) -> None:
        """Convert the n elements of x to the wire format f16 (wire.py), rounded to nearest even. `y` and
        `kept` both get the result, u32 [wire_words("f16", n)].

        Infinities remain, NaN becomes quiet, floats below 2^-126 become zero, and an odd n is padded with
        zero.
        """
        n = rows_of(x, 1)
        for out in (y, kept or y):
            assert out.dtype == "u32" and math.prod(out.shape) == wire_words("f16", n), (x, out)
        groups = (*self.fold(-(-n // (4 * F16_BLOCK))), 1)  # 16 threads per block
        consts = {"LOCAL": 64, "KEEPS": int(kept is not None)}
        self.record("pack_halves", "f32", (x, y, kept or y), {"n": n}, consts, groups, flops=2 * n)

    def add_partials(
        self,
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
    ) -> None:
        """Compute h = residual + the devices' partial sums, in slot order. If w is given, y = rms_norm(h) *
        w.

        Shapes: h, residual and y [n_rows, n], slots [n_slots, words per slot]. A slot begins with a device's
        partial sum: n_rows * n floats, the result of pack_bf16 (wire="bf16"), or the result of pack_halves
        (wire="f16"). Bit s of `writers` is set if slot s holds a partial sum. The op reads this device's
        partial sum from `own`, not from slot own_index. For f32 and bf16, `own` is f32. For bf16, the op
        rounds `own`. For f16, `own` is the result `kept` of pack_halves. `h` may be `residual`. `y` may be
        q8. If `slot_stride` is given, `slots` is one-dimensional and ends at the end of the last slot's
        partial sum.
        """
        n = h.shape[-1]
        n_rows = rows_of(h, n)
        assert slots.dtype in ("f32", "u32"), slots
        n_words = wire_words(wire, n_rows * n)
        if slot_stride is None:
            n_slots, slot_stride = slots.shape
        else:
            n_slots = 1 + (slots.shape[0] - n_words) // slot_stride
        assert n_slots <= MAX_SLOTS and slot_stride >= n_words and writers < 1 << n_slots, (slots, h, writers)
        assert (w is None) == (y is None) and (own is None) == (own_index is None), (w, y, own, own_index)
        out = _activation(y) if y else "f32"
        assert y is None or rows_of(y, n, out) == n_rows, (h, y)
        assert residual is None or rows_of(residual, n) == n_rows, (residual, h)
        own_words = n_words if wire == "f16" else n_rows * n
        assert own is None or math.prod(own.shape) == own_words, (own, h, wire)
        local, batch = row_consts(self.limits, n)
        self.record(
            "add_partials",
            out,
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
                "LOCAL": local,
                "HAS_RESIDUAL": int(residual is not None),
                "HAS_NORM": int(y is not None),
                "WIRE": FORMATS.index(wire),
                "BATCH": batch,
            },
            (*self.fold(n_rows), 1),
            flops=(n_slots + 5) * n * n_rows,
        )

    def top_k(
        self,
        x: View,
        ids: View,
        values: View,
        *,
        source: View | None = None,
        mask: View | None = None,
        chunk: int,
    ) -> None:
        """Write the k largest values of each chunk of x [n_rows, n] to `values`, in descending order. Of
        equal values the lower position is first. NaN is the largest value.

        `ids` u32 and `values` f32 are [n_rows, n_chunks, k], with k at most MAX_TOP_K. `ids` are positions,
        or the values of `source` u32 [n_rows, n] at these positions. `mask` u32 [n_rows, ceil(n / 32)] holds
        a 1 bit per allowed position, lowest bit first. If a chunk has fewer than k allowed positions, the
        last ids are 0xffffffff with values -inf.
        """
        n_rows, n = x.shape
        n_chunks, k = ids.shape[-2:]
        assert ids.dtype == "u32" and 1 <= k <= MAX_TOP_K and n_chunks == -(-n // chunk), (x, ids, chunk)
        assert rows_of(values, n_chunks * k) == n_rows and ids.shape[0] == n_rows, (x, ids, values)
        assert source is None or (source.dtype == "u32" and source.shape == x.shape), (x, source)
        assert mask is None or (mask.dtype == "u32" and mask.shape == (n_rows, -(-n // 32))), (x, mask)
        assert source is None or mask is None, (source, mask)
        args = x, source or mask or x, ids, values
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "chunk": chunk, "n_chunks": n_chunks}
        kind = 1 if source is not None else 2 if mask is not None else 0
        consts = {"LOCAL": 32 if self.limits.is_cpu else 128, "K": k, "KIND": kind}
        self.record("top_k", "f32", args, push, consts, (n_chunks, 1, n_rows))

    def log_sum_exp(self, x: View, y: View, *, chunk: int) -> None:
        """Write the maximum and the sum of exp(x - maximum) of each chunk of x [n_rows, n] to y [n_rows,
        n_chunks, 2]. The sum is NaN if the chunk contains NaN or +inf. `log_of_sums` combines the chunks."""
        n_rows, n = x.shape
        n_chunks = y.shape[1]
        assert y.shape == (n_rows, n_chunks, 2) and n_chunks == -(-n // chunk), (x, y, chunk)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "chunk": chunk, "n_chunks": n_chunks}
        local, batch = (32, 1) if self.limits.is_cpu else (256, 4)
        consts = {"LOCAL": min(local, floor_pow2(self.limits.max_invocations)), "BATCH": batch}
        self.record("log_sum_exp", "f32", (x, y), push, consts, (n_chunks, 1, n_rows), flops=4 * n_rows * n)
