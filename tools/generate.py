"""`vkbackend generate`: continue a prompt.

The text streams to stdout; devices, loading, memory and timings go to stderr. Without -m the small demo model
that comes with the package is used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.arguments import HOST, device_list, whole_number
from vkbackend.models.llm import LLM
from vkbackend.models.sampling import MAX_SEED, SamplingParams
from vkbackend.tools.console import MIB, byte_progress, console, printable, table, tell_notes, write_json
from vkbackend.tools.control_vectors import add_control_arguments, control_of
from vkbackend.tools.device_flags import add_device_arguments, parse_split
from vkbackend.tools.devices import device_table, present
from vkbackend.tools.placement import add_placement_arguments, placement_of

if TYPE_CHECKING:
    from vkbackend.capabilities import DeviceInfo

MEMORY_PARTS = ("weights", "mapped", "kv", "scratch", "host", "shared", "staging", "free_before", "free")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", "--model", metavar="FILE", help="the model, a .gguf file (default: the embedded demo model)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "-p", "--prompt", metavar="TEXT", help="the text to continue (default: start from nothing)"
    )
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a UTF-8 file, - for stdin")
    add(
        "-n",
        "--n-predict",
        type=int,
        default=-1,
        metavar="N",
        help="tokens to generate at most; -1: until the model ends or the context is full (default: -1)",
    )
    add("-c", "--ctx-size", type=int, default=512, metavar="N",
        help="context size in tokens; 0: the model's own (default: 512)")  # fmt: skip
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-text token")
    add("--json", action="store_true",
        help="print one JSON object instead of the text: text, tokens, prompt_tokens, finish_reason, seed, "
        "devices, memory (bytes), timings (ms, tokens/s, us per reduce)")  # fmt: skip

    sampling = parser.add_argument_group("sampling, in the order applied").add_argument
    sampling(
        "--repeat-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divide the logits of recent tokens by X; 1: off (default: 1.0)",
    )
    sampling(
        "--repeat-last-n",
        type=int,
        default=64,
        metavar="N",
        help="how many recent tokens are penalized, prompt included (default: 64)",
    )
    sampling(
        "--top-k", type=int, default=40, metavar="N", help="keep the N likeliest tokens; 0: all (default: 40)"
    )
    sampling(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="keep the likeliest tokens that reach the probability P; 1: all (default: 0.95)",
    )
    sampling(
        "--min-p",
        type=float,
        default=0.05,
        metavar="P",
        help="drop tokens below P times the best probability; 0: none (default: 0.05)",
    )
    sampling(
        "--temp",
        type=float,
        default=0.8,
        metavar="T",
        help="temperature; 0: always the likeliest token (default: 0.8)",
    )
    sampling("-s", "--seed", type=int, default=-1, metavar="N",
             help="seed of the random numbers; -1: a random one, shown at the end (default: -1)")  # fmt: skip

    add_device_arguments(parser)
    add_placement_arguments(parser)
    add_control_arguments(parser)


def demo_model() -> str:
    """The path of the embedded demo model."""
    return str(files("vkbackend.models") / "demo" / "demo.gguf")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt of -p or -f; one newline at the end of a file is dropped."""
    if args.file is None:
        return args.prompt or ""
    try:
        data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
        return data.decode().removesuffix("\n")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the prompt file {args.file!r} cannot be read: {error}; give a UTF-8 text"
        ) from None


def chosen_devices(
    words: Sequence[str] | None, split: Sequence[float] | str | None
) -> list[DeviceInfo | None]:
    """The device behind each word, None for the host itself; those with a share of 0 are left out."""
    if words is None:
        return [present()[0]]
    if isinstance(split, list) and len(split) == len(words):
        words = [word for word, share in zip(words, split, strict=True) if share]
    if all(word == HOST for word in words):  # needs no Vulkan loader
        return [None] * len(words)
    from vkbackend.instance import select

    infos = present()
    return [None if word == HOST else select(word, infos) for word in words]


