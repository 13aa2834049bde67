"""Shader interfaces.

Tests compare each spec with the shader's source, numpy twin and test cases. `SPECS` lists the ops that are
methods of the recorder. `OPS` in table.py lists all ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

PUSH_NBYTES = 128  # guaranteed by Vulkan


@dataclass(frozen=True)
class OpSpec:
    """`args` are storage bindings in order, "name:r" or "name:w"."""

    name: str
    args: tuple[str, ...]
    # (name, "u" or "f") of each push constant after the args' word offsets.
    push: tuple[tuple[str, str], ...]
    consts: tuple[str, ...] = ("LOCAL",)
    step: bool = False  # Whether the shader reads StepParams, the binding after the args.
    rows: bool = False  # Whether the shader reads the step's rows, the last binding.
    needs: tuple[str, ...] = ()  # Optional features that the shader needs.
    twin: str = ""  # The op whose numpy twin this op also uses, or "" for a twin of its own.

    @cached_property
    def addressed(self) -> bool:
        """Return whether the shader gets 64-bit addresses of the args instead of bindings."""
        return "buffer_address" in self.needs

    @cached_property
    def arg_names(self) -> tuple[str, ...]:
        return tuple(arg.partition(":")[0] for arg in self.args)

    @cached_property
    def written(self) -> tuple[int, ...]:
        return tuple(i for i, arg in enumerate(self.args) if arg.endswith(":w"))

    def __post_init__(self) -> None:
        assert 4 * (len(self.args) * (1 + self.addressed) + len(self.push)) <= PUSH_NBYTES, (
            f"{self.name}: push constants exceed 128 bytes"
        )
        assert len(self.args) <= 8 and self.consts[0] == "LOCAL", self


def op_spec(
    name: str,
    args: str,
    push: str,
    consts: str = "",
    step: bool = False,
    rows: bool = False,
    needs: tuple[str, ...] = (),
    twin: str = "",
) -> OpSpec:
    """Parse a spec. A float push constant is "name:f". `consts` are the specialization constants after
    LOCAL. `rows` implies `step`."""
    fields = tuple((field.partition(":")[0], field.partition(":")[2] or "u") for field in push.split())
    return OpSpec(
        name, tuple(args.split()), fields, ("LOCAL", *consts.split()), step or rows, rows, needs, twin
    )


_DECODE_PUSH = "n_heads n_kv group q_first n_rows blocks_per_slot n_splits window chunk scale:f softcap:f"
_PREFILL_PUSH = (
    "n_heads n_kv group q_first n_rows blocks_per_slot window chunk first_head causal scale:f softcap:f"
)
_CHOSEN_PUSH = (
    "n_heads n_kv group q_first n_rows blocks_per_slot n_splits n_chosen n_lists block_size tail scale:f"
)
_SCORES_PUSH = "n_heads n_rows first_row blocks_per_slot n_positions block_size cells_per_block n_best"
_MAXIMA_PUSH = "n_heads n_rows first_row blocks_per_slot n_blocks block_size n_local n_best"
_UNIT_CONSTS = (
    "UNIT_M UNIT_N UNIT_K LANES ROW_GROUPS V_PARTS UNROLL HEAD_K HEAD_V HAS_SINKS K_TYPE V_TYPE HAS_SOFTCAP"
)
_CHUNK_CONSTS = "DIM_PARTS K_CHUNKS V_CHUNKS"
_DELTA_PUSH = "n_heads n_k tiled q_stride v_stride n_rows scale:f"

SPECS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        op_spec("embed", "w:r chosen:r y:w", "n_embd n_vocab n_rows ids first", rows=True),
        op_spec("rms_norm", "x:r w:r y:w", "n n_rows eps:f", "HAS_W BATCH"),
        op_spec("layer_norm", "x:r w:r b:r y:w", "n n_rows eps:f", "HAS_B"),
        op_spec("center", "x:r y:w", "n n_rows share:f"),
        op_spec("quantize_q8", "x:r y:w", "k n_rows"),
        op_spec("pack_f16", "x:r y:w", "k n_rows"),
        op_spec(
            "rope", "x:r w:r cos_sin:r y:w", "n_heads head_dim n_rot n_rows eps:f", "HALF_SPLIT NORM PARTS"
        ),
        op_spec("hadamard", "x:r y:w", "head head_out n_heads"),
        op_spec(
            "kv_store",
            "x:r w:r cos_sin:r cells:r cache:w",
            "width n_rows blocks_per_slot head_dim n_rot half_split block_size cells_per_block first_cell"
            " eps:f",
            "TYPE NORM BLOCKS",
            rows=True,
        ),
        op_spec(
            "kv_load",
            "cache:r cells:r cos_sin:r y:w",
            "width n_rows blocks_per_slot head_dim n_rot half_split",
            "TYPE",
            rows=True,
        ),
        op_spec(
            "attn_decode",
            "q:r k:r v:r cells:r sinks:r slopes:r part:w",
            _DECODE_PUSH,
            "HEAD_K HEAD_V HEADS K_TYPE V_TYPE FINAL HAS_SINKS BATCH ROWS FIRST HAS_SLOPES",
            rows=True,
        ),
        op_spec(
            "attn_decode_coop",
            "q:r k:r v:r cells:r sinks:r slopes:r part:w",
            _DECODE_PUSH,
            f"{_UNIT_CONSTS} FINAL ROWS FIRST {_CHUNK_CONSTS} MOST",
            rows=True,
            needs=("matrix_units", "full_subgroups"),
            twin="attn_decode",
        ),
        op_spec(
            "attn_combine",
            "part:r sinks:r y:w",
            "n_heads n_rows n_splits",
            "HEAD_V HAS_SINKS MAX_SPLITS",
        ),
        op_spec(
            "attn_chosen",
            "q:r k:r v:r cells:r chosen:r part:w",
            _CHOSEN_PUSH,
            "HEAD_K HEAD_V HEADS K_TYPE V_TYPE FINAL BATCH",
            rows=True,
        ),
        op_spec(
            "attn_chosen_coop",
            "q:r k:r v:r cells:r chosen:r part:w",
            _CHOSEN_PUSH,
            "UNIT_M UNIT_N UNIT_K LANES ROW_GROUPS V_PARTS DIM_PARTS K_CHUNKS V_CHUNKS UNROLL HEAD_K HEAD_V"
            " K_TYPE V_TYPE FINAL DENSE",
            rows=True,
            needs=("matrix_units", "full_subgroups"),
            twin="attn_chosen",
        ),
        op_spec(
            "attn_blocks_coop",
            "q:r k:r v:r cells:r chosen:r part:w",
            _CHOSEN_PUSH,
            "UNIT_M UNIT_N UNIT_K LANES ROW_GROUPS V_PARTS UNROLL SCORE_UNROLL HEAD_K HEAD_V K_TYPE V_TYPE"
            " FINAL ROWS LIST_BLOCK JOINT",
            rows=True,
            needs=("matrix_units", "full_subgroups"),
            twin="attn_chosen",
        ),
        op_spec(
            "attn_entries",
            "q:r k:r v:r cells:r entry_cells:r chosen:r part:w",
            "n_heads n_kv group q_first n_rows blocks_per_slot n_splits n_chosen block_size cells_per_block"
            " first_entry window scale:f",
            "HEAD_K HEAD_V HEADS K_TYPE V_TYPE FINAL BATCH",
            rows=True,
        ),
        op_spec(
            "index_scores",
            "q:r w:r k:r cells:r y:w",
            _SCORES_PUSH,
            "HEAD HEADS K_TYPE BATCH HAS_W",
            rows=True,
        ),
        op_spec(
            "index_scores_coop",
            "q:r w:r k:r cells:r y:w",
            _SCORES_PUSH,
            "UNIT_M UNIT_N UNIT_K LANES KEY_GROUPS HEAD_GROUPS FN FH HEAD K_TYPE HAS_W ROWS",
            rows=True,
            needs=("matrix_units", "full_subgroups"),
            twin="index_scores",
        ),
        op_spec(
            "pool_keys",
            "k:r cells:r bias:r y:w",
            "n_rows blocks_per_slot block_size cell_quads first_quad",
            "HEAD K_TYPE GATED SERIES",
            rows=True,
        ),
        op_spec("index_maxima", "q:r k:r cells:r y:w", _MAXIMA_PUSH, "HEAD HEADS K_TYPE BATCH", rows=True),
        op_spec(
            "index_maxima_coop",
            "q:r k:r cells:r y:w",
            _MAXIMA_PUSH,
            "UNIT_M UNIT_N UNIT_K LANES FN HEAD HEADS K_TYPE ROWS",
            rows=True,
            needs=("matrix_units", "full_subgroups"),
            twin="index_maxima",
        ),
        op_spec(
            "index_top_k",
            "x:r ids:w",
            "n_positions n_rows first_row n_chosen n_lists block_size tail",
            "BATCH",
            rows=True,
        ),
        op_spec(
            "attn_prefill",
            "q:r k:r v:r cells:r sinks:r slopes:r y:w",
            _PREFILL_PUSH,
            "TQ HEAD_K HEAD_V HAS_SINKS K_TYPE V_TYPE HAS_SOFTCAP HAS_SLOPES BATCH",
            step=True,
        ),
        op_spec(
            "attn_prefill_coop",
            "q:r k:r v:r cells:r sinks:r slopes:r y:w",
            _PREFILL_PUSH,
            f"{_UNIT_CONSTS} HAS_SLOPES MOST {_CHUNK_CONSTS}",
            step=True,
            needs=("matrix_units", "full_subgroups"),
            twin="attn_prefill",
        ),
        op_spec("glu", "gate:r up:r y:w", "n", "ACT"),
        op_spec("scale", "x:r y:w", "n c:f"),
        op_spec("copy_words", "src:r dst:w", "n"),
        op_spec("softcap", "x:r y:w", "n c:f"),
        op_spec("xielu", "x:r y:w", "n alpha_p:f alpha_n:f beta:f eps:f"),
        op_spec("top_k", "x:r source:r ids:w values:w", "n n_rows chunk n_chunks", "K KIND"),
        op_spec("log_sum_exp", "x:r y:w", "n n_rows chunk n_chunks", "BATCH"),
        op_spec("add", "a:r b:r y:w", "n"),
        op_spec("gate_rows", "gate:r x:r y:w", "n n_rows", "SOFTPLUS"),
        op_spec("add_bias", "x:r b:r y:w", "n n_rows"),
        op_spec("clamp", "x:r y:w", "n low:f high:f"),
        op_spec("mul_vector", "x:r v:r y:w", "n n_rows"),
        op_spec("pool_rows", "x:r y:w", "n n_rows count"),
        op_spec("columns", "x:r y:w", "n width first n_rows"),
        op_spec("moe_logits", "h:r w_norm:r w:r logits:w", "n_embd n_experts n_rows", "N"),
        op_spec(
            "moe_topk",
            "logits:r h:r bias:r select:r gain:r ids:w weights:w",
            "n_embd n_experts n_used n_rows n_groups n_groups_used norm_w per_id"
            " eps:f scale:f logit_scale:f softcap:f",
            "GATING HAS_BIAS HAS_SELECT HAS_GAIN",
        ),
        op_spec("add_id", "x:r b:r ids:r starts:r y:w", "n n_pairs", "RAGGED"),
        op_spec("moe_group", "ids:r order:w tiles:w", "n_pairs n_experts tile n_tiles"),
        op_spec(
            "moe_lookup",
            "ids:r table:r misses:w hits:w counts:w",
            "n_pairs n_used n_experts",
            "COUNTED",
            step=True,
        ),
        op_spec("moe_sum", "x:r weights:r y:w", "n n_used n_rows"),
        op_spec("adapter_experts", "adapters:r experts:r ids:w", "n_rows n_used n_terms term n_experts"),
        op_spec(
            "low_rank_add",
            "w:r t:r ids:r scales:r starts:r x:r y:w",
            "n y_stride w_stride rank t_stride n_rows n_used n_terms s_stride s_first first count",
            "N STACKED",
        ),
        op_spec("mat_heads", "w:r x:r y:w", "k n n_heads n_rows", "TPR N"),
        op_spec("concat", "a:r b:r y:w", "n_a n_b n_rows times"),
        op_spec(
            "ssm_conv", "x:r w:r b:r state:w y:w", "width n_rows", "D_CONV SILU HAS_B ROW_STATES", step=True
        ),
        op_spec("l2_norm", "x:r y:w", "n n_heads x_stride n_rows eps:f"),
        op_spec("delta_gates", "a:r dt:r decay:r b:r g:w beta:w", "n_heads width n_rows bound:f", "BOUNDED"),
        op_spec(
            "delta_net",
            "q:r k:r v:r g:r beta:r state:w y:w",
            _DELTA_PUSH,
            "S KDA ROW_STATES",
            step=True,
        ),
        op_spec(
            "delta_chunk",
            "q:r k:r v:r g:r beta:r work:w",
            _DELTA_PUSH,
            "S KDA C",
            step=True,
        ),
        op_spec("delta_scan", "work:r state:w y:w", "n_heads n_rows", "S C", step=True),
        op_spec(
            "ssm_scan",
            "x:r bc:r dt:r bias:r a:r d:r state:w y:w",
            "n_heads n_groups group first n_rows",
            "P N COLUMNS ROWS ROW_STATES",
            step=True,
        ),
        op_spec(
            "selective_scan",
            "x:r dt:r b:r c:r a:r d:r state:w y:w",
            "width n_rows",
            "N COLUMNS ROWS ROW_STATES",
            step=True,
        ),
        op_spec("token_shift", "x:r mu:r state:w y:w", "width n_rows", "MIXES ROW_STATES", step=True),
        op_spec(
            "wkv_keys",
            "k:r rate:r removal:r replacement:r key:w removed:w added:w",
            "size n_heads n_rows",
        ),
        op_spec(
            "wkv",
            "r:r decay:r key:r v:r removed:r added:r state:w y:w",
            "n_heads n_rows",
            "S COLUMNS ROWS ROW_STATES",
            step=True,
        ),
        op_spec("wkv_norm", "x:r r:r key:r v:r bonus:r w:r b:r y:w", "size n_heads n_rows eps:f"),
        op_spec(
            "group_squares", "z:r x:r squares:w", "width first skip group n_groups n_rows", "HAS_Z BATCH"
        ),
        op_spec(
            "group_norm", "z:r x:r squares:r w:r y:w", "width first group n_groups n_rows eps:f", "HAS_Z"
        ),
        op_spec("streams_of", "x:r a:r y:w", "n n_streams n_rows least:f"),
        op_spec("streams_predict", "x:r routed:r w:r y:w", "n n_rows scale:f", "STREAMS"),
        op_spec("streams_correct", "x:r a:r routed:r w:r g:r y:w z:w", "n n_rows scale:f", "STREAMS"),
        op_spec("streams_add", "x:r a:r y:w", "n n_streams n_rows"),
        op_spec("streams_attend", "x:r a:r w:r y:w", "n n_rows eps:f", "STREAMS"),
        op_spec("streams_mix", "x:r mixes:r scale:r base:r y:w", "n n_rows width eps:f", "STREAMS"),
        op_spec("streams_spread", "x:r a:r mixes:r scale:r base:r y:w", "n n_rows gain:f eps:f", "STREAMS"),
        op_spec("streams_gate", "x:r k:r a:r y:w", "n n_rows n_streams"),
        op_spec("ngram_ids", "x:r table:r ids:w", "n_rows n_heads end", "LONGEST"),
        op_spec(
            "streams_sinkhorn",
            "x:r a:r mixes:r scale:r base:r y:w",
            "n n_rows n_turns eps:f",
            "STREAMS",
        ),
        op_spec("rows_before", "x:r kept:r y:w", "n n_rows n_kept", "HAS_X", rows=True),
        op_spec("keep_rows", "x:r kept:w", "n n_rows n_kept", rows=True),
        op_spec("row_moments", "x:r y:w", "n n_rows"),
        op_spec("gaussian_topk", "x:r moments:r y:w", "n width n_rows c:f"),
        op_spec("pack_bf16", "x:r y:w", "n"),
        op_spec("pack_halves", "x:r y:w kept:w", "n", "KEEPS"),
        op_spec(
            "add_partials",
            "residual:r own:r slots:r w:r h:w y:w",
            "n n_rows n_slots own_index slot_stride writers eps:f",
            "HAS_RESIDUAL HAS_NORM WIRE BATCH",
        ),
    )
}
