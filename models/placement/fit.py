"""Checks whether a layout fits the devices, and finds the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vkbackend.errors import OutOfDeviceMemory, VkbackendError
from vkbackend.meta.elsewhere import Elsewhere
from vkbackend.meta.sizing import StepSizes
from vkbackend.models.options import Options
from vkbackend.models.placement.host_limits import least_host_limit
from vkbackend.models.placement.layout import Layout
from vkbackend.models.placement.memory_report import Held, allocations
from vkbackend.models.placement.resident import Resident
from vkbackend.runtime import Device

RESERVE = 0.02  # This part of each heap is left to drivers.
ON_DEVICE, ON_HOST = ("weights", "kv", "scratch"), ("host", "stream", "shared", "staging")
NAMES = {
    "weights": "weights",
    "kv": "KV cache",
    "scratch": "scratch",
    "host": "tensors placed on the host",
    "stream": "memory for weights that stay in the file",
    "shared": "tables that all devices read",
    "staging": "staging",
}
Sizes = Callable[[Options], list[Held]]


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a physical device or a node can hold now. `members` are its logical devices. The budget
    limits the kinds of memory in `homes`. `others` are the models whose bytes are already subtracted from
    `nbytes`."""

    name: str
    nbytes: int
    members: tuple[int, ...]
    max_binding: int = 1 << 62
    homes: tuple[str, ...] = ON_DEVICE
    others: tuple[tuple[str, int], ...] = ()

    @property
    def room(self) -> str:
        """Return the bytes as text, with the models that are subtracted."""
        used = " and ".join(f"{mib(nbytes)} of the {name}" for name, nbytes in self.others)
        return mib(self.nbytes) + (f" besides {used}" if used else "")

    def held(self, sizes: Sequence[Held]) -> dict[str, int]:
        return {home: sum(sizes[d].homes[home] for d in self.members) for home in self.homes}


def budgets_of(devices: Sequence[Device]) -> list[Budget]:
    """Return a budget per physical device. Devices that are not physical (numpy, null) have none."""
    groups: dict[str, list[int]] = {}
    for d, device in enumerate(devices):
        if device.physical:
            groups.setdefault(device.physical.uuid, []).append(d)
    budgets = []
    for members in groups.values():
        info = devices[members[0]].physical
        assert info is not None
        heap = max((h for h in info.heaps if h.device_local), key=lambda h: h.nbytes, default=info.heaps[0])
        usable = int((heap.budget or heap.nbytes) * (1 - RESERVE))
        binding = min(devices[d].limits.max_storage_range for d in members)
        budgets.append(Budget(f"{devices[members[0]].name} ({info.name})", usable, tuple(members), binding))
    return budgets


def without(
    budgets: Sequence[Budget], devices: Sequence[Device], residents: Sequence[Resident]
) -> list[Budget]:
    """Return the budgets of `devices` minus the memory of other models of this process. A driver's budget
    (VK_EXT_memory_budget) includes memory that this process has allocated, so open models are subtracted,
    too."""
    left = []
    for budget in budgets:
        of_models = ((r.name, r.nbytes(devices[budget.members[0]], budget.homes)) for r in residents)
        others = tuple((name, nbytes) for name, nbytes in of_models if nbytes)
        nbytes = max(0, budget.nbytes - sum(nbytes for _, nbytes in others))
        left.append(replace(budget, nbytes=nbytes, others=budget.others + others))
    return left


def host_budgets(devices: Sequence[Device], residents: Sequence[Resident] = ()) -> list[Budget]:
    """Return the budgets of host memory. A node whose free memory is known has one budget, and a second one
    for its software devices, because their memory is host memory. Each GPU has a budget for the memory that
    its driver can pin. `residents` that are not yet loaded are subtracted. A driver may allocate more than it
    can pin, and fail later."""
    planned = [resident for resident in residents if not resident.is_loaded]
    members: dict[str, list[int]] = {}
    for d, device in enumerate(devices):
        members.setdefault(device.node, []).append(d)
    budgets = []
    for node, indices in members.items():
        stand_in = devices[indices[0]]
        if isinstance(stand_in, Elsewhere):
            name, free = f"memory of {node}", stand_in.host_free
        else:
            limit = least_host_limit()
            name, free = (f"host memory ({limit.name})", limit.nbytes) if limit else ("", None)
        if free is None:
            continue
        others = [(resident.name, resident.host_nbytes(node, ON_HOST)) for resident in planned]
        usable = max(0, int(free * (1 - RESERVE)) - sum(nbytes for _, nbytes in others))
        besides = tuple((name, nbytes) for name, nbytes in others if nbytes)
        budgets.append(Budget(name, usable, tuple(indices), homes=ON_HOST, others=besides))
        software = tuple(d for d in indices if (info := devices[d].physical) and info.is_cpu)
        if software:
            homes = *ON_DEVICE, *ON_HOST
            budgets.append(Budget(name, usable, software, homes=homes, others=besides))
    return budgets + without(_pinned_budgets(devices), devices, planned)


def _pinned_budgets(devices: Sequence[Device]) -> list[Budget]:
    members: dict[str, list[int]] = {}
    for d, device in enumerate(devices):
        if device.physical and not device.physical.is_cpu:
            members.setdefault(device.physical.uuid, []).append(d)
    budgets = []
    for indices in members.values():
        info = devices[indices[0]].physical
        assert info is not None
        room = max((heap.budget or heap.nbytes for heap in info.heaps if not heap.device_local), default=0)
        if room:
            name = f"host memory that the driver of {devices[indices[0]].name} can pin"
            budgets.append(Budget(name, int(room * (1 - RESERVE)), tuple(indices), homes=ON_HOST))
    return budgets


