"""Parse calls whose arguments are a JSON object."""

from __future__ import annotations

from vkbackend.models.tool_calls.calls import CallReader
from vkbackend.models.tool_calls.source import Trying

FENCE = "```"
FENCE_LANGUAGES = ("", "json", "xml", "tool_call", "tool_calls")
MISTRAL_MARKS = ("[ARGS]", "[CALL_ID]", "{")
ASSISTANT = "<|assistant|>"
NAME_STARTS = ("\n", ASSISTANT, f"{ASSISTANT}\n")  # Texts before a name in GLM-4.
CALLS, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


def hermes(r: CallReader) -> Trying:
    """Read a call between <tool_call> and </tool_call>, or calls in a code fence."""
    if r.source.text.startswith(FENCE):
        return (yield from fenced(r))
    yield from r.source.begins("<tool_call>")
    yield from r.source.skip_space()
    is_fenced = (yield from r.source.begins(FENCE)) is not None
    if is_fenced:
        yield from r.source.skip_space()
        yield from r.source.begins("json")
    if not (yield from r.call_object()):
        return False
    yield from r.source.skip_space()
    if is_fenced:
        yield from r.source.begins(FENCE)
        yield from r.source.skip_space()
    yield from r.source.begins("</tool_call>")
    return True


def fenced(r: CallReader) -> Trying:
    """Read calls in a code fence. Calls without <tool_call> must name a known function."""
    yield from r.source.begins(FENCE)
    if r.n_fences % 2:  # A closing fence.
        return False
    language, mark = yield from r.source.until("\n", "{", "<", "`")
    if language.strip() not in FENCE_LANGUAGES:
        return False
    r.source.put_back(mark)
    n = r.n_calls
    while True:
        yield from r.source.skip_space()
        is_marked = (yield from r.source.begins("<tool_call>")) is not None
        if not (yield from r.call_object(None if is_marked else r.tools)):
            return r.n_calls > n
        yield from r.source.skip_space()
        if is_marked:
            yield from r.source.begins("</tool_call>")
            yield from r.source.skip_space()
        if (yield from r.source.begins(FENCE)) is not None:
            return True


def json_answer(r: CallReader) -> Trying:
    yield from r.source.begins("<|python_tag|>")
    n = r.n_calls
    while (yield from r.call_object(r.tools)):
        yield from r.source.skip_space()
        yield from r.source.begins(";", ",")
        yield from r.source.skip_space()
        if r.source.text[:1] != "{":
            break
    return r.n_calls > n


def lenient(r: CallReader) -> Trying:
    """Read <tool_call>, a code fence or plain JSON, for templates that do not show a format."""
    if r.source.text.startswith(("<tool_call>", FENCE)):
        return (yield from hermes(r))
    return (yield from json_answer(r))


def mistral(r: CallReader) -> Trying:
    """Read [TOOL_CALLS][{...}, {...}], or since 2025 [TOOL_CALLS]name[ARGS]{...} for each call. Later calls
    may lack [TOOL_CALLS]."""
    yield from r.source.begins("[TOOL_CALLS]")
    yield from r.source.skip_space()
    if r.source.text[:1] in ("[", "{"):
        return (yield from row(r, ""))
    name, mark = yield from r.source.until(*MISTRAL_MARKS)
    if not mark or not name.strip():
        return False
    heads = {name + mark: (name, mark) for name in r.tools for mark in MISTRAL_MARKS}
    while True:
        id_ = None
        if mark == "[CALL_ID]":
            id_, mark = yield from r.source.until("[ARGS]", "{")
            if not mark:
                return False
        if mark == "{":
            r.source.put_back(mark)
        yield r.begin(name.strip(), id_)
        yield from r.arguments()
        yield from r.source.skip_space()
        if (yield from r.source.begins(",")) is not None:
            yield from r.source.skip_space()
        head = yield from r.source.begins(*heads)
        if head is None:
            return True
        name, mark = heads[head]


def row(r: CallReader, closer: str) -> Trying:
    """Read calls in an array [{...}, {...}] or in succession, and the marker `closer`."""
    n = r.n_calls
    is_row = (yield from r.source.begins("[")) is not None
    while True:
        if not (yield from r.call_object()):
            return r.n_calls > n
        yield from r.source.skip_space()
        between = yield from r.source.begins(",", "]") if is_row else r.source.begins(",", ";")
        if between == "]":
            break
        if between is not None:
            yield from r.source.skip_space()
        if r.source.text[:1] != "{":
            break
    if closer:
        yield from r.source.skip_space()
        yield from r.source.begins(closer)
    return True


def phi4(r: CallReader) -> Trying:
    yield from r.source.begins("<|tool_call|>")
    yield from r.source.skip_space()
    return (yield from row(r, "<|/tool_call|>"))


def kimi(r: CallReader) -> Trying:
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


def deepseek(r: CallReader) -> Trying:
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


def glm4(r: CallReader) -> Trying:
    """Read a known function's name, a line end and its arguments, for each call."""
    names = {f"{name}\n": name for name in r.tools}
    n = r.n_calls
    while True:
        yield from r.source.skip_space()
        yield from r.source.begins(ASSISTANT)
        yield from r.source.skip_space()
        head = yield from r.source.begins(*names)
        if head is None:
            return r.n_calls > n
        yield from r.source.skip_space()
        is_fenced = (yield from r.source.begins("```json", FENCE)) is not None
        if is_fenced:
            yield from r.source.skip_space()
            yield from r.source.begins("json")
            yield from r.source.skip_space()
        if not r.source.text.startswith("{"):
            return r.n_calls > n
        yield r.begin(names[head])
        yield from r.arguments()
        if is_fenced:
            yield from r.source.skip_space()
            yield from r.source.begins(FENCE)
