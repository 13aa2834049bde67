"""Fits synthetic models to simulated cards of any memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkbackend.meta.rates import Rates
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.fitting.fitter import Fitter
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import Budget, budgets_of, sizes_with, spared
from vkbackend.models.placement.layout import layouts
from vkbackend.models.placement.memory_report import Held
from vkbackend.models.placement.tensors import check_weights
from vkbackend.models.placement.traced_steps import fitting_steps
from vkbackend.tools.measure.simulated import Hollow, SimulatedDevice

GIB, N_CTX = 1 << 30, 131_072
RATES = Rates(400e9, 20e9, 50e-6)


class Cards:
    """`gib` lists the memory of each card. The model's context has N_CTX tokens."""

    def __init__(self, spec: str, gib: Sequence[float], n_layer: int | None = None) -> None:
        gguf = Hollow(spec, n_layer)
        gguf.metadata._values[f"{gguf.architecture}.context_length"] = N_CTX  # type: ignore[attr-defined]
        self.model = load_model(gguf, False)
        self.types = check_weights(gguf, self.model)
        self.devices = [SimulatedDevice(i, int(GIB * n)) for i, n in enumerate(gib)]
        self.spec, self.free = spec, budgets_of(self.devices)

    def options(self, **given: Any) -> Options:
        names = [device.name for device in self.devices]
        return Options.of(self.spec, **{"devices": names, "use_mmap": False, "fit": True, **given})

    def fit(self, **given: Any) -> Options:
        options, halves = self.options(**given), len(self.devices) > 1
        fitter = Fitter(
            self.model, self.types, self.devices, options, halves=halves, rates=RATES, budgets=self.free
        )
        return fitter.fit()

    def budgets(self, margin_mib: int = 1024) -> list[Budget]:
        return spared(self.free, [margin_mib << 20] * len(self.devices))

    def held(self, options: Options) -> list[Held]:
        """Size everything anew."""
        model, types, limits = self.model, self.types, [device.limits for device in self.devices]
        layout_of, rows = layouts(model, types, len(limits)), options.n_ubatch or 512
        _, steps = fitting_steps(model, layout_of(options), options, limits, rows, halves=len(limits) > 1)
        return sizes_with(layout_of, self.devices, steps)(options)
