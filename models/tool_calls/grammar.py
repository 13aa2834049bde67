"""Writes a grammar (in llguidance's Lark) that forces tool calls in the model's format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vkbackend.checks import refused
from vkbackend.models.grammar.structure import json_rule, regex_to_lark
from vkbackend.models.tool_calls import formats
from vkbackend.models.tool_calls.argument_values import kinds_of, resolved
from vkbackend.models.tool_calls.formats import ToolFormat

Special = Callable[[str], int | None]  # text -> its control token


class CallGrammar:
    """Writes grammar rules for calls of `tools`, which maps each function to its argument schema. `special`
    returns a marker's control token, which a grammar names by id, because the token has no text."""

    def __init__(self, format_: ToolFormat, tools: Mapping[str, Any], special: Special) -> None:
        self._format, self._tools, self._special = format_, tools, special
        self._rules: list[str] = []

    def lark(self, *, several: bool) -> str:
        """Return the rules. The first rule, `calls`, matches one call, or one or more calls if `several`."""
        call = self._rule(" | ".join([self._rule(self._call(name)) for name in self._tools]))
        return "\n".join([f"calls: {self._row(call, several)}", *self._rules])

    # ---- pieces ----

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _text_up_to(self, mark: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(text_up_to(name, mark, self._special))
        return name

    def _mark(self, text: str) -> str:
        return literal(text, self._special)

    def _schema(self, name: str) -> dict[str, Any]:
        schema = self._tools[name]
        none = {"type": "object", "properties": {}, "additionalProperties": False}
        return schema if isinstance(schema, dict) and schema else none

    def _arguments(self, name: str) -> str:
        return json_rule(json.dumps({"type": "object", **self._schema(name)}))

    def _object(self, name: str, key: str = "arguments") -> str:
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return f'{json.dumps(head)} {self._arguments(name)} "}}"'

    # ---- formats ----

    def _row(self, call: str, several: bool) -> str:
        mark, row = self._mark, ("", '"\\n"', "")
        around: dict[ToolFormat, tuple[str, str, str]] = {
            formats.MISTRAL: (f'{mark("[TOOL_CALLS]")} "["', '", "', '"]"'),
            formats.PHI4: (f'{mark("<|tool_call|>")} "["', '", "', f'"]" {mark("<|/tool_call|>")}'),
            formats.KIMI: (mark("<|tool_calls_section_begin|>"), '""', mark("<|tool_calls_section_end|>")),
            formats.GLM4: ("", mark(formats.ASSISTANT), ""),
            formats.HUNYUAN: (f'{mark("<tool_calls>")} "\\n"', '"\\n"', f'"\\n" {mark("</tool_calls>")}'),
            formats.HUNYUAN_KEYS: (
                f'{mark("<tool_calls>")} "\\n"',
                '"\\n"',
                f'"\\n" {mark("</tool_calls>")}',
            ),
            formats.HUNYUAN_ARRAY: (f'{mark("<tool_calls>")} "["', '", "', f'"]" {mark("</tool_calls>")}'),
            formats.DEEPSEEK: (mark(formats.CALLS), '""', mark(formats.CALLS_END)),
        }
        begin, between, end = around.get(self._format, row)
        if self._format in (formats.LLAMA3, formats.GENERIC, formats.GPT_OSS):
            several = False  # Templates with these formats write one call per message.
        more = f" ({between} {call})*" if several else ""
        return f"{begin} {call}{more} {end}"

    def _call(self, name: str) -> str:
        quoted, arguments = json.dumps(name, ensure_ascii=False), self._arguments
        rules: dict[ToolFormat, Callable[[], str]] = {
            formats.HERMES: lambda: (
                f'{self._mark("<tool_call>")} "\\n" {self._object(name)} "\\n" {self._mark("</tool_call>")}'
            ),
            formats.QWEN_CODER: lambda: self._by_key(
                name, f"<tool_call>\n<function={name}>\n", "<parameter={}>\n", "\n</parameter>",
                "</function>\n</tool_call>",
            ),
            formats.SEED: lambda: self._by_key(
                name, f"<seed:tool_call>\n<function={name}>\n", "<parameter={}>\n", "\n</parameter>",
                "</function>\n</seed:tool_call>",
            ),
            formats.GLM: lambda: self._by_key(
                name, f"<tool_call>{name}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>",
                "</tool_call>",
            ),
            formats.GLM4: lambda: f'{quoted} "\\n" {arguments(name)}',
            formats.HUNYUAN: lambda: (
                f'{self._mark("<tool_call>")} {quoted} "\\n```json\\n" {arguments(name)} '
                f'"\\n```\\n" {self._mark("</tool_call>")}'
            ),
            formats.HUNYUAN_KEYS: lambda: self._by_key(
                name, f"<tool_call>{name}<tool_sep>\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>",
                "</tool_call>",
            ),
            formats.LLAMA3: lambda: self._object(name, "parameters"),
            formats.MISTRAL_ARGS: lambda: (
                f'{self._mark("[TOOL_CALLS]")} {quoted} {self._mark("[ARGS]")} {arguments(name)}'
            ),
            formats.GPT_OSS: lambda: (
                f'{self._mark("<|channel|>")} {json.dumps(f"commentary to=functions.{name} ")} '
                f'{self._mark("<|constrain|>")} "json" {self._mark("<|message|>")} {arguments(name)}'
            ),
            formats.KIMI: lambda: (
                f'{self._mark("<|tool_call_begin|>")} {json.dumps(f"functions.{name}:")} /[0-9]{{1,3}}/ '
                f'{self._mark("<|tool_call_argument_begin|>")} {arguments(name)} '
                f'{self._mark("<|tool_call_end|>")}'
            ),
            formats.GEMMA: lambda: self._gemma(name, "<|tool_call>", '<|"|>', "<tool_call|>"),
            formats.FUNCTION_GEMMA: lambda: self._gemma(
                name, "<start_function_call>", "<escape>", "<end_function_call>"
            ),
            formats.DEEPSEEK: lambda: (
                f"{self._mark(formats.CALL)} {quoted} {self._mark(formats.SEPARATOR)} {arguments(name)} "
                f"{self._mark(formats.CALL_END)}"
            ),
        }  # fmt: skip
        return rules.get(self._format, lambda: self._object(name))()

    def _properties(self, name: str) -> list[tuple[str, Any, bool]]:
        schema = self._schema(name)
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        return [(key, property_, key in required) for key, property_ in properties.items()]

    def _by_key(self, name: str, head: str, opener: str, closer: str, end: str) -> str:
        """Return a rule for a call in which the markers around each value include the key."""
        before, after = opener.split("{}")
        parts = [literals(head, self._special)]
        for key, schema, must in self._properties(name):
            opening = f"{literals(before, self._special)} {json.dumps(key)} {literals(after, self._special)}"
            value = self._value_by_key(name, schema, closer)
            parts.append(f'({opening} {value} "\\n"){"" if must else "?"}')
        return " ".join([*parts, literals(end, self._special)])

    def _value_by_key(self, name: str, schema: Any, closer: str) -> str:
        """Return a rule for a value and its closing marker. The value is plain text if the schema wants a
        string, else JSON."""
        schema = resolved(schema, self._schema(name))
        kinds, end = kinds_of(schema), self._mark(closer)
        values = _values(schema)
        if values is not None:
            texts = [
                json.dumps(value_ if isinstance(value_, str) else json.dumps(value_)) for value_ in values
            ]
            return f"({' | '.join(texts)}) {end}"
        if "string" not in kinds:
            return f"{self._json(name, schema)} {end}"
        text = self._rule(_text_of(schema)) + f" {end}" if _is_bounded(schema) else self._text_up_to(closer)
        return f'({text} | "null" {end})' if "null" in kinds else text

    def _json(self, name: str, schema: Any) -> str:
        whole = self._schema(name)
        shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        return json_rule(json.dumps({**shared, **schema} if isinstance(schema, dict) else schema))

    def _gemma(self, name: str, opener: str, quote: str, closer: str) -> str:
        pairs = [
            (self._pair(name, key, schema, quote, 4), must) for key, schema, must in self._properties(name)
        ]
        body = _members(pairs)
        return f'{self._mark(opener)} {json.dumps(f"call:{name}{{")} {body} "}}" {self._mark(closer)}'

    def _pair(self, name: str, key: str, schema: Any, quote: str, depth: int) -> str:
        return f"{json.dumps(key + ':')} {self._gemma_value(name, schema, quote, depth)}"

    def _gemma_value(self, name: str, schema: Any, quote: str, depth: int) -> str:
        """Return a rule for a value in Gemma's format, with `quote` around strings. Raises InvalidArgument
        for more than `depth` levels of arrays, objects and alternatives."""
        schema = resolved(schema, self._schema(name))
        mark, inner = self._mark(quote), depth - 1
        if not isinstance(schema, dict) or depth < 0:
            raise refused("tools", name, "its parameters are nested too deep for a call to be forced")
        if (values := _values(schema)) is not None:
            texts = [
                f"{mark} {json.dumps(v)} {mark}" if isinstance(v, str) else json.dumps(json.dumps(v))
                for v in values
            ]
            return self._rule(" | ".join(texts))
        if options := [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
            return self._rule(
                " | ".join(self._gemma_value(name, alternative, quote, inner) for alternative in options)
            )
        kinds = schema.get("type")
        if isinstance(kinds, list):
            options = [{**schema, "type": kind} for kind in kinds]
            return self._rule(
                " | ".join(self._gemma_value(name, alternative, quote, inner) for alternative in options)
            )
        if kinds in ("integer", "number", "boolean", "null"):
            return self._rule(self._json(name, schema))
        if kinds == "array":
            item = self._gemma_value(name, schema.get("items", {"type": "string"}), quote, inner)
            low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
            more = "*" if high is None else f"{{{max(0, low - 1)},{max(0, int(high) - 1)}}}"
            row = f'{item} ("," {item}){more}'
            return self._rule(f'"[" {row if low else f"({row})?"} "]"')
        if kinds == "object" or "properties" in schema:
            needed = schema.get("required") or ()
            pairs = [
                (self._rule(self._pair(name, key, alternative, quote, inner)), key in needed)
                for key, alternative in (schema.get("properties") or {}).items()
            ]
            return self._rule(f'"{{" {_members(pairs)} "}}"')
        if _is_bounded(schema):
            return self._rule(f"{mark} {self._rule(_text_of(schema))} {mark}")
        return self._rule(f"{mark} {self._text_up_to(quote)}")


def _members(pairs: Sequence[tuple[str, bool]]) -> str:
    """Return a rule for comma-separated pairs in this order. A pair's flag is True if the pair is
    required."""
    rest, any_needed = "", False
    for i in reversed(range(len(pairs))):
        pair, needed = pairs[i]
        # `this` matches pairs that begin with this pair. `rest` matches pairs that begin with this or a later
        # pair.
        after = "".join(f' ("," {later})' + ("" if must else "?") for later, must in pairs[i + 1 :])
        this = f"{pair}{after}"
        rest = this if needed else f"({this}" + (f" | {rest})" if rest else ")" + ("" if any_needed else "?"))
        any_needed |= needed
    return rest


def _values(schema: Any) -> list[Any] | None:
    """Return the values of const or enum, or None."""
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum") or None


def _is_bounded(schema: Any) -> bool:
    return isinstance(schema, dict) and any(key in schema for key in ("pattern", "minLength", "maxLength"))


def _text_of(schema: dict[str, Any]) -> str:
    if pattern := schema.get("pattern"):
        whole = ("" if pattern.startswith("^") else "(?s:.*)") + pattern.removeprefix("^").removesuffix("$")
        return "/" + regex_to_lark(whole + ("" if pattern.endswith("$") else "(?s:.*)")) + "/"
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength", "")
    return f"/(?s:.{{{low},{high}}})/"


def literal(text: str, special: Special) -> str:
    token = special(text)
    return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"


def literals(text: str, special: Special) -> str:
    parts = (part for part in re.split(r"(<[^<>\n]+>)", text) if part)
    return " ".join(literal(part, special) for part in parts)


def text_up_to(name: str, mark: str, special: Special) -> str:
    token = special(mark)
    if token is not None:
        # The text must not spell the marker in other tokens, because a parser could not distinguish them from
        # the marker.
        spelled = re.escape(mark).replace("/", r"\/")
        return f"{name}: {name.upper()} <[{token}]>\n{name.upper()}: /(?s:.*)/ & ~/(?s:.*{spelled}.*)/"
    return f"{name}[suffix={json.dumps(mark, ensure_ascii=False)}]: /(?s:.*)/"
