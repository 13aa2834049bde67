"""Opens the projector that the options ask for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from vkbackend.models.arguments import HOST
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.resident import Resident
from vkbackend.models.vision.projector import Projector
from vkbackend.models.vision.projector_plan import ProjectorPlan, plan_projector
from vkbackend.runtime import Device


def open_projector(options: Options, residents: Sequence[Resident] = ()) -> Projector | None:
    """Open the projector of the options, if there is one. Open it before the model, whose layout then uses
    the remaining memory. `residents` are already loaded. Raises the errors of `Projector.open`."""
    if options.mmproj is None:
        return None
    device = open_projector_device(options)
    with GGUF.open(options.path) as text:
        how: dict[str, Any] = {"limits": options.image_limits, "residents": residents}
        return Projector.open(options.mmproj, device, text=text, **how)


def open_projector_device(options: Options) -> Device:
    word = projector_word(options)
    (device,) = open_devices(None if word is None else [word], options.runtime, exact=options.exact)
    return device


def projector_word(options: Options) -> str | None:
    """Return the word of the projector's device, by default the first of the model's devices on this machine,
    or None for the best device."""
    here = [word.removeprefix("0/") for word in options.devices or () if options.node_of(word) in ("", "0")]
    word = options.mmproj_device or next(iter(here), None)
    return HOST if word == "none" else word and word.removeprefix("0/")


def planned_projector(options: Options, device: Device, text: GGUF | None = None) -> ProjectorPlan:
    """Plan the projector of the options on a device, which may be a stand-in. `text` is the open text model's
    file. Raises GGUFError, UnsupportedModel, InvalidArgument."""
    assert options.mmproj is not None
    with GGUF.open(options.mmproj) as gguf, nullcontext(text) if text else GGUF.open(options.path) as model:
        return plan_projector(gguf, device, text=model, limits=options.image_limits)
