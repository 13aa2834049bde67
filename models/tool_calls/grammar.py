"""The grammar that forces an answer to call tools, in the format of the model: llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from vkbackend.models.grammar.structure import json_rule
from vkbackend.models.tool_calls import formats
from vkbackend.models.tool_calls.formats import ToolFormat

Special = Callable[[str], int | None]  # the control token of a text


class CallGrammar:
    """Rules for calls of `tools`, schemas of the arguments by name; `special` tells which markers are control
    tokens: those stand for no text."""

    def __init__(self, format_: ToolFormat, tools: Mapping[str, Any], special: Special) -> None:
        self._format, self._tools, self._special = format_, tools, special
        self._rules: list[str] = []

    def lark(self, *, several: bool) -> str:
        """Rules of which `calls` is the first: one call, or with `several` one or more."""
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
        found = self._tools[name]
        none = {"type": "object", "properties": {}, "additionalProperties": False}
        return found if isinstance(found, dict) and found else none

    def _arguments(self, name: str) -> str:
        return json_rule(json.dumps({"type": "object", **self._schema(name)}))

    def _object(self, name: str, key: str = "arguments") -> str:
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return f'{json.dumps(head)} {self._arguments(name)} "}}"'

    # ---- formats ----

    def _row(self, call: str, several: bool) -> str:
        """One call or several, with what stands around and between them."""
        mark, row = self._mark, ("", '"\\n"', "")
        around: dict[ToolFormat, tuple[str, str, str]] = {
            formats.MISTRAL: (f'{mark("[TOOL_CALLS]")} "["', '", "', '"]"'),
            formats.PHI4: (f'{mark("<|tool_call|>")} "["', '", "', f'"]" {mark("<|/tool_call|>")}'),
            formats.KIMI: (mark("<|tool_calls_section_begin|>"), '""', mark("<|tool_calls_section_end|>")),
            formats.DEEPSEEK: (mark(formats.CALLS), '""', mark(formats.CALLS_END)),
        }
        begin, between, end = around.get(self._format, row)
        if self._format in (formats.LLAMA3, formats.GENERIC, formats.GPT_OSS):
            several = False  # their templates know one call at a time
        more = f" ({between} {call})*" if several else ""
        return f"{begin} {call}{more} {end}"

    def _call(self, name: str) -> str:
        quoted, arguments = json.dumps(name, ensure_ascii=False), self._arguments
        made: dict[ToolFormat, Callable[[], str]] = {
            formats.HERMES: lambda: (
                f'{self._mark("<tool_call>")} "\\n" {self._object(name)} "\\n" {self._mark("</tool_call>")}'
            ),
            formats.QWEN_CODER: lambda: self._by_key(
                name, f"<tool_call>\n<function={name}>\n", "<parameter={}>\n", "\n</parameter>",
                "</function>\n</tool_call>",
            ),
            formats.GLM: lambda: self._by_key(
                name, f"<tool_call>{name}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>",
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
        return made.get(self._format, lambda: self._object(name))()

    def _properties(self, name: str) -> list[tuple[str, Any, bool]]:
        """(argument, schema, whether it must be given), in order."""
        schema = self._schema(name)
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        return [(key, one, key in required) for key, one in properties.items()]

    def _by_key(self, name: str, head: str, opener: str, closer: str, end: str) -> str:
        """Arguments one by one, texts as they stand."""
        parts = [literals(head, self._special)]
        for key, schema, must in self._properties(name):
            opening = literals(opener.replace("{}", key), self._special)
            if isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema:
                value = self._text_up_to(closer)
            elif isinstance(schema, dict) and all(isinstance(one, str) for one in schema.get("enum", [0])):
                value = f"({' | '.join(json.dumps(one) for one in schema['enum'])}) {self._mark(closer)}"
            else:
                value = f"{json_rule(json.dumps(schema))} {self._mark(closer)}"
            parts.append(f'({opening} {value} "\\n"){"" if must else "?"}')
        return " ".join([*parts, literals(end, self._special)])

    def _gemma(self, name: str, opener: str, quote: str, closer: str) -> str:
        must = [self._pair(key, schema, quote) for key, schema, needed in self._properties(name) if needed]
        may = [self._pair(key, schema, quote) for key, schema, needed in self._properties(name) if not needed]
        body = ' "," '.join(must)
        if must:
            body += "".join(f' ("," {pair})?' for pair in may)
        elif may:
            body = f"({' | '.join(may)})?"
        return f'{self._mark(opener)} {json.dumps(f"call:{name}{{")} {body} "}}" {self._mark(closer)}'

    def _pair(self, key: str, schema: Any, quote: str) -> str:
        return f"{json.dumps(key + ':')} {self._gemma_value(schema, quote, 3)}"

    def _gemma_value(self, schema: Any, quote: str, depth: int) -> str:
        """A string between its quotes; rows and objects down to `depth` levels, plain values below."""
        schema = schema if isinstance(schema, dict) else {}
        kind, options = schema.get("type"), schema.get("enum")
        if options and all(isinstance(one, str) for one in options):
            texts = " | ".join(json.dumps(one) for one in options)
            return self._rule(f"{self._mark(quote)} ({texts}) {self._mark(quote)}")
        if kind in ("integer", "number", "boolean", "null") and not options:
            return self._rule(json_rule(json.dumps(schema)))
        if kind == "array" and depth:
            item = self._gemma_value(schema.get("items"), quote, depth - 1)
            return self._rule(f'"[" ({item} ("," {item})*)? "]"')
        if kind == "object" and depth and schema.get("properties"):
            pairs = [self._rule(self._pair(key, one, quote)) for key, one in schema["properties"].items()]
            return self._rule('"{" ' + ' "," '.join(pairs) + ' "}"')
        return self._rule(f"{self._mark(quote)} {self._text_up_to(quote)}")


def literal(text: str, special: Special) -> str:
    """A marker: the control token of this text, or the text."""
    token = special(text)
    return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"


def literals(text: str, special: Special) -> str:
    """A text that may hold markers."""
    parts = (part for part in re.split(r"(<[^<>\n]+>)", text) if part)
    return " ".join(literal(part, special) for part in parts)


def text_up_to(name: str, mark: str, special: Special) -> str:
    """A rule of that name: any text, and the marker that ends it."""
    token = special(mark)
    if token is not None:  # not spelled out in the text either: who reads it sees no difference
        spelled = re.escape(mark).replace("/", r"\/")
        return f"{name}: {name.upper()} <[{token}]>\n{name.upper()}: /(?s:.*)/ & ~/(?s:.*{spelled}.*)/"
    return f"{name}[suffix={json.dumps(mark, ensure_ascii=False)}]: /(?s:.*)/"
