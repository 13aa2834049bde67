"""Separates a model's thoughts from its answer while the text arrives, and removes the markers."""

from __future__ import annotations

from dataclasses import dataclass

from vkbackend.models.text import harmony
from vkbackend.models.text.stop_text import overlap


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    is_thought: bool


THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>thought\n": "<channel|>",
}
MARKS = (*THOUGHTS, *THOUGHTS.values(), "<|channel>", *harmony.MARKS)


def has_channels(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


def opened(prompt: str) -> bool:
    """Return whether a prompt ends inside a thought."""
    return prompt.rstrip().endswith(tuple(mark.rstrip() for mark in THOUGHTS))


class ReasoningSplit:
    """If `thinking`, the text begins in a thought. If `channels`, the text is in Harmony."""

    def __init__(self, thinking: bool = False, channels: bool = False) -> None:
        self._harmony = harmony.HarmonyReader() if channels else None
        self._held, self._thinking, self._begun = "", thinking, False
        self._closers = tuple(THOUGHTS.values()) if thinking else ()

    def push(self, piece: str, *, last: bool = False) -> list[Piece]:
        """Return pieces of thoughts and answers. Text that may begin a marker is returned later, or with the
        `last` piece."""
        if self._harmony:
            parts = self._harmony.push(piece, last=last)
            return [Piece(part.text, part.is_thought) for part in parts if part.text]
        text, out = self._held + piece, list[Piece]()
        while hits := [(at, marker) for marker in self._markers() if (at := text.find(marker)) >= 0]:
            at, marker = min(hits)
            self._give(text[:at], out)
            text = text[at + len(marker) :]
            if marker in THOUGHTS and self._begun:
                self._give(marker, out)
            else:
                self._thinking = marker in THOUGHTS
                self._closers = (THOUGHTS[marker],) if marker in THOUGHTS else ()
        n_held = 0 if last else max((overlap(text, marker) for marker in self._markers()), default=0)
        if not (last or self._begun or self._thinking or text[: len(text) - n_held].strip()):
            n_held = len(text)  # white space before a marker is not part of the answer
        self._held = text[len(text) - n_held :]
        self._give(text[: len(text) - n_held], out)
        return out

    def _markers(self) -> tuple[str, ...]:
        openers = () if self._begun or self._thinking else tuple(THOUGHTS)
        return (*self._closers, *openers)

    def _give(self, text: str, out: list[Piece]) -> None:
        if not self._thinking and not self._begun:
            if not text.strip():
                return
            self._begun = True
        if text:
            out.append(Piece(text, self._thinking))


def split(text: str, thinking: bool = False, channels: bool = False) -> tuple[str, str]:
    pieces = ReasoningSplit(thinking, channels).push(text, last=True)
    thought = "".join(piece.text for piece in pieces if piece.is_thought)
    return thought.strip(), "".join(piece.text for piece in pieces if not piece.is_thought)