def open_model(args: argparse.Namespace, words: Sequence[str] | None, split: list[float] | str | None,
               err: Console) -> LLM:  # fmt: skip
    """Load the model under a progress bar."""
    path = args.model
    if path is None:
        path = demo_model()
        err.print("no model given (-m): using the embedded demo model", style="yellow")
    with byte_progress(err, "loading", keep=True, then="compiling shaders") as progress:
        return LLM(
            path,
            devices=words,
            tensor_split=split,
            n_ctx=args.ctx_size,
            n_ubatch=args.ubatch_size,
            n_snapshots=args.snapshots,
            type_k=args.cache_type_k,
            type_v=args.cache_type_v,
            progress=progress,
            **placement_of(args),
            **control_of(args),
        )


def show_memory(llm: LLM, err: Console) -> None:
    rows = [
        (str(m["device"]), *("-" if m[part] is None else m[part] / MIB for part in MEMORY_PARTS))
        for m in llm.memory()
    ]
    columns = "weights", "mapped", "KV cache", "scratch", "host", "shared", "staging", "free before", "free"
    err.print(table("memory in MiB", ("device", *columns), rows))


def show_timings(timings: dict[str, float], seed: int | None, err: Console) -> None:
    t = timings
    for part in ("prompt", "decode"):
        rate = t[f"{part}_tokens_per_second"]
        err.print(f"{part} {t[f'{part}_n']:6d} tokens {t[f'{part}_ms']:10.1f} ms {rate:10.1f} tokens/s")
    err.print(f"reduce {t['n_reduces']:6d} times  {t['reduce_us']:10.1f} us each")
    err.print(f"seed   {seed}")


def describe(info: DeviceInfo | None) -> dict[str, Any]:
    """A device in the JSON result."""
    if info is None:
        return {"name": HOST, "type": "host"}
    return {
        key: getattr(info, key)
        for key in ("index", "name", "uuid", "vendor", "driver", "driver_version", "type")
    }


def run(args: argparse.Namespace) -> None:
    err = console(stderr=True)
    prompt, words, split = read_prompt(args), device_list(args.device), parse_split(args.tensor_split)
    whole_number("--seed", args.seed, -1, MAX_SEED, " (-1: a random one)")
    sampling = SamplingParams(
        args.temp, args.top_k, args.top_p, args.min_p, args.repeat_penalty, args.repeat_last_n,
        None if args.seed == -1 else args.seed,
    )  # fmt: skip
    n_predict = whole_number("--n-predict", args.n_predict, -1, 1 << 31, " (-1: no limit)")
    infos = chosen_devices(words, split)
    if vulkan := [info for info in infos if info is not None]:
        err.print(device_table(vulkan, "devices"))
    with open_model(args, words, split, err) as llm:
        tell_notes([*llm.prediction, *llm.notes], err)
        show_memory(llm, err)
        ids = llm.tokenize(prompt)
        chunks = []
        most = None if n_predict == -1 else n_predict
        try:
            for chunk in llm.stream(ids, most, ignore_eos=args.ignore_eos, **asdict(sampling)):
                chunks.append(chunk)
                if not args.json:
                    write_text(chunk.text)
        except VkbackendError:
            if chunks and not args.json:
                write_text("\n")  # the error is told in a line of its own
            raise
        timings, memory = chunks[-1].timings or {}, llm.memory()
        n_tokens = sum(chunk.token is not None for chunk in chunks)
        full = chunks[-1].finish_reason == "length" and n_tokens != most
        notes = [f"ended  because the context of {llm.n_ctx} tokens is full (-c)"] if full else []
    if args.json:
        result = {
            "text": "".join(chunk.text for chunk in chunks),
            "tokens": [chunk.token for chunk in chunks if chunk.token is not None],
            "prompt_tokens": ids, "finish_reason": chunks[-1].finish_reason, "seed": sampling.seed,
            "devices": [describe(info) for info in infos], "memory": memory, "timings": timings,
        }  # fmt: skip
        write_json(result)
    else:
        write_text("\n")
    show_timings(timings, sampling.seed, err)
    tell_notes(notes, err)


def write_text(text: str) -> None:
    """Text as it comes; on a terminal, control characters that a model might make up are shown as escapes."""
    sys.stdout.write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["generate", *sys.argv[1:]]))
