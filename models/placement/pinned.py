"""Chooses how many weights in host memory are pinned. The others stay in the mapped file
(meta/streams.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkbackend.models.options import Options
from vkbackend.models.placement.fit import Budget, Sizes, fits, largest, mib, shortfall
from vkbackend.models.placement.layout import Layout, host_nbytes

# At least this part of the memory that could be pinned is left free, mostly for pages of the file.
SPARE = 0.1


def with_pinned_size(options: Options, layout: Layout, sizes_of: Sizes, budgets: Sequence[Budget]) -> Options:
    """Replace a `pinned_mib` of "auto" by the most that fits, if not all weights fit. In `layout`, all
    weights are pinned. `budgets` are for host memory. Without a mapped file, or if the model would not fit
    even without pinned weights, the options do not change."""
    if options.pinned_mib != "auto" or not options.use_mmap or shortfall(sizes_of(options), budgets) is None:
        return options
    total = -(-sum(host_nbytes(layout).values()) // 2**20)
    spared = [replace(budget, nbytes=int(budget.nbytes * (1 - SPARE))) for budget in budgets]

    def fit(n: int) -> bool:
        return fits(replace(options, pinned_mib=float(n)), sizes_of, spared)

    n = largest(1, total, fit)
    return replace(options, pinned_mib=float(n)) if n or (total and fit(0)) else options


def stream_notes(layout: Layout, region_nbytes: int) -> list[str]:
    """Return a note for the user about weights that stay in the file. `region_nbytes` is the pinned memory
    for them, on all devices."""
    if not layout.streamed:
        return []
    by_layer = host_nbytes(layout)
    left = sum(by_layer[il] for il in layout.streamed)
    n, of_file, pinned = len(layout.streamed), mib(left), mib(sum(by_layer.values()) - left)
    return [
        f"weights of {n} layers ({of_file}) stay in the file, and each step copies what it reads through "
        f"{mib(region_nbytes)} of pinned memory; {pinned} of weights in host memory are pinned"
    ]
