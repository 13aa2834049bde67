"""Converts arguments from plain text to values, as the tool's JSON Schema requires."""

from __future__ import annotations

import json
from typing import Any


def value_of(text: str, schema: Any) -> Any:
    """Return an argument's value. If the schema wants a string, or `text` is invalid JSON, the value is
    `text`."""
    kinds, word = kinds_of(schema), text.strip()
    if "null" in kinds and word.lower() in ("null", "none"):
        return None
    if "string" in kinds:
        return text
    if word in ("True", "False"):  # Python's spelling
        return word == "True"
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # JSON has no NaN


_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def kinds_of(schema: Any) -> set[str]:
    """Return the types of a schema, including the types of its listed values and of its alternatives."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    kinds = {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)}
    values = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    kinds |= {_KINDS[type(value)] for value in values if type(value) in _KINDS}
    for alternative in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        kinds |= kinds_of(alternative)
    return kinds


def resolved(schema: Any, whole: Any) -> Any:
    """Return the schema that `schema`'s $ref names in `whole`. Without $ref, return `schema`."""
    for _ in range(8):
        where = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(where, str) or not where.startswith("#/"):
            return schema
        target = whole
        for key in where[2:].split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        schema = target
    return schema
