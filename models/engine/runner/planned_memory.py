from __future__ import annotations

from collections.abc import Sequence

from vkbackend.models.engine.runner.loading import Loading
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.memory_report import Held
from vkbackend.runtime import Device


def planned_memory(options: Options, devices: Sequence[Device]) -> tuple[list[Held], Options]:
    """Return (bytes on each device, options after loading) for an engine with these options and without a
    draft model. The devices may be stand-ins. Nothing is loaded. Raises the errors of loading, such as
    OutOfDeviceMemory if the model exceeds the devices' budgets."""
    with GGUF.open(options.path) as gguf:
        loading = Loading(gguf, options, None, devices, None)
        mesh = loading.open(lambda words: list(devices), keep_values=False)
        try:
            loading.plan(mesh)
            return loading.held(mesh), loading.options
        finally:
            mesh.close()
