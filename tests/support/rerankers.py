"""Tiny rerankers with a vocabulary of words: a BERT, a RoBERTa and a generative one."""

from __future__ import annotations

from pathlib import Path

from oracles import encoders, fixtures
from oracles.fixture import N_VOCAB, Fixture, write
from oracles.parts import N_EMBD

NORMAL, UNKNOWN, CONTROL = 1, 2, 3
SPACE = "\u2581"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[Q]", "[D]"]
WORDS = ["a", "bear", "cat", "dog", "panda", "tree", "what", "is", "the", "in", "red", "apples", "?", "eats"]
QUERY = "what eats a panda ?"
DOCUMENTS = ["the bear is in the tree", "red apples", "a panda eats red apples", "dog cat", "w7 w8 w9"]
TEMPLATE = "[Q]{query}[D]{document}"


def add_words(m: Fixture) -> None:
    words = [SPACE + word for word in WORDS]
    words += [f"{SPACE}w{i}" for i in range(N_VOCAB - len(SPECIAL) - len(words))]
    tokens = [*SPECIAL, *words]
    m.keys |= {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * len(words),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }


def add_head(m: Fixture) -> None:
    m.keys["pooling_type"] = 4
    m.matrix("cls", N_EMBD, N_EMBD, bias=True)
    m.matrix("cls.output", 1, N_EMBD, bias=True, gain=4.0)


def bert_reranker(path: Path) -> Path:
    m = encoders.build("bert")
    add_words(m)
    add_head(m)
    return write(m, path)


def generative_reranker(path: Path, name: str = "") -> Path:
    m = fixtures.build("qwen3")
    m.keys |= {"general.name": name} if name else {}
    add_words(m)
    m.keys |= {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    m.keys["tokenizer.chat_template.rerank"] = TEMPLATE
    m.matrix("cls.output", 2, N_EMBD, gain=2.0)
    return write(m, path)
