"""Flags for devices, their shares, and the sizes of steps and caches, with llama.cpp's names."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from typing import Any

from vkbackend.ops import CACHE_TYPES
from vkbackend.step import MAX_ROWS
from vkbackend.tools.flags.fit import add_fit_arguments
from vkbackend.tools.flags.notes import note
from vkbackend.tools.flags.options import adder

AUTO_WHERE_UNLIKE = "auto where devices differ, else equal"  # the default of LLM


class _Rows(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        if values > MAX_ROWS:
            note(namespace, f"{flag} {values}: prompts are computed {MAX_ROWS} tokens at a time", of=flag)
        namespace.n_ubatch = min(values, MAX_ROWS)


def add_device_arguments(
    parser: argparse.ArgumentParser, *, shares: str = AUTO_WHERE_UNLIKE, steps: bool = True
) -> None:
    """Add -dev and -ts. If `steps` is set, add -ub and the cache flags. `shares` is the default of -ts."""
    add = adder(parser, "devices and memory")
    add(
        "devices",
        "-dev",
        "--device",
        metavar="LIST",
        help="devices that share the model, comma-separated: indices, UUIDs or names from `vkbackend devices`"
        "; repeat one to open it several times; numpy: the processor, slow, without Vulkan "
        "(default: the best device)",
    )
    add("hostfile", "--hostfile", metavar="FILE",
        help="a file of hosts that run the model together; replaces -dev (docs/hosts.md)")  # fmt: skip
    automatic = "; auto: measure the devices once and balance their time" if "auto" in shares else ""
    add(
        "tensor_split",
        "-ts",
        "--tensor-split",
        type=parse_split,
        metavar="LIST",
        help=f"the share of each device, in any unit, for example 3,1{automatic} (default: {shares})",
    )
    if not steps:
        return
    add("n_ubatch", "-ub", "--ubatch-size", action=_Rows, type=int, metavar="N",
        help=f"tokens of a prompt computed at once; above {MAX_ROWS}: {MAX_ROWS} (default: 512, or up to "
        "2048 if layers or experts are in host memory)")  # fmt: skip
    for cache in ("K", "V"):
        add(
            f"type_{cache.lower()}",
            f"-ct{cache.lower()}",
            f"--cache-type-{cache.lower()}",
            metavar="TYPE",
            help=f"type of the {cache} cache: {', '.join(CACHE_TYPES)} (default: %(default)s)",
        )
    add("kv_cells", "--kv-cells", type=int, metavar="N",
        help="size of the KV cache that all slots share, in positions (default: -c for each "
        "slot)")  # fmt: skip
    add("prefix_cache", "--cache-prompt", action="store_true", help=argparse.SUPPRESS)
    add("prefix_cache", "--no-prefix-cache", "--no-cache-prompt", action="store_false",
        help="compute every prompt completely, even if an earlier one has the same prefix")  # fmt: skip
    add("cache_ram", "-cram", "--cache-ram", type=int, metavar="MIB",
        help="host memory for blocks of the KV cache that leave the devices; -1: no limit (default: "
        "%(default)s)")  # fmt: skip
    add("cache_disk", "--cache-disk", metavar="FOLDER",
        help="keep such blocks in files, not encrypted, which a later process finds again (default: "
        "none)")  # fmt: skip
    add("cache_disk_mib", "--cache-disk-size", type=int, metavar="MIB",
        help="what all files of --cache-disk may have together (default: %(default)s)")  # fmt: skip
    add("n_snapshots", "--snapshots", "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", type=int,
        metavar="N", help="earlier states of recurrent layers kept per slot (default: "
        "%(default)s)")  # fmt: skip
    add_fit_arguments(parser)


def parse_split(text: str) -> list[float | str] | str:
    """Return the numbers of "3,1", "3/1" or "3:1", and "auto" unchanged. The option's check rejects other
    words."""
    return text if text == "auto" else [_number(part) for part in re.split("[,/:]", text)]


def _number(text: str) -> float | str:
    with suppress(ValueError):
        return float(text)
    return text
