"""The tool call formats of model families. The chat template identifies the format, because it writes earlier
calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vkbackend.models.tool_calls import json_formats, keyed_formats
from vkbackend.models.tool_calls.calls import CallReader
from vkbackend.models.tool_calls.json_formats import (
    ASSISTANT,
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    FENCE,
    SEPARATOR,
)
from vkbackend.models.tool_calls.source import Trying


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call begins with one of the `openers`. `read` reads text that begins with an opener, and returns
    whether the text was a call. `inner` lists other markers that may be control tokens. If `at_start`, an
    answer that begins with "{" may be a call. If `by_name`, a line that is only a function's name may begin a
    call. If `described`, the prompt must describe the tools, because the template does not."""

    name: str
    openers: tuple[str, ...]
    read: Callable[[CallReader], Trying] | None
    inner: tuple[str, ...] = ()
    at_start: bool = False
    by_name: bool = False
    described: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.openers, *self.inner)


HERMES = ToolFormat("hermes", ("<tool_call>", FENCE), json_formats.hermes, ("</tool_call>",))
QWEN_CODER = ToolFormat(
    "qwen3-coder",
    ("<tool_call>", "<function="),
    keyed_formats.coder("<tool_call>", "</tool_call>"),
    ("</tool_call>",),
)
SEED = ToolFormat(
    "seed-oss",
    ("<seed:tool_call>",),
    keyed_formats.coder("<seed:tool_call>", "</seed:tool_call>"),
    ("</seed:tool_call>",),
)
LENIENT = ToolFormat("json", ("<tool_call>", "<|python_tag|>", FENCE), json_formats.lenient, at_start=True)
GLM = ToolFormat(
    "glm-4.5", ("<tool_call>",), keyed_formats.glm,
    ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)  # fmt: skip
GLM4 = ToolFormat("glm-4", (), json_formats.glm4, (ASSISTANT,), by_name=True)
HUNYUAN_MARKS = ("</tool_calls>", "</tool_call>", "<tool_sep>")
HUNYUAN = ToolFormat("hunyuan", ("<tool_calls>", "<tool_call>"), keyed_formats.hunyuan, HUNYUAN_MARKS)
HUNYUAN_ARRAY = ToolFormat(
    "hunyuan a13b", ("<tool_calls>", "<tool_call>"), keyed_formats.hunyuan, HUNYUAN_MARKS
)
HUNYUAN_KEYS = ToolFormat(
    "hunyuan 3", ("<tool_calls>", "<tool_call>"), keyed_formats.hunyuan,
    (*HUNYUAN_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)  # fmt: skip
LLAMA3 = ToolFormat("llama 3", ("<|python_tag|>",), json_formats.json_answer, at_start=True)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), json_formats.mistral, ("[ARGS]", "[CALL_ID]"))
MISTRAL_ARGS = ToolFormat(
    "mistral with arguments", ("[TOOL_CALLS]",), json_formats.mistral, ("[ARGS]", "[CALL_ID]")
)
PHI4 = ToolFormat("phi-4", ("<|tool_call|>",), json_formats.phi4, ("<|/tool_call|>",))
KIMI = ToolFormat(
    "kimi k2", ("<|tool_calls_section_begin|>",), json_formats.kimi,
    ("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
     "<|tool_call_end|>"),
)  # fmt: skip
GPT_OSS = ToolFormat("gpt-oss", (), None)  # models/text/harmony.py reads its calls
GEMMA = ToolFormat("gemma 4", ("<|tool_call>",), keyed_formats.gemma, ("<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = ToolFormat(
    "functiongemma", ("<start_function_call>",), keyed_formats.gemma, ("<end_function_call>", "<escape>")
)
DEEPSEEK = ToolFormat("deepseek", (CALLS,), json_formats.deepseek, (CALLS_END, CALL, CALL_END, SEPARATOR))
GENERIC = ToolFormat("generic", (FENCE,), json_formats.lenient, at_start=True, described=True)

# A template uses the first format whose texts all occur in the template.
SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "functions."), GPT_OSS),
    (("<|tool_calls_section_begin|>",), KIMI),
    ((CALLS,), DEEPSEEK),
    (("<tool_calls>", "<arg_key>"), HUNYUAN_KEYS),
    (("<arg_key>",), GLM),
    (("[gMASK]", "metadata"), GLM4),
    (("<seed:tool_call>",), SEED),
    (("<function=",), QWEN_CODER),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<tool_calls>", "<tool_call>", "```json"), HUNYUAN),
    (("<tool_calls>",), HUNYUAN_ARRAY),
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
