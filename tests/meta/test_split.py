"""The tests cover every rule that derives a split state, and every combination of states that a rule
refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from vkbackend.errors import PlanError
from vkbackend.meta import split as rules
from vkbackend.meta import split_recurrent as recurrent_rules
from vkbackend.meta.split import (
    MIRRORED,
    State,
    check_tiling,
    holders,
    partial,
    scaled,
    split,
    split_experts,
)

pytestmark = pytest.mark.no_vulkan


HALVES, THIRDS, LEFT = ((0, 8), (8, 16)), ((0, 5), (5, 16)), ((0, 16), (16, 16))
ROWS, COLUMNS = split(0, HALVES), split(1, HALVES)
SUM = partial((0, 1))


def attend(q: State, k: State, v: State) -> State:
    """Derive the split state of attention with four q heads and two kv heads. A kv head has 8 elements in K
    and 16 elements in V."""
    return rules.attention(q, k, v, heads=4, kv_heads=2, head_dim_k=8, head_dim_v=16)


Q, K, V = split(1, ((0, 16), (16, 32))), split(1, ((0, 8), (8, 16))), split(1, ((0, 16), (16, 32)))

# The two experts are split at different rows or columns. Device 0 has no part of the second expert.
BY_ROWS, BY_COLUMNS = (split_experts(axis, [HALVES, ((0, 0), (0, 16))]) for axis in (1, 2))


def mix(
    x: State = MIRRORED, router: State = MIRRORED, gate: State = BY_ROWS, up: State = BY_ROWS,
    down: State = BY_COLUMNS, biases: tuple[State, ...] = (),
) -> State:  # fmt: skip
    return rules.moe(x, router, gate, up, down, *biases)


def sinks(y: State, w: State) -> State:
    """Apply the rule for a weight with one value per head, here of 8 elements, and return y."""
    rules.per_head_weight("sinks", y, w, 8)
    return y


# Heads have 8 elements. Two value heads read each key head. In VALUES, the value heads of a key head are
# adjacent. In TILED with n key heads, value heads h and h + n read key head h. QKV, a tensor with the
# segments q, k and v, is split by key heads.
KEYS, VALUES, TILED = (split(1, ((0, 1), (1, 2)), n) for n in ([8], [16], [8, 8]))
QKV, TILED_QKV = (split(1, ((0, 1), (1, 2)), n) for n in ([8, 8, 16], [8, 8, 8, 8]))
BETA, TILED_BETA = rules.resized(VALUES, 1, 8), rules.resized(TILED, 1, 8)
OTHER = split(1, ((0, 2), (2, 2)))


QKV_ROWS, BETA_ROWS = replace(QKV, axis=0), replace(BETA, axis=0)
QKV_STATE, DELTA_STATE = rules.resized(QKV, 3), rules.resized(VALUES, 8)


def conv(x: State = QKV, w: State = QKV_ROWS, state: State = QKV_STATE) -> State:
    return recurrent_rules.ssm_conv(x, w, state, 3)


def gates(
    a: State = BETA, dt: State = BETA_ROWS, decay: State = BETA_ROWS, b: State = BETA, width: int = 1
) -> State:
    return recurrent_rules.delta_gates(a, dt, decay, b, width)


def delta(
    *parts: State, g: State = BETA, beta: State = BETA, state: State = DELTA_STATE, width: int = 1
) -> State:
    return recurrent_rules.delta_net(parts, g, beta, state, 8, width)


# There are six heads of 8 elements, and two heads form a group. B and C of a group have 4 values each. Every
# device that needs a group has a copy. The second group is on both devices, because both need it.
HEADS, GROUPS = split(1, ((0, 3), (3, 6)), [1]), split(1, ((0, 2), (1, 3)), [4, 4])
INNER, SCANNED = rules.resized(HEADS, 8), rules.resized(HEADS, 32)


def scan(x: State = INNER, bc: State = GROUPS, dt: State = HEADS, state: State = SCANNED) -> State:
    return recurrent_rules.ssm_scan(x, bc, dt, state, (8, 4, 2))


SELECTED = rules.resized(COLUMNS, 4)


def selective(
    x: State = COLUMNS, dt: State = COLUMNS, b: State = MIRRORED, a: State = ROWS, state: State = SELECTED
) -> State:
    return recurrent_rules.selective_scan(x, dt, (b, MIRRORED), (a, ROWS), state, 4)


BEFORE = split(1, ((0, 9), (0, 9)))


def shift(x: State = MIRRORED, mu: State = MIRRORED, state: State = BEFORE) -> State:
    recurrent_rules.token_shift(x, mu, state)
    return x


def wkv(*parts: State, weights: Sequence[State] = (), state: State | None = None) -> State:
    return recurrent_rules.wkv("wkv", parts, weights, 8, state)


def normed(x: State) -> State:
    rules.group_norm(x, MIRRORED, 8)
    return x


HEADWISE = split(1, ((0, 8), (8, 16)))
RULES: list[tuple[str, Callable[[], State], State]] = [
    ("linear, all mirrored", lambda: rules.linear(MIRRORED, MIRRORED), MIRRORED),
    ("linear, rows of w", lambda: rules.linear(MIRRORED, ROWS), COLUMNS),
    ("linear, columns of w", lambda: rules.linear(COLUMNS, COLUMNS), SUM),
    ("linear, one writer", lambda: rules.linear(split(1, LEFT), split(1, LEFT)), partial((0,))),
    ("add_bias, mirrored", lambda: rules.add_bias(MIRRORED, MIRRORED), MIRRORED),
    ("add_bias, with the rows", lambda: rules.add_bias(COLUMNS, ROWS), COLUMNS),
    ("add_bias, once on a sum", lambda: rules.add_bias(SUM, MIRRORED), SUM),
    ("elementwise, mirrored", lambda: rules.elementwise("f", MIRRORED, MIRRORED), MIRRORED),
    ("elementwise, alike", lambda: rules.elementwise("f", COLUMNS, COLUMNS), COLUMNS),
    ("add, mirrored", lambda: rules.add(MIRRORED, MIRRORED), MIRRORED),
    ("add, split", lambda: rules.add(COLUMNS, COLUMNS), COLUMNS),
    ("add, sums", lambda: rules.add(partial((0,)), partial((2, 0))), partial((0, 2))),
    ("add, sum and base", lambda: rules.add(SUM, MIRRORED), SUM),
    ("add, base and sum", lambda: rules.add(MIRRORED, SUM), SUM),
    ("gate_rows, mirrored", lambda: rules.gate_rows(MIRRORED, MIRRORED), MIRRORED),
    ("gate_rows, of a split", lambda: rules.gate_rows(MIRRORED, COLUMNS), COLUMNS),
    ("gate_rows, of a sum", lambda: rules.gate_rows(MIRRORED, SUM), SUM),
    ("gate_heads, mirrored", lambda: rules.gate_heads(MIRRORED, MIRRORED, 4), MIRRORED),
    ("gate_heads, of a split", lambda: rules.gate_heads(split(1, ((0, 1), (1, 2))), HEADWISE, 8), HEADWISE),
    ("sinks, mirrored", lambda: sinks(MIRRORED, MIRRORED), MIRRORED),
    ("sinks, with the heads", lambda: sinks(COLUMNS, split(0, ((0, 1), (1, 2)))), COLUMNS),
    ("moe, biases with their rows", lambda: mix(biases=(BY_ROWS, BY_ROWS)), SUM),
    ("ssm_conv, channels", conv, QKV),
    ("delta_gates, of heads", gates, BETA),
    (
        "delta_gates, of key channels",
        lambda: gates(VALUES, replace(VALUES, axis=0), width=8),
        VALUES,
    ),
    ("delta_net, segments", lambda: delta(QKV), VALUES),
    (
        "delta_net, value heads apart",
        lambda: delta(TILED_QKV, g=TILED_BETA, beta=TILED_BETA, state=rules.resized(TILED, 8)),
        TILED,
    ),
    ("delta_net, three tensors", lambda: delta(KEYS, KEYS, VALUES), VALUES),
    ("delta_net, gates of channels", lambda: delta(QKV, g=VALUES, width=8), VALUES),
    ("ssm_scan", scan, INNER),
    ("selective_scan", selective, COLUMNS),
    ("token_shift", shift, MIRRORED),
    ("token_shift, empty share", lambda: shift(state=split(1, ((0, 9), (9, 9)))), MIRRORED),
    ("wkv", lambda: wkv(INNER, INNER, state=rules.resized(INNER, 8)), INNER),
    ("wkv, weights", lambda: wkv(INNER, weights=(replace(INNER, axis=0),)), INNER),
    ("share, of heads", lambda: rules.share(MIRRORED, INNER), INNER),
    ("share, of all", lambda: rules.share(MIRRORED, MIRRORED), MIRRORED),
    ("mat_heads", lambda: rules.mat_heads(KEYS, replace(VALUES, axis=0), 8, 16), VALUES),
    ("concat", lambda: rules.concat(KEYS, VALUES, 8, 16), split(1, ((0, 24), (24, 48)))),
    (
        "concat, empty share",
        lambda: rules.concat(split(1, LEFT), split(1, ((0, 4), (4, 4))), 8, 2),
        split(1, ((0, 20), (20, 20))),
    ),
    ("concat, one for all heads", lambda: rules.concat(KEYS, MIRRORED, 8, 8), split(1, ((0, 16), (16, 32)))),
    ("rows_op", lambda: rules.rows_op("norm", MIRRORED), MIRRORED),
    ("per_head, mirrored", lambda: rules.per_head("rope", MIRRORED, 8), MIRRORED),
    ("per_head, between heads", lambda: rules.per_head("rope", COLUMNS, 8), COLUMNS),
    ("per_head, empty share", lambda: rules.per_head("rope", split(1, LEFT), 8), split(1, LEFT)),
    ("moe, two devices", mix, SUM),
    (
        "moe, writers are those with columns of any expert",
        lambda: mix(
            gate=(rows := split_experts(1, [LEFT, LEFT])), up=rows, down=split_experts(2, [LEFT, LEFT])
        ),
        partial((0,)),
    ),
    ("attention, mirrored", lambda: attend(MIRRORED, MIRRORED, MIRRORED), MIRRORED),
    ("attention, groups", lambda: attend(Q, K, V), split(1, ((0, 32), (32, 64)))),
    (
        "attention, empty share",
        lambda: attend(*(split(1, ((0, n), (n, n))) for n in (32, 16, 32))),
        split(1, ((0, 64), (64, 64))),
    ),
]

REFUSED: list[tuple[str, Callable[[], State], str]] = [
    ("linear, sum", lambda: rules.linear(SUM, MIRRORED), r"linear of x PARTIAL.*, w MIRRORED"),
    (
        "linear, split x alone",
        lambda: rules.linear(COLUMNS, MIRRORED),
        r"x SPLIT\(axis 1, 0:8 8:16\), w MIRRORED",
    ),
    ("linear, columns of w alone", lambda: rules.linear(MIRRORED, COLUMNS), r"x MIRRORED, w SPLIT\(axis 1"),
    ("linear, split differently", lambda: rules.linear(COLUMNS, split(1, THIRDS)), "0:8 8:16.*0:5 5:16"),
    ("linear, split rows of x", lambda: rules.linear(ROWS, COLUMNS), "linear"),
    ("linear, both rows", lambda: rules.linear(COLUMNS, ROWS), "linear"),
    ("add_bias, split bias of a whole", lambda: rules.add_bias(MIRRORED, ROWS), "add_bias of y MIRRORED"),
    ("add_bias, whole bias of a split", lambda: rules.add_bias(COLUMNS, MIRRORED), "bias MIRRORED"),
    ("add_bias, split bias of a sum", lambda: rules.add_bias(SUM, ROWS), "add_bias of y PARTIAL"),
    ("add_bias, split differently", lambda: rules.add_bias(COLUMNS, split(0, THIRDS)), "0:8 8:16.*0:5 5:16"),
    ("add_bias, a sum as bias", lambda: rules.add_bias(MIRRORED, SUM), "bias PARTIAL"),
    ("moe, split x", lambda: mix(x=COLUMNS), r"moe of x SPLIT\(axis 1"),
    ("moe, sum", lambda: mix(x=SUM), "moe of x PARTIAL"),
    ("moe, split router", lambda: mix(router=ROWS), r"router SPLIT\(axis 0"),
    ("moe, mirrored experts", lambda: mix(gate=MIRRORED, up=MIRRORED, down=MIRRORED), "gate MIRRORED"),
    ("moe, up cut otherwise", lambda: mix(up=split_experts(1, [HALVES, HALVES])), "moe of"),
    ("moe, down cut otherwise", lambda: mix(down=split_experts(2, [HALVES, HALVES])), "moe of"),
    ("moe, down cut by rows", lambda: mix(down=BY_ROWS), "moe of"),
    ("moe, gate cut by columns", lambda: mix(gate=BY_COLUMNS, up=BY_COLUMNS), "moe of"),
    ("moe, one matrix", lambda: mix(gate=ROWS, up=ROWS, down=COLUMNS), "moe of"),
    ("elementwise, sums", lambda: rules.elementwise("glu", SUM, SUM), "glu of x0 PARTIAL"),
    ("elementwise, mixed", lambda: rules.elementwise("f", MIRRORED, COLUMNS), "x0 MIRRORED, x1 SPLIT"),
    ("elementwise, split differently", lambda: rules.elementwise("f", COLUMNS, split(1, THIRDS)), "f of"),
    ("add, sum and split", lambda: rules.add(SUM, COLUMNS), "add of"),
    ("add, split and sum", lambda: rules.add(COLUMNS, SUM), "add of"),
    ("add, mirrored and split", lambda: rules.add(MIRRORED, COLUMNS), "add of"),
    ("gate_rows, split gate", lambda: rules.gate_rows(COLUMNS, COLUMNS), r"gate SPLIT\(axis 1"),
    ("gate_rows, gate a sum", lambda: rules.gate_rows(SUM, MIRRORED), "gate PARTIAL"),
    (
        "gate_heads, whole gate",
        lambda: rules.gate_heads(MIRRORED, COLUMNS, 4),
        "of 4 of gate MIRR",
    ),
    ("gate_heads, other heads", lambda: rules.gate_heads(split(1, ((0, 1), (1, 2))), HEADWISE, 4), "of 4 of"),
    ("sinks, whole beside split heads", lambda: sinks(COLUMNS, MIRRORED), "sinks of heads SPLIT"),
    ("sinks, split beside whole heads", lambda: sinks(MIRRORED, split(0, HALVES)), "sinks of heads MIRRORED"),
    ("sinks, of other heads", lambda: sinks(COLUMNS, split(0, ((0, 2), (2, 2)))), "sinks of"),
    ("moe, a mirrored bias", lambda: mix(biases=(BY_ROWS, MIRRORED)), "moe of"),
    ("moe, a bias cut otherwise", lambda: mix(biases=(split_experts(1, [HALVES, HALVES]),) * 2), "moe of"),
    ("ssm_conv, whole x", lambda: conv(MIRRORED, MIRRORED, MIRRORED), "ssm_conv of x MIRRORED"),
    ("ssm_conv, sum", lambda: conv(SUM), "ssm_conv of x PARTIAL"),
    ("ssm_conv, whole taps", lambda: conv(w=MIRRORED), "w MIRRORED"),
    ("ssm_conv, whole state", lambda: conv(state=MIRRORED), "state MIRRORED"),
    ("ssm_conv, state of other columns", lambda: conv(state=rules.resized(QKV, 4)), "ssm_conv of"),
    ("ssm_conv, cut in other segments", lambda: conv(w=replace(TILED_QKV, axis=0)), "8[+]8[+]8[+]8"),
    ("delta_gates, sum", lambda: gates(SUM, b=SUM), "delta_gates of a PARTIAL"),
    ("delta_gates, whole", lambda: gates(MIRRORED, MIRRORED, MIRRORED, MIRRORED), "a MIRRORED"),
    ("delta_gates, other heads", lambda: gates(b=OTHER), "delta_gates of"),
    ("delta_gates, whole dt", lambda: gates(dt=MIRRORED), "dt MIRRORED"),
    ("delta_gates, whole decay", lambda: gates(decay=MIRRORED), "decay MIRRORED"),
    ("delta_net, whole", lambda: delta(MIRRORED), "delta_net of x0 MIRRORED"),
    ("delta_net, sums", lambda: delta(SUM, SUM, SUM), "delta_net of x0 PARTIAL"),
    ("delta_net, split without segments", lambda: delta(VALUES), "delta_net of"),
    ("delta_net, q and k apart", lambda: delta(KEYS, OTHER, VALUES), "delta_net of"),
    (
        "delta_net, v of other key heads",
        lambda: delta(KEYS, KEYS, split(1, ((0, 8), (8, 32)))),
        "delta_net of",
    ),
    ("delta_net, two tensors", lambda: delta(KEYS, VALUES), "delta_net of"),
    (
        "delta_net, through a head",
        lambda: delta(split(1, ((0, 4), (4, 16))), split(1, ((0, 4), (4, 16))), split(1, ((0, 4), (4, 16)))),
        "delta_net with heads of 8",
    ),
    ("delta_net, gates elsewhere", lambda: delta(QKV, g=OTHER), "delta_net of"),
    ("delta_net, beta elsewhere", lambda: delta(QKV, beta=OTHER), "delta_net of"),
    ("delta_net, whole state", lambda: delta(QKV, state=MIRRORED), "state MIRRORED"),
    ("ssm_scan, whole", lambda: scan(MIRRORED), "ssm_scan of x MIRRORED"),
    ("ssm_scan, sum", lambda: scan(SUM), "x PARTIAL"),
    ("ssm_scan, through a head", lambda: scan(split(1, ((0, 20), (20, 48)))), "ssm_scan with heads of 8"),
    ("ssm_scan, of other groups", lambda: scan(bc=split(1, ((0, 1), (1, 3)), [4, 4])), "ssm_scan of"),
    ("ssm_scan, steps of other heads", lambda: scan(dt=OTHER), "ssm_scan of"),
    ("ssm_scan, state of other heads", lambda: scan(state=rules.resized(INNER, 3)), "ssm_scan of"),
    ("selective_scan, whole", lambda: selective(MIRRORED), "selective_scan of x MIRRORED"),
    ("selective_scan, sum of B", lambda: selective(b=SUM), "b PARTIAL"),
    ("selective_scan, steps of other channels", lambda: selective(dt=OTHER), "selective_scan of"),
    ("selective_scan, whole decay", lambda: selective(a=MIRRORED), "a MIRRORED"),
    ("selective_scan, state of other channels", lambda: selective(state=COLUMNS), "selective_scan of"),
    ("token_shift, split", lambda: shift(COLUMNS), "token_shift of x SPLIT"),
    ("token_shift, split state", lambda: shift(state=COLUMNS), "token_shift of"),
    ("wkv, whole", lambda: wkv(MIRRORED), "wkv of a MIRRORED"),
    ("wkv, sum", lambda: wkv(SUM), "a PARTIAL"),
    ("wkv, through a head", lambda: wkv(split(1, THIRDS)), "wkv with heads of 8"),
    ("wkv, other heads", lambda: wkv(INNER, COLUMNS), "wkv of"),
    ("wkv, whole weights", lambda: wkv(INNER, weights=(MIRRORED,)), "b MIRRORED"),
    ("wkv, state of other heads", lambda: wkv(INNER, state=INNER), "wkv of"),
    ("share, of a sum", lambda: rules.share(SUM, COLUMNS), "share of x PARTIAL"),
    ("share, like a sum", lambda: rules.share(MIRRORED, SUM), "like PARTIAL"),
    ("group_norm, sum", lambda: normed(SUM), "group_norm of x PARTIAL"),
    ("group_norm, whole weight", lambda: normed(INNER), "w MIRRORED"),
    ("mat_heads, whole x", lambda: rules.mat_heads(MIRRORED, ROWS, 8, 8), "x MIRRORED"),
    ("mat_heads, sum", lambda: rules.mat_heads(SUM, ROWS, 8, 8), "x PARTIAL"),
    ("mat_heads, columns of w", lambda: rules.mat_heads(KEYS, KEYS, 8, 8), "mat_heads of"),
    ("mat_heads, other heads", lambda: rules.mat_heads(KEYS, split(0, LEFT), 8, 8), "mat_heads of"),
    ("mat_heads, through a head", lambda: rules.mat_heads(split(1, THIRDS), ROWS, 8, 8), "heads of 8"),
    ("concat, whole", lambda: rules.concat(MIRRORED, KEYS, 8, 8), "concat"),
    ("concat, other heads", lambda: rules.concat(KEYS, split(1, LEFT), 8, 8), "concat of"),
    ("concat, through a head", lambda: rules.concat(KEYS, split(1, THIRDS), 8, 8), "concat with heads of 8"),
    ("rows_op, split", lambda: rules.rows_op("rms_norm", COLUMNS), "rms_norm of x SPLIT"),
    ("rows_op, sum", lambda: rules.rows_op("rms_norm", SUM), "rms_norm of x PARTIAL"),
    ("per_head, through a head", lambda: rules.per_head("rope", split(1, THIRDS), 8), "rope with heads of 8"),
    ("per_head, rows", lambda: rules.per_head("rope", ROWS, 8), "rope with heads of 8"),
    ("per_head, sum", lambda: rules.per_head("rope", SUM, 8), "rope with heads of 8"),
    (
        "attention, k of another group",
        lambda: attend(Q, split(1, ((0, 0), (0, 16))), V),
        "attention of q SPLIT",
    ),
    ("attention, v of another group", lambda: attend(Q, K, split(1, ((0, 0), (0, 32)))), "attention"),
    ("attention, v through a head", lambda: attend(Q, K, split(1, ((0, 20), (20, 32)))), "attention"),
    ("attention, q through a head", lambda: attend(split(1, ((0, 20), (20, 32))), K, V), "attention"),
    ("attention, k through a head", lambda: attend(Q, split(1, ((0, 9), (9, 16))), V), "attention"),
    ("attention, mirrored k", lambda: attend(Q, MIRRORED, V), "attention"),
    ("attention, sum", lambda: attend(SUM, K, V), "attention"),
]


def test_a_group_norm_is_exchanged_if_a_group_is_cut() -> None:
    w = replace(INNER, axis=0)
    assert [rules.group_norm(INNER, w, group) for group in (8, 24, 16, 48)] == [True, True, False, False]
    left = split(1, ((0, 48), (48, 48)))
    assert rules.group_norm(left, replace(left, axis=0), 48)


@pytest.mark.parametrize(("derive", "want"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_rule(derive: Callable[[], State], want: State) -> None:
    assert derive() == want


@pytest.mark.parametrize(("derive", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_combination_without_a_rule(derive: Callable[[], State], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        derive()


@pytest.mark.parametrize(
    "ranges", [((0, 3), (4, 8)), ((0, 5), (4, 8)), ((1, 8),), ((0, 7),), ((0, 9), (9, 8)), ()]
)
def test_ranges_that_do_not_tile(ranges: rules.Ranges) -> None:
    with pytest.raises(PlanError, match=r"foo: .* do not tile 0\.\.8"):
        check_tiling(ranges, 8, "foo")


def test_small_helpers() -> None:
    check_tiling(((0, 0), (0, 8), (8, 8)), 8, "foo")
    assert holders(((0, 0), (0, 8), (8, 8), (8, 9))) == (1, 3)
    assert scaled(((0, 1), (1, 1), (1, 4)), 3) == ((0, 3), (3, 3), (3, 12))
