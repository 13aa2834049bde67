"""Converts text to token ids and back, with a GGUF file's vocabulary. This module handles special tokens and
incremental decoding. Each kind of tokenizer has a separate module.
"""

import codecs
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from vkbackend.errors import GGUFError, InvalidArgument, UnsupportedModel
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.bpe import bpe, gemma4, whitespace_bpe
from vkbackend.models.text.rwkv import rwkv
from vkbackend.models.text.special_tokens import MAX_LENGTH, SpecialTokens
from vkbackend.models.text.spm import spm
from vkbackend.models.text.token_roles import MARKERS, WHITE_SPACE, TokenType, settle_roles, stripping
from vkbackend.models.text.unigram import unigram
from vkbackend.models.text.vocabulary import Vocabulary
from vkbackend.models.text.wordpiece import wordpiece

MAX_TEXT = 1 << 22  # Characters. The regular expression engine fails after 10,000,000 steps.
_KINDS = {  # By `tokenizer.ggml.model`.
    "llama": ("SPM", spm),
    "gpt2": ("BPE", bpe),
    "gemma4": ("BPE of Gemma 4", gemma4),
    "whitespace": ("BPE of words", whitespace_bpe),
    "bert": ("WordPiece", wordpiece),
    "t5": ("Unigram", unigram),
    "rwkv": ("RWKV's", rwkv),
}


