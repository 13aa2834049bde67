"""Flags of measuring commands, and functions that open their models and runner."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Unpack

from rich.console import Console

from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hub import fetch
from vkbackend.models.keywords import Keywords
from vkbackend.models.options import Options
from vkbackend.tools.console import byte_progress, console, tell_notes
from vkbackend.tools.flags.adapters import add_adapter_arguments
from vkbackend.tools.flags.control_vectors import add_control_arguments
from vkbackend.tools.flags.devices import add_device_arguments
from vkbackend.tools.flags.experiments import add_experiment_arguments
from vkbackend.tools.flags.llama_cpp import settle_common
from vkbackend.tools.flags.options import options_of
from vkbackend.tools.flags.placement import add_placement_arguments, host_patterns
from vkbackend.tools.flags.rope import add_rope_arguments
from vkbackend.tools.flags.speculation import settle_draft
from vkbackend.tools.measure.synthetic import SHAPES, Synthetic

if TYPE_CHECKING:
    from vkbackend.models.hosts.group import Group


# In node 0's process, `hosts run` sets the group of nodes and the group's devices.
group: Group | None = None
places: tuple[str, ...] = ()


def add_model_arguments(parser: argparse.ArgumentParser, *, synthetic: bool = True) -> None:
    add = parser.add_argument
    add("-m", "--model", action="append", default=[], metavar="FILE",
        help="a model, a .gguf file" + ("; may be given several times" if synthetic else ""))  # fmt: skip
    if synthetic:
        add(
            "--synthetic",
            action="append",
            default=[],
            metavar="SHAPE:TYPE",
            help="a model of a published shape with random weights, for example llama-8b:Q4_0; "
            f"shapes: {', '.join(SHAPES)}; may be given several times",
        )
    add_device_arguments(parser)
    add_placement_arguments(parser)
    add_rope_arguments(parser)
    add_control_arguments(parser)
    add_adapter_arguments(parser)
    add_experiment_arguments(parser)


def settle_models(args: argparse.Namespace) -> None:
    if hasattr(args, "hf_repo"):
        settle_common(args)
        if args.hf_repo is not None:
            args.model, args.hf_repo, args.hf_file = [fetch(args.hf_repo, args.hf_file)], None, None
    settle_draft(args)


def open_models(args: argparse.Namespace, stack: ExitStack) -> list[GGUF]:
    """Return the synthetic models and the opened files. `stack` closes the files. Raises InvalidArgument if
    no model is named."""
    settle_models(args)
    models: list[GGUF] = [stack.enter_context(GGUF.open(path)) for path in args.model]
    models += [Synthetic(spec) for spec in getattr(args, "synthetic", [])]
    if not models:
        other = " or --synthetic SHAPE:TYPE" if hasattr(args, "synthetic") else ""
        raise InvalidArgument(f"no model was given; pass one with -m FILE{other}")
    return models


def refuse_hostfile(options: Options) -> None:
    """Raise InvalidArgument for a hostfile, because only `hosts run` uses several nodes."""
    if options.hostfile is not None:
        raise InvalidArgument(
            "this command runs in node 0's process: write "
            f"`vkbackend hosts run --hostfile {options.hostfile} -- COMMAND ...`"
        )


def open_runner(gguf: GGUF, args: argparse.Namespace, **changed: Unpack[Keywords]) -> Runner:
    """Load the model. `changed` overrides flags. Print progress, measured shares and unused parts of the file
    to stderr."""
    err, path = console(stderr=True), gguf.paths[0]
    if group is not None:
        changed["devices"] = places
    if args.host_tensors:
        changed["override_tensor"] = host_patterns(args, gguf.tensors)
    options = options_of(args, path, **changed)
    refuse_hostfile(options)
    with byte_progress(err, f"loading {path.name}", then="compiling shaders") as progress:
        runner = Runner(options, gguf, progress=progress, group=group)
    tell_runner(runner, err)
    tell_notes(getattr(args, "notes", ()), err)
    return runner


def tell_runner(runner: Runner, err: Console) -> None:
    names = [device.name for device in runner.mesh.devices]
    tell_notes([*(runner.prediction.lines(names) if runner.prediction else ()), *runner.notes], err)
