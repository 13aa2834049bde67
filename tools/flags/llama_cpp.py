"""llama.cpp's flags: aliases of ours, and flags without effect, which are accepted with a note."""

from __future__ import annotations

import argparse
import re
from typing import Any

from vkbackend.errors import InvalidArgument
from vkbackend.models.hub import fetch
from vkbackend.tools.console import console

_HOST = "the devices compute, the host only hands them their work"
# Flags, placeholder of the value (None: no value, "[X]": optional), why they do nothing.
WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], str | None, str], ...] = (
    (("-t", "--threads"), "N", _HOST),
    (("-tb", "--threads-batch"), "N", _HOST),
    (("--prio",), "N", _HOST),
    (("--poll",), "N", _HOST),
    (("--numa",), "TYPE", _HOST),
    (("-fa", "--flash-attn"), "[on|off|auto]", "attention is always computed in one pass"),
    (("--mlock",), None, "weights are in device memory or pinned host memory"),
    (("--jinja",), None, "chat templates are always rendered with jinja"),
    (("--no-warmup",), None, "nothing is computed before the prompt"),
    (("--no-display-prompt",), None, "the prompt is never shown"),
    (("--simple-io",), None, "text is written as it comes"),
    (("-co", "--color"), "[on|off|auto]", "text has no colours"),
    (("-cb", "--cont-batching"), None, "requests are always computed together"),
)
LOAD_MODES = {"auto": True, "none": False, "mmap": True, "mlock": True, "mmap+mlock": True, "dio": False}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


class _WithoutEffect(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        note(namespace, f"{flag} has no effect: {self.why}")

    why = ""


class _LoadMode(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        if values not in LOAD_MODES:
            raise argparse.ArgumentError(self, f"{values!r}: expected one of {', '.join(LOAD_MODES)}")
        namespace.use_mmap = LOAD_MODES[values]
        if values not in ("auto", "none", "mmap"):
            note(namespace, f"{flag} {values}: weights are {'mapped' if namespace.use_mmap else 'copied'}")


class _ListDevices(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        from vkbackend.tools.flags.present import present, show_devices

        show_devices(present(), console())
        parser.exit()


def note(namespace: argparse.Namespace, line: str) -> None:
    """Queue a line for stderr, printed after the arguments are checked."""
    namespace.notes = [*getattr(namespace, "notes", ()), line]


def add_llama_cpp_arguments(parser: argparse.ArgumentParser) -> None:
    """-b, -lm, -r, -e, -hf, --list-devices and the flags without effect."""
    add = parser.add_argument_group("llama.cpp's flags").add_argument
    add("-r", "--reverse-prompt", dest="stop", action="append", default=[], metavar="TEXT",
        help="stop before TEXT; may be given several times")  # fmt: skip
    add("-e", "--escape", action="store_true", default=True,
        help=r"read \n, \t, \r, \", \', \\ and \xHH in texts on the command line (the default)")  # fmt: skip
    add("--no-escape", dest="escape", action="store_false", help="take texts on the command line as they are")
    add("-b", "--batch-size", dest="n_batch", type=int, metavar="N",
        help="tokens of a prompt in one batch; a value below -ub lowers -ub (default: -ub)")  # fmt: skip
    modes = ", ".join(LOAD_MODES)
    add("-lm", "--load-mode", action=_LoadMode, metavar="MODE", dest="load_mode",
        help=f"how weights are read: {modes}; none, dio: as --no-mmap (default: auto)")  # fmt: skip
    add("-hf", "-hfr", "--hf-repo", dest="hf_repo", metavar="USER/REPO[:TAG]",
        help="a model of the Hugging Face Hub, for example user/repo:Q4_K_M (default: -m)")  # fmt: skip
    add(
        "-hff",
        "--hf-file",
        dest="hf_file",
        metavar="FILE",
        help="the file of the -hf repository (default: the one of the tag)",
    )
    add("--list-devices", action=_ListDevices, nargs=0, help="show the devices and end")
    for flags, value, why in WITHOUT_EFFECT:
        count = {"nargs": 0} if value is None else {"nargs": "?"} if value[0] == "[" else {}
        action = add(*flags, action=_WithoutEffect, metavar=value and value.strip("[]"),
                     dest=argparse.SUPPRESS, help=argparse.SUPPRESS, **count)  # fmt: skip
        assert isinstance(action, _WithoutEffect)
        action.why = why


def settle(args: argparse.Namespace) -> None:
    """Apply these flags to the options they stand for. Raises InvalidArgument."""
    if args.n_batch is not None:
        if args.n_batch < 1:
            raise InvalidArgument(f"--batch-size={args.n_batch}: expected a whole number of 1 or more")
        args.n_ubatch = min(args.n_ubatch, args.n_batch)
    if args.hf_repo is not None:
        if args.model is not None:
            raise InvalidArgument("-m and -hf name a model each; give one")
        args.model = fetch(args.hf_repo, args.hf_file)
    if args.escape:
        args.stop = [unescaped(text) for text in args.stop]
        for name in ("prompt", "system_prompt"):
            if getattr(args, name, None) is not None:
                setattr(args, name, unescaped(getattr(args, name)))


def unescaped(text: str) -> str:
    """Replace llama.cpp's escapes; leave others alone. Consecutive \\xHH bytes may form one character."""

    def read(match: re.Match[str]) -> str:
        if match[1]:
            return bytes.fromhex(match[1].replace("\\x", "")).decode("utf-8", "replace")
        return _ESCAPES.get(match[2], match[0])

    return re.sub(r"((?:\\x[0-9a-fA-F]{2})+)|\\(.)", read, text, flags=re.DOTALL)
