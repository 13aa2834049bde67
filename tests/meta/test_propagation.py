"""llama.cpp has rules that derive the split state of an op's result. For each rule, vkbackend's op derives
the same state or raises PlanError, unless no model here needs the op.

In llama.cpp, the axes of activations are [width, rows] and the axes of weights are [in, out]. In vkbackend's
terms, "A0" splits an activation's width or a weight's columns, "A1" splits a weight's rows, and "A2" splits a
weight's heads.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vkbackend import ops
from vkbackend.errors import PlanError
from vkbackend.meta import split as rules
from vkbackend.meta.split import MIRRORED, State, partial, split, split_experts

pytestmark = pytest.mark.no_vulkan


A, B = ((0, 8), (8, 32)), ((0, 16), (16, 32))  # two ways to split 32
WIDTH, OTHER = split(1, A), split(1, B)
ROWS, COLUMNS = split(0, A), split(1, A)
SUM = partial((0, 1))
EXPERTS = split_experts(1, [A, A]), split_experts(2, [A, A])
# four q heads and two kv heads, with 8 elements in each head
HEADS = split(1, ((0, 16), (16, 32))), split(1, ((0, 8), (8, 16)))


def attention(q: State, k: State, v: State) -> State:
    return rules.attention(q, k, v, heads=4, kv_heads=2, head_dim_k=8, head_dim_v=8)


def shared(*, q: State = MIRRORED, k: State = MIRRORED) -> State:
    return attention(q, k, k)


Rule = tuple[str, Callable[[], State], State]
GIVEN: list[Rule] = [
    ("GENERIC unary, mirrored", lambda: rules.elementwise("softcap", MIRRORED), MIRRORED),
    ("GENERIC unary, split", lambda: rules.elementwise("softcap", WIDTH), WIDTH),
    ("GENERIC GLU, alike", lambda: rules.elementwise("glu", WIDTH, WIDTH), WIDTH),
    ("PER_ROW RMS_NORM, mirrored", lambda: rules.rows_op("rms_norm", MIRRORED), MIRRORED),
    ("PER_ROW norm of heads, split between them", lambda: rules.per_head("head_norm", WIDTH, 8), WIDTH),
    ("PER_ROW L2_NORM of heads", lambda: rules.per_head("l2_norm", OTHER, 16), OTHER),
    ("BIN_BCAST ADD, mirrored", lambda: rules.add(MIRRORED, MIRRORED), MIRRORED),
    ("BIN_BCAST ADD, alike", lambda: rules.add(WIDTH, WIDTH), WIDTH),
    ("BIN_BCAST ADD, partials", lambda: rules.add(SUM, SUM), SUM),
    ("BIN_BCAST (a) bias broadcast over rows", lambda: rules.add_bias(WIDTH, ROWS), WIDTH),
    ("BIN_BCAST (a) MUL by one value per row", lambda: rules.gate_rows(MIRRORED, WIDTH), WIDTH),
    ("BIN_BCAST (b) ADD_ID, mirrored + partial", lambda: rules.add(MIRRORED, SUM), SUM),
    ("BIN_BCAST (b) ADD_ID, the biases of experts", lambda: rules.moe(
        MIRRORED, MIRRORED, EXPERTS[0], EXPERTS[0], EXPERTS[1], EXPERTS[0]), SUM),
    ("MUL_MAT mirrored x mirrored", lambda: rules.linear(MIRRORED, MIRRORED), MIRRORED),
    ("MUL_MAT rows of W x mirrored", lambda: rules.linear(MIRRORED, ROWS), WIDTH),
    ("MUL_MAT columns of W x split alike", lambda: rules.linear(WIDTH, COLUMNS), SUM),
    ("MUL_MAT_ID rows, then columns of each expert", lambda: rules.moe(
        MIRRORED, MIRRORED, EXPERTS[0], EXPERTS[0], EXPERTS[1]), SUM),
    ("CONCAT of heads, split alike", lambda: rules.concat(HEADS[0], HEADS[0], 8, 8),
     split(1, ((0, 2), (2, 4)), [16])),
    ("ROPE, positions mirrored", lambda: rules.per_head("rope", WIDTH, 8), WIDTH),
    ("SET_ROWS into a cache split alike", lambda: rules.elementwise("kv_store", WIDTH, WIDTH), WIDTH),
    ("FLASH_ATTN all mirrored", shared, MIRRORED),
    ("FLASH_ATTN Q, K, V by heads", lambda: shared(q=HEADS[0], k=HEADS[1]), HEADS[0]),
    ("FLASH_ATTN sinks by heads", lambda: _sinks(HEADS[0], split(0, ((0, 2), (2, 4)))), HEADS[0]),
]  # fmt: skip

REFUSED: list[tuple[str, Callable[[], State]]] = [
    ("GENERIC, sources differ", lambda: rules.elementwise("glu", WIDTH, OTHER)),
    ("GENERIC, one mirrored", lambda: rules.elementwise("glu", WIDTH, MIRRORED)),
    ("GENERIC, a partial that is not linear in it", lambda: rules.elementwise("softcap", SUM)),
    ("PER_ROW over a split width", lambda: rules.rows_op("rms_norm", WIDTH)),
    ("PER_ROW of a partial", lambda: rules.rows_op("rms_norm", SUM)),
    ("PER_ROW TOP_K over split logits", lambda: rules.rows_op("outputs", WIDTH)),
    ("PER_ROW, heads cut through", lambda: rules.per_head("head_norm", WIDTH, 16)),
    ("BIN_BCAST, split + mirrored", lambda: rules.add(WIDTH, MIRRORED)),
    ("BIN_BCAST, split + partial", lambda: rules.add(WIDTH, SUM)),
    ("BIN_BCAST, split otherwise", lambda: rules.add(WIDTH, OTHER)),
    ("BIN_BCAST (a), a mirrored bias of split rows", lambda: rules.add_bias(WIDTH, MIRRORED)),
    ("BIN_BCAST (a), a split bias of whole rows", lambda: rules.add_bias(MIRRORED, ROWS)),
    ("BIN_BCAST (b), ADD_ID with split ids", lambda: rules.moe(
        MIRRORED, ROWS, EXPERTS[0], EXPERTS[0], EXPERTS[1], EXPERTS[0])),
    ("BIN_BCAST (c), ids of a partial", lambda: rules.gate_rows(SUM, WIDTH)),
    ("MUL_MAT W mirrored x split width", lambda: rules.linear(WIDTH, MIRRORED)),
    ("MUL_MAT columns x mirrored", lambda: rules.linear(MIRRORED, COLUMNS)),
    ("MUL_MAT columns x rows", lambda: rules.linear(WIDTH, ROWS)),
    ("MUL_MAT ratios differ", lambda: rules.linear(OTHER, COLUMNS)),
    ("MUL_MAT of a partial", lambda: rules.linear(SUM, ROWS)),
    ("MUL_MAT of split tokens", lambda: rules.linear(split(0, A), MIRRORED)),
    ("MUL_MAT_ID experts cut otherwise in down", lambda: rules.moe(
        MIRRORED, MIRRORED, EXPERTS[0], EXPERTS[0], split_experts(2, [A, B]))),
    ("CONCAT of heads, split otherwise", lambda: rules.concat(HEADS[0], HEADS[1], 8, 8)),
    ("ROPE through a head", lambda: rules.per_head("rope", WIDTH, 32)),
    ("ROPE of a partial", lambda: rules.per_head("rope", SUM, 8)),
    ("SET_ROWS into a cache split otherwise", lambda: rules.elementwise("kv_store", WIDTH, OTHER)),
    ("SET_ROWS of a partial", lambda: rules.elementwise("kv_store", SUM, SUM)),
    ("FLASH_ATTN Q split, K and V mirrored", lambda: shared(q=HEADS[0])),
    ("FLASH_ATTN Q mirrored, K and V split", lambda: shared(k=HEADS[1])),
    ("FLASH_ATTN K and V differ", lambda: attention(HEADS[0], HEADS[1], split(1, ((0, 0), (0, 16))))),
    ("FLASH_ATTN kv heads of other q heads", lambda: shared(q=HEADS[0], k=split(1, ((0, 16), (16, 16))))),
    ("FLASH_ATTN sinks mirrored beside split heads", lambda: _sinks(HEADS[0], MIRRORED)),
]  # fmt: skip

# No model here needs these ops of llama.cpp, so their split states cannot occur.
ABSENT = """
reshape cont permute transpose pad repeat dup sum cumsum mean argmax count_equal norm
argsort soft_max leaky_relu fill sub div out_prod set diag conv_2d pool_2d upscale arange tri solve_tri
win_part rwkv_wkv gated_linear_attn lightning_indexer
""".split()


def _sinks(heads: State, w: State) -> State:
    rules.per_head_weight("sinks", heads, w, 8)
    return heads


@pytest.mark.parametrize(("derive", "want"), [r[1:] for r in GIVEN], ids=[r[0] for r in GIVEN])
def test_given(derive: Callable[[], State], want: State) -> None:
    assert derive() == want


@pytest.mark.parametrize("derive", [r[1] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(derive: Callable[[], State]) -> None:
    with pytest.raises(PlanError, match="no rule for"):
        derive()


def test_remaining_rules_have_no_op() -> None:
    assert not set(ABSENT) & ops.OPS.keys()
