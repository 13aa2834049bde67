"""Parse calls that write each argument as a separate key and value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any

from vkbackend.models.tool_calls.argument_values import resolved, value_of
from vkbackend.models.tool_calls.calls import CallReader
from vkbackend.models.tool_calls.json_formats import FENCE, row
from vkbackend.models.tool_calls.source import AnswerPart, Trying


def _schema(r: CallReader, name: str, argument: str) -> Any:
    tool = r.tools.get(name)
    properties = tool.get("properties") if isinstance(tool, dict) else None
    schema = properties.get(argument) if isinstance(properties, dict) else None
    return resolved(schema, tool)


def coder(opener: str, closer: str) -> Callable[[CallReader], Trying]:
    """Return a parser of calls with each parameter on separate lines. The markers around calls are
    optional."""

    def read(r: CallReader) -> Trying:
        yield from r.source.begins(opener)
        n = r.n_calls
        while True:
            yield from r.source.skip_space()
            if (yield from r.source.begins("<function=")) is None:
                break
            name, mark = yield from r.source.until(">")
            if not mark:
                return r.n_calls > n
            arguments = yield from _parameters(r, name)
            if r.source.is_cut_off:
                return r.n_calls > n
            yield from r.whole(name, arguments)
            yield from r.source.begins("</function>")
        yield from r.source.begins(closer)
        return r.n_calls > n

    return read


def _parameters(r: CallReader, name: str) -> Generator[AnswerPart | None, None, dict[str, Any]]:
    arguments: dict[str, Any] = {}
    yield from r.source.skip_space()
    while (yield from r.source.begins("<parameter=")) is not None:
        key, _ = yield from r.source.until(">")
        ends = "</parameter>", "\n<parameter=", "\n</function>"
        text, mark = yield from r.source.until(*ends)
        if mark and mark != ends[0]:
            r.source.put_back(mark)
        arguments[key] = value_of(text.removeprefix("\n").removesuffix("\n"), _schema(r, name, key))
        yield from r.source.skip_space()
    return arguments


def glm(r: CallReader) -> Trying:
    yield from r.source.begins("<tool_call>")
    name, mark = yield from r.source.until("<arg_key>", "</tool_call>")
    if not mark or not name.strip():
        return False
    return (yield from _pairs(r, name.strip(), mark))


def _pairs(r: CallReader, name: str, mark: str) -> Trying:
    """Read pairs of a key and a value, up to </tool_call>. `mark` was read last."""
    arguments: dict[str, Any] = {}
    while mark == "<arg_key>":
        key, _ = yield from r.source.until("</arg_key>")
        yield from r.source.until("<arg_value>")
        text, _ = yield from r.source.until("</arg_value>")
        arguments[key.strip()] = value_of(text, _schema(r, name, key.strip()))
        _, mark = yield from r.source.until("<arg_key>", "</tool_call>")
    if r.source.is_cut_off:
        return False
    yield from r.whole(name, arguments)
    return True


def hunyuan(r: CallReader) -> Trying:
    """Read <tool_calls> with an array of calls, or with a <tool_call> for each call. A <tool_call> contains
    the name, and JSON in a code fence or pairs of a key and a value."""
    n = r.n_calls
    is_section = (yield from r.source.begins("<tool_calls>")) is not None
    yield from r.source.skip_space()
    if is_section and r.source.text[:1] in ("[", "{"):
        return (yield from row(r, "</tool_calls>"))
    while (yield from r.source.begins("<tool_call>")) is not None:
        if not (yield from _hunyuan_call(r)):
            return r.n_calls > n
        yield from r.source.skip_space()
        if not is_section:
            return True
    if is_section:
        yield from r.source.begins("</tool_calls>")
    return r.n_calls > n


def _hunyuan_call(r: CallReader) -> Trying:
    ends = FENCE, "{", "<arg_key>", "</tool_call>"
    name, mark = yield from r.source.until("<tool_sep>", *ends)
    if mark == "<tool_sep>":
        rest, mark = yield from r.source.until(*ends)
        name = rest.strip() or name  # For function<tool_sep>NAME.
    name = name.strip()
    if mark == "{" and not name:
        r.source.put_back(mark)
        is_call = yield from r.call_object()
    elif not mark or not name:
        return False
    elif mark in ("<arg_key>", "</tool_call>"):
        return (yield from _pairs(r, name, mark))
    else:
        if mark == FENCE:
            yield from r.source.skip_space()
            yield from r.source.begins("json")
        else:
            r.source.put_back(mark)
        yield r.begin(name)
        yield from r.arguments()
        is_call = True
    yield from r.source.skip_space()
    yield from r.source.begins(FENCE)
    yield from r.source.skip_space()
    yield from r.source.begins("</tool_call>")
    return is_call


def gemma(r: CallReader) -> Trying:
    """Read call:NAME{key:value,...}, with Gemma's quote markers around strings."""
    opener = yield from r.source.begins("<|tool_call>", "<start_function_call>")
    text, _ = yield from r.source.until("<tool_call|>", "<end_function_call>")
    call = re.fullmatch(r"\s*call:([^{\s]+)\s*(\{.*\})\s*", text, re.DOTALL)
    quote = '<|"|>' if opener == "<|tool_call>" else "<escape>"
    arguments = _of_gemma(call[2], quote) if call else None
    if call is None or arguments is None:
        return False
    yield from r.whole(call[1], arguments)
    return True


def _of_gemma(text: str, quote: str) -> Any:
    """Return the value of arguments in Gemma's format, in which keys and strings may lack quotes, or None for
    invalid text."""
    parts = text.split(quote)
    if len(parts) % 2 == 0:
        return None
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([{,]\s*)([^\s{}\[\],:\"][^{}\[\],:\"]*?)(\s*:)", _quoted, parts[i])
        parts[i] = re.sub(r"([:\[,]\s*)([^\s{}\[\],:\"][^{}\[\],:\"]*?)(\s*(?=[,\]}]))", _quoted, parts[i])
    try:
        return json.loads("".join(parts))
    except (ValueError, RecursionError):
        return None


def _quoted(match: re.Match[str]) -> str:
    word = match[2]
    is_json = re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|null", word)
    keeps = is_json and not match[3].strip().endswith(":")
    return match[0] if keeps else f"{match[1]}{json.dumps(word)}{match[3]}"
