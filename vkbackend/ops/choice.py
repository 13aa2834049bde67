"""Which op multiplies with a matrix: the one measured to be fastest on the driver (choices.py), else by
rules."""

from __future__ import annotations

from vkbackend import shaderlib
from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.half import mat_mul_coop, mat_mul_f16, pack_f16
from vkbackend.ops.matrix import MAX_VEC_ROWS, mat_lane, mat_mul, mat_tile, mat_vec, mat_wave
from vkbackend.ops.measured import row_class
from vkbackend.ops.quantized import mat_dot, mat_mul_dot, quantize_q8
from vkbackend.ops.spec import OPS, rows_of
from vkbackend.recording import Recording

_OPS = {
    op.name: op
    for op in (
        mat_vec, mat_wave, mat_lane, mat_mul, mat_tile, mat_dot, mat_mul_dot, mat_mul_coop, mat_mul_f16
    )
}  # fmt: skip
GPU_OPS = frozenset({"mat_tile", "mat_mul_f16", "mat_mul_coop"})  # what CPUs emulate at a loss


def mat(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    y: View,
    *,
    bias: View | None = None,
    y_stride: int | None = None,
    label: str = "",
) -> None:
    """y[r, i] = sum over k of w[i, k] * x[r, k] (+ bias[i]): by the op that suits the device and x's rows.

    x is of the type that `operand_type` says."""
    op = mat_op(limits, rows_of(x, w.shape[1], x.dtype), w.dtype)
    _OPS[op](rec, limits, w, x, y, bias=bias, y_stride=y_stride, label=label)


def operand_type(limits: Limits, n_rows: int, dtype: str) -> str:
    """The type in which that many rows of x go to a matrix of type `dtype`: f32, or what `convert` makes."""
    return _OPS[mat_op(limits, n_rows, dtype)].x_type


def convert(rec: Recording, limits: Limits, x: View, y: View, *, label: str = "") -> None:
    """y of an operand type = x f32."""
    op = quantize_q8 if y.dtype == "q8" else pack_f16
    op(rec, limits, x, y, label=label or op.__name__)


def mat_op(limits: Limits, n_rows: int, dtype: str) -> str:
    """The op for that many rows of x and weights of that type."""
    measured = dict(limits.choices).get(row_class(n_rows), ())
    return next(op for op in (*measured, *_by_rules(limits, n_rows)) if runs(limits, op, dtype))


def runs(limits: Limits, op: str, dtype: str) -> bool:
    """Whether the device can run the op, and the op has the type of weights."""
    return limits.features.issuperset(OPS[op].needs) and dtype in shaderlib.types_of(op)


def _by_rules(limits: Limits, n_rows: int) -> tuple[str, ...]:
    """Ops from the best down to one that every device runs."""
    if prefers_lanes(limits):
        return ("mat_lane",)
    few = n_rows <= MAX_VEC_ROWS
    dots = ("mat_dot" if few else "mat_mul_dot",) if prefers_dots(limits) else ()
    if not few and prefers_tiles(limits):
        return ("mat_mul_coop", *dots, "mat_tile")  # mat_mul_f16 has to win in `tune`: some GPUs lose
    if not few:
        return (*dots, "mat_mul")
    return (*dots, "mat_wave" if prefers_waves(limits) else "mat_vec")


def prefers_lanes(limits: Limits) -> bool:
    """Whether mat_lane is the fastest matrix op: 5 to 10 times the others on lavapipe (8 lanes), half as fast
    as they are on SwiftShader (4 lanes)."""
    has_all = limits.features.issuperset(OPS["mat_lane"].needs)
    return limits.is_cpu and has_all and limits.subgroup_size >= 8


def prefers_dots(limits: Limits) -> bool:
    """Whether dot products of integers have instructions of their own."""
    return not limits.is_cpu and "int_dot_accelerated" in limits.features


def prefers_waves(limits: Limits) -> bool:
    """Whether mat_wave suits better than mat_vec, whose threads meet in shared memory: on GPUs with subgroups
    wide enough for a row."""
    has_all = limits.features.issuperset(OPS["mat_wave"].needs)
    return not limits.is_cpu and has_all and limits.subgroup_size >= 16


def prefers_tiles(limits: Limits) -> bool:
    """Whether mat_tile suits better than mat_mul: on GPUs; SwiftShader needs up to twice the time for it."""
    return not limits.is_cpu and limits.subgroup_size > 1
