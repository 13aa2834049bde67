"""Random grammars, schemas and chat templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from material import DATA

from fuzz.damage import damaged
from fuzz.kind import Wrong
from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.generate_options import GenerateOptions
from vkbackend.models.grammar.compiler import Compiler, Vocabulary
from vkbackend.models.text.chat_template import ChatTemplate

# ---- grammars ----

VOCABULARY = Vocabulary((*(bytes([b]) for b in range(256)), b"", b'{"', b"<|end|>"), (256, 258), (258,))
N_TAKEN = 40
COMPILE_S = 60.0
GBNF = (
    'root ::= "a"', 'root ::= [a-z]+ " " n\nn ::= [0-9]{1,3} | "x"*', 'root ::= ("a" | root "b")?',
    'root ::= object\nobject ::= "{" (pair ("," pair)*)? "}"\npair ::= "\\"" [^"]* "\\":" [0-9]+',
)  # fmt: skip
LARK = ('start: "a" b+\nb: /[0-9]/ | "x"', "start: A\nA: /a{2,5}/", 'start: %json {"type":"integer"}')
REGEX = (r"[a-z]{2,9}(\d+|x)?", r"(a|b|c)*d", r"\p{L}+ \w+", r"(?i)yes|no", r"[^\n]{1,200}")
SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {
        "a": {"type": "integer", "minimum": 1, "maximum": 30},
        "b": {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "maxItems": 3},
        "c": {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"const": None}]},
    },
    "$defs": {"d": {"enum": ["x", 1, None]}},
}  # fmt: skip
SCHEMA_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 40, 0.5, "", "^(a+)+$", "(", "#", "#/$defs/none", "http://a.example", [], {},
    [{}],
    {"$ref": "#"}, {"not": {}}, {"type": "array"}, {"type": ["string", "null"]},
    {"allOf": [{}, {"$ref": "#"}]},
    {"format": "date-time", "type": "string"}, {"multipleOf": 7, "type": "integer"}, {"uniqueItems": True},
    {"patternProperties": {"^x": {}}}, {"if": {}, "then": False}, {"minLength": 10_000_000, "type": "string"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"maxItems": -1}, {"enum": []}, "integer", "object",
)  # fmt: skip
PIECES = tuple(
    piece.encode()
    for piece in ("::=", "|", "(", ")", "[", "]", "*", "+", "?", "{1,1000000}", "{,}", '"', "\\",
                  "\\u{110000}", "/", "root", "%json {}", "%regex", "%import", "\n", "$", "^", ".", "(?=a)",
                  "\\p{", "\ud7ff", "#", "~", "\\Z")
)  # fmt: skip


class Grammars:
    """A case is the name of an option, a line break, and its text."""

    deadline_s = 3 * COMPILE_S

    def __init__(self, folder: Path) -> None:
        self._compiler: Compiler | None = None

    def make(self, rng: random.Random) -> bytes:
        name = rng.choice(("grammar", "lark", "regex", "json_schema", "json_schema"))
        if name == "json_schema" and rng.random() < 0.9:
            schema: Any = SCHEMA
            for _ in range(rng.choice((1, 1, 2, 3))):
                schema = other_json(rng, schema)
            text = json.dumps(schema).encode()
        else:
            sources = {"grammar": GBNF, "lark": LARK, "regex": REGEX, "json_schema": (json.dumps(SCHEMA),)}
            text = damaged(rng, rng.choice(sources[name]).encode(), PIECES)
        return name.encode() + b"\n" + text

    def check(self, case: bytes) -> str:
        name, _, raw = case.partition(b"\n")
        if name not in (b"grammar", b"lark", b"regex", b"json_schema"):
            return "refused"
        text, rng = raw.decode(errors="surrogateescape"), random.Random(raw)
        self._compiler = self._compiler or Compiler(VOCABULARY)
        try:
            options: dict[str, Any] = {name.decode(): text}
            structure = GenerateOptions(seed=0, **options).structure
            if structure is None:
                return "refused"
            matcher = self._compiler.start(self._compiler.compile(structure).result(COMPILE_S))
            written = b""
            for _ in range(N_TAKEN):
                matcher.find()
                token = int(rng.choice(matcher.allowed(len(VOCABULARY.pieces))))
                matcher.take(token)
                if token == 258:
                    break
                written += VOCABULARY.pieces[token]
        except VkbackendError:
            return "refused"
        if name == b"json_schema" and token == 258:
            try:
                json.loads(written)
            except ValueError:
                raise Wrong("the answer of a schema is not JSON") from None
        return "accepted"

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


def other_json(rng: random.Random, value: Any) -> Any:
    """Return JSON in which one value is replaced by another value."""
    if not value or not isinstance(value, dict | list) or rng.random() < 0.2:
        return rng.choice(SCHEMA_VALUES)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], other_json(rng, value[at]), *value[at + 1 :]]
    name = rng.choice(list(value))
    if rng.random() < 0.2:
        name = rng.choice(("items", "not", "$ref", "pattern", "type", "format", "minLength", "x"))
    return value | {name: other_json(rng, value.get(name))}


# ---- templates ----

TEMPLATE_PIECES = tuple(
    piece.encode()
    for piece in ("{{", "}}", "{%", "%}", "{% for m in messages %}", "{% endfor %}", "{% if a %}",
                  "{% endif %}", "{{ messages | tojson }}", "{{ 9 ** 9 ** 9 }}",
                  "{{ 'x' * 10 ** 9 }}", "{{ ().__class__ }}",
                  "{% set a = messages %}", "{{ raise_exception('a') }}",
                  "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
                  "{{ range(10 ** 9) | list }}", "{% break %}", "{% raw %}", "| sort", "| map('upper')",
                  "[::-1]", "(" * 99,
                  "{{ '%s' % messages }}", "{{ strftime_now('%') }}", "{% generation %}", "{{ self }}",
                  "{# ", "-%}", "\x00")
)  # fmt: skip
CONTENTS: tuple[Any, ...] = (
    "Hi", "", "{{ 1 }}", "\ud800", "\x00", "x" * 10_000, None, 1, ["a"], {"a": 1},
    [{"type": "text", "text": "a"}],
    [{"type": "image"}], "</think>a<think>", [[[[]]]], 1e308, True,
)  # fmt: skip
ROLES: tuple[Any, ...] = ("user", "assistant", "system", "tool", "x", "", None, 1)


class Templates:
    """A case is JSON with a template's source and messages. Each source needs a process."""

    deadline_s = 90.0

    def __init__(self, folder: Path) -> None:
        self._sources = [path.read_bytes() for path in sorted((DATA / "templates").glob("*.jinja"))]

    def make(self, rng: random.Random) -> bytes:
        source = rng.choice(self._sources)
        if rng.random() < 0.7:
            begin = rng.randrange(len(source))
            source = damaged(rng, source[begin : begin + rng.choice((50, 300, 20_000))], TEMPLATE_PIECES)
        talks = [[random_message(rng) for _ in range(rng.randrange(5))] for _ in range(5)]
        return json.dumps([source.decode(errors="replace"), talks]).encode()

    def check(self, case: bytes) -> str:
        try:
            source, talks = json.loads(case)
            talks = [[dict(message) for message in talk] for talk in talks]
        except (ValueError, TypeError, RecursionError):
            return "no case"
        end = "refused"
        try:
            template = ChatTemplate(source, "<s>", "</s>")
        except InvalidArgument:
            return end
        for talk in talks:
            try:
                if not isinstance(template.render(talk), str):
                    raise Wrong("the prompt is not a str")
                end = "accepted"
            except InvalidArgument:
                pass
        return end


def random_message(rng: random.Random) -> dict[str, Any]:
    message = {"role": rng.choice(ROLES[: rng.choice((2, 4, 8))]), "content": rng.choice(CONTENTS)}
    if rng.random() < 0.2:
        call = {
            "function": {"name": rng.choice(("f", None, 3)), "arguments": rng.choice(({}, "{}", None, "{"))}
        }
        message["tool_calls"] = rng.choice(
            ([call], call, [], [None], "x", [{"id": "c", "type": "function"} | call])
        )
    if rng.random() < 0.2:
        message[rng.choice(("reasoning_content", "tool_call_id", "name", "x"))] = rng.choice(CONTENTS)
    return message
