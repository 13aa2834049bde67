"""Flags of `generate`, `chat` and `serve`, and functions that open the model and describe it on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files

from rich.console import Console

from vkbackend.device_info import DeviceInfo
from vkbackend.models.arguments import HOST
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.llm import LLM
from vkbackend.models.options import Options
from vkbackend.tools.console import MIB, byte_progress, printable, table, tell_notes
from vkbackend.tools.flags.adapters import add_adapter_arguments
from vkbackend.tools.flags.control_vectors import add_control_arguments
from vkbackend.tools.flags.devices import add_device_arguments
from vkbackend.tools.flags.experiments import add_experiment_arguments
from vkbackend.tools.flags.llama_cpp import add_llama_cpp_arguments
from vkbackend.tools.flags.notes import note
from vkbackend.tools.flags.options import adder, fields_given, options_of
from vkbackend.tools.flags.placement import add_placement_arguments
from vkbackend.tools.flags.present import present, show_devices
from vkbackend.tools.flags.rope import add_rope_arguments
from vkbackend.tools.flags.sampling import add_sampling_arguments
from vkbackend.tools.flags.speculation import add_speculation_arguments
from vkbackend.tools.flags.structure import add_structure_arguments
from vkbackend.tools.flags.vision import add_vision_arguments

NO_MODEL = "no model given (-m): using the embedded demo model"
VISION_DEMO = "no model given (-m): using the embedded vision demo, which describes one or two colored shapes"
MEMORY_PARTS = ("weights", "mapped", "kv", "scratch", "host", "shared", "staging", "free_before", "free")


def add_length_arguments(
    parser: argparse.ArgumentParser, *, n_ctx: int, ends: str, capped: bool = False
) -> None:
    """Add -n, -c and --ignore-eos. `n_ctx` is the default of -c. `ends` describes in the help what ends a
    text.

    If `capped` is set, -c defaults to None, and the command uses the model's context, but at most `n_ctx`.
    """
    add = parser.add_argument
    most = (
        f"tokens to generate at most; -1: until {ends} or the context is full; -2: the same, without "
        "--context-shift (default: -1)"
    )
    add("-n", "--n-predict", "--predict", dest="max_tokens", type=int, default=-1, metavar="N", help=most)
    default = f"the model's own, at most {n_ctx}" if capped else n_ctx
    add("-c", "--ctx-size", dest="n_ctx", type=int, default=None if capped else n_ctx, metavar="N",
        help=f"context size in tokens; 0: the model's own (default: {default})")  # fmt: skip
    add("--ignore-eos", action="store_true", help="forbid the model's end-of-text tokens")


def add_context_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "full context")
    add("context_shift", "--context-shift", action="store_true",
        help="when the context is full, discard the older half of the tokens after --keep, and "
        "continue")  # fmt: skip
    add("context_shift", "--no-context-shift", action="store_false",
        help="end the text when the context is full (the default)")  # fmt: skip
    add("n_keep", "--keep", type=int, metavar="N",
        help="tokens of the prompt that --context-shift keeps, besides BOS; -1: all "
        "(default: %(default)s)")  # fmt: skip


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    add_context_arguments(parser)
    add_sampling_arguments(parser)
    add_structure_arguments(parser)
    add_device_arguments(parser)
    add_placement_arguments(parser)
    add_rope_arguments(parser)
    add_control_arguments(parser)
    add_adapter_arguments(parser)
    add_vision_arguments(parser)
    add_speculation_arguments(parser)
    add_llama_cpp_arguments(parser)
    add_experiment_arguments(parser)


def demo_model() -> str:
    return str(files("vkbackend.models") / "demo" / "demo.gguf")


def vision_demo() -> tuple[str, str]:
    folder = files("vkbackend.models") / "demo"
    return str(folder / "demo-vision.gguf"), str(folder / "mmproj-demo-vision.gguf")


def take_vision_demo(args: argparse.Namespace) -> None:
    if args.image and args.model is None and args.hf_repo is None and args.mmproj is None:
        args.model, args.mmproj = vision_demo()
        note(args, VISION_DEMO)


def own_context(path: str) -> int:
    with GGUF.open(path) as gguf:
        return int(gguf.u32(f"{gguf.architecture}.context_length"))


def chosen_devices(options: Options) -> list[DeviceInfo | None]:
    """Return the device of each word of -dev, or None for the host. Leave out devices with a share of 0."""
    words = options.devices
    if words is None:
        return [present()[0]]
    if options.shares:
        words = tuple(word for word, share in zip(words, options.shares, strict=True) if share)
    if all(word == HOST for word in words):  # no Vulkan loader needed
        return [None] * len(words)
    from vkbackend.vulkan.instance import select

    infos = present()
    return [None if word == HOST else select(word, infos) for word in words]


def open_model(args: argparse.Namespace, err: Console) -> tuple[LLM, list[DeviceInfo | None]]:
    """Print notes about the file to stderr."""
    path = demo_model() if args.model is None else args.model
    infos = chosen_devices(options_of(args, path))
    with byte_progress(err, "loading", keep=True, then="compiling shaders") as progress:
        llm = LLM(path, progress=progress, **fields_given(args, Options))
    tell_notes([*llm.prediction, *llm.notes], err)
    return llm, infos


def show_model(llm: LLM, infos: Sequence[DeviceInfo | None], args: argparse.Namespace, err: Console) -> None:
    if vulkan := [info for info in infos if info is not None]:
        show_devices(vulkan, err, "devices")
    if args.model is None:
        err.print(NO_MODEL)
    tell_notes(getattr(args, "notes", ()), err)
    show_memory(llm, err)


def show_memory(llm: LLM, err: Console) -> None:
    memory = llm.memory()
    parts = {part: part.replace("_", " ") for part in MEMORY_PARTS} | {"kv": "KV cache"}
    if any(m["adapters"] for m in memory):
        parts |= {"adapters": "of these adapters"}
    if any(m["stream"] for m in memory):
        parts |= {"stream": "for weights in the file"}
    rows = [
        (str(m["device"]), *("-" if m[part] is None else m[part] / MIB for part in parts)) for m in memory
    ]
    err.print(table("memory in MiB", ("device", *parts.values()), rows))


def show_timings(timings: dict[str, float], seed: int | None, err: Console) -> None:
    t = timings
    for part in ("prompt", "decode"):
        rate = t[f"{part}_tokens_per_second"]
        err.print(f"{part} {t[f'{part}_n']:6d} tokens {t[f'{part}_ms']:10.1f} ms {rate:10.1f} tokens/s")
    if n := t.get("image_n"):
        parts = ", ".join(
            f"{part} {t[f'image_{part}_ms']:.1f}" for part in ("decode", "preprocess", "encode")
        )
        err.print(f"images {n:6.0f}        {t['image_ms']:10.1f} ms ({parts})")
    if n := t.get("draft_n"):
        right = t["draft_n_accepted"]
        err.print(f"draft  {n:6d} tokens {right:10d} accepted ({100 * right / n:.0f} %)")
    if t["n_reduces"]:
        err.print(f"reduce {t['n_reduces']:6d} times  {t['reduce_us']:10.1f} us each")
    err.print(f"seed   {seed}")


def write_text(text: str) -> None:
    """Write text to stdout and flush. On a terminal, escape control characters."""
    sys.stdout.write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()
