"""Makes `vocab/*.gguf`, small vocabularies of three kinds, and `vocab/*.json`, llama.cpp's ids of texts.

    PYTHONPATH=tests/support python tests/data/make_vocabularies.py

Needs xllamacpp. The tokens are learnt from this project's text, the stories of the demo grammar and the prose
of the golden tokenizers; the named models have this layout.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gguf_files import F32, STRING, U32, array, key, vocabulary
from oracles import llama_cpp
from oracles.make_tokenizers import PROSE, SPACE, texts
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from vkbackend.models.text.pre_tokenizers import PRE_TOKENIZERS
from vkbackend.tools.demo.stories import tell_story

FOLDER = Path(__file__).resolve().parent / "vocab"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
N_STORIES, WINDOW = 400, 5
LLAMA3 = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip
QWEN2 = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
UNMERGED = ("telescope", " ambiguë", "HTTPServer", " мягких", "\u4e00\u4e8c\u4e09\u56db", " snake_case")


def corpus() -> list[str]:
    rng = random.Random(3)
    return [*(tell_story(rng).text for _ in range(N_STORIES)), *("\n".join(PROSE), *PROSE) * 4]


def vectors() -> list[str]:
    rng = random.Random(4)
    runs = [c * n for c in ("3", " ", "!", "\t") for n in range(1, 10)]
    specials = [f"a{token}b {token}{token}\n" for token in (*LLAMA3, *QWEN2, "<s>", "</s>", "<unk>")]
    words = [f"{before}{word}{after}" for word in UNMERGED for before in ("", "x") for after in ("", "s ")]
    return [*texts(), *runs, *specials, *words, *(tell_story(rng).text for _ in range(5))]


def learnt(pieces: Iterable[str], n: int, alphabet: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=n, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(pieces, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def llama_spm() -> bytes:
    words = (
        word
        for text in corpus()
        for word in re.findall(f"{SPACE}*[^{SPACE}]+", SPACE + text.replace(" ", SPACE))
    )
    tokens, _ = learnt((w.replace("\n", "") for w in words), 1700, [])
    pieces = [t for t in tokens if len(t) > 1] + [SPACE * n for n in (2, 4, 8, 3, 5)]
    pieces += [t for t in tokens if len(t) == 1 and t not in "🦙Д"]
    pieces = list(dict.fromkeys(pieces))
    special = ["<unk>", "<s>", "</s>"]
    every = [*special, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    scores = [0.0] * (len(every) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    ids = [key(f"tokenizer.ggml.{name}_token_id", U32, i) for i, name in enumerate(("unknown", "bos", "eos"))]
    extra = [array("tokenizer.ggml.scores", F32, scores), key("tokenizer.ggml.pre", STRING, "default"), *ids]
    return vocabulary("llama", every, types=types, extra=extra)


def byte_level(pre: str, special: list[str], eos: str, bos: str | None) -> bytes:
    """Learn merges from words, and from windows of any five characters. The latter merges cross the places
    where the expression cuts, so that other cuts give other tokens. No merges make the words UNMERGED, which
    only one of the two kinds takes as single tokens."""
    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[pre].patterns]
    )
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def as_bytes(text: str) -> str:
        return "".join(piece for piece, _ in spelt.pre_tokenize_str(text))

    def pieces() -> Iterator[str]:
        for text in corpus():
            yield from (as_bytes(piece) for piece, _ in cut.pre_tokenize_str(text))
        text = "\n".join(PROSE)
        for i in range(WINDOW):
            yield from (as_bytes(text[at : at + WINDOW]) for at in range(i, len(text), WINDOW))

    tokens, merges = learnt(pieces(), 2200, pre_tokenizers.ByteLevel.alphabet())
    tokens += [word for word in map(as_bytes, UNMERGED) if word not in tokens]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(special)
    tokens += special
    extra = [
        key("tokenizer.ggml.pre", STRING, pre),
        array("tokenizer.ggml.merges", STRING, [" ".join(pair) for pair in merges]),
        key("tokenizer.ggml.eos_token_id", U32, tokens.index(eos)),
    ]
    if bos:
        extra.append(key("tokenizer.ggml.bos_token_id", U32, tokens.index(bos)))
    return vocabulary("gpt2", tokens, types=types, extra=extra)


MAKE = {
    "llama-spm": llama_spm,
    "llama-bpe": lambda: byte_level("llama-bpe", LLAMA3, LLAMA3[1], LLAMA3[0]),
    "qwen2": lambda: byte_level("qwen2", QWEN2, QWEN2[0], None),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in MAKE.items():
        path = FOLDER / f"{name}.gguf"
        path.write_bytes(make())
        said = llama_cpp.Vocabulary(path)
        found = {
            "made by": llama_cpp.versions(),
            "texts": vectors(),
            "ids": [said.encode(text) for text in vectors()],
            "parsed": [said.encode(text, True, True) for text in vectors()],
        }
        said.close()
        path.with_suffix(".json").write_text(
            json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8"
        )
        print(f"{path.name} {path.stat().st_size}", flush=True)


if __name__ == "__main__":
    main()
