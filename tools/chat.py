"""`vkbackend chat`: talk with a model.

Every line is a message. A backslash at a line's end continues the message; three double quotes begin and end
a message of several lines. Answers stream to stdout, with thoughts dimmed on a terminal. All other output is
on stderr. When the context is full, the oldest messages are dropped. Type /help to list the commands, /clear
to forget the conversation, and /exit or Ctrl-D to quit. Ctrl-C stops an answer and keeps its text; at the
prompt Ctrl-C quits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from vkbackend.errors import InvalidArgument
from vkbackend.models.arguments import token_limit
from vkbackend.models.conversation import Chat
from vkbackend.models.engine.completion import Chunk, total
from vkbackend.models.sampling.params import MAX_SEED, SamplingParams
from vkbackend.models.text.chat_template import Message
from vkbackend.models.text.reasoning import ReasoningSplit
from vkbackend.models.vision.images import image_of
from vkbackend.paths import quoted, why
from vkbackend.system.files import words_of
from vkbackend.tools.console import console, tell_notes
from vkbackend.tools.flags.llama_cpp import settle
from vkbackend.tools.flags.sampling import sampling_of
from vkbackend.tools.flags.structure import structure_given
from vkbackend.tools.flags.templates import add_template_arguments, template_of
from vkbackend.tools.flags.text import (
    add_length_arguments,
    add_shared_arguments,
    demo_model,
    open_model,
    own_context,
    show_model,
    show_timings,
    take_vision_demo,
    write_text,
)
from vkbackend.tools.flags.vision import add_image_argument, image_files
from vkbackend.tools.message_lines import messages

N_CTX = 4096
FRESH = "/clear forgets the conversation, a larger -c takes longer ones (0: the model's own)"
UNPROTECTED = "special tokens in messages are parsed as special tokens: the template alters the messages"
COMMANDS = {
    "/help": "show these commands",
    "/clear": "forget the conversation; the system prompt stays",
    "/regen": "answer the last message once more",
    "/image": "FILE [TEXT]: show an image with TEXT, or with the next message",
    "/save": "FILE: write the conversation to a JSON file",
    "/exit": "end, as Ctrl-D does",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    path = "the model, a .gguf file (default: the embedded demo model)"
    add("-m", "--model", metavar="FILE", help=path)
    system = parser.add_mutually_exclusive_group().add_argument
    system("-sys", "--system-prompt", metavar="TEXT", help="the system prompt (default: none)")
    system("-sysf", "--system-prompt-file", metavar="FILE", help="the same from a UTF-8 file")
    first = parser.add_mutually_exclusive_group().add_argument
    first("-p", "--prompt", metavar="TEXT", help="the first message (default: the first line that is read)")
    first("-f", "--file", metavar="FILE", help="read the first message from a UTF-8 file")
    add_image_argument(parser, "an image of the first message")
    add("-st", "--single-turn", action="store_true", help="end after one answer")
    add_template_arguments(parser)
    add("--parse-special", action="store_true",
        help="parse special tokens in messages; by default they are plain text")  # fmt: skip
    add_length_arguments(parser, n_ctx=N_CTX, ends="the answer ends", capped=True)
    add_shared_arguments(parser)


def run(args: argparse.Namespace) -> None:
    err = console(stderr=True)
    take_vision_demo(args)
    settle(args, demo_model())
    sampling, most = sampling_of(args), token_limit("max_tokens", args.max_tokens)
    source = template_of(args)
    if args.system_prompt_file is not None:
        args.system_prompt = read_message(args.system_prompt_file)
    if args.file is not None:
        args.prompt = read_message(args.file)
    if args.n_ctx is None:
        args.n_ctx = min(own_context(demo_model() if args.model is None else args.model), N_CTX)
    llm, infos = open_model(args, err)
    with llm:
        chat = Chat(
            llm,
            args.system_prompt,
            source,
            variables=args.chat_template_kwargs,
            parse_special=args.parse_special,
        )
        show_model(llm, infos, args, err)
        tell_notes(chat.notes, err)
        options = {"ignore_eos": args.ignore_eos, "stop": args.stop, **structure_given(args)}
        conversation = Conversation(chat, sampling, most, options, err)
        conversation.images = image_files(args)
        try:
            conversation.hold(args.prompt, args.single_turn)
        finally:
            if conversation.timings:
                show_timings(total(conversation.timings), sampling.seed, err)


def read_message(path: str) -> str:
    """Return a file's text. One final newline is removed. Raises InvalidArgument."""
    try:
        return Path(path).read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the file {quoted(path)} cannot be read: {why(error)}; give a UTF-8 text"
        ) from None


