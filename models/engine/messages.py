"""What the engine and its callers say to each other: requests, events, and the checks of requests.

Plain picklable data: no object is shared, so the engine runs in the caller's process or in its own.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vkbackend import errors
from vkbackend.errors import InvalidArgument, PromptTooLong, VkbackendError
from vkbackend.models.grammar.compiler import Vocabulary
from vkbackend.models.grammar.structure import Structure
from vkbackend.models.sampling.logprobs import Logprobs
from vkbackend.models.sampling.params import SamplingParams

Progress = Callable[[int, int], None]  # (bytes loaded, bytes in all)


# ---- what is loaded ----


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded."""

    n_vocab: int
    n_ctx: int
    n_slots: int
    n_ubatch: int
    devices: tuple[str, ...]
    prediction: tuple[str, ...] = ()  # of an automatic split, as text
    notes: tuple[str, ...] = ()  # what users should know of the file and its use, as text


# ---- requests ----


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue `tokens` by at most `max_tokens` (None: until the context is full) or up to a token of
    `stop_ids`. With `slot` it waits for that slot, and computes only what the slot does not hold of the
    tokens.
    """

    id: int
    tokens: tuple[int, ...]
    max_tokens: int | None
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    slot: int | None = None
    priority: int = 0  # the lower the earlier
    deadline_s: float | None = None  # seconds from now on; then it ends with DeadlineExceeded
    timed: bool = False  # every token comes with timings: the caller may end the text at any of them
    structure: Structure | None = None  # what the text of the tokens must be; needs a vocabulary


@dataclass(frozen=True, slots=True)
class SetVocabulary:
    """What tokens stand for, told before the first request with a structure; answered when it is taken."""

    id: int
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits of every position of `tokens`; they come in parts, in order."""

    id: int
    tokens: tuple[int, ...]
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per device by purpose."""

    id: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What the engine is doing."""

    id: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write positions first..last (None: all) of what `slot` holds now to the file `path`."""

    id: int
    path: str
    slot: int
    first: int = 0
    last: int | None = None


@dataclass(frozen=True, slots=True)
class LoadState:
    """Put a saved state into `slot`, which must be free; answered by the tokens that the slot then holds."""

    id: int
    path: str
    slot: int


@dataclass(frozen=True, slots=True)
class CopySlot:
    """Put what `slot` holds into `target`, which must be free; answered by the tokens that it then holds."""

    id: int
    slot: int
    target: int


@dataclass(frozen=True, slots=True)
class EraseSlot:
    """Forget what `slot`, which must be free, holds; answered by the tokens that it held."""

    id: int
    slot: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget request `id` and free its slot; answered by nothing."""

    id: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Compute nothing for request `id` until Resume; answered by nothing."""

    id: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with request `id`; answered by nothing."""

    id: int


@dataclass(frozen=True, slots=True)
class Close:
    """Release everything and stop."""


Request = (
    Generate | SetVocabulary | Logits | Memory | Stats
    | SaveState | LoadState | CopySlot | EraseSlot | Cancel | Pause | Resume | Close
)  # fmt: skip


# ---- answers ----


@dataclass(frozen=True, slots=True)
class Timings:
    """Time of the steps that a sequence took part in: `prompt` steps read its prompt, `decode` steps one
    token.
    """

    prompt_n: int = 0
    prompt_s: float = 0.0
    decode_n: int = 0
    decode_s: float = 0.0
    n_reduces: int = 0
    reduce_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ErrorData:
    """A typed error as data."""

    kind: str
    message: str
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> ErrorData:
        """An error that is not a VkbackendError is a bug; its message has the traceback."""
        if isinstance(error, VkbackendError):
            return cls(type(error).__name__, str(error), dict(vars(error)))
        told = "".join(traceback.format_exception(error))
        return cls("VkbackendError", f"the engine failed: {told}")

    def exception(self) -> VkbackendError:
        """A fresh exception: one instance raised in two threads would mix up their tracebacks."""
        kind = getattr(errors, self.kind, VkbackendError)
        error: VkbackendError = kind(self.message, **self.fields)
        return error


@dataclass(slots=True)
class Event:
    """One answer to request `id`; `done` on its last. `finish_reason` is "stop" or "length"."""

    id: int
    done: bool = True
    token: int | None = None
    finish_reason: str | None = None
    slot: int | None = None  # the slot that the sequence runs in
    tokens: tuple[int, ...] | None = None  # of a loaded state
    timings: Timings | None = None
    logits: np.ndarray | None = None  # float32 [rows of this part, n_vocab], a copy
    memory: list[dict[str, Any]] | None = None
    stats: dict[str, Any] | None = None
    logprobs: Logprobs | None = None  # of the token
    error: ErrorData | None = None


Answer = Event | int  # an int: the next token, and nothing else


@dataclass(slots=True)
class News:
    """Answers in order: request `ids[i]` gets `answers[i]`."""

    ids: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids)

    def add(self, event: Event) -> None:
        self.ids.append(event.id)
        self.answers.append(event)


def is_last(answer: Answer) -> bool:
    """Whether nothing follows. Raises the error that the answer carries."""
    if isinstance(answer, int):
        return False
    if answer.error:
        raise answer.error.exception()
    return answer.done


# ---- checks that callers make too, so that a bad request fails where it is made ----


def check_tokens(tokens: Sequence[int], n_vocab: int, n_ctx: int) -> None:
    """Raises InvalidArgument: no token, more than the context holds, an id outside the vocabulary."""
    if not tokens:
        raise InvalidArgument(
            "the prompt has no tokens; give at least one (a model with a BOS token adds it itself)"
        )
    if len(tokens) > n_ctx:
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens and the context holds {n_ctx}; shorten the prompt or open "
            f"the model with n_ctx (-c) of at least {len(tokens) + 1}, 0 for the model's own",
            n_tokens=len(tokens),
            n_ctx=n_ctx,
        )
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= n_vocab:
        bad = low if low < 0 else high
        raise InvalidArgument(f"token id {bad} is out of range: the model has ids 0..{n_vocab - 1}")


def check_slot(slot: int, n_slots: int) -> None:
    """Raises InvalidArgument for a slot that does not exist."""
    if not 0 <= slot < n_slots:
        raise InvalidArgument(
            f"slot {slot} does not exist: the model was opened with n_slots={n_slots}, numbered from 0"
        )
