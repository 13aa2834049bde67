"""The tool call formats of model families. The chat template identifies the format, because it writes earlier
calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from vkbackend.models.tool_calls.argument_values import resolved, value_of
from vkbackend.models.tool_calls.calls import CallReader
from vkbackend.models.tool_calls.source import AnswerPart, Trying


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call begins with one of the `openers`. `read` reads from the opener and returns whether the text was
    a call. `inner` has other markers that may be control tokens. If `at_start`, an answer that begins with
    "{" may be a call. If `described`, the prompt must describe the tools, because the template does not."""

    name: str
    openers: tuple[str, ...]
    read: Callable[[CallReader], Trying] | None
    inner: tuple[str, ...] = ()
    at_start: bool = False
    described: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.openers, *self.inner)


# ---- JSON between markers ----


def _hermes(r: CallReader) -> Trying:
    yield from r.source.begins("<tool_call>")
    if not (yield from r.call_object()):
        return False
    yield from r.source.skip_space()
    yield from r.source.begins("</tool_call>")
    return True


def _json_answer(r: CallReader) -> Trying:
    yield from r.source.begins("<|python_tag|>")
    n = r.n_calls
    while (yield from r.call_object(r.tools)):
        yield from r.source.skip_space()
        yield from r.source.begins(";", ",")
        yield from r.source.skip_space()
        if r.source.text[:1] != "{":
            break
    return r.n_calls > n


def _lenient(r: CallReader) -> Trying:
    """Read <tool_call> or plain JSON, for templates that do not show a format."""
    if r.source.text.startswith("<tool_call>"):
        return (yield from _hermes(r))
    return (yield from _json_answer(r))


def _mistral(r: CallReader) -> Trying:
    """Read [TOOL_CALLS][{...}, {...}], or since 2025 [TOOL_CALLS]name[ARGS]{...} for each call."""
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


def _row(r: CallReader, closer: str) -> Trying:
    """Read calls in an array [{...}, {...}], and the marker `closer`."""
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


def _phi4(r: CallReader) -> Trying:
    yield from r.source.begins("<|tool_call|>")
    yield from r.source.skip_space()
    return (yield from _row(r, "<|/tool_call|>"))


def _kimi(r: CallReader) -> Trying:
    """Read calls whose id is functions.NAME:INDEX."""
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


CALLS, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


def _deepseek(r: CallReader) -> Trying:
    """DeepSeek V3.1 writes NAME, separator, JSON. Earlier versions write "function", separator, NAME, and
    JSON in a code fence."""
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


# ---- arguments with separate keys ----


def _schema(r: CallReader, name: str, argument: str) -> Any:
    tool = r.tools.get(name)
    properties = tool.get("properties") if isinstance(tool, dict) else None
    schema = properties.get(argument) if isinstance(properties, dict) else None
    return resolved(schema, tool)


def _coder(opener: str, closer: str) -> Callable[[CallReader], Trying]:
    """Return a reader of calls with each parameter on separate lines. The markers around calls are
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
            yield from r.whole(name, (yield from _parameters(r, name)))
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
            r.source.text = mark + r.source.text
        arguments[key] = value_of(text.removeprefix("\n").removesuffix("\n"), _schema(r, name, key))
        yield from r.source.skip_space()
    return arguments


def _glm(r: CallReader) -> Trying:
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


def _gemma(r: CallReader) -> Trying:
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


# ---- choice of the format ----

HERMES = ToolFormat("hermes", ("<tool_call>",), _hermes, ("</tool_call>",))
QWEN_CODER = ToolFormat(
    "qwen3-coder", ("<tool_call>", "<function="), _coder("<tool_call>", "</tool_call>"), ("</tool_call>",)
)
SEED = ToolFormat(
    "seed-oss", ("<seed:tool_call>",), _coder("<seed:tool_call>", "</seed:tool_call>"), ("</seed:tool_call>",)
)
LENIENT = ToolFormat("json", ("<tool_call>", "<|python_tag|>"), _lenient, at_start=True)
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
GPT_OSS = ToolFormat("gpt-oss", (), None)  # models/text/harmony.py reads its calls
GEMMA = ToolFormat("gemma 4", ("<|tool_call>",), _gemma, ("<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = ToolFormat(
    "functiongemma", ("<start_function_call>",), _gemma, ("<end_function_call>", "<escape>")
)
DEEPSEEK = ToolFormat("deepseek", (CALLS,), _deepseek, (CALLS_END, CALL, CALL_END, SEPARATOR))
GENERIC = ToolFormat("generic", (), _json_answer, at_start=True, described=True)

# A template has the first format whose texts all occur in the template.
SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "functions."), GPT_OSS),
    (("<|tool_calls_section_begin|>",), KIMI),
    ((CALLS,), DEEPSEEK),
    (("<arg_key>",), GLM),
    (("<seed:tool_call>",), SEED),
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
    (("tools",), LENIENT),
)
FORMATS = (*dict.fromkeys(format_ for _, format_ in SIGNS), GENERIC)


def format_of(template: str) -> ToolFormat:
    """Return a template's format. The default is plain JSON."""
    return next((format_ for signs, format_ in SIGNS if all(sign in template for sign in signs)), GENERIC)
