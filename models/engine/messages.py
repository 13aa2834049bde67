"""Picklable requests to the engine, its answers, and checks of requests."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vkbackend import errors
from vkbackend.errors import InvalidArgument, PromptTooLong, UnsupportedModel, VkbackendError
from vkbackend.meta.step_kind import MAX_ADAPTERS
from vkbackend.models.adapters.info import AdapterInfo
from vkbackend.models.arguments import MAX_SCALE, ONLY_EMBEDS
from vkbackend.models.engine.cache.image_spans import Span
from vkbackend.models.grammar.compiler import Vocabulary
from vkbackend.models.grammar.structure import Structure
from vkbackend.models.sampling.logprobs import Logprobs
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.vision.picture import Tile
from vkbackend.models.vision.rows import ImageRows


@dataclass(frozen=True, slots=True)
class EngineInfo:
    n_vocab: int
    n_ctx: int
    n_slots: int
    n_ubatch: int
    devices: tuple[str, ...]
    prediction: tuple[str, ...] = ()  # expected times of an automatic split
    notes: tuple[str, ...] = ()
    adapters: tuple[AdapterInfo, ...] = ()
    encodes: bool = False  # The model computes only hidden states, and generates no text.
    n_text: int = 0  # Maximum number of tokens of a text to embed.
    image_width: int = 0  # Number of values of an image's row, or 0 if the model takes no images.


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue `tokens` until a token of `stop_ids`, or for `max_tokens` tokens. A limit of None means the
    end of the context. If `slot` is set, wait for that slot and skip the tokens in its cache."""

    id: int
    tokens: tuple[int, ...]
    max_tokens: int | None
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    slot: int | None = None
    priority: int = 0  # A lower number runs earlier.
    deadline_s: float | None = None  # After this time the request ends with DeadlineExceeded.
    timed: bool = False  # Send timings with every token, because the caller may stop after any.
    structure: Structure | None = None  # Needs SetVocabulary first.
    uses_cache: bool = True
    reports_progress: bool = False  # Send events while the prompt is computed.
    n_keep: int = 0  # How many of the first tokens a context shift keeps.
    n_discard: int = 0  # How many tokens a context shift discards; 0: half of the other tokens.
    adapters: tuple[tuple[int, float], ...] = ()  # (id, scale)
    draft_max: int | None = None  # Maximum number of tokens of a draft; None: the model's limit.
    resumed: tuple[int, ...] = ()  # Tokens that a lost engine generated. The answers do not repeat them.
    images: tuple[Span, ...] = ()  # In prompt order. Rows of images have negative ids (image_spans.py).


@dataclass(frozen=True, slots=True)
class SetVocabulary:
    """The texts of tokens, which requests with a structure need."""

    id: int
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute the logits of every position. The rows arrive in several events."""

    id: int
    tokens: tuple[int, ...]
    priority: int = 0
    deadline_s: float | None = None
    adapters: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Embed:
    """Compute the hidden states of all positions, or of the first or the last one. The rows arrive in several
    events. In an encoder, tokens from position `second` on are the second text of a pair (0: no pair)."""

    id: int
    tokens: tuple[int, ...]
    rows: Literal["all", "first", "last"] = "all"
    priority: int = 0
    deadline_s: float | None = None
    second: int = 0
    adapters: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeTile:
    """Compute the rows of tile `index` of the picture with `key`. Between two tiles, steps of other requests
    continue."""

    id: int
    key: bytes
    index: int
    tile: Tile


@dataclass(frozen=True, slots=True)
class Memory:
    id: int


@dataclass(frozen=True, slots=True)
class Stats:
    id: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """Save positions `first` to `last` - 1, or to the end if `last` is None."""

    id: int
    path: str
    slot: int
    first: int = 0
    last: int | None = None


@dataclass(frozen=True, slots=True)
class LoadState:
    """`slot` must be free. The answer contains the loaded tokens."""

    id: int
    path: str
    slot: int


@dataclass(frozen=True, slots=True)
class CopySlot:
    """`target` must be free. The answer contains the copied tokens."""

    id: int
    slot: int
    target: int


@dataclass(frozen=True, slots=True)
class EraseSlot:
    """`slot` must be free. The answer contains the erased tokens."""

    id: int
    slot: int


@dataclass(frozen=True, slots=True)
class Cancel:
    id: int


@dataclass(frozen=True, slots=True)
class Pause:
    id: int


@dataclass(frozen=True, slots=True)
class Resume:
    id: int


@dataclass(frozen=True, slots=True)
class Close:
    pass


Request = (
    Generate | SetVocabulary | Logits | Embed | EncodeTile | Memory | Stats
    | SaveState | LoadState | CopySlot | EraseSlot | Cancel | Pause | Resume | Close
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timings:
    """Totals of the steps that computed a sequence. `prompt` counts rows of its prompt, and `decode` counts
    generated tokens after the first. `draft_n` counts drafted tokens."""

    prompt_n: int = 0
    prompt_s: float = 0.0
    decode_n: int = 0
    decode_s: float = 0.0
    n_reduces: int = 0
    reduce_s: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How many tokens a prompt has, how many were cached, and how many are computed or cached so far."""

    total: int
    cached: int
    processed: int
    seconds: float  # Seconds since the slot was assigned.


