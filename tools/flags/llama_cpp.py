"""llama.cpp's flags that several commands share, for texts, batches, models of the Hugging Face Hub and
logs."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

import vkbackend
from vkbackend.errors import InvalidArgument
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hub import fetch
from vkbackend.models.options import DEFAULT_ROWS
from vkbackend.tools.flags.log_file import log_to
from vkbackend.tools.flags.notes import note
from vkbackend.tools.flags.placement import host_patterns
from vkbackend.tools.flags.speculation import settle_draft
from vkbackend.tools.flags.vision import settle_projector

LOAD_MODES = {"auto": True, "none": False, "mmap": True, "mlock": True, "mmap+mlock": True, "dio": False}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


class _LoadMode(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        if values not in LOAD_MODES:
            raise argparse.ArgumentError(self, f"{values!r}: expected one of {', '.join(LOAD_MODES)}")
        namespace.use_mmap = LOAD_MODES[values]
        if values not in ("auto", "none", "mmap"):
            note(namespace, f"{flag} {values}: weights are {'mapped' if namespace.use_mmap else 'copied'}")


class _Verbosity(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        if not isinstance(values, int) or values > 9:
            namespace.is_verbose = True  # the server adds `__verbose` to answers
        if not isinstance(values, int) or values >= 4:
            os.environ.setdefault("DEBUG", "1")
            note(namespace, f"{flag} is DEBUG=1: devices, plan and tracebacks are shown", of="verbosity")
        else:
            note(namespace, f"{flag} {values} has no effect: 4 and above are DEBUG=1", of="verbosity")


class _Set(argparse.Action):
    """Store the flag's value in an environment variable, which a library reads."""

    def __init__(self, *args: Any, variable: str, **how: Any) -> None:
        super().__init__(*args, **how)
        self._variable = variable

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        os.environ[self._variable] = values or "1"


def add_llama_cpp_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_common_arguments(parser)
    add("-r", "--reverse-prompt", dest="stop", action="append", default=[], metavar="TEXT",
        help="stop before TEXT; may be given several times")  # fmt: skip
    add("-e", "--escape", action="store_true", default=True,
        help=r"read \n, \t, \r, \", \', \\ and \xHH in texts on the command line (the default)")  # fmt: skip
    add("--no-escape", dest="escape", action="store_false", help="take texts on the command line as they are")


def add_common_arguments(parser: argparse.ArgumentParser) -> Any:
    """Add the flags, and return the group's `add_argument`."""
    add = parser.add_argument_group("llama.cpp's flags (docs/llama-cpp.md lists all)").add_argument
    add("-b", "--batch-size", dest="n_batch", type=int, metavar="N",
        help="tokens of a prompt in one batch; a value below -ub lowers -ub (default: -ub)")  # fmt: skip
    modes = ", ".join(LOAD_MODES)
    add("-lm", "--load-mode", action=_LoadMode, metavar="MODE", dest="load_mode",
        help=f"how weights are read: {modes}; none, dio: as --no-mmap (default: auto)")  # fmt: skip
    add("-hf", "-hfr", "--hf-repo", dest="hf_repo", metavar="USER/REPO[:TAG]",
        help="a model of the Hugging Face Hub, for example user/repo:Q4_K_M (default: -m)")  # fmt: skip
    add("-hff", "--hf-file", dest="hf_file", metavar="FILE",
        help="the file of the -hf repository (default: the one of the tag)")  # fmt: skip
    add("-hft", "--hf-token", action=_Set, variable="HF_TOKEN", dest=argparse.SUPPRESS, metavar="TOKEN",
        help="the token for -hf; other users of this machine can see it, so prefer HF_TOKEN")  # fmt: skip
    add("--offline", action=_Set, variable="HF_HUB_OFFLINE", nargs=0, dest=argparse.SUPPRESS,
        help="take -hf's model from the cache; ask no network")  # fmt: skip
    add("--log-file", metavar="FILE", help="append what goes to stderr to this file too")
    add("-v", "--verbose", "--log-verbose", action=_Verbosity, nargs=0, dest=argparse.SUPPRESS,
        help="show devices, plan and tracebacks, as DEBUG=1")  # fmt: skip
    add("-lv", "--verbosity", "--log-verbosity", action=_Verbosity, type=int, metavar="N",
        dest=argparse.SUPPRESS, help="4 and above: as -v")  # fmt: skip
    add("--list-devices", action="store_true", help="show the devices and end")
    add("--usage", action="help", help=argparse.SUPPRESS)
    add("--version", action="version", version=f"vkbackend {vkbackend.__version__}", help=argparse.SUPPRESS)
    return add


def settle(args: argparse.Namespace, path: str = "") -> None:
    """Set options from llama.cpp's flags. `path` is the model if -m is missing. Raises InvalidArgument."""
    settle_common(args)
    if args.hf_repo is not None:
        args.model = fetch(args.hf_repo, args.hf_file)
        settle_projector(args)
    settle_draft(args)
    if args.host_tensors:
        with GGUF.open(args.model or path) as gguf:
            args.override_tensor = host_patterns(args, gguf.tensors)
    if getattr(args, "max_tokens", None) == -2:
        args.max_tokens, args.context_shift = -1, False  # -2: until the context is full
    if args.top_k < 0:
        args.top_k = 0  # in llama.cpp, negative numbers and 0 mean all tokens
    if args.temperature < 0:
        note(args, f"--temp {args.temperature:g} is 0: the likeliest token")
        args.temperature = 0.0
    if args.escape:
        args.stop = [unescaped(text) for text in args.stop]
        for name in ("prompt", "system_prompt"):
            if getattr(args, name, None) is not None:
                setattr(args, name, unescaped(getattr(args, name)))


def settle_common(args: argparse.Namespace) -> None:
    """Open the log file, limit `n_ubatch`, and check -hf."""
    if args.log_file is not None:
        log_to(args.log_file)
    if args.n_batch is not None:
        if args.n_batch < 1:
            raise InvalidArgument(f"--batch-size={args.n_batch}: expected a whole number of 1 or more")
        args.n_ubatch = min(args.n_ubatch or DEFAULT_ROWS, args.n_batch)
    if args.hf_repo is not None and args.model:
        raise InvalidArgument("-m and -hf name a model each; give one")
    if args.hf_file is not None and args.hf_repo is None:
        raise InvalidArgument("--hf-file names a file of the repository of -hf; give -hf USER/REPO too")


def unescaped(text: str) -> str:
    """Replace the escapes that llama.cpp knows. Consecutive \\xHH bytes may form one character."""

    def read(match: re.Match[str]) -> str:
        if match[1]:
            return bytes.fromhex(match[1].replace("\\x", "")).decode("utf-8", "replace")
        return _ESCAPES.get(match[2], match[0])

    return re.sub(r"((?:\\x[0-9a-fA-F]{2})+)|\\(.)", read, text, flags=re.DOTALL)
