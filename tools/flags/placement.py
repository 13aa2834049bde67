"""The flags that say where a model's tensors lie, how devices share it and how exactly they compute, for
every subcommand that loads one."""

from __future__ import annotations

import argparse
from typing import Any

from vkbackend.meta.policy import POLICIES
from vkbackend.meta.reduce import PROVIDERS, WIRES
from vkbackend.models.engine.arguments import ahead_depth, layer_count, override_list
from vkbackend.models.placement.layout import SPLIT_MODES


def add_placement_arguments(parser: argparse.ArgumentParser, *, steps: bool = True) -> None:
    """-ngl, -ot, -sm, -mg, --split-policy and, with `steps`, -nkvo, --reduce-type, --reduce-provider,
    --submit-ahead, --exact."""
    add = parser.add_argument_group("placement and split").add_argument
    add(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        dest="n_gpu_layers",
        metavar="N",
        help="layers on the devices, counted from the output: a number, all, or auto for as many as fit; the "
        "others stay in host memory, from which every device reads its own slices (default: all)",
    )
    add(
        "-ot",
        "--override-tensor",
        action="append",
        default=[],
        metavar="REGEX=TARGET,...",
        help="place the tensors whose names match: CPU or host for host memory, a device's place in --device "
        "for that device alone; may be given several times, the first match wins",
    )
    add(
        "--no-mmap",
        action="store_true",
        help="copy all weights into memory; else software devices read them in the mapped file, which must "
        "stay as it is meanwhile",
    )
    add(
        "-sm",
        "--split-mode",
        default="tensor",
        metavar="MODE",
        help=f"how devices share the model: {', '.join(SPLIT_MODES)}; tensor: each holds a slice of every "
        "matrix, layer: whole layers one device after another, none: --main-gpu alone (default: tensor)",
    )
    add("-mg", "--main-gpu", type=int, default=0, metavar="INDEX",
        help="the device of split mode none, as its place in --device, from 0 (default: 0)")  # fmt: skip
    add(
        "--split-policy",
        default="balanced",
        metavar="POLICY",
        help=f"how shares become slices: {', '.join(POLICIES)} (default: balanced)",
    )
    if not steps:
        return
    add("-nkvo", "--no-kv-offload", action="store_true", help="keep the KV cache in host memory")
    add(
        "--reduce-provider",
        default="auto",
        metavar="NAME",
        help=f"where partial sums meet: auto, {', '.join(PROVIDERS)}; auto: what the devices can do and the "
        "size asks for (default: auto)",
    )
    add(
        "--submit-ahead",
        default="all",
        metavar="N",
        help="segments of a step handed to a device before they may run: a number or all; bench-reduce "
        "measures what a driver likes (default: all)",
    )
    add(
        "--reduce-type",
        default="auto",
        metavar="TYPE",
        help=f"what partial sums travel as: {', '.join(WIRES)}; auto: bf16 for large ones (default: auto)",
    )
    add(
        "--exact",
        action="store_true",
        help="compute with F32 activations alone; else a device may round them to 8 or 16 bits where it has "
        "faster instructions for those (also VKBACKEND_EXACT=1)",
    )


def placement_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `LLM` that these flags stand for."""
    found = {
        "n_gpu_layers": layer_count("--n-gpu-layers", args.n_gpu_layers),
        "override_tensor": override_list(args.override_tensor),
        "use_mmap": not args.no_mmap,
        "split_mode": args.split_mode,
        "main_gpu": args.main_gpu,
        "split_policy": args.split_policy,
    }
    if not hasattr(args, "exact"):  # the flags of steps were left out
        return found
    return found | {
        "kv_offload": not args.no_kv_offload,
        "reduce_type": args.reduce_type,
        "reduce_provider": args.reduce_provider,
        "exact": args.exact,
        "submit_ahead": ahead_depth(args.submit_ahead, "--submit-ahead"),
    }
