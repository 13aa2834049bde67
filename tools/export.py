"""`vkbackend export`: load a model onto devices, read it back, and write it as GGUF.

The devices' slices of each tensor are joined, so the written file must equal the loaded file. A model in
several files becomes one file. The flag --synthetic writes random weights and needs no device.
"""

from __future__ import annotations

import argparse
import sys

from vkbackend.atomic_file import check_target
from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.console import byte_progress, console, printable, size, tell_notes
from vkbackend.tools.flags.devices import add_device_arguments
from vkbackend.tools.flags.experiments import add_experiment_arguments
from vkbackend.tools.flags.options import options_of
from vkbackend.tools.flags.placement import add_placement_arguments, host_patterns
from vkbackend.tools.flags.runner import refuse_hostfile, tell_runner
from vkbackend.tools.measure.synthetic import Synthetic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("-m", "--model", metavar="FILE", help="the model, a .gguf file")
    model.add_argument("--synthetic", metavar="SHAPE:TYPE", help="random weights, for example llama-1b:Q4_0")
    add("-o", "--output", metavar="FILE", required=True, help="the .gguf file to write")
    add_device_arguments(parser, steps=False)
    add_placement_arguments(parser, steps=False)
    add_experiment_arguments(parser, steps=False)


def run(args: argparse.Namespace) -> None:
    check_target(args.output, InvalidArgument)
    if args.synthetic:
        model = Synthetic(args.synthetic)
        total = write_gguf(args.output, model, (), {}, ())
        sys.stdout.write(printable(f"{args.output}: {len(model.tensors)} tensors, {size(total)}") + "\n")
        return
    err = console(stderr=True)
    with GGUF.open(args.model) as source:
        with byte_progress(err, "loading", keep=True) as progress:
            patterns = host_patterns(args, source.tensors)
            # Use the smallest context, because only the weights are needed.
            options = options_of(args, args.model, n_ctx=1, n_ubatch=1, override_tensor=patterns)
            refuse_hostfile(options)
            runner = Runner(options, source, progress=progress)
        try:
            tell_runner(runner, err)
            tell_notes(getattr(args, "notes", ()), err)
            mesh, names = runner.mesh, runner.device_names()
            with byte_progress(err, "writing", keep=True) as progress:
                specs = runner.model.weights()
                total = write_gguf(args.output, source, mesh.devices, mesh.weights, specs, progress)
        finally:
            runner.close()
    summary = f"{len(source.tensors)} tensors, {size(total)}, from {', '.join(names)}"
    sys.stdout.write(printable(f"{args.output}: {summary}") + "\n")


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["export", *sys.argv[1:]]))
