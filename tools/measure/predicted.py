"""The predicted time of a token of a loaded model, for comparison with its measured time."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from vkbackend import cache_folder
from vkbackend.errors import OutOfDeviceMemory, Timeout
from vkbackend.meta.balance import Times, times_on
from vkbackend.meta.known_speed import known_speed
from vkbackend.meta.learned_times import Token, remember_token
from vkbackend.meta.rates import MEASURED
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement.cost import cost_of, stages_of
from vkbackend.models.placement.traced_steps import trace_reduces
from vkbackend.runtime import Device


class TokenTime:
    """The prediction for a token at the beginning of the context. `times` is None without a prediction. There
    is no prediction for several machines, or for a processor whose speed is unknown, because measuring the
    speed takes seconds."""

    def __init__(self, runner: Runner, *, measures: bool = False) -> None:
        self._devices: list[Device] = runner.mesh.devices
        self.times: Times | None = None
        here = not any(device.node for device in self._devices)
        known = all(known_speed(d) for d in self._devices if not d.physical or d.physical.is_cpu)
        if not (here and (measures or known)):
            return
        options, layout = runner.options, runner.layout
        reduces = trace_reduces(runner.model, layout, options, [d.limits for d in self._devices])
        self._n_reduces = len(reduces)
        cost = cost_of(runner.model, layout, tuple(4 * reduce.elements for reduce in reduces))
        cost = replace(cost, stages=stages_of(options, len(self._devices)))
        shares = options.shares or (1,) * len(self._devices)
        self._busy = [d for d, share in zip(self._devices, shares, strict=True) if share]
        self._n_layers, self._n_reduces = cost.n_layers, len(reduces)
        with suppress(OutOfDeviceMemory, Timeout):
            self.times = times_on(self._devices, shares, cost)

    @property
    def rate(self) -> float | None:
        return 1e3 / self.times.total_ms if self.times else None

    @property
    def n_exchanges(self) -> int:
        return self._n_reduces

    def learn(self, measured_s: float) -> None:
        if not self.times or not cache_folder.writable():
            return
        read_s = 1e-3 * (self.times.weights_ms + self.times.host_ms)
        cuts_s = self._n_reduces * MEASURED.cut(self._busy) if self._n_reduces else 0.0
        exchange_s = max(0.0, 1e-3 * self.times.reduce_ms - cuts_s)
        predicted_s = 1e-3 * self.times.total_ms
        token = Token(self._n_layers, read_s, self._n_reduces, exchange_s, predicted_s, measured_s)
        remember_token(self._busy, token)
