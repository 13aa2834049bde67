"""Ops on one value at a time: sums, gated products, scaling, capping, copies."""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.spec import fold, record, rows_of
from vkbackend.recording import Recording

ACTS = ("none", "silu", "gelu", "sigmoid", "swiglu_oai")  # as numbered in shaders/glu.comp


def glu(
    rec: Recording, limits: Limits, gate: View, up: View, y: View, *, act: str = "silu", label: str = ""
) -> None:
    """y = act(gate) * up, any equal sizes; y may be gate or up (Shazeer 2020).

    gelu is its tanh form; swiglu_oai is min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (up kept in +-7, + 1).
    """
    consts = {"LOCAL": 128, "ACT": ACTS.index(act)}
    _record(rec, limits, "glu", (gate, up, y), {}, consts, label)


def add(rec: Recording, limits: Limits, a: View, b: View, y: View, *, label: str = "") -> None:
    """y = a + b, any equal sizes; y may be a or b."""
    _record(rec, limits, "add", (a, b, y), {}, {"LOCAL": 128}, label)


def scale(rec: Recording, limits: Limits, x: View, y: View, *, c: float, label: str = "") -> None:
    """y = c * x, any equal sizes; y may be x. c = 0 gives zeros whatever x holds."""
    _record(rec, limits, "scale", (x, y), {"c": c}, {"LOCAL": 128}, label)


def softcap(rec: Recording, limits: Limits, x: View, y: View, *, c: float, label: str = "") -> None:
    """y = c * tanh(x / c), c > 0, any equal sizes; y may be x."""
    assert c > 0, c
    _record(rec, limits, "softcap", (x, y), {"c": c}, {"LOCAL": 128}, label)


def _record(
    rec: Recording,
    limits: Limits,
    op: str,
    args: tuple[View, ...],
    push: dict[str, float],
    consts: dict[str, int],
    label: str,
) -> None:
    n = rows_of(args[0], 1)
    assert all(rows_of(view, 1) == n for view in args), (op, *(view.shape for view in args))
    groups = (*fold(limits, -(-n // consts["LOCAL"])), 1)
    record(rec, op, "f32", args, {"n": n, **push}, consts, groups, label=label, flops=n)


def add_bias(rec: Recording, limits: Limits, x: View, b: View, y: View, *, label: str = "") -> None:
    """y = x + b for every row of x [n_rows, n]; b f32 [n]; y may be x."""
    n = x.shape[-1]
    n_rows = rows_of(x, n)
    assert b.shape == (n,) and b.dtype == "f32" and rows_of(y, n) == n_rows, (x, b, y)
    groups = (*fold(limits, -(-n * n_rows // 128)), 1)
    push: dict[str, int | float] = {"n": n, "n_rows": n_rows}
    record(rec, "add_bias", "f32", (x, b, y), push, {"LOCAL": 128}, groups, label=label, flops=n * n_rows)


def gate_rows(rec: Recording, limits: Limits, gate: View, x: View, y: View, *, label: str = "") -> None:
    """y[r] = sigmoid(gate[r]) * x[r] for x [n_rows, n], gate [n_rows]; y may be x."""
    n = x.shape[-1]
    n_rows = rows_of(x, n)
    assert rows_of(gate, 1) == rows_of(y, n) == n_rows, (gate, x, y)
    groups = (*fold(limits, -(-n * n_rows // 128)), 1)
    push: dict[str, int | float] = {"n": n, "n_rows": n_rows}
    record(rec, "gate_rows", "f32", (gate, x, y), push, {"LOCAL": 128}, groups, label=label, flops=n * n_rows)


def columns(rec: Recording, limits: Limits, x: View, y: View, *, first: int, label: str = "") -> None:
    """y [n_rows, n] = x[:, first : first + n]; x [n_rows, width]."""
    (n_rows, width), n = x.shape, y.shape[-1]
    assert rows_of(y, n) == n_rows and 0 <= first <= width - n, (x, y, first)
    groups = (*fold(limits, -(-n * n_rows // 128)), 1)
    push: dict[str, int | float] = {"n": n, "width": width, "first": first, "n_rows": n_rows}
    record(rec, "columns", "f32", (x, y), push, {"LOCAL": 128}, groups, label=label)


COPY_GROUPS = 256  # enough to hide the latency of a bus; each takes turns


def copy_words(rec: Recording, limits: Limits, src: View, dst: View, *, label: str = "") -> None:
    """dst = src, as 32-bit words; equal sizes, any types. For runtimes that cannot copy ranges themselves."""
    n = src.nbytes // 4
    assert dst.nbytes == src.nbytes, (src, dst)
    groups = min(COPY_GROUPS, max(1, -(-n // 128))), 1, 1
    record(rec, "copy_words", "f32", (src, dst), {"n": n}, {"LOCAL": 128}, groups, label=label)
