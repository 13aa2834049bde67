"""Makes `golden/pre-tokenizers.json`: ids of random lines for all pre-tokenizers that split differently.

    PYTHONPATH=tests/support python tests/support/oracles/make_pre_tokenizers.py  # Writes the file.

Every pair of bytes is a token, and the merges are in random order, so a different split nearly always
produces different ids. If llama.cpp uses the published expression, the ids come from llama.cpp, otherwise
from `tokenizers` with the published expression. Needs xllamacpp.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from gguf_files import STRING, U32, array, key, vocabulary
from oracles import llama_cpp
from oracles.make_tokenizers import PATTERN, byte_characters
from oracles.random_lines import random_lines
from places import GOLDEN
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from vkbackend.models.text.pre_tokenizers import PRE_TOKENIZERS

FILE = GOLDEN / "pre-tokenizers.json"
N_LINES = 40
WHOLE = ("the", "hello", "1234", "   ", "http", "我们")

_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = _CASED % (_SUFFIX, _SUFFIX, r"\p{N}{1,3}")
# These are the models' own expressions, from which llama.cpp deviates. Most of llama.cpp's expressions
# recognise only ASCII capital letters, or no capital letters. llama.cpp groups tiny_aya's digits before
# letters, and knows only ASCII digits for superbpe.
ORIGINALS: dict[str, tuple[str, ...]] = {
    "tekken": (_CASED % ("", "", r"\p{N}"),),
    "gpt-4o": (_GPT4O,),
    "granite-embed-multi-97m": (_GPT4O,),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    "kimi-k2": (PATTERN,),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "youtu": (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
        _CASED % (_SUFFIX, _SUFFIX, r"\p{N}"),
    ),
}
# llama.cpp's ids differ on lines that match these expressions. llama.cpp treats wide spaces as white space in
# character classes. For deepseek-llm llama.cpp also groups digits, and for afmoe it joins characters before a
# number with the number's first digits.
DEVIATING = {
    "deepseek-llm": r"\d\d|[\u2000-\u3000²³½Ⅷ]",
    "deepseek-coder": r"[\u2000-\u3000]",
    "afmoe": r"(\s\s|[\u200c\u200d])[\d²³½Ⅷ]",
}


def names() -> list[str]:
    first: dict[object, str] = {}
    for name, pre in PRE_TOKENIZERS.items():
        first.setdefault(pre, name)
    return list(first.values())


def pairs_of(lines: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens and merges. The tokens are all bytes, all pairs of the lines' bytes in random order, and
    WHOLE."""
    shown = byte_characters()
    used = sorted({b for line in lines for b in line.encode()})
    merges = [(shown[a], shown[b]) for a in used for b in used]
    random.Random(1).shuffle(merges)
    whole = ["".join(shown[b] for b in text.encode()) for text in WHOLE]
    return [*shown.values(), *map("".join, merges), *whole], merges


def write(path: Path, pre: str, tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> Path:
    extra = [
        key("tokenizer.ggml.pre", STRING, pre),
        array("tokenizer.ggml.merges", STRING, list(map(" ".join, merges))),
        key("tokenizer.ggml.bos_token_id", U32, 0),
    ]
    path.write_bytes(vocabulary("gpt2", tokens, types=[1] * len(tokens), extra=extra))
    return path


def of_originals(name: str, lines: list[str]) -> list[list[int]]:
    tokens, merges = pairs_of(lines)
    ids = {token: i for i, token in enumerate(tokens)}
    ignore = PRE_TOKENIZERS[name].ignore_merges
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=ignore))
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in ORIGINALS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return [backend.encode(line, add_special_tokens=False).ids for line in lines]


def of_llama_cpp(name: str, lines: list[str], folder: Path) -> tuple[list[list[int]], bool]:
    vocab = llama_cpp.Vocabulary(write(folder / "v.gguf", name, *pairs_of(lines)))
    ids, add_bos = [vocab.encode(line) for line in lines], vocab.add_bos
    vocab.close()
    return ids, add_bos


def main() -> None:
    lines, results = random_lines(N_LINES, longest=8), {}
    for name in names():
        with tempfile.TemporaryDirectory() as folder:
            theirs, add_bos = of_llama_cpp(name, lines, Path(folder))
        ids = of_originals(name, lines) if name in ORIGINALS else theirs
        same = sum(a == b for a, b in zip(ids, theirs, strict=True))
        unlike = re.compile(DEVIATING.get(name, "(?!)"))
        kept = [None if unlike.search(line) else row for line, row in zip(lines, ids, strict=True)]
        by = f"tokenizers {version('tokenizers')}" if name in ORIGINALS else llama_cpp.versions()
        results[name] = {"by": by, "same as llama.cpp": same, "add_bos": add_bos, "ids": kept}
        print(name, by, same, len(lines) - kept.count(None), flush=True)
    FILE.write_text(
        json.dumps({"lines": lines, "found": results}, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    print(FILE.name, FILE.stat().st_size)


if __name__ == "__main__":
    main()
