"""Flags that set where tensors are stored, how devices share tensors, and how exactly devices compute."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any

from vkbackend.models.arguments import EXPERTS
from vkbackend.models.options import SPLIT_MODES
from vkbackend.tools.flags.notes import note
from vkbackend.tools.flags.options import adder

DENSE = r"\.ffn_(up|down|gate)\."  # of -ncffn


class _SplitMode(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        if values == "row":
            note(namespace, f"{flag} row is {flag} tensor: each device holds rows of every matrix")
        namespace.split_mode = "tensor" if values == "row" else values


class _HostTensors(argparse.Action):
    def __init__(self, *args: Any, pattern: str, **how: Any) -> None:
        super().__init__(*args, **how)
        self._pattern = pattern

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        if isinstance(values, int):
            if values < 0:
                raise argparse.ArgumentError(self, f"{values}: expected 0 layers or more")
            if not values:
                return
            layers = "|".join(map(str, range(values)))
            pattern, flag = rf"blk\.({layers}){self._pattern}", f"{flag} {values}"
        else:
            pattern = self._pattern
        namespace.host_tensors = [*(namespace.host_tensors or ()), (flag, pattern)]


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
        "--mmap",
        "-mmp",
        action="store_true",
        help=argparse.SUPPRESS,
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
        action=_SplitMode,
        metavar="MODE",
        help=f"how devices share the model: {', '.join(SPLIT_MODES)}; tensor: each holds a slice of every "
        "matrix, layer: whole layers one device after another, hosts: whole layers on each host, slices of "
        "them on its devices, none: --main-gpu alone (default: %(default)s)",
    )
    add("main_gpu", "-mg", "--main-gpu", type=int, metavar="INDEX",
        help="the device of split mode none, as its place in --device, from 0 "
        "(default: %(default)s)")  # fmt: skip
    add("host_tensors", "-cmoe", "--cpu-moe", action=_HostTensors, pattern=EXPERTS, nargs=0, default=None,
        help="keep the weights of all experts in host memory, as -ot does")  # fmt: skip
    add("host_tensors", "-ncmoe", "--n-cpu-moe", action=_HostTensors, pattern=EXPERTS, type=int, default=None,
        metavar="N", help="keep the experts of the first N layers in host memory")  # fmt: skip
    add("host_tensors", "-ncffn", "--n-cpu-ffn", action=_HostTensors, pattern=DENSE, type=int, default=None,
        metavar="N", help="the same of the dense feed-forward weights of the first N layers")  # fmt: skip
    add("moe_cache_mib", "--moe-cache-mib", metavar="MIB",
        help="device memory, on all devices together, for copies of the experts that are used most, if "
        "experts are in host memory; auto: as much as fits (default: %(default)s)")  # fmt: skip
    add("pinned_mib", "--pinned-mib", metavar="MIB",
        help="host memory, on all devices together, for pinned weights of layers in host memory; the "
        "weights of further layers stay in the file, and every step copies them; auto: as much as fits "
        "(default: %(default)s)")  # fmt: skip
    if not steps:
        return
    add("kv_offload", "-kvo", "--kv-offload", action="store_true", help=argparse.SUPPRESS)
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


def host_patterns(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the patterns of -ot, -cmoe, -ncmoe and -ncffn. Notes show the last three flags as -ot flags."""
    patterns = list(args.override_tensor)
    for flag, pattern in args.host_tensors or ():
        if any(re.search(pattern, name) for name in names):
            patterns.append(f"{pattern}=CPU")
            note(args, f"{flag} is -ot '{pattern}=CPU'")
        else:
            note(args, f"{flag} has no effect: no tensor of the model has such a name")
    return patterns
