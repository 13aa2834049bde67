"""How families of models write a tool call, each read by a few lines. Which one a model has follows from its
chat template, as it writes the calls of earlier turns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vkbackend.models.tool_calls.reader import ToolReader
from vkbackend.models.tool_calls.source import Trying


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`openers`: what a call or a row of calls begins with; `read` takes it from there, and tells whether it
    was one. `inner`: further markers that may be control tokens. `at_start`: an answer that begins with "{"
    may be one, too. `in_channels`: calls are a channel of their own beside those of thought and answer.
    `described`: in words, where a template knows no tools."""

    name: str
    openers: tuple[str, ...]
    read: Callable[[ToolReader], Trying]
    inner: tuple[str, ...] = ()
    at_start: bool = False
    in_channels: bool = False
    described: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.openers, *self.inner)


# ---- JSON between markers ----


def _hermes(r: ToolReader) -> Trying:
    yield from r.source.begins("<tool_call>")
    if not (yield from r.call_object()):
        return False
    yield from r.source.skip_space()
    yield from r.source.begins("</tool_call>")
    return True


def _json_answer(r: ToolReader) -> Trying:
    """The answer is a call: one of a tool that there is, maybe several behind each other."""
    yield from r.source.begins("<|python_tag|>")
    n = r.n_calls
    while (yield from r.call_object(r.tools)):
        yield from r.source.skip_space()
        yield from r.source.begins(";", ",")
        yield from r.source.skip_space()
        if r.source.text[:1] != "{":
            break
    return r.n_calls > n


def _mistral(r: ToolReader) -> Trying:
    """[TOOL_CALLS][{...}, {...}], or since 2025 [TOOL_CALLS]name[ARGS]{...}, each with its marker."""
    yield from r.source.begins("[TOOL_CALLS]")
    yield from r.source.skip_space()
    if r.source.text[:1] in ("[", "{"):
        return (yield from _row(r, ""))
    name, mark = yield from r.source.until("[ARGS]", "[CALL_ID]", "{")
    id_ = None
    if mark == "[CALL_ID]":
        id_, mark = yield from r.source.until("[ARGS]", "{")
    if not mark or not name.strip():
        return False
    if mark == "{":
        r.source.text = "{" + r.source.text
    yield r.begin(name.strip(), id_)
    yield from r.arguments()
    return True


def _row(r: ToolReader, closer: str) -> Trying:
    """[{...}, {...}] and what closes it."""
    n = r.n_calls
    is_row = (yield from r.source.begins("[")) is not None
    while True:
        if not (yield from r.call_object()):
            return r.n_calls > n
        yield from r.source.skip_space()
        if not is_row or (yield from r.source.begins(",", "]")) != ",":
            break
    if closer:
        yield from r.source.skip_space()
        yield from r.source.begins(closer)
    return True


def _phi4(r: ToolReader) -> Trying:
    yield from r.source.begins("<|tool_call|>")
    yield from r.source.skip_space()
    return (yield from _row(r, "<|/tool_call|>"))


def _kimi(r: ToolReader) -> Trying:
    """The id names the function: functions.NAME:INDEX."""
    yield from r.source.begins("<|tool_calls_section_begin|>")
    n = r.n_calls
    while True:
        yield from r.source.skip_space()
        if (yield from r.source.begins("<|tool_call_begin|>")) is None:
            yield from r.source.begins("<|tool_calls_section_end|>")
            return r.n_calls > n
        id_, mark = yield from r.source.until("<|tool_call_argument_begin|>")
        if not mark:
            return r.n_calls > n
        id_ = id_.strip()
        yield r.begin(id_.removeprefix("functions.").rpartition(":")[0] or id_, id_)
        yield from r.arguments()
        yield from r.source.until("<|tool_call_end|>")


def _gpt_oss(r: ToolReader) -> Trying:
    """A message to functions.NAME: the recipient stands in front of its channel, or behind it."""
    header, mark = yield from r.source.until("<|message|>")
    if not mark or (found := re.search(r"to=functions\.([^\s<]+)", header)) is None:
        return False
    yield r.begin(found[1])
    yield from r.arguments()
    yield from r.source.skip_space()
    yield from r.source.begins("<|call|>", "<|end|>")
    return True


CALLS, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


def _deepseek(r: ToolReader) -> Trying:
    """V3.1: NAME, separator, JSON; before: "function", separator, NAME and JSON in a fence."""
    yield from r.source.begins(CALLS)
    n = r.n_calls
    while True:
        yield from r.source.skip_space()
        if (yield from r.source.begins(CALL)) is None:
            yield from r.source.begins(CALLS_END)
            return r.n_calls > n
        name, mark = yield from r.source.until(SEPARATOR)
        if not mark:
            return r.n_calls > n
        yield from r.source.skip_space()
        if name.strip() == "function" and not r.source.text.startswith("{"):
            name, _ = yield from r.source.until("\n")
            yield from r.source.begins("```json\n", "```json")
        yield r.begin(name.strip())
        yield from r.arguments()
        yield from r.source.until(CALL_END)


# ---- arguments one by one ----


