from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkbackend import env
from vkbackend.errors import InvalidArgument, UnsupportedFeature
from vkbackend.open_device import open_device
from vkbackend.ops import MAX_SLOTS
from vkbackend.runtime import Device
from vkbackend.twins.device import NumpyDevice


def open_devices(
    specs: Sequence[str | int] | None,
    runtime: str | None = None,
    *,
    exact: bool = False,
    batch_invariant: bool = False,
) -> list[Device]:
    """Open devices by index, name or UUID, or the best device for None. A device may be repeated.

    A `runtime` of None means VKBACKEND_RUNTIME, or native if unset. "numpy" runs numpy versions of the ops on
    the host. If `exact` is set, devices use only ops with F32 activations. If `exact` or `batch_invariant` is
    set, a row's bits do not depend on the number of rows of its step (docs/engine.md). Raises
    InvalidArgument, UnsupportedFeature.
    """
    env.disabled()  # raises on unknown names
    if specs is not None and not len(specs):
        raise InvalidArgument(
            "the device list is empty; give at least one device, or none at all for the best one"
        )
    wanted: list[str | int] = [0] if specs is None else list(specs)
    if len(wanted) > MAX_SLOTS:
        raise InvalidArgument(f"{len(wanted)} devices were given; at most {MAX_SLOTS} can share one model")
    opened: list[Device] = []
    try:
        for n, spec in enumerate(wanted):
            if spec == "numpy":
                opened.append(NumpyDevice(f"numpy.{n}" if len(wanted) > 1 else "numpy"))
                continue
            opened.append(_open_vulkan(spec, n if wanted.count(spec) > 1 else None, runtime))
    except BaseException:
        for device in opened:
            device.close()
        raise
    for device in opened:
        if exact:
            device.limits = device.limits.exact()
        elif batch_invariant:
            device.limits = replace(device.limits, batch_invariant=True)
    return opened


def _open_vulkan(spec: str | int, copy: int | None, runtime: str | None) -> Device:
    # Numpy devices need no Vulkan loader.
    from vkbackend.vulkan.instance import devices, no_device_message, select

    present = devices()
    if not present:
        raise UnsupportedFeature(no_device_message())
    info = select(spec, present)
    return open_device(info, f"Vulkan{info.index}" + ("" if copy is None else f".{copy}"), runtime)
