"""Tokenizes a query and a document together, as rerankers read them."""

from __future__ import annotations

from typing import NamedTuple

from vkbackend.errors import InvalidArgument
from vkbackend.models.text.tokenizer import Tokenizer

QUERY, DOCUMENT = "{query}", "{document}"


class Text(NamedTuple):
    """Token ids. The second text of a pair begins at index `second`, which is 0 for a single text."""

    ids: tuple[int, ...]
    second: int = 0


def pair_of(
    tokenizer: Tokenizer, query: str, document: str, template: str | None, most: int | None = None
) -> Text:
    """Return the tokens of a pair. If the file has a template, it is used. If `most` is set, the document is
    truncated so that at most `most` tokens remain. Raises InvalidArgument if the query alone is longer."""
    text = _pair(tokenizer, query, document, template)
    if most is None or len(text.ids) <= most:
        return text
    ids = tokenizer.encode(document, add_special=False)
    n_left = len(ids)
    while len(text.ids) > most:
        # A truncated document may have other tokens at its end, so one pass may not be enough.
        n_left -= max(1, len(text.ids) - most)
        if n_left < 1:
            raise InvalidArgument(
                f"the query fills the {most} tokens of a text; shorten the query", argument="query"
            )
        text = _pair(tokenizer, query, tokenizer.decode(ids[:n_left]), template)
    return text


def _pair(tokenizer: Tokenizer, query: str, document: str, template: str | None) -> Text:
    if template is None:
        return Text(*tokenizer.encode_pair(query, document))
    prompt, spans = _filled(template, {QUERY: query, DOCUMENT: document})
    return Text(tuple(tokenizer.encode(prompt, parse_special=True, plain=spans)))


def _filled(template: str, values: dict[str, str]) -> tuple[str, list[tuple[int, int]]]:
    """Replace the names in the template. Return the text, and the (begin, end) of each value in it. Special
    tokens in the values are ordinary text, because documents come from anywhere."""
    out, spans = "", list[tuple[int, int]]()
    while template:
        at, name = min((template.find(name) % (len(template) + 1), name) for name in values)
        if not template.startswith(name, at):
            return out + template, spans
        out += template[:at]
        spans.append((len(out), len(out) + len(values[name])))
        out += values[name]
        template = template[at + len(name) :]
    return out, spans
