"""The keywords of `LLM.chat`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Unpack

from vkbackend.checks import items, optional, refused, switch
from vkbackend.models.arguments import text_of
from vkbackend.models.generate_options import GenerateKeywords, GenerateOptions
from vkbackend.models.grammar.structure import schema_text
from vkbackend.options_class import option

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
WORDS = ("auto", "none", "required")


class ChatKeywords(GenerateKeywords, total=False):
    """The keywords of `LLM.generate`, and keywords for a conversation's prompt."""

    tools: Sequence[Mapping[str, Any]] | None
    """Functions that the model may call: {"type": "function", "function": {"name", "description",
    "parameters"}}, where the parameters are a JSON Schema. None (default): none."""
    tool_choice: Literal["auto", "none", "required"] | str | Mapping[str, Any]
    """Which functions the model calls: "auto" (default; it decides), "none", "required" (at least one), or
    the function {"type": "function", "function": {"name": ...}}. A grammar forces a required call."""
    parallel_tool_calls: bool
    """False: at most one call in an answer (default: True)."""
    template: str | None
    """A chat template, or the name of a template of the model (default: the model's default template)."""
    template_variables: Mapping[str, Any] | None
    """Further variables of the template, such as enable_thinking, reasoning_effort, documents (default:
    none)."""
    continue_final_message: bool | Literal["content", "reasoning_content"]
    """True or "content": continue the content of the last message instead of answering the message.
    "reasoning_content": continue its thought."""
    add_generation_prompt: bool
    """False: the prompt does not open an answer, so the model may continue the conversation in any role
    (default: True)."""


def tool_list(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return checked tools with distinct names."""
    if value is None:
        return ()
    expected = "expected a list of {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
    tools, names = [], set[str]()
    for i, tool in enumerate(items(name, value, expected)):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise refused(f"{name}[{i}]", tool, expected)
        if not isinstance(called := function.get("name"), str) or not _NAME.fullmatch(called):
            raise refused(
                f"{name}[{i}].function.name", called, "expected 1 to 64 of a-z, A-Z, 0-9, _, - and ."
            )
        if called in names:
            raise refused(f"{name}[{i}].function.name", called, "two tools have this name")
        parameters = function.get("parameters")
        if not isinstance(parameters := {} if parameters is None else parameters, Mapping):
            raise refused(f"{name}[{i}].function.parameters", parameters, "expected a JSON Schema")
        _check_shape(f"{name}[{i}].function.parameters", parameters)
        schema_text(f"{name}[{i}].function.parameters", dict(parameters))
        if not isinstance(function.get("description") or "", str):
            raise refused(f"{name}[{i}].function.description", function["description"], "expected a text")
        names.add(called)
        described = {"name": called, "description": function.get("description") or ""}
        checked = {**described, **function, "parameters": dict(parameters)}
        tools.append({"type": "function", "function": checked})
    if len(tools) > MAX_TOOLS:
        raise refused(name, f"{len(tools)} tools", f"at most {MAX_TOOLS} are taken")
    return tuple(tools)


def _check_shape(name: str, schema: Any) -> None:
    if not isinstance(schema, Mapping):
        if not isinstance(schema, bool):
            raise refused(name, schema, "expected a JSON Schema")
        return
    for key, kind, expected in (
        ("properties", Mapping, "an object of schemas"), ("$defs", Mapping, "an object of schemas"),
        ("required", list | tuple, "a list of names"), ("enum", list | tuple, "a list of values"),
        ("anyOf", list | tuple, "a list of schemas"), ("oneOf", list | tuple, "a list of schemas"),
    ):  # fmt: skip
        if key in schema and not isinstance(schema[key], kind):
            raise refused(f"{name}.{key}", schema[key], f"expected {expected}")
    for key in ("properties", "$defs"):
        for inner, schema_ in schema.get(key, {}).items():
            _check_shape(f"{name}.{key}.{inner}", schema_)
    for key in ("anyOf", "oneOf"):
        for i, schema_ in enumerate(schema.get(key, ())):
            _check_shape(f"{name}.{key}[{i}]", schema_)
    if "items" in schema:
        _check_shape(f"{name}.items", schema["items"])


def choice_of_tools(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value if value in WORDS or value.startswith("=") else f"={value}"
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return f"={function['name']}"
    raise refused(name, value, "expected auto, none, required, or {'function': {'name': ...}}")


def variables(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refused(name, value, "expected a dict by names")
    if taken := {"messages", "add_generation_prompt", "continue_final_message"} & set(value):
        raise refused(name, min(taken), "this name is taken")
    return dict(value)


def continued_part(name: str, value: Any) -> str:
    """Return "content", "reasoning_content", or "" to continue nothing."""
    if value is None or value == "" or value is False:
        return ""
    if value is True or value in ("content", "reasoning_content"):
        return "content" if value is True else str(value)
    raise refused(name, value, "expected true, false, content or reasoning_content")


@dataclass(frozen=True, slots=True)
class ChatOptions(GenerateOptions):
    """Checked options of a chat. Raises InvalidArgument."""

    parse_special: bool = option(False, switch)
    tools: tuple[Mapping[str, Any], ...] = option((), tool_list)
    tool_choice: str = option("auto", choice_of_tools)
    parallel_tool_calls: bool = option(True, switch)
    template: str | None = option(None, optional(text_of))
    template_variables: Mapping[str, Any] | None = option(None, variables)
    continue_final_message: str = option("", continued_part)
    add_generation_prompt: bool = option(True, switch)

    def __post_init__(self) -> None:
        super(ChatOptions, self).__post_init__()
        if self.echo:
            raise refused("echo", True, "the answer of a conversation cannot begin with its prompt")
        names = [tool["function"]["name"] for tool in self.tools]
        choice = self.tool_choice
        if choice.startswith("=") and choice[1:] not in names:
            raise refused(
                "tool_choice", choice[1:], f"no tool has this name; there are: {', '.join(names) or 'none'}"
            )
        if choice == "required" and not names:
            raise refused("tool_choice", choice, "there are no tools; give `tools`")

    @classmethod
    def of(cls, **options: Unpack[ChatKeywords]) -> ChatOptions:
        given: dict[str, Any] = {**options}
        return cls(**given)

    def plain(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(GenerateOptions)}
