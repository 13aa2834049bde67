"""Compares the vocabularies of a model and its draft model, with llama.cpp's rule."""

from __future__ import annotations

from vkbackend.errors import InvalidArgument
from vkbackend.models.gguf.reader import GGUF

MAX_DIFFERENCE = 128  # The vocabulary's padding differs between the model sizes of a family.
FIRST_COMPARED = 5  # The first tokens are special tokens, whose texts differ between conversions.
KEY = "tokenizer.ggml."


def check_vocabulary(model: GGUF, draft: GGUF) -> int:
    """Return how many tokens the vocabularies share. Raises InvalidArgument if the vocabularies differ."""
    kinds = [gguf.string(f"{KEY}model", "") for gguf in (model, draft)]
    if kinds[0] != kinds[1]:
        raise _differs(draft, f"the tokenizers are {kinds[0]!r} and {kinds[1]!r}")
    for end in ("bos", "eos"):
        adds = [gguf.boolean(f"{KEY}add_{end}_token", None) for gguf in (model, draft)]
        ids = [gguf.u32(f"{KEY}{end}_token_id", None) for gguf in (model, draft)]
        if bool(adds[0]) != bool(adds[1]) or (adds[0] and ids[0] != ids[1]):
            raise _differs(draft, f"the {end.upper()} tokens are {ids[0]} and {ids[1]}")
    texts = [gguf.strings(f"{KEY}tokens", []) for gguf in (model, draft)]
    n = min(map(len, texts))
    if max(map(len, texts)) - n > MAX_DIFFERENCE:
        raise _differs(draft, f"the sizes are {len(texts[0])} and {len(texts[1])}")
    for token in range(FIRST_COMPARED, n):
        if texts[0][token] != texts[1][token]:
            raise _differs(draft, f"token {token} is {texts[0][token]!r} and {texts[1][token]!r}")
    return n


def _differs(draft: GGUF, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{draft.paths[0]} cannot draft, because its vocabulary is not the model's: {why}; use a smaller "
        "model of the same family, or --spec-type ngram",
        argument="draft",
    )
