"""Makes `golden/kind-*.json`: small vocabularies of WordPiece, Unigram, RWKV and lower-case words, and
llama.cpp's ids of random lines and prose for each vocabulary.

    PYTHONPATH=tests/support python tests/support/oracles/make_kinds.py  # Writes the files.

Needs xllamacpp.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf_files import BOOL, F32, STRING, U32, array, key, vocabulary
from oracles import llama_cpp
from oracles.make_tokenizers import PROSE, SPACE
from oracles.random_lines import random_lines
from places import GOLDEN
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

U8 = 0
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
MAP = {
    "\u3000": " ", "\u00a0": " ", "\u2003": " ", "\t": " ", "\n": " ", "\r": " ", "²": "2", "³": "3",
    "½": "1\u20442", "e\u0301": "é", "a\u0308": "ä", "\u200d": "", "\uff0c": ",", "\uff1a": ":", "…": "...",
    "Ⅷ": "VIII", "ª": "a",
}  # fmt: skip


def character_map(replaced: Mapping[str, str]) -> bytes:
    """Return a precompiled character map: the size of a double array, the array, and the replacement
    texts."""
    texts, tree = b"", {}
    for text, other in replaced.items():
        node = tree
        for byte in text.encode():
            node = node.setdefault(byte, {})
        node[0] = len(texts)
        texts += other.encode() + b"\0"
    units, bases = {0: 0}, set[int]()
    queue = [(0, tree)]
    while queue:
        at, children = queue.pop()
        free = (
            b for b in range(1, 1 << 16) if b not in bases and all((b ^ c) not in units for c in children)
        )
        # bases of nodes are distinct, so the byte at an entry identifies the parent node
        bases.add(base := next(free))
        for label, child in children.items():
            leaf = label == 0
            units[base ^ label] = child | 1 << 31 if leaf else label
            if not leaf:
                queue.append((base ^ label, child))
        units[at] |= (at ^ base) << 10 | (0 in children) << 8
    array_ = np.full(max(units) + 256, 0, "<u4")
    array_[list(units)] = list(units.values())
    return len(array_.tobytes()).to_bytes(4, "little") + array_.tobytes() + texts


def learnt(trainer: Any, model: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Lowercase() if isinstance(model, models.WordPiece) else None
    unigram = isinstance(model, models.Unigram)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace() if unigram else pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(PROSE * 3, trainer)
    trained: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return trained


def bert() -> dict[str, Any]:
    model = learnt(trainers.WordPieceTrainer(vocab_size=500, show_progress=False), models.WordPiece())
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    spelt = [t[2:] if t.startswith("##") else SPACE + t for t in model["vocab"] if "ж" not in t]
    tokens = list(dict.fromkeys([*special, *spelt]))
    types = [CONTROL] * len(special) + [NORMAL] * (len(tokens) - len(special))
    ids = {"unknown": 1, "bos": 2, "seperator": 3, "padding": 0, "mask": 4}
    return {"model": "bert", "tokens": tokens, "types": types, "special_ids": ids}


def t5() -> dict[str, Any]:
    trainer = trainers.UnigramTrainer(vocab_size=400, show_progress=False, unk_token="<unk>")
    pieces = [
        (t, s) for t, s in learnt(trainer, models.Unigram())["vocab"] if "\u0436" not in t and t != "<unk>"
    ]
    special = ["<pad>", "</s>", "<unk>", "<extra>", "<user>"]
    tokens = [*special, *(t for t, _ in pieces)]
    types = [CONTROL, CONTROL, UNKNOWN, CONTROL, USER_DEFINED, *[NORMAL] * len(pieces)]
    scores = [0.0] * len(special) + [round(s, 5) for _, s in pieces]
    flags = {"add_space_prefix": True, "remove_extra_whitespaces": True}
    return {"model": "t5", "tokens": tokens, "types": types, "scores": scores, "flags": flags,
            "map": MAP, "special_ids": {"unknown": 2, "eos": 1}}  # fmt: skip


def t5_spaces() -> dict[str, Any]:
    return {**t5(), "flags": {"add_space_prefix": False, "remove_extra_whitespaces": False}, "map": {}}


def _escaped(raw: bytes) -> str:
    plain = {0x5C: "\\\\", 0x0A: "\\n", 0x09: "\\t", 0x0D: "\\r"}
    return "".join(plain.get(b) or (chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in raw)


def rwkv() -> dict[str, Any]:
    raw = [bytes([b]) for b in range(256)]
    text = "\n".join(PROSE).encode()
    raw += [text[i : i + n] for n in (2, 3, 5, 9) for i in range(0, len(text) - n, 7)]
    tokens = ["<s>", *dict.fromkeys(map(_escaped, raw))]
    types = [CONTROL] + [NORMAL] * (len(tokens) - 1)
    return {"model": "rwkv", "tokens": tokens, "types": types, "special_ids": {"eos": 0}}


def words() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(PROSE * 3, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    tokens = ["<s>", "</s>", *model["vocab"]]
    types = [CONTROL, CONTROL, *[NORMAL] * len(model["vocab"])]
    return {"model": "whitespace", "pre": "whitespace", "tokens": tokens, "types": types, "merges": merges,
            "flags": {"normalizer.lowercase": True}, "special_ids": {"bos": 0, "eos": 1}}  # fmt: skip


MAKE = {"bert": bert, "t5": t5, "t5-spaces": t5_spaces, "rwkv": rwkv, "words": words}


def write(path: Path, fields: Mapping[str, Any]) -> Path:
    path.write_bytes(
        vocabulary(fields["model"], fields["tokens"], types=fields["types"], extra=_extra(fields))
    )
    return path


def _extra(fields: Mapping[str, Any]) -> Iterator[bytes]:
    if "scores" in fields:
        yield array("tokenizer.ggml.scores", F32, fields["scores"])
    if "merges" in fields:
        yield array("tokenizer.ggml.merges", STRING, fields["merges"])
    if "pre" in fields:
        yield key("tokenizer.ggml.pre", STRING, fields["pre"])
    if fields.get("map"):
        yield array("tokenizer.ggml.precompiled_charsmap", U8, list(character_map(fields["map"])))
    for name, flag in fields.get("flags", {}).items():
        yield key(f"tokenizer.ggml.{name}", BOOL, flag)
    for name, token in fields["special_ids"].items():
        yield key(f"tokenizer.ggml.{name}_token_id", U32, token)


def asked(fields: Mapping[str, Any], texts: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        vocab = llama_cpp.Vocabulary(write(Path(folder) / "v.gguf", fields))
    said = {
        "ids": [vocab.encode(text) for text in texts],
        "parsed": [vocab.encode(text, True, True) for text in texts],
        "pieces": [vocab.piece(i).hex() for i in range(len(fields["tokens"]))],
    }
    vocab.close()
    return said


def main() -> None:
    texts = [*PROSE, *random_lines(80, longest=8), "", " ", "  ", " <user>  a<extra>b ", "[MASK] a [SEP]"]
    for name, make in MAKE.items():
        fields = make()
        record = {"made by": llama_cpp.versions(), **fields, "texts": texts, **asked(fields, texts)}
        path = GOLDEN / f"kind-{name}.json"
        path.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{path.name} {path.stat().st_size}", flush=True)


if __name__ == "__main__":
    main()
