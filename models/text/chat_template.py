"""A model's chat template, which turns messages into a prompt.

Templates come from model files and are not trusted. They therefore run in jinja2's immutable sandbox, in a
process with time and memory limits (template_process.py). Templates may use the additions of Hugging Face's
`apply_chat_template`, such as loop controls and `strftime_now`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from vkbackend.errors import InvalidArgument
from vkbackend.models.text.template_process import TemplateProcess
from vkbackend.models.text.tokenizer import MAX_TEXT

MAX_SOURCE = 1 << 20  # characters; published templates have up to 20,000

Message = Mapping[str, Any]  # Keys include "role" ("system", "user", "assistant", "tool") and "content".

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
REASONING = ("reasoning_content", "thinking", "reasoning")  # Templates read a thought by one of these keys.
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # If a template trims contents, it removes the final space.

_in_use: WeakValueDictionary[tuple[str, str, str], TemplateProcess] = WeakValueDictionary()


def choose(templates: Mapping[str, str], given: str | None, tools: bool) -> tuple[str, list[str]]:
    """Return a template's source, and notes for the user. `given` is a template's name or a source. The
    default is the model's tool template (if `tools`), else its default template, else ChatML."""
    if given is not None:
        return templates.get(given, given), []
    for name in ("tool_use", "default") if tools else ("default",):
        if name in templates:
            return templates[name], []
    return CHATML, [
        "the model has no chat template: messages are written as ChatML, which it may not have been "
        "trained on; --chat-template-file (in Python `template`) gives another one"
    ]


class ChatTemplate:
    """A compiled template. Equal templates share a process.

    Raises InvalidArgument if the template is too long, invalid, or exceeds its limits. Raises Timeout or
    VkbackendError if the template's process cannot be started.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if not isinstance(source, str):
            raise InvalidArgument(f"the chat template is a {type(source).__name__}, expected a str")
        if len(source) > MAX_SOURCE:
            raise InvalidArgument(f"the chat template has {len(source)} characters, expected <= {MAX_SOURCE}")
        key = (source, bos, eos)
        self._process = _in_use.get(key) or _in_use.setdefault(key, TemplateProcess(*key, most=MAX_TEXT))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """Return the prompt for an answer to `messages`. `add_generation_prompt` opens an answer. If
        `continue_final_message` is set, the prompt ends with the last message's content, or with its thought
        if the value is "reasoning_content". `variables` are for the template, such as `tools` and
        `documents`.

        Raises Timeout. Raises InvalidArgument if the template refuses the messages, fails, exceeds a limit,
        or writes more text than a tokenizer accepts.
        """
        rendered = [with_thought(message) for message in messages]
        if continue_final_message:
            if not rendered:
                raise InvalidArgument("continue_final_message: there is no message to continue")
            is_thought = continue_final_message == "reasoning_content"
            rendered[-1], end = (tagged_thought if is_thought else tagged)(rendered[-1])
            add_generation_prompt = False
        variables = {name: value for name, value in variables.items() if value is not None}
        text = self._process.render(rendered, {"add_generation_prompt": add_generation_prompt, **variables})
        return before_tag(text, end) if continue_final_message else text


def with_thought(message: Message) -> Message:
    """Return the message with its thought under "thinking" and "reasoning_content", as in Hugging Face."""
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def tagged(message: Message) -> tuple[Message, str]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + TAG}, content
    parts = list(content) if isinstance(content, list | tuple) else []
    for i in reversed(range(len(parts))):
        if isinstance(parts[i], Mapping) and "text" in parts[i]:
            end = parts[i]["text"]
            parts[i] = {**parts[i], "text": end + TAG}
            return {**message, "content": parts}, end
    raise InvalidArgument("continue_final_message: the last message has no text to continue")


def tagged_thought(message: Message) -> tuple[Message, str]:
    thought = message.get("reasoning_content")
    if not isinstance(thought, str):
        raise InvalidArgument("continue_final_message: the last message has no reasoning_content to continue")
    return {**message, **dict.fromkeys(REASONING, thought + TAG)}, thought


def before_tag(text: str, end: str) -> str:
    at = text.rfind(TAG.strip())
    if at < 0 or end.strip() not in text:
        raise InvalidArgument("continue_final_message: the template leaves out the end of the last message")
    return text[:at] if text.startswith(TAG, at) else text[:at].rstrip()
