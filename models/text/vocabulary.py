"""Reads and checks the tokens of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.token_roles import TokenType

SPACE = "\u2581"  # a space inside tokens
_BYTE_TEXT = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How text becomes ids. `spell` returns the bytes of a normal token's text. Flags and tokens come from
    the file. If the file lacks them, they are the defaults of this kind of tokenizer. `add_eos` appends
    `close`, or `eos` if `close` is None."""

    encode: Callable[[str], list[int]]
    spell: Callable[[str], bytes]
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    bos: int | None = None
    eos: int | None = None
    close: int | None = None


class Vocabulary:
    """A file's tokens. `ids` maps every text that is not empty to its id."""

    def __init__(self, gguf: GGUF) -> None:
        self.path = gguf.paths[0]
        self._gguf = gguf
        self.tokens = gguf.strings("tokenizer.ggml.tokens")
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        n_empty = 0 if self.ids.pop("", None) is None else self.tokens.count("")
        if len(self.ids) < len(self.tokens) - n_empty:
            twice = next(text for i, text in enumerate(self.tokens) if text and self.ids[text] != i)
            raise GGUFError(f"{self.path}: 'tokenizer.ggml.tokens' holds {twice!r} twice")
        self.types = self._read_types(gguf)

    def __len__(self) -> int:
        return len(self.tokens)

    def _read_types(self, gguf: GGUF) -> list[int]:
        types = gguf.ints("tokenizer.ggml.token_type", None)
        if types is None:
            return [TokenType.NORMAL] * len(self)
        self.check_length("token_type", len(types))
        for i in (types == TokenType.BYTE).nonzero()[0].tolist():
            if not _BYTE_TEXT.fullmatch(self.tokens[i]):
                raise GGUFError(
                    f"{self.path}: byte token {i} is {self.tokens[i]!r}, expected '<0x00>'..'<0xFF>'"
                )
        return types.tolist()

    def check_length(self, name: str, length: int) -> None:
        if length != len(self):
            raise GGUFError(
                f"{self.path}: 'tokenizer.ggml.{name}' has {length} entries for {len(self)} tokens"
            )

    def named(self, name: str, default: int | None = None) -> int | None:
        """Return the token of `tokenizer.ggml.NAME_token_id`. Without this key, return `default` if the
        vocabulary has that id."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._gguf.u32(key, None)
        if value is None:
            return default if default is not None and default < len(self) else None
        if value >= len(self):
            raise GGUFError(f"{self.path}: {key!r} is {value}, the vocabulary has {len(self)} tokens")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self._gguf.boolean(f"tokenizer.ggml.{name}", default)

    def byte_ids(self, unknown: int | None) -> list[int]:
        byte_ids = [self.ids.get(f"<0x{b:02X}>", unknown) for b in range(256)]
        known = [i for i in byte_ids if i is not None]
        if len(known) < 256:
            raise GGUFError(f"{self.path}: the vocabulary has neither all byte tokens nor an unknown token")
        return known


def spell_spaced(text: str) -> bytes:
    return text.replace(SPACE, " ").encode()
