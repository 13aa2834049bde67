"""Two policies for dividing a model: "balanced", and the arithmetic of llama.cpp.

In each layer, "balanced" splits in the smallest units that quant blocks allow, and minimizes the largest load
of a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.errors import InvalidArgument, PlanError
from vkbackend.meta.plan import Plan, normalise
from vkbackend.meta.split import Ranges, kv_heads_of, scaled

POLICIES = ("balanced", "llama.cpp")


@dataclass(frozen=True, slots=True)
class Attention:
    """`block` is the number of elements per quant block of attn_output, which is split by columns."""

    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    block: int = 1

    @property
    def group(self) -> int:
        return self.n_head // self.n_head_kv

    @property
    def sizes(self) -> dict[str, int]:
        return {"kv_heads": self.n_head_kv, "heads": self.n_head}


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The sizes of a delta net. A device gets key heads, with their value heads and state.

    The output projection has `columns` columns per key head and `block` elements per quant block. If
    `shifts`, the layer mixes each row with the row before it. For this, every device with a share keeps the
    last row.
    """

    n_k_heads: int
    columns: int
    block: int = 1
    shifts: bool = False

    @property
    def grain(self) -> int:
        """The smallest number of key heads whose columns of the output projection are complete quant
        blocks."""
        return min(self.block // math.gcd(self.block, self.columns), self.n_k_heads)

    @property
    def sizes(self) -> dict[str, int]:
        return {"k_heads": self.n_k_heads} | ({"shifts": 1} if self.shifts else {})

    def ranges(self, k_heads: Ranges, shares: Sequence[float]) -> dict[str, Ranges]:
        rows = tuple((0, int(share > 0)) for share in shares)
        return {"k_heads": k_heads} | ({"shifts": rows} if self.shifts else {})


@dataclass(frozen=True, slots=True)
class StateSpace:
    """The sizes of a Mamba-2 layer, split between groups. If a device would get no group, the layer is split
    between heads, and B and C are copied. B has `n_state` values per group. The output projection has `block`
    elements per quant block."""

    n_head: int
    n_group: int
    head_dim: int
    n_state: int
    block: int = 1

    @property
    def as_attention(self) -> Attention:
        return Attention(self.n_head, self.n_group, self.head_dim, self.head_dim, self.block)

    @property
    def sizes(self) -> dict[str, int]:
        return {"ssm_groups": self.n_group, "ssm_heads": self.n_head}


Mixer = Attention | DeltaNet | StateSpace


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The FFN columns of a layer, or of each of its experts. `block` is the number of elements per quant
    block of ffn_down. A shared expert has `n_ff_shared` columns, in blocks of `shared_block`."""

    n_ff: int
    block: int = 1
    n_expert: int = 0
    n_ff_shared: int = 0
    shared_block: int = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """Layers of one `kind` rotate together (llama.cpp). The mixer `parallel` runs in parallel with
    `attention`."""

    attention: Mixer | None
    ffn: FeedForward | None
    kind: str = ""
    parallel: StateSpace | None = None

    @property
    def mixers(self) -> list[Mixer]:
        return [mixer for mixer in (self.attention, self.parallel) if mixer]


def plan_model(
    layers: Sequence[Layer],
    n_vocab: int,
    n_devices: int,
    tensor_split: Sequence[float] | None = None,
    policy: str = "balanced",
) -> tuple[list[Plan], Plan]:
    """Return (the layers' plans, the plan for all other tensors). `tensor_split` None means equal shares.
    Raises PlanError if a dimension is smaller than a unit, or InvalidArgument for an unknown policy."""
    if policy not in POLICIES:
        raise InvalidArgument(f"split policy {policy!r} is unknown; there are: {', '.join(POLICIES)}")
    shares = normalise(tensor_split, n_devices)
    if policy == "llama.cpp":
        return _llama_cpp(layers, n_vocab, n_devices, tensor_split)
    held = [0.0] * n_devices
    plans = [_balanced(layer, shares, held) for layer in layers]
    return plans, Plan({"vocab": _take(n_vocab, 1, shares, held)})


# ---- ours ----


def _balanced(layer: Layer, shares: Sequence[float], held: list[float]) -> Plan:
    ranges: dict[str, Ranges] = {}
    for mixer in layer.mixers:
        ranges |= _mixer_ranges(mixer, shares, held)
    if (ffn := layer.ffn) is None:
        return Plan(ranges)
    unit = ffn_unit(ffn.n_ff, ffn.block)
    here = [0.0] * len(shares)  # columns of each device, summed over experts to balance rounding differences
    experts = []
    for _ in range(max(1, ffn.n_expert)):
        experts.append(_take(ffn.n_ff, unit, shares, held, here))
        for d, (begin, end) in enumerate(experts[-1]):
            here[d] += end - begin
    if not ffn.n_expert:
        return Plan(ranges | {"ffn": experts[0]})
    if ffn.n_ff_shared:
        ranges["ffn"] = _take(ffn.n_ff_shared, ffn_unit(ffn.n_ff_shared, ffn.shared_block), shares, held)
    return Plan(ranges, tuple(experts))


def _mixer_ranges(mixer: Mixer, shares: Sequence[float], held: list[float]) -> dict[str, Ranges]:
    if isinstance(mixer, DeltaNet):
        return mixer.ranges(_take(mixer.n_k_heads, mixer.grain, shares, held), shares)
    if isinstance(mixer, StateSpace):
        width = (
            2 * mixer.n_state / (3 * mixer.head_dim)
        )  # size of a group's B and C / size of a head's z, x and output
        return _of_state_space(attention_ranges(mixer.as_attention, shares, held, width))
    return attention_ranges(mixer, shares, held)


def _of_state_space(ranges: Mapping[str, Ranges]) -> dict[str, Ranges]:
    return {"ssm_groups": ranges["kv_heads"], "ssm_heads": ranges["heads"]}


def ffn_unit(n_ff: int, block: int) -> int:
    """Return the columns per unit: complete blocks of ffn_down, and if possible a multiple of 4, because
    shaders load 4 elements at once."""
    wide = math.lcm(block, 4)
    return wide if n_ff % wide == 0 else block


def attention_ranges(
    attention: Attention, shares: Sequence[float], held: list[float], kv_width: float = 1.0
) -> dict[str, Ranges]:
    """Split between kv groups. If a device would get no group, split between q heads and copy kv heads,
    provided that this costs less."""
    a = attention
    group_unit = min(a.block // math.gcd(a.block, a.group * a.head_dim_v), a.n_head_kv)
    kv = _take(a.n_head_kv, group_unit, shares, list(held))
    whole = {"kv_heads": kv, "heads": scaled(kv, a.group)}
    chosen = whole
    if a.group > 1 and a.n_head_kv // group_unit < sum(share > 0 for share in shares):
        unit = min(a.block // math.gcd(a.block, a.head_dim_v), a.n_head)
        heads = _take(a.n_head, unit, shares, list(held))
        replicated = {"kv_heads": kv_heads_of(heads, a.group), "heads": heads}
        chosen = min(whole, replicated, key=lambda ranges: attention_cost(ranges, shares, kv_width))
    for d, (begin, end) in enumerate(chosen["heads"]):
        held[d] += (end - begin) * a.head_dim_k
    return chosen


def attention_cost(ranges: Mapping[str, Ranges], shares: Sequence[float], kv_width: float) -> float:
    """Return the largest ratio of a device's load, in q heads, to its share. A kv head counts as `kv_width` q
    heads."""
    heads, kv = ranges["heads"], ranges["kv_heads"]
    return max(
        2 * ((heads[d][1] - heads[d][0]) + kv_width * (kv[d][1] - kv[d][0])) / share
        for d, share in enumerate(shares)
        if share > 0
    )


def _take(
    size: int, unit: int, shares: Sequence[float], held: list[float], here: Sequence[float] | None = None
) -> Ranges:
    """Divide `size` into multiples of `unit` by D'Hondt's rule, which minimizes the largest load per share.

    If loads are equal, the device that holds the fewest elements of the model per share is first. `held[d]`
    is the number of elements that device d holds, and is updated. `here` lists each device's columns of this
    layer's other experts. The last unit may be incomplete.
    """
    units, n = size // unit, len(shares)
    if not units:
        raise PlanError(f"a dimension of {size} is smaller than a unit of {unit}")
    before = [0.0] * n if here is None else [h / unit for h in here]
    total = units + sum(before)
    # D'Hondt's rule gives a device at least its exact share, rounded down.
    counts = [max(0, math.floor(shares[d] * total - before[d] + 1e-9)) for d in range(n)]
    candidates = [d for d in range(n) if shares[d] > 0]

    def load(d: int, more: int) -> float:
        return round((before[d] + counts[d] + more) / shares[d], 6)

    while sum(counts) > units:  # `before` may exceed some devices' shares
        taking = [d for d in candidates if counts[d]]
        counts[max(taking, key=lambda d: load(d, 0))] -= 1
    for _ in range(units - sum(counts)):
        least = min(candidates, key=lambda d: (load(d, 1), held[d] / shares[d], d))
        counts[least] += 1
    last = max(d for d in range(n) if counts[d])
    ranges, at = [], 0
    for d in range(n):
        end = at + counts[d] * unit + (size % unit if d == last else 0)
        ranges.append((at, end))
        held[d] += end - at
        at = end
    return tuple(ranges)


# ---- llama.cpp's ----


def _llama_cpp(
    layers: Sequence[Layer], n_vocab: int, n: int, shares: Sequence[float] | None
) -> tuple[list[Plan], Plan]:
    """Round cumulative float32 shares down to a grain. The device that gets the remainder changes from layer
    to layer."""
    seen: dict[str, int] = {}
    plans = []
    for layer in layers:
        rotation = seen.get(layer.kind, 0) % n
        seen[layer.kind] = seen.get(layer.kind, 0) + 1
        ranges: dict[str, Ranges] = {}
        for mixer in layer.mixers:
            ranges |= _llama_cpp_heads(mixer, n, shares, rotation)
        if (ffn := layer.ffn) is None:
            plans.append(Plan(ranges))
            continue
        columns_ffn = _cumulative(ffn.n_ff, math.lcm(ffn.block, 128), n, shares, rotation)
        if ffn.n_ff_shared:
            grain = math.lcm(ffn.shared_block, 128)
            ranges["ffn"] = _cumulative(ffn.n_ff_shared, grain, n, shares, rotation)
        elif not ffn.n_expert:
            ranges["ffn"] = columns_ffn
        plans.append(Plan(ranges, (columns_ffn,) * ffn.n_expert))
    return plans, Plan({"vocab": _cumulative(n_vocab, 1, n, shares, len(layers) % n)})


def _llama_cpp_heads(a: Mixer, n: int, shares: Sequence[float] | None, rotation: int) -> dict[str, Ranges]:
    if isinstance(a, StateSpace):
        return _of_state_space(_llama_cpp_heads(a.as_attention, n, shares, rotation))
    # llama.cpp splits q, k and v separately, not by key heads. So with 3 devices its split may differ from
    # this one.
    if isinstance(a, DeltaNet):
        grain = math.lcm(a.block, 128) // math.gcd(math.lcm(a.block, 128), a.columns)
        return a.ranges(_cumulative(a.n_k_heads, grain, n, shares, rotation), shares or (1,) * n)
    columns = a.group * a.head_dim_k
    padded = a.block
    while padded < 128 and padded * n < columns:
        padded *= 2
    grain = math.lcm(columns, padded) // columns  # in kv heads
    kv = _cumulative(a.n_head_kv * a.head_dim_k, grain * a.head_dim_k, n, shares, rotation)
    kv_heads = tuple((b // a.head_dim_k, e // a.head_dim_k) for b, e in kv)
    return {"kv_heads": kv_heads, "heads": scaled(kv_heads, a.group)}


def _cumulative(size: int, grain: int, n: int, shares: Sequence[float] | None, rotation: int) -> Ranges:
    order = [(j + rotation) % n for j in range(n)]
    sums = np.cumsum([np.float32(shares[d] if shares else 0) for d in order], dtype=np.float32)
    lengths, low = [0] * n, 0
    for j in range(n - 1):
        even = np.float32(size * (j + 1) // n)
        high = int(np.float32(np.float32(size) * sums[j]) / sums[-1] if sums[-1] else even)
        high -= high % grain
        lengths[order[j]], low = high - low, high
    lengths[order[-1]] = size - low
    ends = np.cumsum(lengths).tolist()
    return tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))
