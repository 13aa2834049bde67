"""Opens the projector that the options ask for."""

from __future__ import annotations

from vkbackend.models.arguments import HOST
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.vision.projector import Projector


def open_projector(options: Options) -> Projector | None:
    """Open the projector of the options, if there is one. Open it before the model, whose layout then uses
    the remaining memory. The default device is the first of the model's devices on this machine."""
    if options.mmproj is None:
        return None
    here = [word.removeprefix("0/") for word in options.devices or () if options.node_of(word) in ("", "0")]
    word = options.mmproj_device or next(iter(here), None)
    words = None if word is None else [HOST if word == "none" else word.removeprefix("0/")]
    (device,) = open_devices(words, options.runtime, exact=options.exact)
    with GGUF.open(options.path) as text:
        return Projector.open(options.mmproj, device, text=text, limits=options.image_limits)