class Conversation:
    def __init__(self, chat: Chat, sampling: SamplingParams, most: int | None, options: Mapping[str, Any],
                 err: Console) -> None:  # fmt: skip
        self.chat, self.err, self.most = chat, err, most
        self._options = asdict(sampling) | dict(options)
        self.timings: list[dict[str, float]] = []
        self.images: list[str] = []  # paths of the next message's images

    def hold(self, first: str | None, single_turn: bool) -> None:
        """Answer `first`, then the messages of the input. If `single_turn` is set, answer only one
        message."""
        for text in messages(first):
            name, _, rest = text.partition(" ")
            if name == "/exit":
                return
            try:
                if name.startswith("/") and "/" not in name[1:]:
                    self.obey(name, rest.strip())
                    continue
                if text:
                    self.send(text)
            except InvalidArgument as error:
                if single_turn or not sys.stdin.isatty():
                    raise
                tell_notes([f"{error}; {FRESH}"], self.err)  # the user may continue
            if text and single_turn:
                return

    def obey(self, name: str, rest: str) -> None:
        if name == "/help":
            tell_notes((f"{command:<8}{description}" for command, description in COMMANDS.items()), self.err)
        elif name == "/clear":
            self.chat.clear()
            tell_notes(["the conversation is forgotten"], self.err)
        elif name == "/regen":
            self.answer(partial(self.chat.regenerate, self.most, **self._options))
        elif name == "/image":
            self.attach(rest)
        elif name == "/save":
            tell_notes([self.save(rest)], self.err)
        else:
            tell_notes([f"{name} is not a command; /help lists them"], self.err)

    def send(self, text: str) -> None:
        images, self.images = self.images, []
        self.answer(partial(self.chat.send, text, self.most, images=images, **self._options))

    def attach(self, rest: str) -> None:
        """Read the file and the text after /image. Quotes may surround a file with spaces."""
        try:
            path, *_ = words = words_of(rest) or [""]
        except ValueError:
            path, words = rest, [rest]
        if os.path.exists(rest):
            path, words = rest, [rest]
        image_of("/image", path)  # raises an error if the file cannot be read
        self.images.append(path)
        if text := " ".join(words[1:]):
            self.send(text)
        else:
            tell_notes([f"images for the next message: {len(self.images)}"], self.err)

    def save(self, path: str) -> str:
        if not path:
            return "/save needs the name of a file"
        try:
            messages = [with_urls(message) for message in self.chat.messages]
            text = json.dumps(messages, ensure_ascii=False, indent=1)
            Path(path).write_text(text + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            return f"{quoted(path)} cannot be written: {why(error)}"
        return f"{len(self.chat.messages)} messages are in {quoted(path)}"

    def answer(self, ask: Callable[[], Generator[Chunk, None, None]]) -> None:
        chunks: list[Chunk] = []
        before = self.chat.n_left_out
        with closing(ask()) as stream, interrupts() as pressed:
            if not self.chat.protected:
                tell_notes([UNPROTECTED], self.err)
            show = shown(self.chat.thinks, self.chat.channels)
            try:
                for chunk in stream:
                    chunks.append(chunk)
                    show(chunk.text, chunk.finish_reason is not None)
                    if pressed:
                        break
            finally:
                show("", True)
                write_text("\n")
        last = chunks[-1]
        self.timings += [last.timings] if last.timings else []
        self._options["seed"] = (self._options["seed"] + 1) % (MAX_SEED + 1)
        if (n := self.chat.n_left_out - before) > 0:
            tell_notes([f"the context is full: its {n} oldest messages have left it"], self.err)
        if last.finish_reason == "length" and len(chunks) != self.most:
            tell_notes([f"ended  because the context is full: {FRESH}"], self.err)


def with_urls(message: Message) -> Message:
    """Return a message in OpenAI's format, in which images are data URLs."""
    if isinstance(message["content"], str):
        return message
    parts = [
        {"type": "image_url", "image_url": {"url": part["image"].data_url()}} if "image" in part else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def shown(thinks: bool, channels: bool = False) -> Callable[[str, bool], None]:
    """Return `show(text, last)`, which writes pieces of an answer and dims thoughts on a terminal."""
    if not sys.stdout.isatty():
        return lambda text, last: write_text(text) if text else None
    split = ReasoningSplit(thinks, channels)

    def show(text: str, last: bool) -> None:
        for piece in split.push(text, last=last):
            if piece.is_thought:
                sys.stdout.write("\x1b[2m")
            write_text(piece.text)
            if piece.is_thought:
                sys.stdout.write("\x1b[22m")
        sys.stdout.flush()

    return show


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yield a list. The first Ctrl-C only appends to this list, so the current step can finish. The second
    Ctrl-C raises KeyboardInterrupt."""
    pressed: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["chat", *sys.argv[1:]]))