class Tokenizer:
    """A vocabulary with its encoder. `stop_ids` end a generation. `fim_ids` maps short names to the
    fill-in-the-middle tokens."""

    def __init__(self, gguf: GGUF) -> None:
        path, model = gguf.paths[0], gguf.string("tokenizer.ggml.model", None)
        if model not in _KINDS:
            reason = "it has none" if model in (None, "none", "no_vocab") else f"it is of kind {model!r}"
            known = ", ".join(f"{name!r} ({kind})" for name, (kind, _) in _KINDS.items())
            raise UnsupportedModel(
                f"{path}: no usable tokenizer: {reason}; known are {known}: give token ids"
            )
        vocabulary = Vocabulary(gguf)
        scheme = _KINDS[model][1](gguf, vocabulary)
        self._tokens, self._ids, self._types = vocabulary.tokens, vocabulary.ids, vocabulary.types
        self.n_vocab = len(self._tokens)
        self._encode_text, self._spell = scheme.encode, scheme.spell
        self.bos_id, self.eos_id, self.add_bos, self.add_eos = (
            scheme.bos,
            scheme.eos,
            scheme.add_bos,
            scheme.add_eos,
        )
        self.add_space_prefix = scheme.add_space_prefix
        # a second separator between the texts of a pair, as in RoBERTa
        has_sep = scheme.close is None and vocabulary.flag("add_sep_token", False)
        self._sep_id = vocabulary.named("seperator") if has_sep else None  # the files' spelling
        self._has_types = scheme.close is not None
        self._close_id = scheme.eos if scheme.close is None else scheme.close
        self.stop_ids, self.fim_ids = settle_roles(
            self._ids, self._types, lambda name: scheme.eos if name == "eos" else vocabulary.named(name)
        )
        self._stripping = stripping(gguf.string("general.name", ""), self._ids, self._types)
        for name, given, token_id in (
            ("bos", self.add_bos, self.bos_id),
            ("eos", self.add_eos, self._close_id),
        ):
            if given and token_id is None:
                raise GGUFError(
                    f"{path}: a {name} token is to be added, but 'tokenizer.ggml.{name}_token_id' is missing"
                )
        self._special, self._user_defined = self._cutters(path)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> "Tokenizer":
        """Return a file's tokenizer. Raises UnsupportedModel if the tokenizer is missing or unknown, and
        GGUFError if the vocabulary is malformed."""
        return cls(gguf)

    def _cutters(self, path: Path) -> tuple[SpecialTokens, SpecialTokens]:
        special = [(t, i) for t, i in self._ids.items() if self._types[i] in MARKERS]
        for text, i in special:
            if len(text) > MAX_LENGTH:
                raise GGUFError(
                    f"{path}: special token {i} has {len(text)} characters, at most {MAX_LENGTH} are accepted"
                )
        user_defined = [(t, i) for t, i in special if self._types[i] == TokenType.USER_DEFINED]
        return SpecialTokens(special), SpecialTokens(user_defined)

    # ---- text to ids ----

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        plain: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """Return a text's ids. `add_special` adds BOS and EOS if the model wants them.

        User-defined tokens in the text become tokens; control tokens only with `parse_special`. The ordered
        spans (begin, end) in `plain` become ordinary text. Lone surrogates become U+FFFD. Raises
        InvalidArgument if the text is not a str or is longer than MAX_TEXT.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"the text is a {type(text).__name__}, expected a str")
        if len(text) > MAX_TEXT:
            raise InvalidArgument(
                f"the text has {len(text)} characters, at most {MAX_TEXT} are taken at once"
            )
        text = whole_characters(text)
        out: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            out.append(self.bos_id)
        prefix = self.add_space_prefix
        strip = False
        for fragment in self._fragments(text, parse_special, plain):
            if isinstance(fragment, int):
                out.append(fragment)
                prefix, strip = self.add_space_prefix, fragment in self._stripping
            elif fragment := fragment.lstrip(WHITE_SPACE) if strip else fragment:
                out += self._encode_text(" " + fragment if prefix else fragment)
                prefix = strip = False
        if add_special and self.add_eos and self._close_id is not None:
            out.append(self._close_id)
        return out

    def encode_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int]:
        """Return the ids of two texts that a reranker compares. Also return the position of the second text
        if the model distinguishes the texts by token types (BERT), else 0.

        The ids are [CLS] first [SEP] second [SEP] (BERT), <s> first </s></s> second </s> (RoBERTa), or both
        texts with the BOS, EOS and separator tokens that the file adds.
        """
        close = [self._close_id] if self.add_eos and self._close_id is not None else []
        sep = [self._sep_id] if self._sep_id is not None else []
        bos = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        head = [*bos, *self.encode(first, add_special=False), *close, *sep]
        ids = (*head, *self.encode(second, add_special=False), *close)
        return ids, len(head) if self._has_types else 0

    def _fragments(self, text: str, parse_special: bool, plain: Sequence[tuple[int, int]]) -> list[str | int]:
        special = self._special if parse_special else self._user_defined
        out: list[str | int] = []
        done = 0
        for begin, end in (*plain, (len(text), len(text))):
            for fragment in (*special.cut(text[done:begin]), text[begin:end]):
                if isinstance(fragment, str) and out and isinstance(before := out[-1], str):
                    out[-1] = before + fragment  # Join adjacent texts.
                elif fragment != "":
                    out.append(fragment)
            done = end
        return out

    def markers(self, wanted: Callable[[str], bool]) -> list[tuple[str, int]]:
        """Return (text, id) of control and unknown tokens, and of user-defined tokens if `wanted(text)`."""
        markers = ((text, i) for text, i in self._ids.items() if self.is_marker(i))
        return [(text, i) for text, i in markers if self.is_special(i) or wanted(text)]

    # ---- ids to text ----

    def decode(self, ids: Iterable[int], skip_special: bool = True, *, at_start: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD. Raises InvalidArgument for an id out of range.

        `at_start` removes the space that `encode` adds at the start of a text. For ids that continue a text,
        such as generated ids, `at_start` must be False.
        """
        ids = list(ids)
        pieces = [self.piece(i) for i in ids]
        if skip_special:
            pieces = [piece for i, piece in zip(ids, pieces, strict=True) if not self.is_special(i)]
        raw = b"".join(pieces)
        if at_start and self.add_space_prefix:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def stream(self, skip_special: bool = True, *, at_start: bool = True) -> "TextStream":
        return TextStream(self, skip_special, at_start)

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a control or unknown token, which `decode` omits."""
        return self._types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def is_marker(self, token_id: int) -> bool:
        """Return whether the token is extracted from a text before merging."""
        return self._types[token_id] in MARKERS

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be an incomplete character."""
        try:
            index = operator.index(token_id)
        except TypeError:
            raise InvalidArgument(
                f"token id {token_id!r} is a {type(token_id).__name__}, expected an int"
            ) from None
        if (piece := self._pieces.get(index)) is not None:
            return piece
        if not 0 <= index < self.n_vocab:
            raise InvalidArgument(
                f"token id {index} is out of range: the vocabulary has {self.n_vocab} tokens",
                argument="tokens",
            )
        return self._pieces.setdefault(index, self._make_piece(self._tokens[index], self._types[index]))

    def _make_piece(self, text: str, kind: int) -> bytes:
        if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED):
            return text.encode()
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])  # text is <0x41>
        if kind != TokenType.NORMAL:
            return b""
        return self._spell(text)


def whole_characters(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class TextStream:
    """Decodes one id at a time, and holds back bytes until they form a complete character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, at_start: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._strip_space = at_start and tokenizer.add_space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Add an id and return the text that it completes, which may be empty. Raises InvalidArgument for an
        id out of range."""
        piece = self._tokenizer.piece(token_id)
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        if piece and self._strip_space:
            self._strip_space = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return the bytes of an incomplete character as U+FFFD. The stream may continue."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def chat_templates(gguf: GGUF) -> dict[str, str]:
    """Return the file's chat templates by name. The template without a name is "default"."""
    templates = {}
    for key in gguf.metadata:
        name = key.removeprefix("tokenizer.chat_template")
        if name != key and (name == "" or name[0] == "."):
            with suppress(GGUFError):
                templates[name[1:] or "default"] = gguf.string(key)
    return templates


def end_ids(gguf: GGUF) -> frozenset[int]:
    """Return the end-of-sequence token of a file whose tokenizer is missing or unknown."""
    with suppress(GGUFError):
        eos = gguf.u32("tokenizer.ggml.eos_token_id", None)
        return frozenset() if eos is None else frozenset([eos])
    return frozenset()
