"""Ops on a residual with several streams of n values per row.

In AltUp (Baykal et al. 2023, arXiv:2301.13310) each stream is predicted from all streams. The layer reads the
first stream, and the layer's result corrects all predictions. In hyper-connections (Zhu et al. 2024,
arXiv:2409.19606), attention or FFN reads a weighted sum of all streams, and adds its result to each stream
with a weight."""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.ops.rows import row_consts
from vkbackend.ops.target import Target, rows_of

MAX_STREAMS = 8  # A thread keeps all streams in registers.
LEAST = 1e-5  # The lower limit for a mean square.


class StreamOps(Target):
    def streams_of(self, x: View, a: View, y: View) -> None:
        """Concatenate x [n_rows, n] and the k streams of `a` [n_rows, k, n] to y [n_rows, 1 + k, n]. The
        streams of `a` are scaled to the root mean square of x."""
        n = x.shape[-1]
        n_rows = rows_of(x, n)
        n_streams = rows_of(a, n) // n_rows + 1
        assert rows_of(y, n) == n_rows * n_streams and rows_of(a, n) == n_rows * (n_streams - 1), (x, a, y)
        push: dict[str, int | float] = {"n": n, "n_streams": n_streams, "n_rows": n_rows, "least": LEAST}
        consts = {"LOCAL": row_consts(self.limits, n)[0]}
        groups = (*self.fold(n_rows * n_streams), 1)
        self.record("streams_of", "f32", (x, a, y), push, consts, groups, flops=5 * n * n_rows * n_streams)

    def streams_predict(self, x: View, routed: View, w: View, y: View, *, scale: float) -> None:
        """Compute y_i = x_i + sum over j, k of w[i, j, k] tanh(scale routed[r, k]) x_j for each stream i of
        row r. Shapes: x and y [n_rows, m, n], routed [n_rows, m], w [m * m, m]."""
        n_rows, m = routed.shape
        n = rows_of(x, n_rows * m)
        assert w.shape == (m * m, m) and rows_of(y, n) == rows_of(x, n) and m <= MAX_STREAMS, (x, w, y)
        self._streams("streams_predict", (x, routed, w, y), n, n_rows, m, scale)

    def streams_correct(
        self, x: View, a: View, routed: View, w: View, g: View, y: View, z: View, *, scale: float
    ) -> None:
        """Compute y_i = x_i + (1 + sum over k of w[i, k] tanh(scale routed[r, k])) (a - x_0) for each stream
        i of row r. Also compute z = y_0 g. Shapes: x and y [n_rows, m, n], a and z [n_rows, n], routed
        [n_rows, m], w [m, m], g [n]."""
        n_rows, m = routed.shape
        n = rows_of(x, n_rows * m)
        assert w.shape == (m, m) and g.shape == (n,) and rows_of(y, n) == rows_of(x, n), (x, w, g, y)
        assert rows_of(a, n) == rows_of(z, n) == n_rows and m <= MAX_STREAMS, (a, z)
        self._streams("streams_correct", (x, a, routed, w, g, y, z), n, n_rows, m, scale)

    def _streams(self, op: str, args: tuple[View, ...], n: int, n_rows: int, m: int, scale: float) -> None:
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "scale": scale}
        groups = (*self.fold(-(-n * n_rows // 64)), 1)
        self.record(op, "f32", args, push, {"LOCAL": 64, "STREAMS": m}, groups, flops=2 * m**3 * n * n_rows)

    def streams_add(self, x: View, a: View, y: View) -> None:
        """Add `a` [n_rows, n] to all streams of x [n_rows, m, n] except the first. `y` may be `x`."""
        n = a.shape[-1]
        n_rows = rows_of(a, n)
        m = rows_of(x, n) // n_rows
        assert rows_of(x, n) == rows_of(y, n) == n_rows * m, (x, a, y)
        push: dict[str, int | float] = {"n": n, "n_streams": m, "n_rows": n_rows}
        groups = (*self.fold(-(-n * n_rows * m // 128)), 1)
        self.record("streams_add", "f32", (x, a, y), push, {"LOCAL": 128}, groups, flops=n * n_rows * m)

    def streams_mix(self, x: View, mixes: View, scale: View, base: View, y: View, *, eps: float) -> None:
        """Compute y = sum over i of (sigmoid(scale[0] mixes[r, i] + base[i]) + eps) x_i for each row r.
        Shapes: x [n_rows, m, n], y [n_rows, n], mixes [n_rows, m or more], scale [1 or more], base [m or
        more]."""
        (n_rows, width), n = mixes.shape, y.shape[-1]
        m = rows_of(x, n) // n_rows
        assert rows_of(x, n) == n_rows * m and rows_of(y, n) == n_rows, (x, mixes, y)
        assert m <= min(width, base.shape[0], MAX_STREAMS), (mixes, base)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "width": width, "eps": eps}
        self._weighted("streams_mix", (x, mixes, scale, base, y), push, m)

    def streams_spread(
        self, x: View, a: View, mixes: View, scale: View, base: View, y: View, *, gain: float, eps: float
    ) -> None:
        """Compute y_i = x_i + (gain sigmoid(scale[1] mixes[r, m + i] + base[m + i]) + eps) a for each stream
        i of row r. Shapes: x and y [n_rows, m, n], a [n_rows, n], mixes [n_rows, 2 m], scale [2], base [2 m].
        `y` may be `x`."""
        (n_rows, width), n = mixes.shape, a.shape[-1]
        m = width // 2
        assert rows_of(x, n) == rows_of(y, n) == n_rows * m and rows_of(a, n) == n_rows, (x, a, y)
        assert scale.shape == (2,) and base.shape == (2 * m,) and m <= MAX_STREAMS, (scale, base)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "gain": gain, "eps": eps}
        self._weighted("streams_spread", (x, a, mixes, scale, base, y), push, m)

    def streams_sinkhorn(
        self, x: View, a: View, mixes: View, scale: View, base: View, y: View, *, n_turns: int, eps: float
    ) -> None:
        """Compute y_i = 2 sigmoid(scale[1] mixes[r, m + i] + base[m + i]) a + sum over streams j of w_ji x_j
        for each stream i of row r. The rows and columns of w [m, m] sum to 1 (Sinkhorn and Knopp 1967). At
        first, w is the softmax over i of scale[2] mixes[r, 2 m:] + base[2 m:], plus eps. In each of `n_turns`
        turns, rows (except in the first turn) and then columns are divided by their sums plus eps. Shapes: x
        and y [n_rows, m, n], a [n_rows, n], mixes [n_rows, 2 m + m^2], scale [3], base [2 m + m^2]."""
        n, n_rows = a.shape[-1], mixes.shape[0]
        m = rows_of(x, n) // n_rows
        assert rows_of(x, n) == rows_of(y, n) == n_rows * m and rows_of(a, n) == n_rows, (x, a, y)
        assert mixes.shape[1] == base.shape[0] == 2 * m + m * m and scale.shape == (3,), (mixes, scale, base)
        assert m <= MAX_STREAMS and n_turns >= 1, (m, n_turns)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "n_turns": n_turns, "eps": eps}
        self.record(
            "streams_sinkhorn",
            "f32",
            (x, a, mixes, scale, base, y),
            push,
            {"LOCAL": 128, "STREAMS": m},
            (-(-n // 128), 1, n_rows),
            flops=2 * m * (m + 1) * n * n_rows,
        )

    def streams_gate(self, x: View, k: View, a: View, y: View) -> None:
        """Compute y_i = sigmoid(sign(d) sqrt(max(|d|, 1e-6))) a with d = x_i . k_i / sqrt(n) for each stream.

        Shapes: x, k and y [n_rows, m, n], a [n_rows, n].
        """
        n_rows, n = a.shape
        m = rows_of(x, n) // n_rows
        assert rows_of(x, n) == rows_of(k, n) == rows_of(y, n) == n_rows * m, (x, k, a, y)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "n_streams": m}
        local = {"LOCAL": 32 if self.limits.is_cpu else 128}
        self.record(
            "streams_gate", "f32", (x, k, a, y), push, local, (m, 1, n_rows), flops=3 * m * n * n_rows
        )

    def ngram_ids(self, x: View, table: View, ids: View, *, end: int) -> None:
        """Hash the n-grams of 2 to `longest` tokens that end at each row. The hashes are `ids` of rows of a
        table. The value x[r, k] is the token k positions before row r, minus the end-of-text token `end`.
        Tokens before an end of text count as ends of text. The hash of an n-gram is the exclusive or of the
        64-bit products token * factor of its tokens. Each length has equally many heads. A head's id is hash
        % size + offset.

        Shapes: x f32 [n_rows, longest], ids u32 [n_rows, n_heads], `table` u32 [2 * (longest + n_heads)]: the
        low and high words of the factors, the sizes (below 2^31), the offsets."""
        (n_rows, longest), n_heads = x.shape, ids.shape[1]
        assert ids.shape == (n_rows, n_heads) and n_heads % (longest - 1) == 0, (x, ids)
        assert ids.dtype == table.dtype == "u32" and table.shape == (2 * (longest + n_heads),), (table, ids)
        push: dict[str, int | float] = {"n_rows": n_rows, "n_heads": n_heads, "end": end}
        groups = (*self.fold(-(-n_rows * n_heads // 64)), 1)
        consts = {"LOCAL": 64, "LONGEST": longest}
        self.record("ngram_ids", "f32", (x, table, ids), push, consts, groups)

    def streams_attend(self, x: View, a: View, w: View, y: View, *, eps: float) -> None:
        """Write to y [n_rows, n] a weighted sum of the m streams x [n_rows, m, n] and the stream `a` [n_rows,
        n]. The weights are the softmax over the streams s of the scores w . s / sqrt(mean(s^2) + eps). The
        vector w is [n]."""
        n = w.shape[0]
        n_rows = rows_of(a, n)
        m = rows_of(x, n) // n_rows
        assert rows_of(x, n) == n_rows * m and rows_of(y, n) == n_rows and m, (x, a, y)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "eps": eps}
        consts = {"LOCAL": row_consts(self.limits, n)[0], "STREAMS": m}
        groups = (*self.fold(n_rows), 1)
        self.record("streams_attend", "f32", (x, a, w, y), push, consts, groups, flops=6 * n * n_rows * m)

    def _weighted(self, op: str, args: tuple[View, ...], push: dict[str, int | float], m: int) -> None:
        n = int(push["n"] * push["n_rows"])
        groups = (*self.fold(-(-n // 128)), 1)
        self.record(op, "f32", args, push, {"LOCAL": 128, "STREAMS": m}, groups, flops=6 * m * n)
