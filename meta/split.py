"""Split states (MIRRORED, PARTIAL, SPLIT on an axis), and the rules by which ops derive their results'
states.

An op without a rule for its operands' states raises PlanError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from vkbackend.errors import PlanError

Ranges = tuple[tuple[int, int], ...]  # a range [begin, end) per device, empty if begin == end


class Kind(Enum):
    MIRRORED = "MIRRORED"  # The complete value is on every device.
    PARTIAL = "PARTIAL"  # The value is the sum of all devices' values.
    SPLIT = "SPLIT"  # Device d has ranges[d] of the axis.


@dataclass(frozen=True, slots=True)
class State:
    """The split state of an activation [rows, width] or a weight [n_out, n_in]; `axis` is an axis of this
    shape."""

    kind: Kind
    axis: int = -1
    ranges: Ranges = ()
    writers: tuple[int, ...] = ()  # The devices with a share of a PARTIAL tensor.
    # The ranges of each expert of a stack. For a stack, `ranges` is experts[0].
    experts: tuple[Ranges, ...] = ()
    # If `segments` is set, the axis consists of segments, `ranges` counts units, and segment i has
    # segments[i] elements per unit.
    segments: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind is Kind.SPLIT:
            of = f" of {'+'.join(map(str, self.segments))}" if self.segments else ""
            return f"SPLIT(axis {self.axis}, {' '.join(f'{b}:{e}' for b, e in self.ranges)}{of})"
        return self.kind.value + (f"(of devices {self.writers})" if self.writers else "")

    def count(self, device: int) -> int:
        begin, end = self.ranges[device]
        return (end - begin) * (sum(self.segments) or 1)

    def slices(self, device: int) -> list[slice]:
        """Return the device's slices of the axis, with adjacent parts joined."""
        begin, end = self.ranges[device]
        n_units = max(end for _, end in self.ranges)
        held: list[slice] = []
        at = 0
        for n in self.segments or (1,):
            if held and held[-1].stop == at + begin * n:
                held[-1] = slice(held[-1].start, at + end * n)
            else:
                held.append(slice(at + begin * n, at + end * n))
            at += n_units * n
        return held


MIRRORED = State(Kind.MIRRORED)


def partial(writers: Sequence[int]) -> State:
    return State(Kind.PARTIAL, writers=tuple(writers))


def split_experts(axis: int, experts: Sequence[Ranges]) -> State:
    """Split a stack [n_expert, n_out, n_in] on axis 1 or 2 by each expert's ranges."""
    return State(Kind.SPLIT, axis, experts[0], experts=tuple(experts))


def split(axis: int, ranges: Ranges, segments: Sequence[int] = ()) -> State:
    """Return the state of a tensor whose `axis` is tiled by `ranges` in device order."""
    if len(segments) == 1:
        ranges, segments = scaled(ranges, segments[0]), ()
    return State(Kind.SPLIT, axis, ranges, segments=tuple(segments))


def check_tiling(ranges: Ranges, size: int, name: str) -> None:
    """Raise PlanError unless the ranges tile 0..size in order."""
    at = 0
    for begin, end in ranges:
        if begin != at or end < begin:
            raise PlanError(f"{name}: ranges {ranges} do not tile 0..{size}")
        at = end
    if at != size:
        raise PlanError(f"{name}: ranges {ranges} do not tile 0..{size}")


def holders(ranges: Ranges) -> tuple[int, ...]:
    return tuple(d for d, (begin, end) in enumerate(ranges) if end > begin)


def scaled(ranges: Ranges, factor: int) -> Ranges:
    return tuple((begin * factor, end * factor) for begin, end in ranges)


