"""The flags that name the devices, their shares and the size of steps and caches, for every subcommand that
loads a model, as llama.cpp names them."""

from __future__ import annotations

import argparse
import re

from vkbackend.models.engine.arguments import finite_number
from vkbackend.ops import CACHE_TYPES

AUTO_WHERE_UNLIKE = "auto where devices differ, else equal"  # the default of LLM


def add_device_arguments(
    parser: argparse.ArgumentParser, *, shares: str = AUTO_WHERE_UNLIKE, steps: bool = True
) -> None:
    """-dev, -ts and, with `steps`, -ub, -ctk, -ctv, --snapshots; `shares` says what the default of -ts is."""
    add = parser.add_argument_group("devices and memory").add_argument
    add(
        "-dev",
        "--device",
        metavar="LIST",
        help="devices that share the model, comma-separated: indices, UUIDs or names as `vkbackend devices` "
        "shows them; one may be given several times; numpy: the host itself, slowly, without Vulkan "
        "(default: the best device)",
    )
    automatic = "; auto: measure the devices once and balance their time" if "auto" in shares else ""
    add(
        "-ts",
        "--tensor-split",
        metavar="LIST",
        help=f"the share of each device, in any unit, such as 3,1{automatic} (default: {shares})",
    )
    if not steps:
        return
    add("-ub", "--ubatch-size", type=int, default=512, metavar="N",
        help="tokens of a prompt computed at once, 1..512 (default: 512)")  # fmt: skip
    for cache in ("K", "V"):
        add(
            f"-ct{cache.lower()}",
            f"--cache-type-{cache.lower()}",
            default="f16",
            metavar="TYPE",
            help=f"type of the {cache} cache: {', '.join(CACHE_TYPES)} (default: f16)",
        )
    add("--snapshots", "--ctx-checkpoints", type=int, default=2, metavar="N",
        help="states of recurrent layers that a slot keeps to go back to (default: 2)")  # fmt: skip


def parse_split(text: str | None) -> list[float] | str | None:
    """ "3,1" (also "3/1" and "3:1") as numbers, "auto" as it is."""
    if text is None or text == "auto":
        return text
    return [
        finite_number("--tensor-split", part, 0, float("inf"))
        for part in map(_to_float, re.split("[,/:]", text))
    ]


def _to_float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
