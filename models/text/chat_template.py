"""A model's chat template: messages to the text that the model was trained to answer.

Templates come with the file, so they are compiled and rendered in a process of their own, under limits of
time and memory (template_process.py), in jinja2's immutable sandbox. They find what Hugging Face's
`apply_chat_template` gives them: `trim_blocks`, `lstrip_blocks`, loop controls, `{% generation %}`, `tojson`,
`raise_exception`, `strftime_now`, `tools`, `documents` and whatever else a caller names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.models.text.template_process import TemplateProcess
from vkbackend.models.text.tokenizer import MAX_TEXT

MAX_SOURCE = 1 << 20  # characters; the longest of known models have some 20,000

Message = Mapping[str, Any]  # "role" ("system", "user", "assistant", "tool"), "content" and what else it has

_in_use: WeakValueDictionary[tuple[str, str, str], TemplateProcess] = WeakValueDictionary()


def required(source: str | None) -> str:
    """`source`; raises UnsupportedModel where a model has none."""
    if source is None:
        raise UnsupportedModel(
            "the model has no chat template; give one with --chat-template-file (in Python `template`), or "
            "continue plain text with `vkbackend generate`"
        )
    return source


class ChatTemplate:
    """A compiled template; equal ones share a process. `bos` and `eos` are the texts of these tokens, which
    it may write out.

    Raises InvalidArgument: too long, no valid template, or one that takes more time or memory than it may;
    Timeout and VkbackendError where no process for it can be started.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if not isinstance(source, str):
            raise InvalidArgument(f"the chat template is a {type(source).__name__}, expected a str")
        if len(source) > MAX_SOURCE:
            raise InvalidArgument(f"the chat template has {len(source)} characters, expected <= {MAX_SOURCE}")
        key = (source, bos, eos)
        self._process = _in_use.get(key) or _in_use.setdefault(key, TemplateProcess(*key, most=MAX_TEXT))

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text that asks for the answer to `messages`; without `add_generation_prompt` that of the
        messages alone. `variables` are what else the template finds by their names, such as `tools`.

        Raises InvalidArgument where the template refuses them, fails, reaches a limit or makes more text than
        a tokenizer takes; Timeout.
        """
        return self._process.render(messages, {"add_generation_prompt": add_generation_prompt, **variables})
