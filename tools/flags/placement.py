"""Flags for where tensors are stored, how devices share them and how exactly they compute."""

from __future__ import annotations

import argparse

from vkbackend.models.options import SPLIT_MODES
from vkbackend.tools.flags.options import adder


def add_placement_arguments(parser: argparse.ArgumentParser, *, steps: bool = True) -> None:
    add = adder(parser, "placement and split")
    add(
        "n_gpu_layers",
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
        metavar="N",
        help="layers on the devices, counted from the output: a number, all, or auto (-1) for as many as "
        "fit; the others stay in host memory, where every device reads its own slices (default: all)",
    )
    add(
        "override_tensor",
        "-ot",
        "--override-tensor",
        action="append",
        default=[],
        metavar="REGEX=TARGET,...",
        help="place the tensors whose names match: CPU or host for host memory, a device's place in --device "
        "for that device alone; may be given several times, the first match wins",
    )
    add(
        "use_mmap",
        "--no-mmap",
        action="store_false",
        help="copy all weights into memory; by default software devices read them from the mapped file, "
        "which must not change during the run",
    )
    add(
        "split_mode",
        "-sm",
        "--split-mode",
        metavar="MODE",
        help=f"how devices share the model: {', '.join(SPLIT_MODES)}; tensor: each holds a slice of every "
        "matrix, layer: whole layers one device after another, hosts: whole layers on each host, slices of "
        "them on its devices, none: --main-gpu alone (default: %(default)s)",
    )
    add("main_gpu", "-mg", "--main-gpu", type=int, metavar="INDEX",
        help="the device of split mode none, as its place in --device, from 0 "
        "(default: %(default)s)")  # fmt: skip
    if not steps:
        return
    add("kv_offload", "-nkvo", "--no-kv-offload", action="store_false",
        help="keep the KV cache in host memory")  # fmt: skip
    add(
        "exact",
        "--exact",
        action="store_true",
        help="compute with F32 activations and send partial sums as F32; by default a device may round "
        "activations to 8 or 16 bits if it has faster instructions for them, and large sums travel as "
        "f16 (also "
        "VKBACKEND_EXACT=1)",
    )
