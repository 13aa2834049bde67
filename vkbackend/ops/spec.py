"""What each shader is called with, as data (`OPS`), and what the op functions record a dispatch of it with.

The table is the single place that says which storage bindings, push constants and specialization constants a
shader has; sources, twins and cases are tested against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.recording import Dispatch, Recording

PUSH_NBYTES = 128  # what every Vulkan device has


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The interface of one shader. `args` are storage bindings in order, "name:r" or "name:w"."""

    name: str
    args: tuple[str, ...]
    push: tuple[tuple[str, str], ...]  # (name, "u" or "f"), behind one word offset per arg
    consts: tuple[str, ...] = ("LOCAL",)  # specialization constants, ids 0, 1, ...
    step: bool = False  # StepParams is one more, uniform binding behind the storage bindings
    needs: tuple[str, ...] = ()  # optional features without which the shader does not run

    @property
    def addressed(self) -> bool:
        """Its push constants begin with 64-bit addresses of the args, which are not bound."""
        return "buffer_address" in self.needs

    @property
    def arg_names(self) -> tuple[str, ...]:
        return tuple(arg.partition(":")[0] for arg in self.args)

    @property
    def written(self) -> tuple[int, ...]:
        """Indices of the args the shader writes."""
        return tuple(i for i, arg in enumerate(self.args) if arg.endswith(":w"))

    def __post_init__(self) -> None:
        assert 4 * (len(self.args) * (1 + self.addressed) + len(self.push)) <= PUSH_NBYTES, (
            f"{self.name}: push constants exceed 128 bytes"
        )
        assert len(self.args) <= 8 and self.consts[0] == "LOCAL", self


def _spec(name: str, args: str, push: str, consts: str = "", step: bool = False, needs: str = "") -> OpSpec:
    fields = tuple((field.partition(":")[0], field.partition(":")[2] or "u") for field in push.split())
    return OpSpec(name, tuple(args.split()), fields, ("LOCAL", *consts.split()), step, tuple(needs.split()))


# What matrix ops share: the args and push constants of a product and of one with experts, and features.
_MATRIX, _PRODUCT, _GATED = "w:r x:r b:r y:w", "k n n_rows y_stride has_bias", "act up_at"
_IDS, _GROUPS = "w:r x:r ids:r starts:r y:w", "w:r x:r order:r tiles:r starts:r y:w"
_EXPERTS = "side first count n_used n_rows x_stride y_stride x_per_used"
_SUBGROUPS, _UNITS = "subgroup_arithmetic full_subgroups", "matrix_units full_subgroups"
_LANES = "buffer_address subgroup_shuffle full_subgroups"

OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        _spec("embed", "w:r y:w", "n_embd n_vocab n_rows ids first", step=True),
        _spec("rms_norm", "x:r w:r y:w", "n n_rows eps:f", "HAS_W BATCH"),
        _spec("mat_vec", _MATRIX, f"{_PRODUCT} {_GATED}", "TPR N"),
        _spec("mat_wave", _MATRIX, f"{_PRODUCT} {_GATED}", "ROWS N", needs=_SUBGROUPS),
        _spec("mat_lane", _MATRIX, f"{_PRODUCT} {_GATED}", "N SUBGROUP", needs=_LANES),
        _spec("mat_mul", _MATRIX, _PRODUCT, "RN"),
        _spec("mat_tile", _MATRIX, _PRODUCT, "RM RN"),
        _spec("quantize_q8", "x:r y:w", "k n_rows"),
        _spec("mat_dot", _MATRIX, f"{_PRODUCT} {_GATED}", "ROWS N", needs=f"int_dot {_SUBGROUPS}"),
        _spec("mat_mul_dot", _MATRIX, _PRODUCT, "RN", needs="int_dot"),
        _spec("pack_f16", "x:r y:w", "k n_rows"),
        _spec("mat_mul_f16", _MATRIX, _PRODUCT, "RM RN", needs="float16"),
        _spec("mat_mul_coop", _MATRIX, _PRODUCT, "M N K FM FN SM SN LANES", needs=_UNITS),
        _spec("rope", "x:r w:r cos_sin:r y:w", "n_heads head_dim n_rot n_rows eps:f", "HALF_SPLIT NORM"),
        _spec(
            "kv_store",
            "x:r w:r cos_sin:r cells:r cache:w",
            "width n_rows blocks_per_slot head_dim n_rot half_split eps:f",
            "TYPE NORM",
            step=True,
        ),
        _spec(
            "attn_decode",
            "q:r k:r v:r cells:r sinks:r part:w",
            "n_heads n_kv group q_first n_rows blocks_per_slot n_splits window scale:f softcap:f",
            "HEAD_K HEAD_V HEADS K_TYPE V_TYPE FINAL HAS_SINKS",
            step=True,
        ),
        _spec("attn_combine", "part:r sinks:r y:w", "n_heads n_rows n_splits", "HEAD_V HAS_SINKS"),
        _spec(
            "attn_prefill",
            "q:r k:r v:r cells:r sinks:r y:w",
            "n_heads n_kv group q_first n_rows blocks_per_slot window scale:f softcap:f",
            "HEAD_K HEAD_V TQ HAS_SINKS K_TYPE V_TYPE HAS_SOFTCAP",
            step=True,
        ),
        _spec("glu", "gate:r up:r y:w", "n", "ACT"),
        _spec("scale", "x:r y:w", "n c:f"),
        _spec("copy_words", "src:r dst:w", "n"),
        _spec("softcap", "x:r y:w", "n c:f"),
        _spec("top_k", "x:r source:r ids:w values:w", "n n_rows chunk n_chunks", "K MAPPED"),
        _spec("add", "a:r b:r y:w", "n"),
        _spec("gate_rows", "gate:r x:r y:w", "n n_rows"),
        _spec("add_bias", "x:r b:r y:w", "n n_rows"),
        _spec("columns", "x:r y:w", "n width first n_rows"),
        _spec("moe_logits", "h:r w_norm:r w:r logits:w", "n_embd n_experts n_rows", "N"),
        _spec(
            "moe_topk",
            "logits:r h:r bias:r select:r gain:r ids:w weights:w",
            "n_embd n_experts n_used n_rows n_groups n_groups_used norm_w eps:f scale:f logit_scale:f",
            "GATING HAS_BIAS HAS_SELECT HAS_GAIN",
        ),
        _spec("mat_vec_id", _IDS, _EXPERTS, "TPR AXIS"),
        _spec("mat_dot_id", _IDS, _EXPERTS, "ROWS AXIS", needs=f"int_dot {_SUBGROUPS}"),
        _spec("mat_mul_id", _GROUPS, _EXPERTS, "RN AXIS"),
        _spec("mat_mul_dot_id", _GROUPS, _EXPERTS, "RN AXIS", needs="int_dot"),
        _spec("mat_mul_id_coop", _GROUPS, _EXPERTS, "M N K FM FN SM SN LANES AXIS", needs=_UNITS),
        _spec("mat_lane_id", _GROUPS, _EXPERTS, "N SUBGROUP AXIS GROUPED", needs=_LANES),
        _spec("add_id", "x:r b:r ids:r starts:r y:w", "n n_pairs", "RAGGED"),
        _spec("moe_group", "ids:r order:w tiles:w", "n_pairs n_experts tile n_tiles"),
        _spec("moe_sum", "x:r weights:r y:w", "n n_used n_rows"),
        _spec("mat_heads", "w:r x:r y:w", "k n n_heads n_rows", "TPR N"),
        _spec("concat", "a:r b:r y:w", "n_a n_b n_rows"),
        _spec("ssm_conv", "x:r w:r state:w y:w", "width n_rows", "D_CONV", step=True),
        _spec("l2_norm", "x:r y:w", "n n_heads x_stride n_rows eps:f"),
        _spec("delta_gates", "a:r dt:r decay:r b:r g:w beta:w", "n_heads width n_rows"),
        _spec(
            "delta_net",
            "q:r k:r v:r g:r beta:r state:w y:w",
            "n_heads n_k tiled q_stride v_stride n_rows scale:f",
            "S KDA",
            step=True,
        ),
        _spec(
            "delta_chunk",
            "q:r k:r v:r g:r beta:r work:w",
            "n_heads n_k tiled q_stride v_stride n_rows scale:f",
            "S KDA C",
            step=True,
        ),
        _spec("delta_scan", "work:r state:w y:w", "n_heads n_rows", "S C", step=True),
        _spec("pack_bf16", "x:r y:w", "n"),
        _spec(
            "add_partials",
            "residual:r own:r slots:r w:r h:w y:w",
            "n n_rows n_slots own_index slot_stride writers eps:f",
            "HAS_RESIDUAL HAS_NORM WIRE BATCH",
        ),
    )
}


# ---- helpers ----


def fold(limits: Limits, count: int) -> tuple[int, int]:
    """Workgroup counts in x and y that cover `count`, few enough for each axis."""
    max_x = min(limits.max_groups[0], 65_535)
    return (count, 1) if count <= max_x else (max_x, -(-count // max_x))


def rows_of(view: View, width: int, dtype: str = "f32") -> int:
    """Rows of `width` elements, f32 unless said otherwise, in a view of any shape."""
    total = math.prod(view.shape)
    assert view.dtype == dtype and total % width == 0, f"{view!r} is not {dtype} rows of {width}"
    return total // width


def record(
    rec: Recording,
    op: str,
    variant: str,
    args: tuple[View, ...],
    push: dict[str, int | float],
    consts: dict[str, int],
    groups: tuple[int, int, int],
    step: View | None = None,
    label: str = "",
    flops: int = 0,
) -> None:
    spec = OPS[op]
    assert tuple(push) == tuple(name for name, _ in spec.push), (op, tuple(push))
    assert tuple(consts) == spec.consts and len(args) == len(spec.args), (op, tuple(consts))
    assert (step is not None) == spec.step, op
    rec.dispatch(
        Dispatch(
            op,
            variant,
            args,
            spec.written,
            tuple((name, float(push[name]) if kind == "f" else push[name]) for name, kind in spec.push),
            tuple(consts.items()),
            groups,
            step,
            label or op,
            flops,
            spec.addressed,
        )
    )


def row_consts(limits: Limits, n: int) -> tuple[int, int]:
    """(LOCAL, BATCH) of a workgroup that goes over a row of n. A step's one row is all the work there is, so
    on a GPU its reads have to overlap: each takes half a microsecond, over a bus one or two."""
    if limits.is_cpu:
        return 32 if n <= 256 else 128, 1
    return max(32, min(512, floor_pow2(limits.max_invocations), floor_pow2(n // 4))), 4


def floor_pow2(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)
