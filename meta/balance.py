"""Choose the split with which all devices read their weights in equal time, and predict its speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vkbackend.figures import short
from vkbackend.meta.known_speed import Speed
from vkbackend.meta.rates import MEASURED, Rates
from vkbackend.runtime import Device

SIXTEENTHS = 16

Shares = tuple[float, ...]  # one number per device, in any unit


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes that a split needs on each device. A device stores `held` bytes. Per token, the device reads
    `read` bytes from its memory and `host` bytes from pinned host memory. `reduces` lists the bytes of each
    all-reduce among all devices, and `inner` lists the bytes of each all-reduce within one node. If layers
    are divided into sequential stages, `stages` lists each device's stage. The model has `n_layers`
    layers."""

    held: tuple[int, ...]
    read: tuple[int, ...]
    host: tuple[int, ...]
    reduces: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    stages: tuple[Hashable, ...] = ()
    n_layers: int = 0


class Budget(Protocol):
    """The memory in bytes that a physical device's logical devices (`members`) share."""

    @property
    def nbytes(self) -> int: ...
    @property
    def members(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Times:
    """`reduce_ms` includes the time that devices idle around exchanges. `layers_ms` is the time of layers in
    addition to reading weights."""

    weights_ms: float
    host_ms: float
    reduce_ms: float
    layers_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.weights_ms + self.host_ms + self.reduce_ms + self.layers_ms


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted times of a split. If fewer devices are faster, `fewer` lists the indices of the fastest
    subset. `alone` is the fastest single device in which the model fits, or -1."""

    tensor_split: Shares
    speeds: tuple[Speed, ...]
    times: Times
    n_reduces: int
    fewer: tuple[int, ...] = ()
    fewer_times: Times | None = None
    alone: int = -1
    alone_times: Times | None = None

    @property
    def break_even_us(self) -> float:
        """Return the time of an exchange at which all devices are as fast as `alone`. It is negative if they
        are slower even without exchanges."""
        if self.alone_times is None or not self.n_reduces:
            return 0.0
        t = self.times
        return 1e3 * (self.alone_times.total_ms - (t.total_ms - t.reduce_ms)) / self.n_reduces

    def lines(self, names: Sequence[str]) -> list[str]:
        split = ", ".join(
            f"{name} {share:g} at {short(speed.weights / 1e9)} GB/s"
            for name, share, speed in zip(names, self.tensor_split, self.speeds, strict=True)
        )
        t = self.times
        out = [
            f"split {','.join(f'{share:g}' for share in self.tensor_split)}: {split}",
            f"predicted {short(t.total_ms)} ms per token: weights {short(t.weights_ms)}, tensors in host "
            f"memory {short(t.host_ms)}, {self.n_reduces} exchanges {short(t.reduce_ms)}"
            + (f", layers beyond reading {short(t.layers_ms)}" if t.layers_ms else ""),
        ]
        if self.fewer_times:
            few = ", ".join(names[d] for d in self.fewer)
            out.append(
                f"fewer devices would be faster: {few} alone, {short(self.fewer_times.total_ms)} ms per token"
            )
        return [*out, *self._against_one(names)]

    def _against_one(self, names: Sequence[str]) -> list[str]:
        """Compare the split with the fastest device alone, and say how short an exchange must be for the
        split to be faster."""
        if self.alone_times is None or not self.n_reduces:
            return []
        name, t, least = names[self.alone], self.times, self.break_even_us
        exchange_us = 1e3 * t.reduce_ms / self.n_reduces
        together = f"together {self.alone_times.total_ms / t.total_ms:.2f} times as fast as {name} alone"
        if least <= 0:
            why = "slower even with exchanges that take no time: give the slower devices smaller shares"
            return [f"{together}; {why}"]
        bound = "faster while" if t.total_ms < self.alone_times.total_ms else "faster only if"
        return [f"{together}; {bound} an exchange takes less than {least:.0f} us (now {exchange_us:.0f})"]


# ---- arithmetic ----


def ratios(speeds: Sequence[float], classes: Sequence[Hashable], resources: Sequence[Hashable]) -> Shares:
    """Return shares in sixteenths of the largest share, proportional to speed.

    Logical devices on one resource share its speed. Devices of one class get equal shares if their resources
    have the same number of logical devices.
    """
    n = len(speeds)
    alone = [speeds[d] / sum(r == resources[d] for r in resources) for d in range(n)]
    kinds = [(classes[d], sum(r == resources[d] for r in resources)) for d in range(n)]
    equal = [
        sum(alone[e] for e in range(n) if kinds[e] == kinds[d]) / kinds.count(kinds[d]) for d in range(n)
    ]
    return tuple(round(SIXTEENTHS * speed / max(equal)) for speed in equal)


def overfull(held: Sequence[int], budgets: Sequence[Budget]) -> set[int]:
    """Return the logical devices whose physical device has too little memory for `held`."""
    return {
        d
        for budget in budgets
        if sum(held[m] for m in budget.members) > budget.nbytes
        for d in budget.members
    }


def too_large(held: Sequence[int], shares: Shares, budgets: Sequence[Budget]) -> bool:
    """Return whether `held` exceeds the total memory of the devices that have a share."""
    room = [budget for budget in budgets if any(shares[d] for d in budget.members)]
    members = {d for budget in room for d in budget.members}
    if any(share for d, share in enumerate(shares) if d not in members):
        return False
    return sum(held[d] for d in members) > sum(budget.nbytes for budget in room)


def fitted(
    shares: Shares,
    held: Callable[[Shares], Sequence[int]],
    budgets: Sequence[Budget],
    kinds: Sequence[Hashable],
) -> Shares:
    """Lower the shares of overfull devices by sixteenths until everything fits. First, lower all devices of a
    kind equally. If this fails, lower each device separately. If both fail, return `shares` unchanged."""
    if too_large(held(shares), shares, budgets):
        return shares
    for alike in (list(kinds), list(range(len(shares)))):
        now = shares
        while full := overfull(held(now), budgets):
            lowered = {alike[d] for d in full}
            new = tuple(max(0, s - 1) if alike[d] in lowered else s for d, s in enumerate(now))
            if new == now or not any(new) or all(kind in lowered for kind in alike):
                break
            now = new
        else:
            return now
    return shares


def times(
    cost: Cost,
    speeds: Sequence[Speed],
    resources: Sequence[Hashable],
    reduce_s: Callable[[int], float],
    inner_s: Callable[[int], float] = lambda nbytes: 0.0,
    layer_s: float = 0.0,
) -> Times:
    """Predict the time of a token. Stages run in sequence. Devices of a stage read in parallel, or in
    sequence on a shared resource. `reduce_s` and `inner_s` return the seconds of an all-reduce of some
    bytes."""
    stages = cost.stages or (0,) * len(speeds)

    def slowest(nbytes: Sequence[int], rates: Sequence[float]) -> float:
        busy: dict[Hashable, dict[Hashable, float]] = {stage: {} for stage in stages}
        for n, rate, resource, stage in zip(nbytes, rates, resources, stages, strict=True):
            busy[stage][resource] = busy[stage].get(resource, 0.0) + n / rate
        return 1e3 * sum(max(stage.values()) for stage in busy.values())

    def meeting(reduces: Sequence[int], seconds: Callable[[int], float]) -> float:
        return 1e3 * sum(count * seconds(nbytes) for nbytes, count in Counter(reduces).items())

    return Times(
        slowest(cost.read, [speed.weights for speed in speeds]),
        slowest(cost.host, [speed.host for speed in speeds]),
        meeting(cost.reduces, reduce_s) + meeting(cost.inner, inner_s),
        1e3 * layer_s * cost.n_layers,
    )


def subsets(shares: Shares, speeds: Sequence[Speed]) -> list[tuple[int, ...]]:
    """For every n below the number of devices, return the n fastest devices in device order."""
    order = sorted((d for d, s in enumerate(shares) if s), key=lambda d: (-speeds[d].weights, d))
    return [tuple(sorted(order[:n])) for n in range(1, len(order))]


# ---- on devices ----


def times_on(devices: Sequence[Device], shares: Shares, cost: Cost, rates: Rates = MEASURED) -> Times:
    """Predict the time of a step with this `cost` on the devices that have a share."""
    busy = [device for device, share in zip(devices, shares, strict=True) if share]
    here = [device for device in busy if not device.node]
    cut_s = rates.cut(busy) if cost.reduces or cost.inner else 0.0
    return times(
        cost,
        rates.speeds(devices, cost.host),
        rates.resources(devices),
        lambda nbytes: rates.reduce(busy, nbytes) + cut_s,
        lambda nbytes: rates.reduce(here, nbytes) + cut_s,
        rates.layer(busy),
    )


def predict(
    devices: Sequence[Device],
    shares: Shares,
    cost: Callable[[Shares], Cost],
    budgets: Sequence[Budget] = (),
    rates: Rates = MEASURED,
) -> Prediction:
    """Predict the time for `shares`, and for a faster subset of the devices in which the model fits."""
    speeds = rates.speeds(devices, cost(shares).host)
    whole = times_on(devices, shares, cost(shares), rates)
    best: tuple[int, ...] = ()
    best_times, alone, alone_times = whole, -1, None
    for members in subsets(shares, speeds):
        part = _among(members, devices, speeds, rates)
        part = fitted(part, lambda s: cost(s).held, budgets, [rates.kind(device) for device in devices])
        if overfull(cost(part).held, budgets):
            continue
        other = times_on(devices, part, cost(part), rates)
        if len(members) == 1:
            (alone,), alone_times = members, other
        if other.total_ms < best_times.total_ms:
            best, best_times = members, other
    n_reduces = len(cost(shares).reduces) + len(cost(shares).inner)
    fewer_times = best_times if best else None
    return Prediction(shares, speeds, whole, n_reduces, best, fewer_times, alone, alone_times)


def auto_split(
    devices: Sequence[Device],
    cost: Callable[[Shares], Cost],
    budgets: Sequence[Budget] = (),
    rates: Rates = MEASURED,
) -> Prediction:
    """Choose the split of a model over open devices, and predict the time of a token.

    `cost` must accept shares of 0. The first call measures each device in about a second.
    """
    shares = by_speed(devices, rates)
    kinds = [(rates.kind(device), shares[d]) for d, device in enumerate(devices)]
    shares = fitted(shares, lambda s: cost(s).held, budgets, kinds)
    return predict(devices, shares, cost, budgets, rates)


def by_speed(devices: Sequence[Device], rates: Rates = MEASURED) -> Shares:
    speeds = [rates.speed(device) for device in devices]
    return _among(range(len(devices)), devices, speeds, rates)


def _among(
    members: Sequence[int], devices: Sequence[Device], speeds: Sequence[Speed], rates: Rates
) -> Shares:
    resources = rates.resources(devices)
    part = ratios(
        [speeds[d].weights for d in members],
        [rates.kind(devices[d]) for d in members],
        [resources[d] for d in members],
    )
    shares = dict(zip(members, part, strict=True))
    return tuple(shares.get(d, 0) for d in range(len(devices)))