@dataclass(frozen=True, slots=True)
class ErrorData:
    kind: str
    message: str
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> ErrorData:
        """An error that is not a VkbackendError is a bug, so the message contains its traceback."""
        if isinstance(error, VkbackendError):
            return cls(type(error).__name__, str(error), dict(vars(error)))
        trace = "".join(traceback.format_exception(error))
        return cls("VkbackendError", f"the engine failed: {trace}")

    def exception(self) -> VkbackendError:
        """Return a new exception. Raising one exception in two threads would mix their tracebacks."""
        kind = getattr(errors, self.kind, VkbackendError)
        error: VkbackendError = kind(self.message, **self.fields)
        return error


@dataclass(slots=True)
class Event:
    """`done` is True in the last answer. `finish_reason` is "stop" or "length"."""

    id: int
    done: bool = True
    token: int | None = None
    finish_reason: str | None = None
    slot: int | None = None
    tokens: tuple[int, ...] | None = None  # of a loaded state
    timings: Timings | None = None
    logits: np.ndarray | None = None  # float32 [rows of this event, n_vocab]
    hidden: np.ndarray | None = None  # float32 [rows of this event, n_embd]
    image: ImageRows | None = None  # of a tile
    memory: list[dict[str, Any]] | None = None
    stats: dict[str, Any] | None = None
    logprobs: Logprobs | None = None
    progress: PromptProgress | None = None
    error: ErrorData | None = None
    n_discarded: int = 0  # tokens that context shifts have discarded


Answer = Event | int  # An int is the next token's id.


@dataclass(slots=True)
class News:
    """`answers[i]` belongs to request `ids[i]`."""

    ids: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids)

    def add(self, event: Event) -> None:
        self.ids.append(event.id)
        self.answers.append(event)


def is_last(answer: Answer) -> bool:
    """Raises the answer's error."""
    if isinstance(answer, int):
        return False
    if answer.error:
        raise answer.error.exception()
    return answer.done


def check_tokens(tokens: Sequence[int], n_vocab: int, n_ctx: int, images: Sequence[Span] = ()) -> None:
    """Raises InvalidArgument, PromptTooLong. The ids of the rows of `images` are not checked."""
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
    for span in reversed(images):
        tokens = (*tokens[: span.first], *tokens[span.end :])
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high >= n_vocab:
        bad = low if low < 0 else high
        raise InvalidArgument(f"token id {bad} is out of range: the model has ids 0..{n_vocab - 1}")


def check_adapters(adapters: Sequence[tuple[int, float]], known: Sequence[AdapterInfo]) -> None:
    """Raises InvalidArgument for unknown ids, an id that occurs twice, too many adapters or absurd scales."""
    ids = [number for number, _ in adapters]
    problem = ""
    if bad := [number for number in ids if not 0 <= number < len(known)]:
        listed = ", ".join(f"{info.id} ({info.name})" for info in known) or "none"
        problem = f"adapter {bad[0]} is unknown; the model was opened with: {listed}"
    elif len(set(ids)) < len(ids):
        problem = f"an adapter occurs twice in {ids}; give its scale once"
    elif len(ids) > MAX_ADAPTERS:
        problem = f"{len(ids)} adapters would be active, and at most {MAX_ADAPTERS} can be"
    elif absurd := [scale for _, scale in adapters if not abs(scale) <= MAX_SCALE]:
        problem = f"the scale {absurd[0]} is not in -{MAX_SCALE:g}..{MAX_SCALE:g}"
    if problem:
        raise InvalidArgument(f"lora: {problem}", argument="lora")


def check_encoder(request: Generate | Logits | Embed, n_text: int) -> None:
    """Raises UnsupportedModel if an encoder is to generate text, and PromptTooLong if a text has more than
    `n_text` tokens."""
    if not isinstance(request, Embed):
        raise UnsupportedModel(ONLY_EMBEDS)
    if (n := len(request.tokens)) > n_text:
        raise PromptTooLong(
            f"the text has {n} tokens and a step of this encoder holds {n_text}; shorten the text",
            n_tokens=n,
            n_ctx=n_text,
        )


def check_slot(slot: int, n_slots: int) -> None:
    if not 0 <= slot < n_slots:
        raise InvalidArgument(
            f"slot {slot} does not exist: the model was opened with n_slots={n_slots}, numbered from 0"
        )
