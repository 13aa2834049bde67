"""Unigram (`tokenizer.ggml.model` "t5"), by the `tokenizers` library. A text becomes the tokens with the
highest sum of scores. The file's character map rewrites the text first.
"""

from __future__ import annotations

import math

from tokenizers import Tokenizer as Backend
from tokenizers import models

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.character_map import CharacterMap
from vkbackend.models.text.token_roles import TokenType
from vkbackend.models.text.vocabulary import SPACE, Scheme, Vocabulary, spell_spaced

_IN_TEXT = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)  # types of ordinary text


def unigram(gguf: GGUF, vocabulary: Vocabulary) -> Scheme:
    scores = gguf.floats("tokenizer.ggml.scores").tolist()
    vocabulary.check_length("scores", len(scores))
    if any(map(math.isnan, scores)):
        raise GGUFError(f"{vocabulary.path}: 'tokenizer.ggml.scores' holds NaN")
    unknown = vocabulary.named("unknown", 2)
    if unknown is None:
        raise GGUFError(f"{vocabulary.path}: the vocabulary has no unknown token")
    types = vocabulary.types
    text_ids = [i for i in vocabulary.ids.values() if types[i] in _IN_TEXT and i != unknown]
    ids = [unknown, *text_ids]
    pieces = [
        (vocabulary.tokens[i], 0.0 if types[i] == TokenType.USER_DEFINED else scores[i]) for i in text_ids
    ]
    # The unknown token gets the empty string, which never matches.
    backend = Backend(models.Unigram([("", 0.0), *pieces], 0, False))
    rewrite = CharacterMap(gguf.get("tokenizer.ggml.precompiled_charsmap", b""), vocabulary.path)
    prefix = vocabulary.flag("add_space_prefix", False)
    merge = vocabulary.flag("remove_extra_whitespaces", False)

    def encode(text: str) -> list[int]:
        text = rewrite(text)
        if merge:
            text = "".join(SPACE + word for word in text.split(" ") if word)
        else:
            text = text.replace(" ", SPACE)
        return [ids[i] for i in backend.encode(text, add_special_tokens=False).ids]

    return Scheme(
        encode,
        spell_spaced,
        add_bos=vocabulary.flag("add_bos_token", False),
        add_eos=vocabulary.flag("add_eos_token", True),
        add_space_prefix=prefix,
        bos=vocabulary.named("bos"),
        eos=vocabulary.named("eos", 1),
    )
