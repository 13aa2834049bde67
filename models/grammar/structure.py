"""The structure that a caller wants for an answer. A JSON Schema, a regular expression or a grammar is
checked and translated to llguidance's Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument, UnsupportedFeature

MAX_NBYTES = 1 << 17  # Limit for schemas and grammars. A schema of 3,000 properties compiles in 3 s.
MAX_DEPTH = 64
# White space in JSON is at most one space, or a line break and an indent. Without a limit, a model could
# write white space forever.
WHITE_SPACE = r"( |\n[ \t]{0,20})?"
# With "no_forcing", a valid text may have any tokenization, so the model can write the tokens it was trained
# on.
PREAMBLE = '%llguidance {"no_forcing": true}\n'

KEYWORDS = ("json_schema", "json_object", "regex", "lark", "grammar")
Kind = Literal["json_schema", "regex", "lark", "grammar"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure as `text` in the language `kind`. The kind "grammar" is llama.cpp's GBNF. A regular
    expression has Rust's syntax and matches the complete answer."""

    kind: Kind
    text: str

    def lark(self) -> str:
        """Return the structure in llguidance's Lark. Raises InvalidArgument if a "grammar" is not GBNF."""
        if self.kind == "json_schema":
            return f"{PREAMBLE}start: {json_rule(self.text)}"
        if self.kind == "regex":
            return f"{PREAMBLE}start: /{regex_to_lark(self.text)}/"
        return PREAMBLE + (self.text if self.kind == "lark" else _of_gbnf(self.text))


def regex_to_lark(regex: str) -> str:
    from llguidance import regex_to_lark as of_library

    return str(of_library(regex))


def json_rule(schema: str) -> str:
    parsed = json.loads(schema)
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"enum": []}
    return "%json " + json.dumps(parsed | {"x-guidance": {"whitespace_pattern": WHITE_SPACE}})


def _of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except (Exception, RecursionError) as error:
        message = " ".join(str(error).split())[:500] or type(error).__name__
        raise InvalidArgument(f"grammar: this is not GBNF: {message}", argument="grammar") from None


# ---- checks ----


def _bounded(name: str, text: str) -> str:
    if (nbytes := len(text.encode(errors="surrogatepass"))) > MAX_NBYTES:
        raise refused(name, f"{text[:60]}...", f"it has {nbytes} bytes, at most {MAX_NBYTES} are taken")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise refused(name, text, "it holds characters that no text has")
    return text


def grammar_text(name: str, value: Any) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise refused(name, value, "expected a str")
    if name == "lark" and "%llguidance" in value:
        raise refused(name, value, "its %llguidance line is given already; leave it out")
    return _bounded(name, value)


def schema_text(name: str, value: Any) -> str | None:
    """Return compact JSON text. `value` is a text, a dict, a bool, or a class with `model_json_schema()`
    (pydantic)."""
    expected = "expected a JSON Schema: a dict, or its text"
    if value is None or value == "":
        return None
    if isinstance(value, type) and callable(make := getattr(value, "model_json_schema", None)):
        value = make()
    if isinstance(value, str):
        try:
            value = json.loads(_bounded(name, value))
        except (ValueError, RecursionError) as error:
            raise refused(name, value, f"{expected}; this text is not JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise refused(name, value, expected)
    if _is_deep(value):
        raise refused(name, value, f"it is nested deeper than {MAX_DEPTH} levels")
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refused(name, value, f"{expected}; it cannot be written as JSON: {error}") from None
    return _bounded(name, text)


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, Sequence) and not isinstance(item, str | bytes):
                inner += item
        if not inner:
            return False
        level = inner
    return True


def structure_of(
    json_schema: str | None, json_object: bool, regex: str | None, lark: str | None, grammar: str | None
) -> Structure | None:
    """Raises InvalidArgument for several structures, and UnsupportedFeature without llguidance."""
    any_object = '{"type":"object"}' if json_object else None
    given: list[tuple[str, Kind, str | None]] = [
        ("json_schema", "json_schema", json_schema), ("json_object", "json_schema", any_object),
        ("regex", "regex", regex), ("lark", "lark", lark), ("grammar", "grammar", grammar),
    ]  # fmt: skip
    structures = [(name, Structure(kind, text)) for name, kind, text in given if text is not None]
    if not structures:
        return None
    if len(structures) > 1:
        names = ", ".join(name for name, _ in structures)
        raise InvalidArgument(f"{names}: an answer can follow one of them; leave out the others")
    if find_spec("llguidance") is None:
        raise UnsupportedFeature(
            f"{structures[0][0]} needs llguidance, which is not installed: pip install 'vkbackend[grammar]'"
        )
    return structures[0][1]
