"""The process that runs a part: `python -m vkbackend.tools.report.worker`.

A JSON job on stdin contains the part, the devices, the finished cases and their rows. Output is one JSON
object per line, first {"cases": [...]}, or {"unable": why} for a part without cases. Each case writes
{"begin": name}, then {"end": name, "rows": [...]}. A failure adds "left_out" or "failed", and "lost" if the
device is unusable.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from vkbackend.errors import DeviceLost, OutOfDeviceMemory, Timeout, VkbackendError
from vkbackend.tools.console import jsonable
from vkbackend.tools.op_cases.check import is_lost
from vkbackend.tools.report import machine
from vkbackend.tools.report.part import LeftOut, Part
from vkbackend.tools.report.parts import PARTS

DEVICES = "devices"


def tell(out: TextIO, **message: Any) -> None:
    out.write(json.dumps(jsonable(message), allow_nan=False) + "\n")
    out.flush()


def describe(words: list[str], out: TextIO) -> None:
    tell(out, cases=[DEVICES])
    tell(out, begin=DEVICES)
    tell(out, end=DEVICES, rows=machine.chosen(tuple(words) or None))


def work(part: Part, done: set[str], out: TextIO) -> None:
    names = part.cases()
    tell(out, cases=names)
    for name in names:
        if name in done:
            continue
        tell(out, begin=name)
        message: dict[str, Any] = {"rows": []}
        try:
            message["rows"] = part.run(name)
            part.rows += message["rows"]
        except (LeftOut, OutOfDeviceMemory) as reason:
            message["left_out"] = str(reason)
        except VkbackendError as error:
            message |= {"failed": str(error), "lost": isinstance(error, DeviceLost | Timeout)}
        opened = part.opened
        if opened is not None and is_lost(opened):
            message["lost"] = True
        tell(out, end=name, **message)
        if message.get("lost"):
            os._exit(0)  # closing the device would hang
    with suppress(VkbackendError):
        part.close()


def main() -> None:
    job = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # drivers may print to stdout
    try:
        if job["part"] == DEVICES:
            describe(job["devices"], out)
        else:
            part = PARTS[job["part"]](tuple(job["devices"]), job["rows"])
            work(part, set(job["done"]), out)
    except VkbackendError as error:
        tell(out, unable=str(error))


if __name__ == "__main__":
    main()