def spared(budgets: Sequence[Budget], margins: Sequence[int]) -> list[Budget]:
    """Lower the budgets of device memory so that each device leaves its margin (bytes) free. RESERVE is part
    of the margin."""
    return [
        replace(
            b,
            nbytes=max(0, min(b.nbytes, int(b.nbytes / (1 - RESERVE)) - max(margins[d] for d in b.members))),
        )
        if "weights" in b.homes
        else b
        for b in budgets
    ]


def sizes_with(layout_of: Callable[[Options], Layout], devices: Sequence[Device], steps: StepSizes) -> Sizes:
    @cache
    def sizes_of(changed: Options) -> list[Held]:
        return allocations(layout_of(changed), devices, steps, changed)

    return sizes_of


def shortfall(sizes: Sequence[Held], budgets: Sequence[Budget]) -> Budget | None:
    return next((b for b in budgets if sum(b.held(sizes).values()) > b.nbytes), None)


def unreadable(sizes: Sequence[Held], budgets: Sequence[Budget]) -> tuple[Budget, int] | None:
    """Return (budget, bytes) of the first device on which a cache exceeds one storage binding, or None."""
    for budget in budgets:
        largest = max(sizes[d].largest_cache for d in budget.members)
        if largest > budget.max_binding:
            return budget, largest
    return None


def check_fit(
    devices: Sequence[Device],
    options: Options,
    sizes_of: Sizes,
    n_layer: int,
    residents: Sequence[Resident] = (),
) -> None:
    """If the layout and the `residents` do not fit, raise OutOfDeviceMemory with the smallest change that
    would fit."""
    budgets = without(budgets_of(devices), devices, residents) + host_budgets(devices, residents)
    planned = sizes_of(options)
    full = shortfall(planned, budgets)
    if full is None:
        if (cache := unreadable(planned, budgets)) is None:
            return
        budget, size = cache
        raise OutOfDeviceMemory(
            f"{budget.name}: the KV cache of one layer needs {mib(size)}, but the device reads at most "
            f"{mib(budget.max_binding)} at once; "
            f"{advice(options, sizes_of, budgets, n_layer)}",
            requested=size,
            budget=budget.max_binding,
        )
    held = full.held(planned)
    parts = ", ".join(f"{mib(nbytes)} of {NAMES[home]}" for home, nbytes in held.items())
    if adapters := sum(planned[d].items["adapters"] for d in full.members):
        parts += f" (these include {mib(adapters)} of LoRA adapters)"
    raise OutOfDeviceMemory(
        f"{full.name} would hold {parts}, but has {full.room}; {advice(options, sizes_of, budgets, n_layer)}",
        requested=sum(held.values()),
        budget=full.nbytes,
    )


def with_fitting_layers(
    devices: Sequence[Device],
    options: Options,
    sizes_of: Sizes,
    n_layer: int,
    budgets: Sequence[Budget] | None = None,
) -> Options:
    """Place as many layers on the devices as fit. The host is not checked. `budgets` replaces the devices'
    free memory."""
    most = n_layer + 1
    n = most_layers(most, options, sizes_of, budgets_of(devices) if budgets is None else budgets)
    return replace(options, n_gpu_layers=None if n == most else n)


def most_layers(most: int, options: Options, sizes_of: Sizes, budgets: Sequence[Budget]) -> int:
    return largest(1, most, lambda n: fits(replace(options, n_gpu_layers=n), sizes_of, budgets))


def fits(options: Options, sizes_of: Sizes, budgets: Sequence[Budget]) -> bool:
    try:
        planned = sizes_of(options)
        return shortfall(planned, budgets) is None and unreadable(planned, budgets) is None
    except VkbackendError:
        return False


def advice(options: Options, sizes_of: Sizes, budgets: Sequence[Budget], n_layer: int) -> str:
    def fit(**changed: Any) -> bool:
        return fits(replace(options, **changed), sizes_of, budgets)

    ways, on_device = [], [b for b in budgets if b.homes == ON_DEVICE]
    n_ctx = largest(32, options.n_ctx, lambda n: fit(n_ctx=n))
    if n_ctx:
        ways.append(f"a context of {n_ctx} (-c {n_ctx})")
    n = len(sizes_of(options))
    if n > 1 and options.split_mode == "tensor":
        room = [sum(b.nbytes // len(b.members) for b in on_device if d in b.members) for d in range(n)]
        for shares in ((1,) * n, tuple(round(16 * r / max(1, *room)) for r in room)):
            if any(shares) and fit(tensor_split=shares):
                text = ",".join(map(str, shares))
                ways.append(f"other shares (-ts {text})")
                break
    layers = most_layers(n_layer, options, sizes_of, on_device)
    if fit(n_gpu_layers=layers):
        ways.append(f"{layers} layers on the devices (-ngl {layers})")
    if options.kv_offload and fit(kv_offload=False):
        ways.append("the KV cache on the host (-nkvo)")
    return f"it would fit with {', or '.join(ways)}" if ways else "use more devices or a smaller model"


def largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest fitting multiple of `least` up to `most`, or 0, by bisection."""
    low, high = 0, most // least + 1  # in units of `least`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * least) else (low, middle)
    return low * least


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}".removesuffix(".0") + " MiB"
