"""The flags of the commands that measure a model, and the runner they stand for."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Unpack

from rich.console import Console

from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Keywords, Options
from vkbackend.tools.console import byte_progress, console, tell_notes
from vkbackend.tools.flags.control_vectors import add_control_arguments
from vkbackend.tools.flags.devices import add_device_arguments
from vkbackend.tools.flags.experiments import add_experiment_arguments
from vkbackend.tools.flags.options import options_of
from vkbackend.tools.flags.placement import add_placement_arguments
from vkbackend.tools.flags.rope import add_rope_arguments
from vkbackend.tools.measure.synthetic import SHAPES, Synthetic

if TYPE_CHECKING:
    from vkbackend.models.hosts.group import Group


# The hosts that run a command together, and their devices: `hosts run` sets them in the process of host 0.
group: Group | None = None
places: tuple[str, ...] = ()


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
    add_rope_arguments(parser)
    add_control_arguments(parser)
    add_experiment_arguments(parser)


def open_models(args: argparse.Namespace, stack: ExitStack) -> list[GGUF]:
    """The files and synthetic models named, open until the stack unwinds; raises InvalidArgument for none."""
    found: list[GGUF] = [stack.enter_context(GGUF.open(path)) for path in args.model]
    found += [Synthetic(spec) for spec in getattr(args, "synthetic", [])]
    if not found:
        other = " or --synthetic SHAPE:TYPE" if hasattr(args, "synthetic") else ""
        raise InvalidArgument(f"no model was given; name one with -m FILE{other}")
    return found


def refuse_hostfile(options: Options) -> None:
    """Raise InvalidArgument where a command that opens devices itself is given a hostfile."""
    if options.hostfile is not None:
        raise InvalidArgument(
            "this command works in the process of host 0: write "
            f"`vkbackend hosts run --hostfile {options.hostfile} -- COMMAND ...`"
        )


def open_runner(gguf: GGUF, args: argparse.Namespace, **changed: Unpack[Keywords]) -> Runner:
    """Load the model on the devices that the flags name; options in `changed` replace the flags. Tells on
    stderr the progress, the shares that were measured, and what of the file is not used. Raises what loading
    raises."""
    err, path = console(stderr=True), gguf.paths[0]
    if group is not None:
        changed["devices"] = places
    options = options_of(args, path, **changed)
    refuse_hostfile(options)
    with byte_progress(err, f"loading {path.name}", then="compiling shaders") as progress:
        runner = Runner(options, gguf, progress=progress, group=group)
    tell_runner(runner, err)
    return runner


def tell_runner(runner: Runner, err: Console) -> None:
    """Tell on stderr the shares that were measured, and what of the file is not used."""
    names = [device.name for device in runner.mesh.devices]
    tell_notes([*(runner.prediction.lines(names) if runner.prediction else ()), *runner.notes], err)
