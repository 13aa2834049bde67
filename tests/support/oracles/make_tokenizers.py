"""Makes `golden/tokenizer-*.json`: small vocabularies, and the ids of texts according to other programs.

    PYTHONPATH=tests/support python tests/support/oracles/make_tokenizers.py  # Writes the files.

Needs tokenizers, transformers, tiktoken and xllamacpp. For Gemma 4, transformers and llama.cpp must agree on
the ids. For Kimi K2, the ids come from tiktoken. llama.cpp does not split between small and capital letters,
so each file states how often llama.cpp agrees.
"""

from __future__ import annotations

import json
import random
import tempfile
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf_files import BOOL, STRING, U32, array, key, vocabulary
from oracles import llama_cpp
from places import GOLDEN

SPACE = "\u2581"
PROSE = """\
The quick brown fox jumps over the lazy dog; it didn't, they're sure, I'LL say, won't we've you'D.
Once upon a time there was a little girl who lived in a wood. She'd been there 1234567 days.
def main(argc, argv):\n    return {"key": [1, 22, 333, 4444]}  # a comment\n\n\n    for (int i = 0; i < 10;)
HelloWorld helloWorld HTTPServer iPhone getUserName XMLHttpRequest ABCdefGHI snake_case kebab-case
Voix ambiguë d\u2019un cœur qui, au zéphyr, préfère les jattes de kiwis. ÀÉÎ Straße ǅungla ʰh ªº
Съешь ещё этих мягких французских булок, да выпей же чаю. ΑΒΓ αβγ العربية עברית हिन्दी ไทย
日本語の文章です。漢字とひらがなとカタカナ。中文也在这里\uff0c一二三四五。한국어 문장 々〇〻
tabs\there  two  spaces   three\r\nwindows\r\n\r\n x\u3000y\u00a0z\u2003 \t \n e\u0301a\u0308 \u0301
""".splitlines()
ALPHABET = "aabcdeEFGS tT  \n\n'\"1234.,;:!?-_/\\\r\téÉßДдع日本ア한々𠀀🦙\u0301\u017f\u2581ªǅʰ٣Ⅷ²"


def texts() -> list[str]:
    rng = random.Random(11)
    lines = ["".join(rng.choices(ALPHABET, k=rng.randint(1, 40))) for _ in range(150)]
    joined = "\n".join(PROSE)
    cuts = [joined[i : i + rng.randint(5, 70)] for i in range(0, len(joined), 37)]
    special = [
        "",
        " ",
        "  ",
        "\n" * 3,
        "\n" * 9,
        "a\n\n\n b\n",
        "</s>x<turn|>y",
        "<0x41>",
        " " * 7 + "x",
        "a \n \n",
    ]
    return [*PROSE, *special, *cuts, *lines]


def write(path: Path, model: str, fields: dict[str, Any]) -> Path:
    extra = [
        array("tokenizer.ggml.merges", STRING, fields["merges"]),
        key("tokenizer.ggml.pre", STRING, fields["pre"]),
        *(
            key(f"tokenizer.ggml.{name}_token_id", U32, value)
            for name, value in fields["special_ids"].items()
        ),
    ]
    if fields["pre"] == "gemma4":
        extra.append(key("tokenizer.ggml.add_bos_token", BOOL, False))
        extra.append(key("tokenizer.ggml.add_space_prefix", BOOL, False))
    path.write_bytes(vocabulary(model, fields["tokens"], types=fields["types"], extra=extra))
    return path


