"""Flags of LoRA adapters, with llama.cpp's names."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from vkbackend.tools.flags.options import adder
from vkbackend.tools.flags.scaled_files import Files, ScaledFiles

_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


class _Adapters(Files):
    def entry(self, path: str, scale: float) -> tuple[Any, ...]:
        if (named := _NAMED.fullmatch(path)) and not os.path.exists(path):
            return named[1], named[2], scale
        return path, scale


class _ScaledAdapters(ScaledFiles, _Adapters):
    pass


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "LoRA adapters")
    add(
        "lora",
        "--lora",
        action=_Adapters,
        metavar="[NAME=]FILE",
        help="apply this LoRA adapter, a GGUF file or a PEFT folder; several, comma-separated or each with "
        "the flag, add up",
    )
    add(
        "lora",
        "--lora-scaled",
        action=_ScaledAdapters,
        metavar="[NAME=]FILE:SCALE",
        help="the same with a scale, which may be negative; several, comma-separated or each with the flag",
    )
    add(
        "lora_init_without_apply",
        "--lora-init-without-apply",
        action="store_true",
        help="load the adapters, but do not apply them unless a request names them",
    )
