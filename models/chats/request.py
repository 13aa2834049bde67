"""Turns a conversation into a request for `LLM.generate` and a parser of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument
from vkbackend.models.chats.answer import AnswerReader
from vkbackend.models.chats.messages import for_template
from vkbackend.models.chats.options import ChatOptions
from vkbackend.models.chats.prompt import PromptMaker
from vkbackend.models.grammar.structure import MAX_NBYTES, Structure, json_rule, regex_to_lark
from vkbackend.models.pictures import MediaPrompt
from vkbackend.models.text.chat_template import Message
from vkbackend.models.text.protection import Prompt
from vkbackend.models.text.reasoning import THOUGHTS, opened
from vkbackend.models.tool_calls.formats import GPT_OSS
from vkbackend.models.tool_calls.grammar import CallGrammar, literal, text_up_to

Ids = list[int] | MediaPrompt
SPACE = r"/[ \n]{0,4}/"  # White space after a thought.


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request with its prompt (`ids`, `text`) and its `keywords` for LLM.generate. A prompt with
    images is a MediaPrompt. `shown` lists the control tokens that the answer's text must contain. `protected`
    is False if special tokens in messages cannot be distinguished from special tokens of the template. If
    `single`, the answer ends with its first tool call."""

    ids: Ids
    keywords: dict[str, Any]
    shown: frozenset[int]
    text: str
    protected: bool
    maker: PromptMaker
    tools: Mapping[str, Any]
    single: bool
    thinking: bool = False  # The prompt ends in a thought.

    def reader(self) -> AnswerReader:
        format_ = self.maker.tool_format if self.tools else None
        thinking, channels = self.thinking, self.maker.channels
        return AnswerReader(format_, self.tools, thinking=thinking, single=self.single, channels=channels)


def chat_request(
    maker: PromptMaker,
    messages: Sequence[Message],
    options: ChatOptions,
    ids_of: Callable[[PromptMaker, Prompt], Ids] = lambda maker, prompt: maker.ids(prompt),
) -> ChatRequest:
    """`ids_of` tokenizes the prompt. Raises InvalidArgument if the template refuses the conversation."""
    choice = options.tool_choice
    tools = () if choice == "none" else options.tools
    if choice.startswith("="):
        tools = tuple(tool for tool in tools if tool["function"]["name"] == choice[1:])
    variables = dict(options.template_variables or {})
    if tools:
        variables["tools"] = [dict(tool) for tool in tools]
    if options.continue_final_message:
        variables["continue_final_message"] = options.continue_final_message
    if not options.add_generation_prompt:
        variables["add_generation_prompt"] = False
    prompt = maker.render(for_template(messages, tools, maker), variables)
    thinking = opened(prompt.text) or options.continue_final_message == "reasoning_content"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    keywords = options.plain() | {"parse_special": True}
    if tools and choice not in ("auto", "none"):
        several = options.parallel_tool_calls and choice == "required"
        keywords["lark"] = _forced(maker, options, schemas, thinking, several)
    elif (structure := options.structure) is not None:
        several = options.parallel_tool_calls
        keywords |= structured(maker, structure, schemas, thinking, several)
    single = not options.parallel_tool_calls or choice.startswith("=")
    return ChatRequest(
        ids_of(maker, prompt),
        keywords,
        maker.shown,
        prompt.text,
        prompt.protected,
        maker,
        schemas,
        single,
        thinking,
    )


def _forced(
    maker: PromptMaker, options: ChatOptions, tools: Mapping[str, Any], thinking: bool, several: bool
) -> str:
    if options.structure is not None:
        raise InvalidArgument(
            "tool_choice forces a call, and an answer of another form is asked for, too; leave one out"
        )
    special = _special(maker)
    calls = CallGrammar(maker.tool_format, tools, special.get).lark(several=several)
    lark = "\n".join([f"start: {_thought(maker, thinking)} calls", *_rules(maker, thinking), calls])
    if len(lark.encode()) > MAX_NBYTES:
        count = f"{len(tools)} tools"
        raise refused(
            "tools", count, f"as a grammar they have more than {MAX_NBYTES} bytes; give fewer at once"
        )
    return lark


def structured(
    maker: PromptMaker, structure: Structure, tools: Mapping[str, Any], thinking: bool, several: bool
) -> dict[str, Any]:
    """Return keywords for a grammar that allows an answer of this structure, or tool calls. If the model
    thinks, the grammar begins with a thought. A Lark or GBNF grammar of the caller matches the complete text,
    so it stays unchanged."""
    thought = _thought(maker, thinking)
    if structure.kind not in ("json_schema", "regex") or not (thought or tools):
        return {}
    if structure.kind == "regex":
        form = f"/{regex_to_lark(structure.text)}/"
    else:
        form = json_rule(structure.text)
    special = _special(maker)
    if maker.tool_format is GPT_OSS:
        marks = (literal(mark, special.get) for mark in ("<|channel|>", "<|message|>"))
        form = f'{next(marks)} "final" {next(marks)} {form}'
    rules = [f"start: {thought} answer", *_rules(maker, thinking)]
    if tools:
        rules += [
            "answer: calls | formed",
            CallGrammar(maker.tool_format, tools, special.get).lark(several=several),
        ]
    else:
        rules.append("answer: formed")
    none = {"json_schema": None, "json_object": False, "regex": None}
    return {**none, "lark": "\n".join([*rules, f"formed: {form}"])}


def _special(maker: PromptMaker) -> dict[str, int]:
    return dict(maker.tokenizer.markers(lambda _: False))


def _opener(maker: PromptMaker) -> str | None:
    """Return the marker that opens a thought, or None if it is unknown."""
    if maker.tool_format is GPT_OSS:
        return "<|channel|>analysis<|message|>"
    return next((mark for mark in THOUGHTS if mark in maker.source), None)


def _thought(maker: PromptMaker, thinking: bool) -> str:
    return "thought" if thinking else "thought?" if _opener(maker) else ""


def _rules(maker: PromptMaker, thinking: bool) -> list[str]:
    """Return grammar rules for a thought up to its end marker. The opening marker is included, unless the
    prompt ends with it."""
    opener, special = _opener(maker), _special(maker)
    if not thinking and opener is None:
        return []
    if maker.tool_format is GPT_OSS:
        head = f'{literal("<|channel|>", special.get)} "analysis" {literal("<|message|>", special.get)}'
        end = f'{literal("<|start|>", special.get)} "assistant"'
        return [f"thought: {head} thinks {end}", text_up_to("thinks", "<|end|>", special.get)]
    assert opener is not None or thinking
    opener = opener or "<think>"
    head = "" if thinking else literal(opener, special.get)
    return [f"thought: {head} thinks {SPACE}", text_up_to("thinks", THOUGHTS[opener], special.get)]
