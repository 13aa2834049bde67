"""WordPiece (`tokenizer.ggml.model` "bert"), by the `tokenizers` library with BERT's normalizer. From left to
right, a word is split into the longest tokens. GGUF files mark tokens that begin a word with U+2581; BERT
marks tokens that continue a word with ##.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.token_roles import TokenType
from vkbackend.models.text.vocabulary import SPACE, Scheme, Vocabulary, spell_spaced

_ON = "##"
_LONGEST_WORD = 100  # as in BERT; the search takes quadratic time


def wordpiece(gguf: GGUF, vocabulary: Vocabulary) -> Scheme:
    bos, unknown, separator = (
        vocabulary.named(name, default)
        for name, default in (("bos", 101), ("unknown", 100), ("seperator", 102))  # the files' spelling
    )
    if unknown is None:
        raise GGUFError(f"{vocabulary.path}: the vocabulary has no unknown token")
    words = {_spelt(text): i for text, i in vocabulary.ids.items() if vocabulary.types[i] == TokenType.NORMAL}
    unk_token = vocabulary.tokens[unknown]
    model = models.WordPiece(
        vocab=words | {unk_token: unknown},
        unk_token=unk_token,
        continuing_subword_prefix=_ON,
        max_input_chars_per_word=_LONGEST_WORD,
    )
    backend = Backend(model)
    lower = vocabulary.flag("normalizer.lowercase", True)
    accents = not vocabulary.flag("normalizer.strip_accents", lower)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=not accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return Scheme(
        lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        spell_spaced,
        add_bos=True,
        add_eos=True,
        bos=bos,
        eos=vocabulary.named("eos"),
        close=separator,
    )


def _spelt(text: str) -> str:
    return text.removeprefix(SPACE) if text.startswith(SPACE) else _ON + text
