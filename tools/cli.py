"""The `vkbackend` command, with one parser and an exit code for each error.

Exit codes are 0 for success, 1 for a failed check, 2 for wrong usage or a typed error, 130 for an interrupt
and 141 for a closed stdout. The message of a typed error (vkbackend/errors.py) is the last line on stderr,
and DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence

import vkbackend
from vkbackend import env
from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.system import interrupts
from vkbackend.system.output import STREAM_ENCODING, enable_escapes, is_closed
from vkbackend.tools.parser import (
    TALKS,
    Parser,
    bind_values,
    conversation,
    unknown_arguments,
    unknown_command,
    with_sources,
)

COMMANDS = {  # name -> (module of this folder, description)
    "devices": ("devices", "List the Vulkan devices of this machine"),
    "models": ("architectures", "List the supported architectures"),
    "generate": ("generate", "Generate text with a GGUF model"),
    "chat": ("chat", "Chat with a GGUF model"),
    "embedding": ("embedding", "Print the embeddings of texts"),
    "serve": ("serve", "Serve a GGUF model over HTTP: OpenAI's, Anthropic's and llama-server's APIs"),
    "info": ("model_info", "Show metadata and tensors of a GGUF model"),
    "hosts": ("hosts", "Run a command over several hosts, or check their network"),
    "plan": ("plan", "Show how a model would be split over devices"),
    "bench": ("bench", "Measure tokens per second"),
    "sweep": ("sweep", "Measure tokens per second at growing context"),
    "perplexity": ("perplexity", "Measure how well a model predicts a text"),
    "verify": ("verify", "Check every op on every device"),
    "bench-serve": ("bench_serve", "Measure a server that speaks OpenAI's API"),
    "bench-reduce": ("bench_reduce", "Time all-reduces between devices"),
    "bench-ops": ("bench_ops", "Time the ops of one device"),
    "tune": ("tune", "Measure which ops suit the devices"),
    "gpu-report": ("gpu_report", "Check and measure GPUs, for a report in two files"),
    "split": ("split", "Write a GGUF model as several files"),
    "merge": ("merge", "Write a split GGUF model as one file"),
    "export": ("export", "Write a loaded model back to a GGUF file from its devices"),
    "completion": ("completion", "Print a script for the completion of a shell"),
}
NO_DEVICE = {
    "devices",
    "models",
    "info",
    "bench-serve",
    "hosts",
    "split",
    "merge",
    "completion",
}  # need no device
LLAMA_CPP = {
    "generate",
    "chat",
    "serve",
    "bench",
    "perplexity",
}  # commands that accept or refuse llama.cpp's flags
EPILOG = """\
examples:
  vkbackend devices
  vkbackend generate -p "Once upon a time" -n 64 -dev 0,0
  vkbackend generate -m model.gguf -f prompt.txt -n -1 -c 0 -dev 0,1 -ts 3,1
  vkbackend chat -m model.gguf -dev 0,1
  vkbackend embedding -m model.gguf -f texts.txt --embd-output-format json
  vkbackend serve -m model.gguf -dev 0,1 --port 8080
  vkbackend hosts run --hostfile hosts.txt -- serve -m model.gguf
  vkbackend info model.gguf
  vkbackend plan -m model.gguf -dev 0,1
  vkbackend bench -m model.gguf -dev 0,1 -p 512 -n 128
  vkbackend sweep -m model.gguf -c 8192 --plot rates.svg
  vkbackend perplexity -m model.gguf -f text.txt
  vkbackend verify
  vkbackend bench-serve --url http://127.0.0.1:8080/v1 -np 1,4,16
  vkbackend bench-reduce -dev 0,1 --sizes 4K,1M
  vkbackend bench-ops -dev 0 --case "Mat.*q4_0"
  vkbackend tune -dev 0
  vkbackend gpu-report --minutes 10 -o gpu-report
  vkbackend split model.gguf parts/model --split-max-size 2G
  vkbackend merge parts/model-00001-of-00003.gguf model.gguf
  vkbackend export -m model.gguf -o copy.gguf -dev 0,1
  vkbackend completion bash > ~/.local/share/bash-completion/completions/vkbackend

docs/env_vars.md describes the environment variables. DEBUG=1 shows devices, plan and tracebacks.
"""


def build_parser(
    chosen: str, words: Sequence[str] = ()
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of all commands, and the parser for `chosen`. Only the second parser has flags.
    Refused and ineffective flags of llama.cpp are added only if they are in `words`."""
    parser = Parser(
        prog="vkbackend",
        description="Runs GGUF language models on one or several Vulkan devices of any vendors at once.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vkbackend {vkbackend.__version__}")
    chosen_parser = parser
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module_name, description) in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=description)
            continue
        module = importlib.import_module(f"vkbackend.tools.{module_name}")
        details = (module.__doc__ or "").partition("\n\n")[2].strip()
        command = commands.add_parser(
            name, help=description, description=f"{description}. {details}", allow_abbrev=False
        )
        module.add_arguments(command)
        if name in LLAMA_CPP:
            from vkbackend.tools.flags.table_actions import add_table_arguments, summary

            add_table_arguments(command, name, words)
            if {"-h", "--help", "--usage"} & set(words):
                command.epilog = summary(name)
        if name not in NO_DEVICE:
            from vkbackend.open_device import RUNTIMES

            command.add_argument("--runtime", metavar="NAME",
                help=f"the runtime: {', '.join(RUNTIMES)} (default: VKBACKEND_RUNTIME, else "
                "native)")  # fmt: skip
        command.set_defaults(run=module.run)
        chosen_parser = command
    return parser, chosen_parser


