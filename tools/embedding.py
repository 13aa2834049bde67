"""`vkbackend embedding`: print the embeddings of texts.

The texts come from -p or -f, a text per line, or from a pipe. The flag --embd-output-format chooses the
output: text, OpenAI's JSON, JSON with cosine similarities, or raw lines.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from vkbackend.errors import InvalidArgument
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hub import fetch
from vkbackend.tools.console import console, tell_notes, write_json
from vkbackend.tools.flags.adapters import add_adapter_arguments
from vkbackend.tools.flags.devices import add_device_arguments
from vkbackend.tools.flags.experiments import add_experiment_arguments
from vkbackend.tools.flags.llama_cpp import add_common_arguments, settle_common, unescaped
from vkbackend.tools.flags.placement import add_placement_arguments, host_patterns
from vkbackend.tools.flags.pooling import add_pooling_arguments, check_pooling
from vkbackend.tools.flags.prompt import add_prompt_arguments, read_prompt
from vkbackend.tools.flags.rope import add_rope_arguments
from vkbackend.tools.flags.text import demo_model, open_model, show_model, write_text

FORMATS = ("", "array", "json", "json+", "raw")
SHOWN = 3  # number of values shown at each end of a vector
SIMILAR = 20  # print a table of similarities for at most this many texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", "--model", metavar="FILE", help="the model, a .gguf file (default: the embedded demo model)")
    add_prompt_arguments(parser, "the texts, a text per line (default: piped texts)")
    add("-c", "--ctx-size", dest="n_ctx", type=int, default=0, metavar="N",
        help="the most tokens of a text; 0: the model's context (default: %(default)s)")  # fmt: skip
    add("-np", "--parallel", dest="n_slots", type=int, default=8, metavar="N",
        help="texts computed together (default: %(default)s; encoders: as many as fit a step)")  # fmt: skip
    add_pooling_arguments(parser)
    add("--embd-output-format", choices=FORMATS, default="", metavar="FORMAT",
        help="array: [[...]]; json: as OpenAI's API; json+: with cosine similarities; raw: a line of numbers "
        "per text (default: the first and last values, and similarities)")  # fmt: skip
    add("--embd-separator", default="\n", metavar="TEXT",
        help=r"what separates the texts (default: \n, a line feed)")  # fmt: skip
    add("--truncate", action="store_true", help="cut texts that are longer than the context")
    add_device_arguments(parser)
    add_placement_arguments(parser)
    add_rope_arguments(parser)
    add_adapter_arguments(parser)
    add_common_arguments(parser)
    add_experiment_arguments(parser)


def texts_of(text: str, separator: str) -> list[str]:
    """Return the texts between separators, without empty texts at the end. Raises InvalidArgument."""
    if not separator:
        raise InvalidArgument("--embd-separator is empty; give a text, such as '\\n'")
    texts = text.split(separator)
    while texts and not texts[-1].strip():
        texts.pop()
    if not texts:
        raise InvalidArgument("there is no text to embed; give one with -p, -f or a pipe")
    return texts


def run(args: argparse.Namespace) -> None:
    err = console(stderr=True)
    settle_common(args)
    if args.hf_repo is not None:
        args.model = fetch(args.hf_repo, args.hf_file)
    if args.host_tensors:
        with GGUF.open(args.model or demo_model()) as gguf:
            args.override_tensor = host_patterns(args, gguf.tensors)
    check_pooling(args)
    texts = texts_of(read_prompt(args), unescaped(args.embd_separator))
    llm, infos = open_model(args, err)
    with llm:
        show_model(llm, infos, args, err)
        vectors = llm.embed(
            texts, pooling=args.pooling, normalize=args.embd_normalize, truncate=args.truncate
        )
        pooling = args.pooling or llm.heads.pooling
    tell_notes([f"texts: {len(texts)}, pooling {pooling}"], err)
    rows = [np.atleast_2d(vector) for vector in vectors]
    if pooling == "none":
        write_text(listed(rows) if not args.embd_output_format else formatted(rows, args.embd_output_format))
    else:
        write_text(output(np.concatenate(rows), args.embd_output_format))


def output(vectors: np.ndarray, kind: str) -> str:
    if kind in ("json", "json+"):
        write_json(as_json(vectors, with_cosines=kind == "json+"))
        return ""
    if kind:
        return formatted(list(vectors[:, None]), kind)
    lines = [listed([vector[None] for vector in vectors])]
    if 1 < len(vectors) <= SIMILAR:
        table = "\n".join(" ".join(f"{value:6.2f}" for value in row) for row in cosines(vectors))
        lines.append(f"\ncosine similarities:\n\n{table}\n")
    return "".join(lines)


def formatted(rows: list[np.ndarray], kind: str) -> str:
    """Return the vectors as `array` or `raw`, with a vector per text or token."""
    vectors = np.concatenate(rows)
    if kind == "raw":
        return "".join(" ".join(f"{value:.9g}" for value in vector) + "\n" for vector in vectors)
    if kind == "array":
        inner = ",".join("[" + ",".join(f"{value:.9g}" for value in vector) + "]" for vector in vectors)
        return f"[{inner}]\n"
    raise InvalidArgument(
        f"--embd-output-format {kind} needs one vector per text; use array or raw with --pooling none"
    )


def listed(rows: list[np.ndarray]) -> str:
    lines = []
    for i, vectors in enumerate(rows):
        for vector in vectors:
            values = [f"{value:9.6f}" for value in vector]
            if len(values) > 2 * SHOWN:
                values = [*values[:SHOWN], "...", *values[-SHOWN:]]
            lines.append(f"embedding {i}: {' '.join(values)}\n")
    return "".join(lines)


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of each pair, [n, n]. The similarity with a vector of zeros is 0."""
    values = vectors.astype(np.float64)
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    unit = np.divide(values, norms, out=np.zeros_like(values), where=norms > 0)
    result: np.ndarray = unit @ unit.T
    return result


def as_json(vectors: np.ndarray, *, with_cosines: bool) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": i, "embedding": vector.tolist()} for i, vector in enumerate(vectors)
    ]
    similar = {"cosineSimilarity": cosines(vectors).tolist()} if with_cosines else {}
    return {"object": "list", "data": data} | similar


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["embedding", *sys.argv[1:]]))
