from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.ops.target import Target, rows_of

ACTS = (
    "none",
    "silu",
    "gelu",
    "sigmoid",
    "swiglu_oai",
    "gelu_alone",
    "relu2_alone",
    "silu_alone",
    "gelu_erf_alone",
    "gelu_quick_alone",
    "relu",
    "sigmoid_alone",
)  # In the order of shaders/lib/glu.glsl.
COPY_GROUPS = 256  # Workgroups of copy_words, enough to hide a bus's latency.


class ElementwiseOps(Target):
    def glu(self, gate: View, up: View, y: View, *, act: str = "silu") -> None:
        """Compute y = act(gate) * up for views of equal size (Shazeer 2020). `y` may be `gate` or `up`.

        `gelu` is the tanh approximation, and `relu` is max(gate, 0). `swiglu_oai` is (clamp(up, -7, 7) + 1) *
        g * sigmoid(1.702 * g) for g = min(gate, 7). Functions whose names end with _alone do not read `up`:
        `gelu_alone` is gelu(gate), `relu2_alone` max(gate, 0)^2, `silu_alone` silu(gate), `gelu_erf_alone`
        gate * (1 + erf(gate / sqrt(2))) / 2, `gelu_quick_alone` gate * sigmoid(1.702 gate) (Hendrycks and
        Gimpel 2016, arXiv:1606.08415), and `sigmoid_alone` sigmoid(gate).
        """
        consts = {"LOCAL": 128, "ACT": ACTS.index(act)}
        self._each("glu", (gate, up, y), {}, consts)

    def add(self, a: View, b: View, y: View) -> None:
        """Compute y = a + b for views of equal size. `y` may be `a` or `b`."""
        self._each("add", (a, b, y), {}, {"LOCAL": 128})

    def scale(self, x: View, y: View, *, c: float) -> None:
        """Compute y = c * x. `y` may be `x`. If c is 0, y is 0 even for NaN."""
        self._each("scale", (x, y), {"c": c}, {"LOCAL": 128})

    def softcap(self, x: View, y: View, *, c: float) -> None:
        """Compute y = c * tanh(x / c) with c > 0. `y` may be `x`."""
        assert c > 0, c
        self._each("softcap", (x, y), {"c": c}, {"LOCAL": 128})

    def clamp(self, x: View, y: View, *, low: float, high: float) -> None:
        """Compute y = min(max(x, low), high). `y` may be `x`."""
        assert low <= high, (low, high)
        self._each("clamp", (x, y), {"low": low, "high": high}, {"LOCAL": 128})

    def xielu(self, x: View, y: View, *, alpha_p: float, alpha_n: float, beta: float, eps: float) -> None:
        """Compute xIELU (Huang and Schlag 2024, arXiv:2411.13010). For x > 0, y = alpha_p x^2 + beta x. For
        other x, y = alpha_n (e^min(x, eps) - 1 - x) + beta x. `y` may be `x`."""
        push = {"alpha_p": alpha_p, "alpha_n": alpha_n, "beta": beta, "eps": eps}
        self._each("xielu", (x, y), push, {"LOCAL": 128})

    def _each(self, op: str, args: tuple[View, ...], push: dict[str, float], consts: dict[str, int]) -> None:
        n = rows_of(args[0], 1)
        assert all(rows_of(view, 1) == n for view in args), (op, *(view.shape for view in args))
        groups = (*self.fold(-(-n // consts["LOCAL"])), 1)
        self.record(op, "f32", args, {"n": n, **push}, consts, groups, flops=n)

    def add_bias(self, x: View, b: View, y: View) -> None:
        """Add b [n] to every row of x [n_rows, n]. `y` may be `x`."""
        n = x.shape[-1]
        n_rows = rows_of(x, n)
        assert b.shape == (n,) and b.dtype == "f32" and rows_of(y, n) == n_rows, (x, b, y)
        groups = (*self.fold(-(-n * n_rows // 128)), 1)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows}
        self.record("add_bias", "f32", (x, b, y), push, {"LOCAL": 128}, groups, flops=n * n_rows)

    def mul_vector(self, x: View, v: View, y: View) -> None:
        """Multiply every row of x [n_rows, n] by v [n]. `y` may be `x`."""
        n = x.shape[-1]
        n_rows = rows_of(x, n)
        assert v.shape == (n,) and v.dtype == "f32" and rows_of(y, n) == n_rows, (x, v, y)
        groups = (*self.fold(-(-n * n_rows // 128)), 1)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows}
        self.record("mul_vector", "f32", (x, v, y), push, {"LOCAL": 128}, groups, flops=n * n_rows)

    def pool_rows(self, x: View, y: View, *, count: int) -> None:
        """Write the mean of each `count` consecutive rows of x [n_rows * count, n] to y [n_rows, n]."""
        n = x.shape[-1]
        n_rows = rows_of(y, n)
        assert rows_of(x, n) == n_rows * count, (x, y, count)
        groups = (*self.fold(-(-n * n_rows // 128)), 1)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "count": count}
        self.record("pool_rows", "f32", (x, y), push, {"LOCAL": 128}, groups, flops=n * n_rows * count)

    def gate_rows(self, gate: View, x: View, y: View, *, softplus: bool = False) -> None:
        """Multiply each row of x [n_rows, n] by sigmoid(gate[r]), or by log(1 + exp(gate[r])) if `softplus`.
        `gate` is [n_rows]. `y` may be `x`."""
        n = x.shape[-1]
        n_rows = rows_of(x, n)
        assert rows_of(gate, 1) == rows_of(y, n) == n_rows, (gate, x, y)
        groups = (*self.fold(-(-n * n_rows // 128)), 1)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows}
        consts = {"LOCAL": 128, "SOFTPLUS": int(softplus)}
        self.record("gate_rows", "f32", (gate, x, y), push, consts, groups, flops=n * n_rows)

    def columns(self, x: View, y: View, *, first: int) -> None:
        """Copy columns first..first + n of x [n_rows, width] to y [n_rows, n]."""
        (n_rows, width), n = x.shape, y.shape[-1]
        assert rows_of(y, n) == n_rows and 0 <= first <= width - n, (x, y, first)
        groups = (*self.fold(-(-n * n_rows // 128)), 1)
        push: dict[str, int | float] = {"n": n, "width": width, "first": first, "n_rows": n_rows}
        self.record("columns", "f32", (x, y), push, {"LOCAL": 128}, groups)

    def copy_words(self, src: View, dst: View) -> None:
        """Copy `src` to `dst` of equal size with a shader, because some runtimes cannot copy a byte range."""
        n = src.nbytes // 4
        assert dst.nbytes == src.nbytes, (src, dst)
        groups = min(COPY_GROUPS, max(1, -(-n // 128))), 1, 1
        self.record("copy_words", "f32", (src, dst), {"n": n}, {"LOCAL": 128}, groups)
