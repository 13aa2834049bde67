"""Prompts for fill in the middle (FIM), as in llama-server's `/infill`. The order is the project's other
files, the file's name, the prefix, and the suffix.
"""

from __future__ import annotations

from collections.abc import Mapping

from vkbackend.errors import UnsupportedModel
from vkbackend.models.text.tokenizer import Tokenizer

PROJECT, FILE_NAME = "myproject", "filename"  # As in llama.cpp.
_SNIPPET = "\n\n--- snippet ---\n\n"  # Used if the vocabulary has no separator.
_NEEDED = ("pre", "suf", "mid")


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    *,
    files: Mapping[str, str] | None = None,
    suffix_first: bool = False,
) -> list[int]:
    """Return the prompt's ids. Special tokens in the texts are plain text.

    `files` maps names of other files to their texts. With `suffix_first` the suffix precedes the prefix
    (llama.cpp's `--spm-infill`). Raises UnsupportedModel if the vocabulary lacks a FIM token.
    """
    fim = tokenizer.fim_ids
    if missing := [name for name in _NEEDED if name not in fim]:
        has = ", ".join(sorted(fim)) or "none"
        raise UnsupportedModel(
            f"infill: the vocabulary has no token for {', '.join(missing)} (it has: {has}); take a model "
            "that was trained to fill in the middle, or write the prompt yourself"
        )

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    out = [fim["rep"], *plain(f"{PROJECT}\n")] if "rep" in fim else []
    for name, text in (files or {}).items():
        head = [fim["sep"], *plain(f"{name}\n")] if "sep" in fim else plain(_SNIPPET)
        out += [*head, *plain(text)]
    if "sep" in fim:
        out += [fim["sep"], *plain(f"{FILE_NAME}\n")]
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        out.append(tokenizer.bos_id)
    before, after = [fim["pre"], *plain(prefix)], [fim["suf"], *plain(suffix)]
    out += [*after, *before] if suffix_first else [*before, *after]
    return [*out, fim["mid"]]
