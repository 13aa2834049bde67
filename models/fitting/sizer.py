"""Sizes a model with any context, shares and placement, for `--fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from vkbackend.errors import VkbackendError
from vkbackend.meta.balance import Shares
from vkbackend.meta.sizing import StepSizes
from vkbackend.models.architectures.base import Model
from vkbackend.models.fitting.sized_layout import STEP, SizedLayout, most_tokens
from vkbackend.models.options import Options
from vkbackend.models.placement.cache_size import with_cache_size
from vkbackend.models.placement.fit import ON_DEVICE, Budget, largest, sizes_with, with_fitting_layers
from vkbackend.models.placement.layout import Layout, lay_out, layouts
from vkbackend.models.placement.step_rows import chosen_rows
from vkbackend.models.placement.traced_steps import fitting_steps
from vkbackend.runtime import Device


class Sizer:
    """`halves` and `reuse` are as for fitting_steps. Contexts have `least` to `most` tokens. With
    `shares_cells`, all slots share the cells of one context."""

    def __init__(
        self,
        model: Model,
        types: Mapping[str, str],
        devices: Sequence[Device],
        budgets: Sequence[Budget],
        contexts: tuple[int, int],
        *,
        shares_cells: bool,
        halves: bool,
        reuse: bool,
    ) -> None:
        self._model, self._types, self._devices, self._budgets = model, types, devices, budgets
        self._least, self._most = contexts
        self._shares_cells, self._halves, self._reuse = shares_cells, halves, reuse
        self._steps: dict[tuple[object, ...], StepSizes] = {}

    def lay_out(self, options: Options) -> Layout:
        return lay_out(self._model, self._types, len(self._devices), options)

    def at(self, options: Options, n_ctx: int) -> Options:
        """Return the options with a context. If the number of slots is not given, all slots share the
        context's cells."""
        shared = self._shares_cells and options.n_slots > 1
        return replace(options, n_ctx=n_ctx, kv_cells=n_ctx if shared else options.kv_cells)

    def with_rows(self, options: Options, shares: Shares | None) -> Options:
        """Return the options with a number of rows per step. If it is not given, choose it."""
        rows = options.n_ubatch or chosen_rows(
            self._model,
            self._types,
            self._devices,
            replace(options, tensor_split=shares),
            self._budgets,
            self._halves,
        )
        return replace(options, n_ubatch=rows)

    def sized(self, options: Options, shares: Shares | None, exact: bool = False) -> SizedLayout:
        """Size a layout. Unless `exact` is set, use the memory of steps that was sized for the first
        shares."""
        options = replace(options, tensor_split=shares)
        if not exact:
            options = self.at(options, self._most)
        layout = self.lay_out(options)
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

    def context(self, sized: SizedLayout, most: int | None = None) -> int:
        """Return the longest context that fits, up to `most`, or 0."""
        most = self._most if most is None else most

        def fits(n_ctx: int) -> bool:
            try:
                return sized.fits(self.at(sized.options, n_ctx), self._budgets)
            except VkbackendError:
                return False

        if not fits(self._least):
            return 0
        return self._least if most <= self._least else max(self._least, most_tokens(most, fits))

    def with_more_cells(self, options: Options, sized: SizedLayout) -> Options:
        """Add cells to the KV cache that all slots share, up to a complete context for each slot."""
        n_slots, n_ctx = options.n_slots, options.n_ctx
        if n_slots == 1 or not self._shares_cells or n_ctx < self._most:
            return options
        n_more = largest(
            STEP,
            (n_slots - 1) * n_ctx,
            lambda n: sized.fits(replace(options, kv_cells=n_ctx + n), self._budgets),
        )
        return replace(options, kv_cells=n_ctx + n_more)

    def with_slots_of_experts(self, options: Options) -> Options:
        """Fill the remaining memory with copies of the most used experts."""
        auto = replace(options, moe_cache_mib="auto")
        sizes = self._model, self._types, self._devices, auto, auto.n_ubatch
        sized = with_cache_size(*sizes, halves=self._halves, reuse=self._reuse, budgets=self._budgets)
        return replace(sized, moe_cache_mib=ceil(100 * float(sized.moe_cache_mib)) / 100)  # short to print

    def with_layers(self, options: Options, shares: Shares | None) -> Options:
        options = replace(options, tensor_split=shares)
        limits = [device.limits for device in self._devices]
        how = {"halves": self._halves, "reuse": self._reuse}
        layout_of = layouts(self._model, self._types, len(self._devices))
        _, steps = fitting_steps(self._model, layout_of(options), options, limits, options.n_ubatch, **how)
        sizes = sizes_with(layout_of, self._devices, steps)
        on_device = [b for b in self._budgets if set(b.homes) <= set(ON_DEVICE)]
        return with_fitting_layers(self._devices, options, sizes, self._model.n_layer, on_device)
