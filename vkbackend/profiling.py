from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from vkbackend.buffer import View
from vkbackend.recording import Barrier, Copy, Cut, Dispatch, Recording, Scope
from vkbackend.runtime import Device


def report_times(name: str, durations: Sequence[tuple[Dispatch | Copy, float]]) -> None:
    """Print a line per command: device, op, variant, microseconds, and GB/s read and written."""
    for command, us in durations:
        kind = f"{command.op}.{command.variant}" if isinstance(command, Dispatch) else "copy"
        nbytes = sum(r.end - r.begin for r in (*command.reads, *command.writes))
        rate = nbytes / us / 1e3 if us else 0.0
        sys.stderr.write(f"{name:<10} {kind:<22} {us:9.1f} us {rate:8.2f} GB/s  {command.label}\n")


_BARS = {Scope.DEVICE: "|", Scope.TO_HOST: "|> host", Scope.FROM_HOST: "host >|"}


def report_order(name: str, recording: Recording) -> None:
    """Print each segment's commands on one line. `|` marks a barrier, and `||` the end of a submission."""
    for i, segment in enumerate(recording.segments()):
        words = []
        for command in segment:
            if isinstance(command, Barrier):
                words.append(_BARS[command.scope])
            else:
                words.append("||" if isinstance(command, Cut) else command.label.replace(" ", "_"))
        sys.stderr.write(f"{name:<10} segment {i}: {' '.join(words)}\n")


def report_values(devices: Sequence[Device], values: Mapping[str, Sequence[View | None]]) -> None:
    """Print a line per intermediate tensor and device: shape, mean, largest magnitude and first elements."""
    for name, views in values.items():
        for device, view in zip(devices, views, strict=True):
            if view is not None:
                x = device.read(view).view(np.float32).reshape(view.shape)
                head = " ".join(f"{v:.5g}" for v in x.reshape(-1)[:4])
                sys.stderr.write(
                    f"{device.name:<10} {name:<28} {view.shape!s:<12} mean {x.mean():.5g} "
                    f"max |x| {np.abs(x).max():.5g}: {head}\n"
                )
