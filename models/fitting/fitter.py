"""Chooses the options of a model that fit the devices, for `--fit`.

The order of preference is: all weights on the devices; K and V caches of type f16, if the context then has at
least COMFORTABLE tokens; the longest context; the fastest shares; room for more slots. If not all weights
fit, the experts of a mixture move to host memory, and copies of the most used experts return to device
memory. In other models, the first layers move to host memory. The reasons are in docs/fit.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vkbackend.errors import InvalidArgument
from vkbackend.meta.balance import Shares, by_speed
from vkbackend.meta.rates import MEASURED, Rates
from vkbackend.models.architectures.base import Model
from vkbackend.models.arguments import EXPERTS
from vkbackend.models.fitting.cache_types import cache_types
from vkbackend.models.fitting.layer_counts import layer_counts
from vkbackend.models.fitting.share_screen import ShareScreen, short
from vkbackend.models.fitting.sized_layout import SizedLayout
from vkbackend.models.fitting.sizer import Sizer
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import (
    Budget,
    budgets_of,
    host_budgets,
    spared,
)
from vkbackend.models.placement.recurrent_state import StatePlan
from vkbackend.runtime import Device

MIB = 1 << 20
COMFORTABLE = 32_768
TRIES = 3  # how many of the best shares are sized exactly


class Fitter:
    """`options.fit` names the options to choose. `halves` and `reuse` are as for fitting_steps. `budgets`
    replace the devices' free memory."""

    def __init__(
        self,
        model: Model,
        types: Mapping[str, str],
        devices: Sequence[Device],
        options: Options,
        *,
        halves: bool,
        reuse: bool = True,
        rates: Rates = MEASURED,
        budgets: Sequence[Budget] | None = None,
    ) -> None:
        self._model, self._types, self._devices, self._rates = model, types, devices, rates
        self._chosen = frozenset(options.fit)
        margins = [int(MIB * mib) for mib in margins_of(options, len(devices))]
        free = [*budgets_of(devices), *host_budgets(devices)] if budgets is None else budgets
        self._budgets = spared(free, margins)
        self._options = options = self._unchosen(options)
        self._least = self._most = options.n_ctx
        if "n_ctx" in self._chosen:
            self._most = min(model.n_ctx_train, options.kv_cells or model.n_ctx_train)
            self._least = min(options.fit_ctx, self._most)
        self._shares = self._starting_shares()
        self._sizer = Sizer(
            *(model, types, devices, self._budgets, (self._least, self._most)),
            shares_cells="kv_cells" in self._chosen,
            halves=halves,
            reuse=reuse,
        )

    def _unchosen(self, options: Options) -> Options:
        """Return the options, but with the default of each option that is chosen here."""
        defaults: dict[str, Any] = {
            "kv_cells": None,
            "n_gpu_layers": None,
            "override_tensor": (),
            "moe_cache_mib": 0.0,
        }
        defaults |= {"type_k": "f16", "type_v": "f16"}
        chosen = {name: value for name, value in defaults.items() if name in self._chosen}
        return replace(options, fit=(), **chosen)

    def _starting_shares(self) -> Shares | None:
        """Return the shares by speed, or None for one device."""
        n, options = len(self._devices), self._options
        if n == 1 or options.split_mode == "none":
            return options.shares
        if "tensor_split" not in self._chosen:
            return options.shares or (1.0,) * n
        return short(by_speed(self._devices, self._rates)) if options.auto_split else (1.0,) * n

    def fit(self) -> Options:
        """Return options that fit, with an empty `fit`. If none fit, return those that need the least device
        memory."""
        for place in self._places():
            for options, enough in self._rungs(place):
                if fitting := self._fitting(options, enough):
                    options = self._sizer.with_more_cells(*fitting)
                    copies = bool(options.override_tensor) and "moe_cache_mib" in self._chosen
                    return self._sizer.with_slots_of_experts(options) if copies else options
        return self._with_layers()

    def _places(self) -> Iterator[Options]:
        yield self._sizer.with_rows(replace(self._options, n_ctx=self._least), self._shares)
        if self._model.n_used and {"override_tensor", "n_gpu_layers"} <= self._chosen:
            on_host = replace(self._options, override_tensor=((EXPERTS, "CPU"),), n_ctx=self._least)
            yield self._sizer.with_rows(on_host, self._shares)

    def _rungs(self, place: Options) -> Iterator[tuple[Options, int]]:
        """Yield the types and slots to try, with the shortest acceptable context."""
        rungs = [
            replace(place, type_k=pair[0], type_v=pair[1], n_slots=n)
            for pair in cache_types(self._model, self._options, self._chosen)
            for n in self._slot_counts(place)
        ]
        for options in rungs:
            coarser = options.type_k != rungs[-1].type_k or options.type_v != rungs[-1].type_v
            is_first = options.type_k == rungs[0].type_k and options.type_v == rungs[0].type_v
            yield options, min(self._most, COMFORTABLE) if coarser and is_first else self._least

    def _slot_counts(self, place: Options) -> list[int]:
        """Return the given number of slots. Smaller numbers follow if they need less memory, as with
        recurrent states and windows."""
        n = place.n_slots
        if "n_slots" not in self._chosen or n == 1:
            return [n]
        layout = self._sizer.lay_out(self._sizer.at(place, self._least))
        needs = any(isinstance(plan, StatePlan) or plan.window for plan in layout.memories())
        return [n >> i for i in range(n.bit_length())] if needs else [n]

    def _fitting(self, options: Options, enough: int) -> tuple[Options, SizedLayout] | None:
        """Return the options with the longest context, if it has `enough` tokens."""
        # Copies of experts fill the memory, however fast the devices are.
        fills = bool(options.override_tensor) and self._chooses_shares
        best = self._sizer.sized(options, self._memory_shares() if fills else self._shares)
        n_ctx = self._sizer.context(best)
        if n_ctx < self._most and self._chooses_shares:
            for shares in self._other_shares(best):
                sized = self._sizer.sized(options, shares)
                if (n := self._sizer.context(sized)) > n_ctx:
                    n_ctx, best = n, sized
                if n_ctx == self._most:
                    break
        if n_ctx < enough:
            return None
        exact = self._sizer.sized(self._sizer.at(best.options, n_ctx), best.options.shares, exact=True)
        n_ctx = self._sizer.context(exact, n_ctx)  # A longer context may need more scratch memory.
        return (self._sizer.at(exact.options, n_ctx), exact) if n_ctx >= enough else None

    @property
    def _chooses_shares(self) -> bool:
        modes = "tensor", "layer"
        several = len(self._devices) > 1 and self._options.split_mode in modes
        return several and "tensor_split" in self._chosen

    def _other_shares(self, sized: SizedLayout) -> Sequence[Shares]:
        by_memory = self._memory_shares()
        if self._options.split_mode == "layer":
            counts = layer_counts(sized, self._budgets, self._most)
            return [counts] if counts else []
        if self._options.split_policy != "balanced":
            return [by_memory]
        speeds = [1.0] * len(self._devices)
        if self._options.auto_split:
            speeds = [self._rates.speed(device).weights for device in self._devices]
        screen = ShareScreen(self._model, self._types, sized, self._budgets, speeds, self._least, self._most)
        return screen.best([self._shares or by_memory, by_memory])[:TRIES]

    def _memory_shares(self) -> Shares:
        n, rooms = len(self._devices), list[int]()
        for d in range(n):
            of_device = [b for b in self._budgets if d in b.members and "weights" in b.homes]
            rooms.append(min((b.nbytes // len(b.members) for b in of_device), default=0))
        return short([16 * room / max(rooms) for room in rooms]) if any(rooms) else (1.0,) * n

    def _with_layers(self) -> Options:
        """Return the shortest context with as many layers on the devices as fit."""
        sizer = self._sizer
        options = sizer.at(replace(self._options, tensor_split=self._shares), self._least)
        if "n_gpu_layers" not in self._chosen:
            return sizer.with_rows(options, self._shares)
        options = sizer.with_rows(replace(options, n_gpu_layers="auto"), self._shares)
        other = self._memory_shares() if self._chooses_shares else self._shares
        tried = [sizer.with_layers(options, shares) for shares in dict.fromkeys([self._shares, other])]
        n = self._model.n_layer
        return max(tried, key=lambda of: n + 1 if of.n_gpu_layers is None else of.n_gpu_layers)


def margins_of(options: Options, n_devices: int) -> tuple[float, ...]:
    """Return the MiB to leave free on each device. Raises InvalidArgument."""
    margins = options.fit_target
    if len(margins) not in (1, n_devices):
        raise InvalidArgument(
            f"fit_target={list(margins)}: {len(margins)} margins for {n_devices} devices; give one, or one "
            "for each", argument="fit_target",
        )  # fmt: skip
    return margins * n_devices if len(margins) == 1 else margins
