"""`vkbackend generate`: continue a prompt.

The text streams to stdout, and all other output to stderr. The default model is the embedded demo model.
Without -p and -f the prompt comes from a pipe.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from typing import Any

from vkbackend.device_info import DeviceInfo
from vkbackend.errors import VkbackendError
from vkbackend.models.arguments import HOST, token_limit
from vkbackend.models.engine.completion import Chunk
from vkbackend.models.generation_maker import Prompt
from vkbackend.models.llm import LLM
from vkbackend.tools.console import console, tell_notes, write_json
from vkbackend.tools.flags.llama_cpp import settle
from vkbackend.tools.flags.prompt import add_prompt_arguments, read_prompt
from vkbackend.tools.flags.sampling import sampling_of
from vkbackend.tools.flags.structure import structure_given
from vkbackend.tools.flags.text import (
    add_length_arguments,
    add_shared_arguments,
    demo_model,
    open_model,
    show_model,
    show_timings,
    take_vision_demo,
    write_text,
)
from vkbackend.tools.flags.vision import add_image_argument, image_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", "--model", metavar="FILE", help="the model, a .gguf file (default: the embedded demo model)")
    add_prompt_arguments(parser, "the text to continue (default: piped text, or nothing)")
    add_image_argument(parser, "an image that replaces <__media__> in the prompt, or precedes the prompt")
    add("--no-parse-special", dest="parse_special", action="store_false",
        help="treat special tokens in the prompt, for example <|im_start|>, as plain text")  # fmt: skip
    add("--display-prompt", action="store_true", help="write the prompt before the text")
    add("--prompt-cache", metavar="FILE",
        help="reuse FILE's state of the prompt, and save the prompt's state there")  # fmt: skip
    add("--prompt-cache-ro", action="store_true", help="do not write to the --prompt-cache file")
    add_length_arguments(parser, n_ctx=512, ends="the model ends")
    add("--json", action="store_true",
        help="print one JSON object instead of the text: text, tokens, logprobs, prompt_tokens, "
        "finish_reason, seed, devices, memory (bytes), timings (ms, tokens/s, us per reduce)")  # fmt: skip
    add_shared_arguments(parser)


def describe(info: DeviceInfo | None) -> dict[str, Any]:
    if info is None:
        return {"name": HOST, "type": "host"}
    return {
        key: getattr(info, key)
        for key in ("index", "name", "uuid", "vendor", "driver", "driver_version", "type")
    }


def prompt_of(llm: LLM, text: str, args: argparse.Namespace) -> Prompt:
    images = image_files(args)
    if not images:
        return llm.tokenize(text, parse_special=args.parse_special)
    return {"prompt_string": text, "multimodal_data": images}


def run(args: argparse.Namespace) -> None:
    err = console(stderr=True)
    take_vision_demo(args)
    settle(args, demo_model())
    sampling, most = sampling_of(args), token_limit("max_tokens", args.max_tokens)
    prompt, cache = read_prompt(args), args.prompt_cache
    llm, infos = open_model(args, err)
    with llm:
        given = prompt_of(llm, prompt, args)
        if cache is not None and os.path.exists(cache):
            llm.load_state(cache)
        options = asdict(sampling) | {"ignore_eos": args.ignore_eos, "stop": args.stop}
        options |= structure_given(args)
        options |= {"slot": None if cache is None else 0, "parse_special": args.parse_special}
        generation = llm.generation(given, most, **options)
        stream = llm.stream_of(generation)
        show_model(llm, infos, args, err)
        if args.display_prompt and not args.json:
            write_text(prompt)
        chunks: list[Chunk] = []
        try:
            for chunk in stream:
                if cache is not None and not chunks and not args.prompt_cache_ro:
                    llm.save_state(cache)
                chunks.append(chunk)
                if not args.json:
                    write_text(chunk.text)
        except VkbackendError:
            if chunks and not args.json:
                write_text("\n")  # before the error
            raise
        timings, memory = chunks[-1].timings or {}, llm.memory()
        n_tokens = sum(chunk.token is not None for chunk in chunks)
        full = chunks[-1].finish_reason == "length" and n_tokens != most
        notes = [f"ended  because the context of {llm.n_ctx} tokens is full (-c)"] if full else []
    if args.json:
        result = {
            "text": "".join(chunk.text for chunk in chunks),
            "tokens": [chunk.token for chunk in chunks if chunk.token is not None],
            "logprobs": [asdict(chunk.logprobs) for chunk in chunks if chunk.logprobs] or None,
            "prompt_tokens": generation.ids, "finish_reason": chunks[-1].finish_reason, "seed": sampling.seed,
            "devices": [describe(info) for info in infos], "memory": memory, "timings": timings,
        }  # fmt: skip
        write_json(result)
    else:
        write_text("\n")
    show_timings(timings, sampling.seed, err)
    tell_notes(notes, err)


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["generate", *sys.argv[1:]]))
