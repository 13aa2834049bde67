"""The flags of `--fit`, with llama.cpp's names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from vkbackend.models.arguments import not_given
from vkbackend.tools.flags.options import adder
from vkbackend.tools.flags.table import OFF, ON

# The destination of a flag -> the option that the flag sets, if their names differ.
SETS = {"host_tensors": "override_tensor", "n_batch": "n_ubatch"}


class _Switch(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        if values is not None and values not in (*ON, *OFF):
            raise argparse.ArgumentError(self, f"{values!r}: expected on or off")
        namespace.fit = values not in OFF


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "fit to the devices' memory (docs/fit.md)")
    add("fit", "-fit", "--fit", action=_Switch, nargs="?", default=None, metavar="on|off",
        help="choose the longest context, and the cache types, slots, shares and placement that it needs, of "
        "the options that are not given, and print them as flags (default: off, but on with the next two "
        "flags)")  # fmt: skip
    add("fit_target", "-fitt", "--fit-target", metavar="MIB,...",
        help="memory of each device to leave free, one number or one per device (default: 1024)")  # fmt: skip
    add("fit_ctx", "-fitc", "--fit-ctx", type=int, metavar="N",
        help="the shortest context to choose (default: %(default)s)")  # fmt: skip


def settle_fit(args: argparse.Namespace, words: Iterable[str], known: Mapping[str, argparse.Action]) -> None:
    """Replace `args.fit` by the names of the options that `--fit` chooses. No flag in `words` sets these
    options."""
    actions = [known[flag] for word in words if (flag := word.partition("=")[0]) in known]
    given = {SETS.get(action.dest, action.dest) for action in actions}
    if args.fit is None:
        args.fit = bool(given & {"fit_target", "fit_ctx"})
    # An option that is set through SETS counts as given, whatever its value.
    values = {name: getattr(args, name, True) if name not in SETS.values() else True for name in given}
    args.fit = not_given(values) if args.fit else ()
