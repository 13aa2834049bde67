"""Prints tables that compare vkbackend's tokenizers with llama.cpp's: ids of random lines, and the time to
load and to encode.

    PYTHONPATH=tests/support python tests/support/oracles/compare_tokenizers.py        # Prints all tables.
    PYTHONPATH=tests/support python tests/support/oracles/compare_tokenizers.py speed  # Prints one table.

- `speed` uses the vocabularies of `../shared/vocab`, or the small vocabularies of tests/data. The columns are
  the number of lines that differ, the load time in CPU seconds (best of three), and the MB of English encoded
  per CPU second. `cold` is the first encoding after loading, `warm` the second.
- `cuts` compares all pre-tokenizers that split differently. The vocabulary contains all pairs of bytes. `own`
  counts lines that differ because llama.cpp does not split as the model does (see make_pre_tokenizers.py).
- `kinds` compares tokenizers of other kinds, with small vocabularies. Needs xllamacpp.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gguf_files import with_keys
from material import DATA, SHARED_VOCABULARIES
from oracles import llama_cpp, make_kinds, make_pre_tokenizers
from oracles.random_lines import random_lines

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.tokenizer import Tokenizer

N_LINES, N_LOADS = 5_000, 3
T = TypeVar("T")


def load_tokenizer(path: Path) -> Tokenizer:
    with GGUF.open(path) as gguf:
        return Tokenizer.from_gguf(gguf)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    done = call()
    return time.process_time() - began, done


def differing(ours: Tokenizer, theirs: llama_cpp.Vocabulary, lines: Sequence[str]) -> list[str]:
    return [line for line in lines if ours.encode(line, add_special=False) != theirs.encode(line)]


# ---- speed ----


def with_inner_space(path: Path, folder: Path) -> Path:
    """Copy the vocabulary with a space inside its last token, because Gemma 3 has tokens with inner
    spaces."""
    with GGUF.open(path) as gguf:
        tokens = gguf.strings("tokenizer.ggml.tokens")
        tokens[-1] = "q\u2581q"
        raw = [token.encode() for token in tokens]
        stored = gguf.metadata.stored("tokenizer.ggml.tokens")[:16]
        contents = with_keys(
            gguf, {"tokenizer.ggml.tokens": stored + b"".join(len(r).to_bytes(8, "little") + r for r in raw)}
        )
    (target := folder / f"{path.stem}-over-a-space.gguf").write_bytes(contents)
    return target


def speed(lines: list[str]) -> None:
    names = ("llama-spm", "llama-bpe", "qwen2")
    paths = [SHARED_VOCABULARIES / f"ggml-vocab-{name}.gguf" for name in names]
    if not all(path.is_file() for path in paths):
        paths = [DATA / "vocab" / f"{name}.gguf" for name in names]
    text = SHARED_VOCABULARIES.parent / "text" / "tinystories.txt"
    stories = text.read_text(encoding="utf-8").split("<|endoftext|>") if text.is_file() else lines
    n_mb = sum(len(story.encode()) for story in stories) / 1e6
    print(
        "| vocabulary | lines | differ | load s | theirs | cold MB/s | warm | theirs |\n" + "|---" * 8 + "|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for path in (*paths, with_inner_space(paths[0], Path(folder))):
            loads = [timed(lambda path=path: load_tokenizer(path)) for _ in range(N_LOADS)]  # type: ignore[misc]
            ours = loads[-1][1]
            their_loads = [timed(lambda path=path: llama_cpp.Vocabulary(path)) for _ in range(N_LOADS)]  # type: ignore[misc]
            theirs = their_loads[-1][1]
            cold, warm = (timed(lambda: [ours.encode(story) for story in stories])[0] for _ in range(2))  # noqa: B023
            their_time = timed(lambda: [theirs.encode(story) for story in stories])[0]  # noqa: B023
            bad = differing(ours, theirs, lines)
            for _, vocabulary in their_loads:
                vocabulary.close()
            seconds = (min(t for t, _ in loads), min(t for t, _ in their_loads))
            rates = [n_mb / t for t in (cold, warm, their_time)]
            print(f"| {path.stem} | {len(lines)} | {len(bad)} | {seconds[0]:.2f} | {seconds[1]:.2f} | "
                  + " | ".join(f"{rate:.2f}" for rate in rates) + " |", flush=True)  # fmt: skip


# ---- cuts and kinds ----


def cuts(lines: list[str]) -> None:
    print("| pre-tokenizer | lines | differ | own | unexplained |\n" + "|---" * 5 + "|")
    for name in make_pre_tokenizers.names():
        with tempfile.TemporaryDirectory() as folder:
            path = make_pre_tokenizers.write(
                Path(folder) / "v.gguf", name, *make_pre_tokenizers.pairs_of(lines)
            )
            ours, theirs = load_tokenizer(path), llama_cpp.Vocabulary(path)
            bad = differing(ours, theirs, lines)
            theirs.close()
        if name in make_pre_tokenizers.ORIGINALS:
            wanted = dict(zip(lines, make_pre_tokenizers.of_originals(name, lines), strict=True))
            explained = [line for line in bad if ours.encode(line, add_special=False) == wanted[line]]
        else:
            unlike = re.compile(make_pre_tokenizers.DEVIATING.get(name, "(?!)"))
            explained = [line for line in bad if unlike.search(line)]
        print(
            f"| {name} | {len(lines)} | {len(bad)} | {len(explained)} | {len(bad) - len(explained)} |",
            flush=True,
        )


def kinds(lines: list[str]) -> None:
    """Print the table of tokenizer kinds. For BERT, `own` counts lines with spacing marks, which BERT's
    normalizer keeps and llama.cpp drops."""
    print("| kind | lines | differ | own | unexplained |\n" + "|---" * 5 + "|")
    for name, make in make_kinds.MAKE.items():
        with tempfile.TemporaryDirectory() as folder:
            path = make_kinds.write(Path(folder) / "v.gguf", make())
            ours, theirs = load_tokenizer(path), llama_cpp.Vocabulary(path)
            bad = differing(ours, theirs, lines)
            theirs.close()
        marks = [line for line in bad if any(unicodedata.category(c) == "Mc" for c in line)]
        explained = marks if name == "bert" else []
        print(
            f"| {name} | {len(lines)} | {len(bad)} | {len(explained)} | {len(bad) - len(explained)} |",
            flush=True,
        )


TABLES = {"speed": speed, "cuts": cuts, "kinds": kinds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("-n", type=int, default=N_LINES, help="random lines (default: %(default)s)")
    options = parser.parse_args()
    lines = random_lines(options.n)
    for name in options.tables or TABLES:
        TABLES[name](lines)
        print(flush=True)


if __name__ == "__main__":
    main()
