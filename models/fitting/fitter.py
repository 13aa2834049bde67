"""Chooses the options of a model that fit the devices, for `--fit`.

The order of preference is: all weights on the devices; K and V caches of type f16, if the context then has
at least COMFORTABLE tokens; the longest context; the fastest shares; room for more slots. If not all weights
fit, the experts of a mixture move to host memory, and copies of the most used ones return. Of other models,
the first layers move. docs/fit.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.meta.balance import Shares, by_speed
from vkbackend.meta.rates import MEASURED, Rates
from vkbackend.meta.sizing import StepSizes
from vkbackend.models.architectures.base import Model
from vkbackend.models.arguments import EXPERTS
from vkbackend.models.fitting.cache_types import cache_types
from vkbackend.models.fitting.layer_counts import layer_counts
from vkbackend.models.fitting.share_screen import ShareScreen, short
from vkbackend.models.fitting.sized_layout import STEP, SizedLayout, most_tokens
from vkbackend.models.options import Options
from vkbackend.models.placement.cache_size import with_cache_size
from vkbackend.models.placement.fit import (
    ON_DEVICE,
    Budget,
    budgets_of,
    host_budgets,
    largest,
    sizes_with,
    spared,
    with_fitting_layers,
)
from vkbackend.models.placement.layout import lay_out, layouts
from vkbackend.models.placement.recurrent_state import StatePlan
from vkbackend.models.placement.step_rows import chosen_rows
from vkbackend.models.placement.traced_steps import fitting_steps
from vkbackend.runtime import Device

MIB = 1 << 20
COMFORTABLE = 32_768
TRIES = 3  # shares of the screen that are sized exactly


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
        self._model, self._types, self._devices = model, types, devices
        self._halves, self._reuse, self._rates = halves, reuse, rates
        self._chosen = frozenset(options.fit)
        margins = [int(MIB * mib) for mib in margins_of(options, len(devices))]
        free = [*budgets_of(devices), *host_budgets(devices)] if budgets is None else budgets
        self._budgets = spared(free, margins)
        self._options = self._unchosen(options)
        if "n_ctx" in self._chosen:
            self._most = min(model.n_ctx_train, self._options.kv_cells or model.n_ctx_train)
            self._least = min(options.fit_ctx, self._most)
        else:
            self._most = self._least = options.n_ctx
        self._shares = self._starting_shares()
        self._steps: dict[tuple[object, ...], StepSizes] = {}

    def _unchosen(self, options: Options) -> Options:
        """Return the options with the defaults of those that are chosen here."""
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
                    return self._with_slots_of_experts(self._with_more_cells(*fitting))
        return self._with_layers()

    def _places(self) -> Iterator[Options]:
        yield self._with_rows(replace(self._options, n_ctx=self._least))
        if self._model.n_used and {"override_tensor", "n_gpu_layers"} <= self._chosen:
            on_host = replace(self._options, override_tensor=((EXPERTS, "CPU"),), n_ctx=self._least)
            yield self._with_rows(on_host)

    def _with_rows(self, options: Options) -> Options:
        rows = options.n_ubatch or chosen_rows(
            self._model,
            self._types,
            self._devices,
            replace(options, tensor_split=self._shares),
            self._budgets,
            self._halves,
        )
        return replace(options, n_ubatch=rows)

    def _rungs(self, place: Options) -> Iterator[tuple[Options, int]]:
        """Yield the types and slots to try, with the shortest context that is accepted."""
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
        """Return the given slots, and fewer slots if they need less memory: recurrent states and windows."""
        n = place.n_slots
        if "n_slots" not in self._chosen or n == 1:
            return [n]
        layout = lay_out(self._model, self._types, len(self._devices), self._at(place, self._least))
        needs = any(isinstance(plan, StatePlan) or plan.window for plan in layout.memories())
        return [n >> i for i in range(n.bit_length())] if needs else [n]

    def _at(self, options: Options, n_ctx: int) -> Options:
        """Return the options with a context. All slots share its cells if their number is not given."""
        shared = "kv_cells" in self._chosen and options.n_slots > 1
        return replace(options, n_ctx=n_ctx, kv_cells=n_ctx if shared else options.kv_cells)

    def _fitting(self, options: Options, enough: int) -> tuple[Options, SizedLayout] | None:
        """Return the options with the longest context, if it has `enough` tokens."""
        # Copies of experts fill the memory, however fast the devices are.
        fills = bool(options.override_tensor) and self._chooses_shares
        best = self._sized(options, self._memory_shares() if fills else self._shares)
        n_ctx = self._context(best)
        if n_ctx < self._most and self._chooses_shares:
            for shares in self._other_shares(best):
                sized = self._sized(options, shares)
                if (n := self._context(sized)) > n_ctx:
                    n_ctx, best = n, sized
                if n_ctx == self._most:
                    break
        if n_ctx < enough:
            return None
        exact = self._sized(self._at(best.options, n_ctx), best.options.shares, exact=True)
        n_ctx = self._context(exact, n_ctx)  # A longer context may need more scratch memory.
        return (self._at(exact.options, n_ctx), exact) if n_ctx >= enough else None

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

    def _sized(self, options: Options, shares: Shares | None, exact: bool = False) -> SizedLayout:
        """Size a layout. Unless `exact` is set, the memory of steps is sized for the first shares alone."""
        options = replace(options, tensor_split=shares)
        if not exact:
            options = self._at(options, self._most)
        layout = lay_out(self._model, self._types, len(self._devices), options)
        key = options.n_slots, options.override_tensor, options.n_ubatch, exact and (shares, options.n_ctx)
        if key not in self._steps:
            limits = [device.limits for device in self._devices]
            self._steps[key] = fitting_steps(
                self._model,
                layout,
                options,
                limits,
                options.n_ubatch,
                halves=self._halves,
                reuse=self._reuse,
            )[1]
        return SizedLayout.of(options, layout, self._devices, self._steps[key])

    def _context(self, sized: SizedLayout, most: int | None = None) -> int:
        """Return the longest context that fits, up to `most`, or 0."""
        most = self._most if most is None else most

        def fits(n_ctx: int) -> bool:
            try:
                return sized.fits(self._at(sized.options, n_ctx), self._budgets)
            except VkbackendError:
                return False

        if not fits(self._least):
            return 0
        return self._least if most <= self._least else max(self._least, most_tokens(most, fits))

    def _with_more_cells(self, options: Options, sized: SizedLayout) -> Options:
        """Add cells to the KV cache that all slots share, up to a complete context for each slot."""
        n_slots, n_ctx = options.n_slots, options.n_ctx
        if n_slots == 1 or "kv_cells" not in self._chosen or n_ctx < self._most:
            return options
        n_more = largest(
            STEP,
            (n_slots - 1) * n_ctx,
            lambda n: sized.fits(replace(options, kv_cells=n_ctx + n), self._budgets),
        )
        return replace(options, kv_cells=n_ctx + n_more)

    def _with_slots_of_experts(self, options: Options) -> Options:
        if not options.override_tensor or "moe_cache_mib" not in self._chosen:
            return options
        auto = replace(options, moe_cache_mib="auto")
        sizes = self._model, self._types, self._devices, auto, auto.n_ubatch
        sized = with_cache_size(*sizes, halves=self._halves, reuse=self._reuse, budgets=self._budgets)
        return replace(sized, moe_cache_mib=ceil(100 * float(sized.moe_cache_mib)) / 100)  # short to print

    def _with_layers(self) -> Options:
        """Return the shortest context with as many layers on the devices as fit."""
        options = self._at(replace(self._options, tensor_split=self._shares), self._least)
        if "n_gpu_layers" not in self._chosen:
            return self._with_rows(options)
        options = self._with_rows(replace(options, n_gpu_layers="auto"))
        limits = [device.limits for device in self._devices]
        on_device = [b for b in self._budgets if set(b.homes) <= set(ON_DEVICE)]
        tried, other = [], self._memory_shares() if self._chooses_shares else self._shares
        layout_of = layouts(self._model, self._types, len(self._devices))
        for shares in dict.fromkeys([self._shares, other]):
            wanted = replace(options, tensor_split=shares)
            layout = layout_of(wanted)
            _, steps = fitting_steps(
                self._model, layout, wanted, limits, wanted.n_ubatch, halves=self._halves, reuse=self._reuse
            )
            sizes = sizes_with(layout_of, self._devices, steps)
            tried.append(with_fitting_layers(self._devices, wanted, sizes, self._model.n_layer, on_device))
        return max(
            tried, key=lambda of: self._model.n_layer + 1 if of.n_gpu_layers is None else of.n_gpu_layers
        )


def margins_of(options: Options, n_devices: int) -> tuple[float, ...]:
    """Return the MiB to leave free on each device. Raises InvalidArgument."""
    margins = options.fit_target
    if len(margins) not in (1, n_devices):
        raise InvalidArgument(
            f"fit_target={list(margins)}: {len(margins)} margins for {n_devices} devices; give one, or one "
            "for each", argument="fit_target",
        )  # fmt: skip
    return margins * n_devices if len(margins) == 1 else margins
