"""`vkbackend chat`: talk with a model.

Every line is a message. Answers stream to stdout; devices, loading, memory and timings go to stderr. /clear
forgets the conversation (the system prompt stays); /exit, Ctrl-D or the end of the input ends it. Ctrl-C ends
an answer and keeps what was said of it; at the prompt it ends the program.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.console import Console

from vkbackend.errors import InvalidArgument
from vkbackend.models.arguments import token_limit
from vkbackend.models.chat import Chat
from vkbackend.models.engine.completion import Chunk, total
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.sampling.params import MAX_SEED, SamplingParams
from vkbackend.models.text.chat_template import required
from vkbackend.models.text.tokenizer import chat_template
from vkbackend.tools.console import console, tell_notes
from vkbackend.tools.flags.sampling import sampling_of
from vkbackend.tools.flags.text import (
    add_length_arguments,
    add_shared_arguments,
    demo_model,
    open_model,
    show_timings,
    write_text,
)

FRESH = "/clear forgets the conversation, a larger -c takes longer ones (0: the model's own)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    path = "the model, a .gguf file with a chat template (default: the embedded demo model, which has none)"
    add("-m", "--model", metavar="FILE", help=path)
    add("-sys", "--system-prompt", metavar="TEXT", help="what the model is told first (default: nothing)")
    add("-p", "--prompt", metavar="TEXT", help="the first message (default: the first line that is read)")
    add("-st", "--single-turn", action="store_true", help="end after one answer")
    add("--chat-template-file", metavar="FILE",
        help="a jinja template in place of the model's own (default: that in the model file)")  # fmt: skip
    add_length_arguments(parser, n_ctx=4096, ends="the answer ends")
    add_shared_arguments(parser)


def run(args: argparse.Namespace) -> None:
    err = console(stderr=True)
    sampling, most = sampling_of(args), token_limit("max_tokens", args.max_tokens)
    source = read_template(args)  # a model without one is told before it is loaded
    llm, _ = open_model(args, err)
    with llm:
        conversation = Conversation(
            Chat(llm, args.system_prompt, source), sampling, most, args.ignore_eos, err
        )
        try:
            conversation.hold(args.prompt, args.single_turn)
        finally:
            if conversation.timings:
                show_timings(total(conversation.timings), sampling.seed, err)


def read_template(args: argparse.Namespace) -> str:
    path = args.chat_template_file
    if path is None:
        with GGUF.open(demo_model() if args.model is None else args.model) as gguf:
            return required(chat_template(gguf))
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the chat template {path!r} cannot be read: {error}; give a UTF-8 text"
        ) from None


class Conversation:
    """A Chat on the terminal; `timings` are those of the answers that came to their end."""

    def __init__(self, chat: Chat, sampling: SamplingParams, most: int | None, ignore_eos: bool,
                 err: Console) -> None:  # fmt: skip
        self.chat, self.err, self.most = chat, err, most
        self._options = asdict(sampling) | {"ignore_eos": ignore_eos}
        self.timings: list[dict[str, float]] = []

    def hold(self, first: str | None, single_turn: bool) -> None:
        """Answer messages until they end, or one; `first` comes before those that are read."""
        for text in messages(first):
            if text == "/exit":
                return
            if text == "/clear":
                self.chat.clear()
                tell_notes(["the conversation is forgotten"], self.err)
            elif text:
                try:
                    self.answer(text)
                except InvalidArgument as error:
                    if single_turn or not sys.stdin.isatty():
                        raise
                    tell_notes([f"{error}; {FRESH}"], self.err)  # somebody is there to do so
                if single_turn:
                    return

    def answer(self, text: str) -> None:
        """Say one message and write the answer, a line of its own."""
        chunks: list[Chunk] = []
        with closing(self.chat.send(text, self.most, **self._options)) as stream, interrupts() as pressed:
            try:
                for chunk in stream:
                    chunks.append(chunk)
                    write_text(chunk.text)
                    if pressed:
                        break
            finally:
                write_text("\n")
        last = chunks[-1]
        self.timings += [last.timings] if last.timings else []
        self._options["seed"] = (self._options["seed"] + 1) % (MAX_SEED + 1)  # other numbers for every answer
        if last.finish_reason == "length" and len(chunks) != self.most:
            tell_notes([f"ended  because the context is full: {FRESH}"], self.err)


def messages(first: str | None) -> Iterator[str]:
    """`first` and the lines of stdin, without the spaces around them."""
    if first is not None:
        yield first.strip()
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    with suppress(ImportError):
        import readline  # noqa: F401  (input() edits its line and keeps a history with it)
    while (line := read_line()) is not None:
        yield line.strip()


def read_line() -> str | None:
    """One line of stdin, None at its end; on a terminal after a prompt, which stays out of a piped stdout."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return input("> ")
        except EOFError:
            write_text("\n")
            return None
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return sys.stdin.readline() or None


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C fills the list, so that no step is broken off in its middle; the second one raises after all."""
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