def kv_heads_of(heads: Ranges, group: int) -> Ranges:
    """Return the kv head ranges for ranges of q heads. Two devices that share a group both hold its kv
    head."""
    at, ranges = 0, []
    for begin, end in heads:
        at = -(-end // group) if end > begin else at
        ranges.append((begin // group if end > begin else at, at))
    return tuple(ranges)


def no_rule(op: str, **states: State) -> PlanError:
    listing = ", ".join(f"{name} {state}" for name, state in states.items())
    return PlanError(f"no rule for {op} of {listing}")


def linear(x: State, w: State) -> State:
    """Return the state of y = x w^T. If the rows of w are split, the width of y is split in the same way. If
    the width of x and the columns of w have the same split, y is PARTIAL."""
    if x == MIRRORED and w == MIRRORED:
        return MIRRORED
    if x == MIRRORED and w.kind is Kind.SPLIT and w.axis == 0:
        return split(1, w.ranges, w.segments)
    if x.kind is Kind.SPLIT and x.axis == w.axis == 1 and x == w:
        return partial(holders(w.ranges))
    raise no_rule("linear", x=x, w=w)


def add_bias(y: State, bias: State) -> State:
    """A bias is split like the rows of its matrix. If y is PARTIAL, one writer adds the mirrored bias."""
    if bias == MIRRORED and y.kind in (Kind.MIRRORED, Kind.PARTIAL):
        return y
    if y.kind is Kind.SPLIT and y.axis == 1 and bias == replace(y, axis=0):
        return y
    raise no_rule("add_bias", y=y, bias=bias)


def elementwise(op: str, *states: State) -> State:
    """All operands must be MIRRORED, or all must have the same split."""
    if all(s == states[0] for s in states) and states[0].kind is not Kind.PARTIAL:
        return states[0]
    raise no_rule(op, **{f"x{i}": s for i, s in enumerate(states)})


def gate_rows(gate: State, x: State) -> State:
    """Multiplying each row by a factor is linear, so x may be split or PARTIAL."""
    if gate == MIRRORED:
        return x
    raise no_rule("gate_rows", gate=gate, x=x)


def gate_heads(gate: State, x: State, head_dim: int) -> State:
    """The gate has one value per head. Both operands must be MIRRORED, or split between the same heads."""
    if gate == x == MIRRORED:
        return x
    if x.kind is gate.kind is Kind.SPLIT and x == split(1, scaled(gate.ranges, head_dim)) and gate.axis == 1:
        return x
    raise no_rule(f"gate_heads of {head_dim}", gate=gate, x=x)


def columns(x: State, width: int, n: int) -> State:
    """Return the state of n of x's columns. A device must have all columns of x or none."""
    if x == MIRRORED:
        return x
    return split(1, scaled(heads_of("columns", x, width), n))


def add(a: State, b: State) -> State:
    """The result is PARTIAL if an operand is PARTIAL. A mirrored addend is added once, after the reduce."""
    if Kind.PARTIAL in (a.kind, b.kind) and Kind.SPLIT not in (a.kind, b.kind):
        return partial(sorted({*a.writers, *b.writers}))
    return elementwise("add", a, b)


def rows_op(op: str, x: State) -> State:
    if x == MIRRORED:
        return x
    raise no_rule(op, x=x)


def per_head(op: str, x: State, head_dim: int) -> State:
    """Check that x is MIRRORED or split between heads."""
    if x == MIRRORED:
        return x
    if (
        x.kind is Kind.SPLIT
        and x.axis == 1
        and all(n % head_dim == 0 for n in x.segments or [at for cut in x.ranges for at in cut])
    ):
        return x
    raise no_rule(f"{op} with heads of {head_dim}", x=x)


def per_new_head(op: str, x: State, head_dim: int, new_dim: int) -> State:
    """Return the state of x after each head gets `new_dim` elements."""
    if (state := per_head(op, x, head_dim)) == MIRRORED or head_dim == new_dim:
        return state
    if state.segments:
        raise no_rule(f"{op} from heads of {head_dim} to {new_dim}", x=x)
    return replace(
        state, ranges=tuple((b // head_dim * new_dim, e // head_dim * new_dim) for b, e in state.ranges)
    )


def wide_norm(x: State, w: State) -> State:
    """x and its weight must be split between heads. Devices exchange sums of squares."""
    if x.kind is Kind.SPLIT and x.axis == 1 and not x.segments and w == replace(x, axis=0):
        return x
    raise no_rule("wide_norm", x=x, w=w)


def attention(
    q: State, k: State, v: State, heads: int, kv_heads: int, head_dim_k: int, head_dim_v: int
) -> State:
    """Each device must hold its q heads' kv heads. The result is split by q heads."""
    if q == k == v == MIRRORED:
        return MIRRORED
    if all(s.kind is Kind.SPLIT and s.axis == 1 for s in (q, k, v)):
        q_heads = tuple((b // head_dim_k, e // head_dim_k) for b, e in q.ranges)
        needed = kv_heads_of(q_heads, heads // kv_heads)
        want = scaled(q_heads, head_dim_k), scaled(needed, head_dim_k), scaled(needed, head_dim_v)
        if (q.ranges, k.ranges, v.ranges) == want:
            return split(1, scaled(q_heads, head_dim_v))
    raise no_rule("attention", q=q, k=k, v=v)


def index_scores(q: State, w: State | None, keys: State, heads: int, head_dim: int) -> None:
    """A device must hold all or none of the indexer."""
    if q == keys == MIRRORED and w in (None, MIRRORED):
        return
    sizes = [(q, heads * head_dim), (keys, head_dim), *([(w, heads)] if w else [])]
    units = [heads_of("index_scores", state, size) for state, size in sizes]
    if any(unit != units[0] for unit in units) or max(end for _, end in units[0]) != 1:
        raise no_rule("index_scores", q=q, w=w or MIRRORED, keys=keys)


def choose_blocks(q: State, keys: State, head_dim: int, top_k: int) -> State:
    """Every device with heads of q holds the complete keys. The result has `top_k` elements per head."""
    heads = heads_of("choose_blocks", q, head_dim) if q != MIRRORED else ()
    if q == keys == MIRRORED:
        return MIRRORED
    if keys.kind is Kind.SPLIT and keys.ranges == scaled(on_holders(heads), head_dim):
        return split(1, scaled(heads, top_k))
    raise no_rule("choose_blocks", q=q, keys=keys)


def on_holders(ranges: Ranges) -> Ranges:
    """Return the range 0..1 for devices that hold any unit, and an empty range for other devices."""
    return tuple((0, 1) if end > begin else (min(begin, 1),) * 2 for begin, end in ranges)


def per_head_weight(op: str, y: State, w: State, head_dim: int) -> None:
    want = MIRRORED if y == MIRRORED else split(0, tuple((b // head_dim, e // head_dim) for b, e in y.ranges))
    if w != want:
        raise no_rule(op, heads=y, w=w)


def moe(x: State, router: State, gate: State, up: State, down: State, *biases: State) -> State:
    """The result is PARTIAL, because every device multiplies by its columns of `down`. The `biases` are split
    like gate and up."""
    if x == router == MIRRORED and all(s == gate for s in (up, *biases)) and (gate.axis, down.axis) == (1, 2):
        if gate.experts and gate.experts == down.experts:
            return partial(sorted({d for ranges in gate.experts for d in holders(ranges)}))
    raise no_rule("moe", x=x, router=router, gate=gate, up=up, down=down)


def resized(x: State, times: int, by: int = 1) -> State:
    """Return the state of a tensor that is split like x, and is `times / by` times as wide."""
    if x.segments:
        return replace(x, segments=tuple(n // by * times for n in x.segments))
    return replace(x, ranges=tuple((begin // by * times, end // by * times) for begin, end in x.ranges))


def heads_of(op: str, x: State, size: int) -> Ranges:
    """Return each device's range of heads. The tensor must be split between heads, without segments."""
    if x.kind is Kind.SPLIT and not x.segments and all(at % size == 0 for cut in x.ranges for at in cut):
        return resized(x, 1, size).ranges
    raise no_rule(f"{op} with heads of {size}", x=x)


def mat_heads(x: State, w: State, k: int, n: int) -> State:
    """Each head's matrix [n, k] must be on the head's device."""
    if x == w == MIRRORED:
        return MIRRORED
    if w.axis == 0 and heads_of("mat_heads", x, k) == heads_of("mat_heads", w, n):
        return replace(w, axis=1)
    raise no_rule("mat_heads", x=x, w=w)


def concat(a: State, b: State, n_a: int, n_b: int) -> State:
    """A device must have both `a` and `b` of each of its heads. If all heads share `b`, every device must
    have `b`."""
    if a == b == MIRRORED:
        return MIRRORED
    if b == MIRRORED:
        return split(1, heads_of("concat", a, n_a), [n_a + n_b])
    if a.axis == b.axis == 1 and (heads := heads_of("concat", a, n_a)) == heads_of("concat", b, n_b):
        return split(1, heads, [n_a + n_b])
    raise no_rule("concat", a=a, b=b)


def share(x: State, like: State) -> State:
    """All devices have the complete x. Return its state after each device keeps only its own columns."""
    if x == MIRRORED and (
        like == MIRRORED or (like.kind is Kind.SPLIT and like.axis == 1 and not like.segments)
    ):
        return like
    raise no_rule("share", x=x, like=like)


def group_norm(x: State, w: State, group: int) -> bool:
    """Return whether x is split between groups of `group` columns. Otherwise devices exchange sums of
    squares."""
    if x.kind is Kind.SPLIT and x.axis == 1 and not x.segments and w == replace(x, axis=0):
        return all(at % group == 0 for cut in x.ranges for at in cut)
    raise no_rule("group_norm", x=x, w=w)
