"""Time all-reduces for every pair of devices, by size, provider and segments submitted ahead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from vkbackend.errors import OutOfDeviceMemory, PlanError, UnsupportedFeature
from vkbackend.meta.bench import time_reduce
from vkbackend.meta.options import ReduceOptions, ahead_depth
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.tools.measure.reduce_sizes import AHEAD, SIZES, parse_size
from vkbackend.tools.report.part import Group, LeftOut, Part, Row

AHEAD_SIZES = ("16K", "1M")  # Sizes for a token and a prompt.


class Reduces(Part):
    """Times pairs of devices. A single device is opened twice, which shows how its driver handles host
    pages."""

    title = "All-reduces of every pair of devices"
    share, deadline_s = 0.08, 60.0

    @staticmethod
    def groups(devices: Sequence[str]) -> list[Group]:
        return list(combinations(devices, 2)) or [(devices[0], devices[0])]

    def cases(self) -> list[str]:
        sizes = SIZES.split(",")
        return [
            *(f"{size} pages ahead all" for size in sizes),
            *(f"{size} host-sum ahead all" for size in sizes),
            *(f"{size} pages ahead {n}" for size in AHEAD_SIZES for n in AHEAD.split(",") if n != "all"),
        ]

    def run(self, case: str) -> list[Row]:
        size, provider, _, ahead = case.split()
        how = ReduceOptions(
            reduce_type="f32", reduce_provider=provider, submit_ahead=ahead_depth("ahead", ahead)
        )
        nbytes = parse_size(size)
        try:
            result = time_reduce(open_devices(self.devices), nbytes, how)
        except (UnsupportedFeature, OutOfDeviceMemory, PlanError) as error:
            raise LeftOut(str(error)) from None
        us = 1e6 * result.median
        row = {"provider": provider, "ahead": ahead, "bytes": nbytes, "us": us, "GB/s": nbytes / us / 1e3}
        return [row | {"sums": "exact" if result.exact else "WRONG"}]

    @classmethod
    def wrong(cls, row: Row) -> str:
        return "" if row["sums"] == "exact" else f"the sums of {row['bytes']} bytes are wrong"
