"""The flags of the commands that measure a model, and the runner they stand for."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.arguments import device_list, share_list, unlike
from vkbackend.models.engine.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.console import byte_progress, console, tell_notes
from vkbackend.tools.flags.control_vectors import add_control_arguments, control_of
from vkbackend.tools.flags.devices import add_device_arguments, parse_split
from vkbackend.tools.flags.placement import add_placement_arguments, placement_of
from vkbackend.tools.measure.synthetic import SHAPES, Synthetic


def add_model_arguments(parser: argparse.ArgumentParser, *, synthetic: bool = True) -> None:
    """-m, --synthetic, -dev, -ts, -ub, -ctk, -ctv, the placement flags and those of control vectors."""
    add = parser.add_argument
    add("-m", "--model", action="append", default=[], metavar="FILE",
        help="a model, a .gguf file" + ("; may be given several times" if synthetic else ""))  # fmt: skip
    if synthetic:
        add(
            "--synthetic",
            action="append",
            default=[],
            metavar="SHAPE:TYPE",
            help="a model of a real shape with random weights instead of a file, such as llama-8b:Q4_0; "
            f"shapes: {', '.join(SHAPES)}; may be given several times",
        )
    add_device_arguments(parser)
    add_placement_arguments(parser)
    add_control_arguments(parser)


def open_models(args: argparse.Namespace, stack: ExitStack) -> list[GGUF]:
    """The files and synthetic models named, open until the stack unwinds; raises InvalidArgument for none."""
    found: list[GGUF] = [stack.enter_context(GGUF.open(path)) for path in args.model]
    found += [Synthetic(spec) for spec in getattr(args, "synthetic", [])]
    if not found:
        other = " or --synthetic SHAPE:TYPE" if hasattr(args, "synthetic") else ""
        raise InvalidArgument(f"no model was given; name one with -m FILE{other}")
    return found


RUNNER_NAMES = {  # of what Runner calls otherwise than LLM
    "split_policy": "policy",
    "reduce_type": "wire",
    "reduce_provider": "provider",
    "submit_ahead": "ahead",
}


def placed(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Runner` that the flags of devices, shares and placement stand for."""
    names, split = device_list(args.device), parse_split(args.tensor_split)
    auto = split == "auto" or (split is None and args.split_mode == "tensor" and unlike(names))
    return {
        "devices": names,
        "tensor_split": None if auto else share_list(split, names),
        "auto_split": auto,
        **{RUNNER_NAMES.get(name, name): value for name, value in placement_of(args).items()},
    }


def open_runner(gguf: GGUF, args: argparse.Namespace, n_ctx: int, **options: Any) -> Runner:
    """The model on the devices that the flags name; progress, shares that were measured, and what of the file
    is not used, on stderr. Raises what loading raises."""
    err = console(stderr=True)
    with byte_progress(err, f"loading {gguf.paths[0].name}", then="compiling shaders") as progress:
        runner = Runner(
            gguf,
            n_ctx=n_ctx,
            n_ubatch=args.ubatch_size,
            n_snapshots=args.snapshots,
            type_k=args.cache_type_k,
            type_v=args.cache_type_v,
            progress=progress,
            **placed(args),
            **control_of(args),
            **options,
        )
    tell_runner(runner, err)
    return runner


def tell_runner(runner: Runner, err: Console) -> None:
    """The shares that were measured, and what of the file is not used."""
    names = [device.name for device in runner.mesh.devices]
    tell_notes([*(runner.prediction.lines(names) if runner.prediction else ()), *runner.notes], err)