def value_of(text: str, schema: Any) -> Any:
    """What a written argument stands for: text where the schema wants a string, else JSON, else text."""
    wanted = schema.get("type") if isinstance(schema, dict) else None
    if wanted == "string" or (isinstance(wanted, list) and "string" in wanted):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _schema(r: ToolReader, name: str, argument: str) -> Any:
    found = r.tools.get(name)
    properties = found.get("properties") if isinstance(found, dict) else None
    return properties.get(argument) if isinstance(properties, dict) else None


def _qwen_coder(r: ToolReader) -> Trying:
    yield from r.source.begins("<tool_call>")
    yield from r.source.skip_space()
    if (yield from r.source.begins("<function=")) is None:
        return False
    name, mark = yield from r.source.until(">")
    if not mark:
        return False
    arguments: dict[str, Any] = {}
    while True:
        yield from r.source.skip_space()
        if (yield from r.source.begins("<parameter=")) is None:
            break
        key, _ = yield from r.source.until(">")
        text, _ = yield from r.source.until("</parameter>")
        text = text.removeprefix("\n").removesuffix("\n")
        arguments[key] = value_of(text, _schema(r, name, key))
    yield from r.source.begins("</function>")
    yield from r.source.skip_space()
    yield from r.source.begins("</tool_call>")
    yield from r.whole(name, arguments)
    return True


def _glm(r: ToolReader) -> Trying:
    yield from r.source.begins("<tool_call>")
    name, mark = yield from r.source.until("<arg_key>", "</tool_call>")
    name = name.strip()
    if not mark or not name:
        return False
    arguments: dict[str, Any] = {}
    while mark == "<arg_key>":
        key, _ = yield from r.source.until("</arg_key>")
        yield from r.source.until("<arg_value>")
        text, _ = yield from r.source.until("</arg_value>")
        arguments[key.strip()] = value_of(text, _schema(r, name, key.strip()))
        _, mark = yield from r.source.until("<arg_key>", "</tool_call>")
    yield from r.whole(name, arguments)
    return True


def _gemma(r: ToolReader) -> Trying:
    """call:NAME{key:value,...}, strings between quotes of their own."""
    opener = yield from r.source.begins("<|tool_call>", "<start_function_call>")
    text, _ = yield from r.source.until("<tool_call|>", "<end_function_call>")
    found = re.fullmatch(r"\s*call:([^{\s]+)\s*(\{.*\})\s*", text, re.DOTALL)
    quote = '<|"|>' if opener == "<|tool_call>" else "<escape>"
    arguments = _of_gemma(found[2], quote) if found else None
    if found is None or arguments is None:
        return False
    yield from r.whole(found[1], arguments)
    return True


def _of_gemma(text: str, quote: str) -> Any:
    parts = text.split(quote)
    if len(parts) % 2 == 0:
        return None
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    parts[::2] = [re.sub(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)", r'\1"\2"\3', part) for part in parts[::2]]
    try:
        return json.loads("".join(parts))
    except (ValueError, RecursionError):
        return None


# ---- which ----

HERMES = ToolFormat("hermes", ("<tool_call>",), _hermes, ("</tool_call>",))
QWEN_CODER = ToolFormat("qwen3-coder", ("<tool_call>",), _qwen_coder, ("</tool_call>",))
GLM = ToolFormat(
    "glm-4.5", ("<tool_call>",), _glm,
    ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)  # fmt: skip
LLAMA3 = ToolFormat("llama 3", ("<|python_tag|>",), _json_answer, at_start=True)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), _mistral, ("[ARGS]", "[CALL_ID]"))
MISTRAL_ARGS = ToolFormat("mistral with arguments", ("[TOOL_CALLS]",), _mistral, ("[ARGS]", "[CALL_ID]"))
PHI4 = ToolFormat("phi-4", ("<|tool_call|>",), _phi4, ("<|/tool_call|>",))
KIMI = ToolFormat(
    "kimi k2", ("<|tool_calls_section_begin|>",), _kimi,
    ("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
     "<|tool_call_end|>"),
)  # fmt: skip
GPT_OSS = ToolFormat(
    "gpt-oss",
    ("<|channel|>commentary to=functions.", "<|start|>assistant to=functions.", " to=functions."),
    _gpt_oss,
    in_channels=True,
)
GEMMA = ToolFormat("gemma 4", ("<|tool_call>",), _gemma, ("<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = ToolFormat(
    "functiongemma", ("<start_function_call>",), _gemma, ("<end_function_call>", "<escape>")
)
DEEPSEEK = ToolFormat("deepseek", (CALLS,), _deepseek, (CALLS_END, CALL, CALL_END, SEPARATOR))
GENERIC = ToolFormat("generic", (), _json_answer, at_start=True, described=True)

# The first whose texts all stand in a template.
SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "functions."), GPT_OSS),
    (("<|tool_calls_section_begin|>",), KIMI),
    ((CALLS,), DEEPSEEK),
    (("<arg_key>",), GLM),
    (("<function=",), QWEN_CODER),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call|>",), PHI4),
    (("<|tool|>", "<|/tool|>"), PHI4),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA3),
    (("ipython", "parameters"), LLAMA3),
    (("tools",), HERMES),
)
FORMATS = (*dict.fromkeys(found for _, found in SIGNS), GENERIC)


def format_of(template: str) -> ToolFormat:
    """How a model with this chat template calls tools: in plain JSON where that says nothing of tools."""
    return next((found for signs, found in SIGNS if all(sign in template for sign in signs)), GENERIC)
