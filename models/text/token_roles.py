"""Finds the roles of tokens by their texts, because converters often omit roles, such as control token or end
of generation. The rules are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens of these types are extracted from a text before merging.
MARKERS = (TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN)

_ENDS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <|endoftext|> "
    "<|end_of_text|> <end_of_turn> <end_of_utterance> <EOT> _<EOT> [EOT] [EOS] [e~[ <turn|> "
    "<|tool_response> <eos> </s>".split()
) | {"<\uff5cend\u2581of\u2581sentence\uff5c>"}
# Models write these tokens at the end of a file. A GGUF key names the token. Without the key, the first of
# these texts that is a token has the role.
_FILE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FILE_PARTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>",
                "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
                "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>",
                "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
}  # fmt: skip
_FORMER_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
# gpt-oss marks thoughts and answers with these tokens, so a reply's text includes them.
_CHANNELS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
_END_OF_MESSAGE = ({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"},
                   {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})  # fmt: skip

WHITE_SPACE = " \t\n\v\f\r"
_NOT_STRIPPING = frozenset(("<unk>", "<s>", "<|endoftext|>"))


def settle_roles(
    ids: Mapping[str, int], types: list[int], named: Callable[[str], int | None]
) -> tuple[frozenset[int], dict[str, int]]:
    """Correct `types`. Return the tokens that end a generation, and the fill-in-the-middle tokens by short
    name. `named(key)` returns the file's token for a key."""
    ends = {ids[text] for text in _ENDS & ids.keys()}
    for i in ends:
        types[i] = TokenType.CONTROL
    fim = dict[str, int]()
    for name, texts in (_FILE_ENDS | _FILE_PARTS).items():
        token = named(_FORMER_KEYS[name]) if name in _FORMER_KEYS else None
        if token is None and (token := named(name)) is None:
            token = next((ids[text] for text in texts if text in ids), None)
            if token is not None:
                types[token] = TokenType.CONTROL
        if token is not None:
            fim[name.removeprefix("fim_")] = token
            if name in _FILE_ENDS:
                ends.add(token)
    for text in _CHANNELS & ids.keys():
        types[ids[text]] = TokenType.USER_DEFINED
    ends.update(token for token in map(named, ("eos", "eot", "eom")) if token is not None)
    if "<|end|>" in ids and any(both <= ids.keys() for both in _END_OF_MESSAGE):
        ends.discard(ids["<|end|>"])  # <|end|> ends a message, but not the turn.
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
    if {"<|tool_response>", "</s>"} <= ids.keys():
        ends.discard(ids["</s>"])  # an HTML tag in Gemma 4
        types[ids["</s>"]] = TokenType.NORMAL
    return frozenset(ends), fim


def stripping(name: str, ids: Mapping[str, int], types: list[int]) -> frozenset[int]:
    """Return Phi-3's tokens that drop the white space after them. `name` is the model's name."""
    if not any(phi in name.lower() for phi in ("phi-3", "phi3")):
        return frozenset()
    return frozenset(i for text, i in ids.items() if types[i] in MARKERS and text not in _NOT_STRIPPING)
