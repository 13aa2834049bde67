"""A layer's plan says which heads, FFN columns and vocabulary rows each device holds.

The plan slices all tensors of the layer, so their slices match.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vkbackend.errors import InvalidArgument, PlanError
from vkbackend.meta.split import MIRRORED, Ranges, State, check_tiling, on_holders, split, split_experts


@dataclass(frozen=True, slots=True)
class Role:
    """How a weight is split along `axis` (0 rows, 1 columns), by the ranges of the plan's dimension `dim`. If
    `dim` is empty, the weight is mirrored. Otherwise `dim` is "heads", "kv_heads", "ffn", "vocab",
    "draft_vocab", "index" or "experts". "index" means a copy on every device with kv heads. "experts" means
    the FFN columns of a stack [n_expert, n_out, n_in]. All matrices of a stack with the dimension "ffn" have
    the same split. If the axis consists of consecutive segments, `segments` lists their relative sizes. All
    segments are split in the same proportions."""

    dim: str = ""
    axis: int = 0
    segments: tuple[int, ...] = (1,)


MIRROR = Role()


def rows(dim: str, segments: tuple[int, ...] = (1,)) -> Role:
    return Role(dim, 0, segments)


def columns(dim: str, segments: tuple[int, ...] = (1,)) -> Role:
    return Role(dim, 1, segments)


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of `size` units. Each device gets a multiple of `grain` units."""

    size: int
    grain: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Each device's range of units in each dimension. `experts` lists the ranges of each expert's FFN
    columns. In a layer with experts, "ffn" is the additional FFN."""

    ranges: Mapping[str, Ranges]
    experts: tuple[Ranges, ...] = ()

    def state(self, role: Role, shape: tuple[int, ...], name: str) -> State:
        """Return how `role` splits a weight [n_out, n_in]. Raises PlanError if the weight's size does not fit
        the plan."""
        if not role.dim:
            return MIRRORED
        if role.dim == "experts":
            # A stack of adapters contains the matrices of all experts for each adapter.
            return split_experts(role.axis, self.experts * (shape[0] // len(self.experts)))
        ranges = on_holders(self.ranges["kv_heads"]) if role.dim == "index" else self.ranges[role.dim]
        if len(shape) == 3:  # all matrices of a stack have the same split
            return split_experts(role.axis, (ranges,) * shape[0])
        units, size = max(end for _, end in ranges), shape[role.axis]
        if size % (units * sum(role.segments)):
            raise PlanError(f"{name}: axis {role.axis} of {shape} is not a multiple of {units} {role.dim}")
        per_unit = size // (units * sum(role.segments))
        return split(role.axis, ranges, [n * per_unit for n in role.segments])


def normalise(tensor_split: Sequence[float] | None, n_devices: int) -> tuple[float, ...]:
    """Return shares that sum to 1, equal shares by default. Raises InvalidArgument."""
    if tensor_split is None:
        return (1 / n_devices,) * n_devices
    try:
        shares = [float(s) for s in tensor_split]
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"tensor split {tensor_split!r} is not a list of numbers; give e.g. 3,1"
        ) from None
    if len(shares) != n_devices:
        raise InvalidArgument(
            f"tensor split {shares} has {len(shares)} shares for {n_devices} devices; give one each"
        )
    if any(not math.isfinite(s) or s < 0 for s in shares):
        raise InvalidArgument(f"tensor split {shares}: shares must be finite and not negative")
    largest = max(shares)
    if not largest:
        raise InvalidArgument(f"tensor split {shares}: at least one share must be above zero")
    shares = [s / largest for s in shares]  # the sum of very large shares would be infinite
    return tuple(s / sum(shares) for s in shares)


def share_out(dim: Dim, shares: Sequence[float], rotation: int = 0) -> Ranges:
    """Split `dim` into a range per device, in device order, by the largest-remainder method. Devices with
    equal remainders are ordered cyclically, beginning with device `rotation`.

    A device with share 0 gets nothing. An incomplete last grain goes to the last device with a range.
    """
    grains, n = dim.size // dim.grain, len(shares)
    if not grains:
        raise PlanError(f"a dimension of {dim.size} units is smaller than a grain of {dim.grain}")
    exact = [share * grains for share in shares]
    counts = [math.floor(x + 1e-9) for x in exact]
    order = sorted(range(n), key=lambda d: (-round(exact[d] - counts[d], 9), (d - rotation) % n))
    candidates = [d for d in order if shares[d] > 0]
    for i in range(grains - sum(counts)):
        counts[candidates[i % len(candidates)]] += 1
    last = max(d for d in range(n) if counts[d])
    ranges, at = [], 0
    for d, count in enumerate(counts):
        end = at + count * dim.grain + (dim.size % dim.grain if d == last else 0)
        ranges.append((at, end))
        at = end
    check_tiling(tuple(ranges), dim.size, "share_out")
    return tuple(ranges)


def table(plans: Sequence[Plan], names: Sequence[str], n_devices: int) -> str:
    lines, start = [], 0
    for i in range(1, len(plans) + 1):
        if i == len(plans) or plans[i] != plans[start]:
            cells = [
                "; ".join(
                    f"{dim} {plans[start].ranges[dim][d][0]}:{plans[start].ranges[dim][d][1]}"
                    for dim in plans[start].ranges
                )
                for d in range(n_devices)
            ]
            where = names[start] if i - start == 1 else f"{names[start]}..{names[i - 1]}"
            lines.append(f"{where}: " + " | ".join(cells))
            start = i
    return "\n".join(lines)
