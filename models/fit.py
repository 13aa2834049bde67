"""Whether a layout fits the devices, and the smallest change that would make it fit. Numbers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vkbackend.errors import OutOfDeviceMemory, VkbackendError
from vkbackend.models.layout import Options
from vkbackend.runtime import Device

RESERVE = 0.02  # of a heap, for scratch, staging and what drivers keep for themselves
Sizes = Callable[[Options], list[dict[str, int]]]  # bytes per device of a layout under these options


@dataclass(frozen=True, slots=True)
class Budget:
    """What one physical device may hold for us now, bytes; `members` are the logical devices that share
    it."""

    name: str
    nbytes: int
    members: tuple[int, ...]
    max_binding: int = 1 << 62  # what a shader can read as one buffer


def budgets_of(devices: Sequence[Device]) -> list[Budget]:
    """One budget per physical device among `devices` (numpy and null devices have none)."""
    groups: dict[str, list[int]] = {}
    for d, device in enumerate(devices):
        if hasattr(device, "info"):
            groups.setdefault(device.info.uuid, []).append(d)
    budgets = []
    for members in groups.values():
        info = devices[members[0]].info  # type: ignore[attr-defined]
        heap = max((h for h in info.heaps if h.device_local), key=lambda h: h.nbytes, default=info.heaps[0])
        usable = int((heap.budget or heap.nbytes) * (1 - RESERVE))
        binding = min(devices[d].limits.max_storage_range for d in members)
        budgets.append(Budget(f"{devices[members[0]].name} ({info.name})", usable, tuple(members), binding))
    return budgets


def shortfall(sizes: Sequence[dict[str, int]], budgets: Sequence[Budget]) -> tuple[Budget, int, int] | None:
    """(budget, weight bytes, kv bytes) of the first physical device that what lies on it exceeds, or None."""
    for budget in budgets:
        weights, kv = (sum(sizes[d][key] for d in budget.members) for key in ("weights", "kv"))
        if weights + kv > budget.nbytes:
            return budget, weights, kv
    return None


def unreadable(sizes: Sequence[dict[str, int]], budgets: Sequence[Budget]) -> tuple[Budget, int] | None:
    """(budget, bytes) of the first device with a cache that exceeds one binding, or None."""
    for budget in budgets:
        largest = max(sizes[d].get("cache", 0) for d in budget.members)
        if largest > budget.max_binding:
            return budget, largest
    return None


def check_fit(devices: Sequence[Device], options: Options, sizes: Sizes, n_layer: int) -> None:
    """Raise OutOfDeviceMemory with the numbers and the smallest change that would fit."""
    budgets = budgets_of(devices)
    planned = sizes(options)
    found = shortfall(planned, budgets)
    if found is None:
        if (cache := unreadable(planned, budgets)) is None:
            return
        budget, largest = cache
        raise OutOfDeviceMemory(
            f"{budget.name}: the KV cache of one layer would take {largest / 2**20:.0f} MiB, and the device "
            f"reads {budget.max_binding / 2**20:.0f} MiB at once; {advice(options, sizes, budgets, n_layer)}",
            requested=largest,
            budget=budget.max_binding,
        )
    budget, weights, kv = found
    raise OutOfDeviceMemory(
        f"{budget.name} would hold {weights / 2**20:.0f} MiB of weights and {kv / 2**20:.0f} MiB of KV "
        f"cache, and has {budget.nbytes / 2**20:.0f} MiB; {advice(options, sizes, budgets, n_layer)}",
        requested=weights + kv,
        budget=budget.nbytes,
    )


def advice(options: Options, sizes: Sizes, budgets: Sequence[Budget], n_layer: int) -> str:
    """What would fit: a smaller context if that is enough, else fewer layers on the devices."""

    def fits(changed: Options) -> bool:
        try:
            planned = sizes(changed)
            return shortfall(planned, budgets) is None and unreadable(planned, budgets) is None
        except VkbackendError:
            return False

    ways = []
    n_ctx = options.n_ctx
    while n_ctx > 32 and not fits(replace(options, n_ctx=n_ctx)):
        n_ctx //= 2
    if fits(replace(options, n_ctx=n_ctx)):
        ways.append(f"a context of {n_ctx} (-c {n_ctx})")
    layers = next((n for n in range(n_layer, -1, -1) if fits(replace(options, n_gpu_layers=n))), None)
    if layers is not None:
        ways.append(f"{layers} layers on the devices (-ngl {layers})")
    if options.kv_offload and fits(replace(options, kv_offload=False)):
        ways.append("the KV cache on the host (-nkvo)")
    return f"it would fit with {', or '.join(ways)}" if ways else "use more devices or a smaller model"
