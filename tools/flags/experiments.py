"""Flags for experiments with sharing a model between devices. --help lists these flags last."""

from __future__ import annotations

import argparse

from vkbackend.meta.known_ways import ONE_CALL
from vkbackend.meta.options import AHEAD
from vkbackend.meta.policy import POLICIES
from vkbackend.meta.reduce import WIRES
from vkbackend.meta.ways import HOST_WRITTEN, PROVIDERS
from vkbackend.runtime import SIGNALS
from vkbackend.tools.flags.options import adder

TITLE = "experiments"


def add_experiment_arguments(parser: argparse.ArgumentParser, *, steps: bool = True) -> None:
    add = adder(parser, TITLE)
    add(
        "split_policy",
        "--split-policy",
        metavar="POLICY",
        help=f"how shares become slices: {', '.join(POLICIES)} (default: %(default)s)",
    )
    if not steps:
        return
    add(
        "reduce_provider",
        "--reduce-provider",
        metavar="NAME",
        help=f"where partial sums are added: auto, {', '.join(PROVIDERS)}; auto: as tune "
        "measured, or else by features and size (default: %(default)s)",
    )
    add(
        "submit_ahead",
        "--submit-ahead",
        metavar="N",
        help=f"segments of a step submitted to a device before it may run them: a number, all, {ONE_CALL} "
        f"(all in one call of the driver; needs the provider {' or '.join(HOST_WRITTEN)}) or auto; auto: as "
        f"tune measured, or else {AHEAD} (default: %(default)s)",
    )
    add(
        "reduce_signal",
        "--reduce-signal",
        metavar="NAME",
        help=f"how host and devices signal each other: auto, {', '.join(SIGNALS)}; flag: the host polls a "
        f"word of its memory; event: devices wait in their command buffers (needs the provider "
        f"{' or '.join(HOST_WRITTEN)}); auto: as tune measured, or else semaphore (default: %(default)s)",
    )
    add(
        "reduce_type",
        "--reduce-type",
        metavar="TYPE",
        help=f"the format of partial sums in transit: {', '.join(WIRES)}; bf16 keeps 8 bits of a number, "
        "f16 keeps 11 and is as small; auto: f16 for large sums, but f32 between software devices "
        "(default: %(default)s)",
    )
