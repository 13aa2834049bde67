"""Time all-reduces for every pair of devices, by size, provider, signal and segments submitted ahead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from vkbackend.errors import OutOfDeviceMemory, PlanError, UnsupportedFeature
from vkbackend.meta.bench import time_reduce
from vkbackend.meta.known_ways import ONE_CALL
from vkbackend.meta.measured_ways import is_trial
from vkbackend.meta.options import AHEAD, ReduceOptions, ahead_depth
from vkbackend.meta.ways import HOST_WRITTEN, WAYS, can_signal
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.runtime import SIGNALS
from vkbackend.tools.measure.reduce_sizes import SIZES, parse_size
from vkbackend.tools.report.part import Group, LeftOut, Part, Row

TOKEN, PROMPT = "16K", "1M"  # Sizes for a token and a prompt.
DEPTHS = "0,1,2,all"
PROVIDERS = [way.name for way in WAYS if way.n_tuned == 2]


def _providers(signal: str) -> Sequence[str]:
    """Return the providers with which `signal` is measured."""
    return ("pages",) if can_signal("pages", signal) else HOST_WRITTEN


class Reduces(Part):
    """Times pairs of devices. A single device is opened twice, which shows how its driver handles host
    pages."""

    title = "All-reduces of every pair of devices"
    share, deadline_s = 0.08, 60.0

    @staticmethod
    def groups(devices: Sequence[str]) -> list[Group]:
        return list(combinations(devices, 2)) or [(devices[0], devices[0])]

    def cases(self) -> list[str]:
        """A case is a message size, a provider, a signal and a number of submissions ahead. Cases with a
        token's size come first."""
        usual, depth = SIGNALS[0], str(AHEAD)
        depths = [text for text in DEPTHS.split(",") if text != depth]
        return [
            *(f"{TOKEN} {provider} {usual} {depth}" for provider in PROVIDERS),
            *(f"{TOKEN} {way} {signal} {depth}" for signal in SIGNALS[1:] for way in _providers(signal)),
            *(
                f"{TOKEN} {way} {signal} {n}"
                for signal in SIGNALS
                for way in _providers(signal)
                for n in depths
            ),
            *(f"{TOKEN} {provider} {usual} {ONE_CALL}" for provider in HOST_WRITTEN),
            *(f"{PROMPT} {provider} {usual} {depth}" for provider in PROVIDERS),
            *(
                f"{size} {provider} {usual} {depth}"
                for size in SIZES.split(",")
                if size not in (TOKEN, PROMPT)
                for provider in PROVIDERS
            ),
        ]

    def run(self, case: str) -> list[Row]:
        size, provider, signal, ahead = case.split()
        how = ReduceOptions(
            reduce_type="f32",
            reduce_provider=provider,
            reduce_signal=signal,
            submit_ahead=ahead_depth("ahead", ahead),
        )
        nbytes = parse_size(size)
        try:
            result = time_reduce(open_devices(self.devices), nbytes, how)
        except (UnsupportedFeature, OutOfDeviceMemory, PlanError) as error:
            raise LeftOut(str(error)) from None
        us = 1e6 * result.median
        row = {"provider": provider, "signal": signal, "ahead": ahead, "bytes": nbytes}
        row |= {"us": us, "GB/s": nbytes / us / 1e3}
        return [row | {"sums": "exact" if result.exact else "WRONG"}]

    @classmethod
    def wrong(cls, row: Row) -> str:
        """Events and steps in one call are experiments, which no default uses."""
        exact = row["sums"] == "exact" or is_trial(row["signal"], row["ahead"])
        return "" if exact else f"the sums of {row['bytes']} bytes are wrong"
