"""The rules of meta/split.py for ops of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkbackend.meta.split import MIRRORED, Kind, State, kv_heads_of, no_rule, per_head, resized, scaled, split


def ssm_conv(x: State, w: State, state: State, n_columns: int) -> State:
    """The convolution is split between channels, or every device with the state computes all of it."""
    if x == w == MIRRORED and state.kind is Kind.SPLIT and state.axis == 1:
        cuts = {cut for cut in state.ranges if cut[1] > cut[0]}
        if len(cuts) == 1 and min(cuts)[0] == 0:
            return MIRRORED
    if x.kind is Kind.SPLIT and x.axis == 1 and w == replace(x, axis=0) and state == resized(x, n_columns):
        return x
    raise no_rule("ssm_conv", x=x, w=w, state=state)


def delta_gates(a: State, dt: State, decay: State, b: State, width: int) -> State:
    """Each head of b has `width` gates in a. A device must hold the weights of its heads' gates."""
    if b.kind is Kind.SPLIT and b.axis == 1 and a == resized(b, width):
        if (dt, decay) == (replace(a, axis=0), replace(b, axis=0)):
            return a
    raise no_rule("delta_gates", a=a, dt=dt, decay=decay, b=b)


def delta_net(
    parts: Sequence[State], g: State, beta: State, state: State, head_dim: int, width: int
) -> State:
    """`parts` is q, k and v, or one tensor with these segments. A device must hold its key heads' value
    heads, gates and state. The result is split like v."""
    v = parts[-1]
    if len(parts) == 1 and len(v.segments) > 2 and v.segments[0] == v.segments[1] == head_dim:
        v = split(1, v.ranges, v.segments[2:])
    elif len(parts) != 3 or not _same_key_heads(*parts):
        v = MIRRORED
    if v.kind is Kind.SPLIT and v.axis == 1 and per_head("delta_net", v, head_dim) == v:
        heads = resized(v, 1, head_dim)
        if (beta, g, state) == (heads, resized(heads, width), resized(v, head_dim)):
            return v
    raise no_rule("delta_net", **{f"x{i}": s for i, s in enumerate(parts)}, g=g, beta=beta, state=state)


def _same_key_heads(q: State, k: State, v: State) -> bool:
    """Return whether the ratio of v's values to q's and k's units is the same on every device."""
    if q != k or any(s.kind is not Kind.SPLIT or s.segments for s in (q, v)):
        return False
    n_q, n_v = (max(end for _, end in s.ranges) for s in (q, v))
    return n_v % n_q == 0 and scaled(q.ranges, n_v // n_q) == v.ranges


def ssm_scan(x: State, bc: State, heads: State, state: State, sizes: tuple[int, int, int]) -> State:
    """A device must hold the values of `heads` for its heads of x, and B and C of these heads' groups.
    `sizes` is (elements per head, elements of B per group, heads per group). The result is split like x."""
    head_dim, n_state, group = sizes
    if per_head("ssm_scan", x, head_dim) == x and not x.segments and x.kind is Kind.SPLIT:
        wanted = resized(x, 1, head_dim)
        groups = split(1, kv_heads_of(wanted.ranges, group), [n_state, n_state])
        if (heads, bc, state) == (wanted, groups, resized(x, n_state)):
            return x
    raise no_rule("ssm_scan", x=x, bc=bc, heads=heads, state=state)


def selective_scan(
    x: State, dt: State, shared: tuple[State, State], weights: tuple[State, State], state: State, n: int
) -> State:
    """A device must hold dt and the weights of its channels of x. All channels share B and C. The result is
    split like x."""
    by_rows = replace(x, axis=0)
    if x.kind is Kind.SPLIT and x.axis == 1 and not x.segments and shared == (MIRRORED, MIRRORED):
        if (dt, *weights, state) == (x, by_rows, by_rows, resized(x, n)):
            return x
    raise no_rule(
        "selective_scan", x=x, dt=dt, b=shared[0], c=shared[1], a=weights[0], d=weights[1], state=state
    )


def token_shift(x: State, mu: State, state: State) -> None:
    """A device with the state must have all of it, because every device shifts the complete rows."""
    cuts = {cut for cut in state.ranges if cut[1] > cut[0]}
    if x == mu == MIRRORED and state.kind is Kind.SPLIT and state.axis == 1 and len(cuts) == 1:
        if min(cuts)[0] == 0:
            return
    raise no_rule("token_shift", x=x, mu=mu, state=state)


def wkv(
    op: str, parts: Sequence[State], weights: Sequence[State], head_dim: int, state: State | None = None
) -> State:
    """A device must hold all `parts`, the weights and the state of its heads. The result is split like the
    parts."""
    x = parts[0]
    if x.kind is Kind.SPLIT and per_head(op, x, head_dim) == x and not x.segments and set(parts) == {x}:
        if set(weights) <= {replace(x, axis=0)} and state in (None, resized(x, head_dim)):
            return x
    states = dict(zip("abcdefg", (*parts, *weights, *([state] if state else ())), strict=False))
    raise no_rule(op, **states)