def asked(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        vocab = llama_cpp.Vocabulary(write(Path(folder) / "v.gguf", model, fields))
    ids = range(len(fields["tokens"]))
    said = {
        "add_bos": vocab.add_bos,
        "ids": [vocab.encode(text) for text in texts()],
        "parsed": [vocab.encode(text, True, True) for text in texts()],
        "pieces": [vocab.piece(i).hex() for i in ids],
        "ends": [i for i in ids if vocab.ends(i)],
    }
    vocab.close()
    return said


# ---- Gemma 4 ----

CONTROL, USER_DEFINED, BYTE = 3, 4, 6


def gemma4() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, trainers
    from transformers import GemmaTokenizer

    trained = Tokenizer(models.BPE())
    lines = [line.replace(" ", SPACE) for text in PROSE for line in text.split("\n") for _ in range(3)]
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=420, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|tool_response>"]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), "</s>", "<b>"]
    types = [CONTROL] * len(special) + [BYTE] * 256 + [1, USER_DEFINED]
    runs = ["\n" * n for n in range(1, 6)]
    spaces = [SPACE * n for n in (2, 3, 4)]
    of_vocab = [t for t in sorted(learnt["vocab"], key=learnt["vocab"].get) if t not in "🦙Дع"]
    tokens = list(dict.fromkeys([*tokens, *runs, *spaces, *of_vocab]))
    pairs = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learnt["merges"]]
    merges = [("\n" * i, "\n" * j) for n in range(2, 6) for i in range(n - 1, 0, -1) for j in [n - i]]
    merges += [(SPACE * i, SPACE * (n - i)) for n in (2, 3, 4) for i in range(n - 1, 0, -1)]
    known = set(tokens)
    merges += [(a, b) for a, b in pairs if {a, b, a + b} <= known and (a, b) not in merges]
    fields = {
        "pre": "gemma4",
        "special_ids": {"bos": 2, "eos": 1, "unknown": 3, "padding": 0},
        "tokens": tokens,
        "types": types + [1] * (len(tokens) - len(types)),
        "merges": [" ".join(m) for m in merges],
    }
    said = asked("gemma4", fields)
    theirs = GemmaTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    backend = theirs._tokenizer
    of_transformers = [backend.encode(text, add_special_tokens=False).ids for text in texts()]
    plain = [i for i, text in enumerate(texts()) if not any(t in text for t in ("</s>", "<turn|>"))]
    different = [texts()[i] for i in plain if of_transformers[i] != said["ids"][i]]
    assert not different, different
    about = {"made by": llama_cpp.versions(), "agrees with": f"transformers {version('transformers')}"}
    return {"about": about, **fields, **said, "texts": texts()}


# ---- Kimi K2 ----

HAN_LESS = r"&&[^\p{Han}]]"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + HAN_LESS, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + HAN_LESS
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def byte_characters() -> dict[int, str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(0x100 + i) for i, b in enumerate(rest)}


def halves(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """Return the two tokens that the last merge of `token` joins, as converters to GGUF do."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        i = joined.index(min(joined))
        assert joined[i] < ranks[token], token
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def kimi_k2() -> dict[str, Any]:
    import tiktoken
    from tiktoken._educational import bpe_train

    # Training on windows of five characters produces tokens that cross the splits of the regular expression.
    text = "".join("\n".join(PROSE)[i:] for i in range(5))
    ranks = bpe_train(text, 900, "(?s).{5}", visualise=None)
    engine = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    character = byte_characters()

    def shown(token: bytes) -> str:
        return "".join(character[b] for b in token)

    in_order = sorted(ranks, key=ranks.__getitem__)
    special = ["[BOS]", "[EOS]", "<|im_end|>"]
    n = len(in_order)
    fields = {
        "pre": "kimi-k2",
        "special_ids": {"bos": n, "eos": n + 1},
        "tokens": [*map(shown, in_order), *special],
        "types": [1] * n + [CONTROL] * len(special),
        "merges": [" ".join(map(shown, halves(ranks, t))) for t in in_order if len(t) > 1],
    }
    said = asked("gpt2", fields)
    ids = [engine.encode(text) for text in texts()]
    same = sum(a == b for a, b in zip(ids, said["ids"], strict=True))
    about = {
        "made by": f"tiktoken {version('tiktoken')}",
        "agrees with": f"{llama_cpp.versions()} on {same} of {len(ids)} texts",
    }
    del said["parsed"]
    return {"about": about, **fields, **said, "ids": ids, "texts": texts()}


def main() -> None:
    for name, make in (("gemma4", gemma4), ("kimi-k2", kimi_k2)):
        record = make()
        path = GOLDEN / f"tokenizer-{name}.json"
        path.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{path.name} {path.stat().st_size} bytes {record['about']}", flush=True)


if __name__ == "__main__":
    main()