def parse(words: Sequence[str], *, raises: bool = False) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the arguments, and a map from an argument's name to its flag. Exit on an unknown flag, or raise
    InvalidArgument. Flags may not be abbreviated or joined to values, because argparse would read -t as -ts,
    -fa as -f a and -hf as -h."""
    chosen = words[0] if words else ""
    notes: list[str] = []
    if chosen in LLAMA_CPP:
        from vkbackend.tools.flags.environment import words_of_environment

        given, notes = words_of_environment(chosen, words[1:])
        words = [chosen, *given, *words[1:]]
    parser, command = build_parser(chosen, words)
    if chosen and not chosen.startswith("-") and chosen not in COMMANDS:
        parser.error(unknown_command(chosen, COMMANDS))
    if isinstance(command, Parser) and isinstance(parser, Parser):
        command.sources, command.raises, parser.raises = notes, raises, raises
    known = command._option_string_actions
    after_dashes: Sequence[str] = []  # the words of `hosts run`'s command
    if command.get_default("words") is not None and "--" in words:
        words, after_dashes = words[: words.index("--")], words[words.index("--") + 1 :]
    unknown = [word for word in words if re.fullmatch("-[A-Za-z][A-Za-z-]*", word) and word not in known]
    args, others = parser.parse_known_args([word for word in words if word not in unknown])
    _check_known(args, [*unknown, *others], chosen, command)
    if getattr(args, "list_devices", False):
        from vkbackend.tools.console import console
        from vkbackend.tools.flags.present import present, show_devices

        show_devices(present(), console())
        sys.exit(0)
    args.line = words[1:]
    if hasattr(args, "fit"):
        from vkbackend.tools.flags.fit import settle_fit

        settle_fit(args, words, known)
    if after_dashes:
        args.words = list(after_dashes)
    if notes:
        from vkbackend.tools.flags.notes import note_first

        note_first(args, notes)
    flags = {action.dest: flag for flag, action in reversed(known.items()) if flag.startswith("--")}
    return args, {"path": "--model"} | flags


def parse_line(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Resolve llama.cpp's spellings of flags, then call `parse`. If flags of `bench` have lists, the command
    line expands to several lines. `sweep` contains each line's arguments, and each line's `swept` contains
    its values from lists."""
    if list(argv[:1]) != ["bench"]:
        return parse(conversation(bind_values(argv)))
    from vkbackend.tools.flags.notes import note_first
    from vkbackend.tools.flags.sweeps import lines_of, notes_of

    parsed = [(parse(bind_values(line)), swept) for line, swept in lines_of(argv)]
    (first, flags), _ = parsed[0]
    for (args, _), swept in parsed:
        args.swept = swept
        if args is not first:
            args.notes, args.noted = [], {}  # print the notes only once
    note_first(first, notes_of(argv))
    first.sweep = [args for (args, _), _ in parsed]
    return first, flags


def _check_known(
    args: argparse.Namespace, unknown: Sequence[str], chosen: str, command: argparse.ArgumentParser
) -> None:
    sentences: list[str] = []
    if unknown:
        others = [build_parser(name)[1] for name in TALKS if chosen in TALKS and name != chosen]
        sentences = unknown_arguments(unknown, command, others[0] if others else None)
    if hasattr(args, "refused"):
        from vkbackend.tools.flags.table_actions import refusals

        sentences += refusals(args)
    if sentences:
        command.error("; ".join(sentences))


def shows_tracebacks() -> bool:
    try:
        return env.debug() > 0
    except VkbackendError:  # DEBUG itself is invalid
        return False


def message_of(error: VkbackendError, flags: Mapping[str, str]) -> str:
    """Return the error's message. If the message begins with a parameter's name, the flag replaces the
    name."""
    from vkbackend.tools.console import printable

    text, name = str(error), error.argument if isinstance(error, InvalidArgument) else ""
    if name in flags and text.startswith(name):
        text = flags[name] + text.removeprefix(name)
    return printable(text)


def main(argv: Sequence[str] | None = None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # the terminal's encoding may lack a character
            stream.reconfigure(encoding=STREAM_ENCODING, errors="backslashreplace")
    if STREAM_ENCODING and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding=STREAM_ENCODING)
    enable_escapes()
    interrupts.catch_break()
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions
        complete()
    args, flags = argparse.Namespace(), dict[str, str]()
    try:
        args, flags = parse_line(sys.argv[1:] if argv is None else argv)
        for variable in (env.debug, env.timeout_s, env.disabled, env.faults):
            variable()  # reject a bad value early
        if hasattr(args, "runtime"):
            from vkbackend.open_device import runtime_of

            runtime = runtime_of(args.runtime)
            if args.runtime:
                os.environ[env.RUNTIME] = runtime  # Devices that are opened later read this variable.
        code = args.run(args)
        sys.stdout.flush()
        return code or 0
    except VkbackendError as error:
        if shows_tracebacks():
            traceback.print_exc()
        message = with_sources(message_of(error, flags), getattr(args, "notes", ()))
        sys.stderr.write(f"error: {message}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 130
    # Commands raise typed errors for their files, so this error comes from stdout (a full disk).
    except OSError as error:
        mute_stdout()
        if is_closed(error):
            return 141
        sys.stderr.write(f"error: the output cannot be written: {error}; free space or write elsewhere\n")
        return 2


def complete() -> None:
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(build_parser(words[1] if len(words) > 1 else "")[0])


def mute_stdout() -> None:
    """Redirect stdout to /dev/null, because Python flushes stdout again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
