"""A layout that is sized once. Caches of any context, type and number of slots are then sized in
milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vkbackend.meta.sizing import StepSizes
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import Budget, largest, shortfall, unreadable
from vkbackend.models.placement.layout import Layout, with_caches_of
from vkbackend.models.placement.memory_report import Held, with_caches, without_caches
from vkbackend.runtime import Device

STEP = 256  # Contexts below the longest are multiples of this.


@dataclass(frozen=True, slots=True)
class SizedLayout:
    """`layout` was made with `options`. `fixed` is the bytes of each device without caches."""

    options: Options
    layout: Layout
    fixed: list[Held]

    @classmethod
    def of(cls, options: Options, layout: Layout, devices: Sequence[Device], steps: StepSizes) -> SizedLayout:
        return cls(options, layout, without_caches(layout, devices, steps, options))

    def held(self, options: Options) -> list[Held]:
        """Return the bytes of each device with the caches of `options`. Raises InvalidArgument."""
        return with_caches(self.fixed, with_caches_of(self.layout, options))

    def fits(self, options: Options, budgets: Sequence[Budget]) -> bool:
        held = self.held(options)
        return shortfall(held, budgets) is None and unreadable(held, budgets) is None


def most_tokens(most: int, fits: Callable[[int], bool]) -> int:
    """Return the most tokens that fit, up to `most`, or 0."""
    return most if fits(most) else largest(STEP, most, fits)
