"""Opens the projector that the options ask for, on the device that they name or on the best one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from vkbackend.errors import InvalidArgument, OutOfDeviceMemory, Timeout
from vkbackend.limits import Limits
from vkbackend.meta.balance import auto_split
from vkbackend.meta.rates import MEASURED, Rates
from vkbackend.models.arguments import HOST
from vkbackend.models.engine.runner.loading import Loading
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options, with_a_share
from vkbackend.models.placement.fit import ON_DEVICE, Budget, budgets_of, without
from vkbackend.models.placement.projector_device import fastest_with_room
from vkbackend.models.placement.resident import Resident
from vkbackend.models.vision.projector import Projector
from vkbackend.models.vision.projector_plan import ProjectorPlan, plan_projector
from vkbackend.runtime import Device

UNBOUNDED = 1 << 62  # the room of a device whose memory is unknown


def open_projector(options: Options, residents: Sequence[Resident] = ()) -> Projector | None:
    """Open the projector of the options, if there is one. Open it before the model, whose layout then uses
    the remaining memory. `residents` are models that are already loaded. Raises the errors of
    `Projector.open`."""
    if options.mmproj is None:
        return None
    with GGUF.open(options.path) as text:
        device = open_projector_device(options, text, residents)
        how: dict[str, Any] = {"limits": options.image_limits, "residents": residents}
        return Projector.open(options.mmproj, device, text=text, **how)


def open_projector_device(
    options: Options, text: GGUF, residents: Sequence[Resident] = (), rates: Rates = MEASURED
) -> Device:
    """Open the device of the projector. `text` is the open text model's file. Raises the errors of loading
    it."""
    words = projector_words(options)
    names = list(dict.fromkeys(words))
    opened = open_devices(names or None, options.runtime, exact=options.exact)
    best: Device | None = opened[0] if len(opened) == 1 else None
    try:
        if best is None:
            devices = [opened[names.index(word)] for word in words]
            best = devices[projector_index(options, devices, text, residents, rates)]
        return best
    finally:
        for device in opened:
            if device is not best:
                device.close()


def projector_words(options: Options) -> list[str]:
    """Return the names (as in `-dev`) of the devices that may run the projector. If the options name a device
    for the projector, this is the only one. Otherwise they are the model's devices that are on this machine
    and have a share, and `projector_index` chooses the best. An empty list means the best device of the
    machine."""
    if word := options.mmproj_device:
        return [HOST if word == "none" else word.removeprefix("0/")]
    words = with_a_share(options).devices or ()
    return [word.removeprefix("0/") for word in words if options.node_of(word) in ("", "0")]


def projector_index(
    options: Options,
    devices: Sequence[Device],
    text: GGUF,
    residents: Sequence[Resident] = (),
    rates: Rates = MEASURED,
) -> int:
    """Return the index of the best device for the projector among the devices of `projector_words`, which may
    be stand-ins. The memory of other nodes is unknown here, so with several nodes only the projector must
    fit. Raises the errors of loading the text model."""
    budgets = without(budgets_of(devices), devices, residents)
    alone = not any(options.node_of(word) for word in options.devices or ())
    held = _text_nbytes(options, devices, text, budgets, rates) if alone else [0] * len(devices)
    left = [UNBOUNDED] * len(devices)
    for budget in budgets:
        of_text = sum(held[d] for d in budget.members)
        for d in budget.members:
            left[d] = budget.nbytes - of_text
    needed = dict[Limits, int]()
    for limits, device in {device.limits: device for device in devices}.items():
        needed[limits] = UNBOUNDED  # this device cannot bind the values of the largest picture
        with suppress(InvalidArgument):
            plan = planned_projector(options, device, text)
            needed[limits] = sum(plan.held.homes[home] for home in ON_DEVICE)
    left = [n - needed[device.limits] for n, device in zip(left, devices, strict=True)]
    return fastest_with_room(_speeds(devices, rates), left)


def _text_nbytes(
    options: Options, devices: Sequence[Device], text: GGUF, budgets: Sequence[Budget], rates: Rates
) -> Sequence[int]:
    """Return the number of bytes of the text model on each device. If the number of layers or the context is
    chosen later, count all layers and the shortest context."""
    n_ctx = options.fit_ctx if "n_ctx" in options.fit else options.n_ctx
    loading = Loading(text, replace(options, fit=(), n_ctx=n_ctx), None, devices, None)
    cost = loading.cost(devices)
    shares = loading.options.shares or (1.0,) * len(devices)
    if loading.options.auto_split:
        shares = auto_split(devices, cost, budgets, rates).tensor_split
    return cost(shares).held


def _speeds(devices: Sequence[Device], rates: Rates) -> list[float]:
    """Return the bytes per second at which each device reads weights. Devices of one kind are equally fast,
    so they are not measured. The speed of a full or hanging device counts as 0."""
    speeds = [0.0 if len(set(map(rates.kind, devices))) > 1 else 1.0] * len(devices)
    for d, device in enumerate(devices):
        with suppress(OutOfDeviceMemory, Timeout):
            speeds[d] = speeds[d] or rates.speed(device).weights
    return speeds


def planned_projector(options: Options, device: Device, text: GGUF | None = None) -> ProjectorPlan:
    """Plan the projector of the options on a device, which may be a stand-in. `text` is the open text model's
    file. Raises GGUFError, UnsupportedModel, InvalidArgument."""
    assert options.mmproj is not None
    with GGUF.open(options.mmproj) as gguf, nullcontext(text) if text else GGUF.open(options.path) as model:
        return plan_projector(gguf, device, text=model, limits=options.image_limits)
