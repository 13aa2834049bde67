"""The interface between the engine and the drafters.

A drafter gets the tokens of sequences and returns tokens that may come next. A drafter knows neither the
sampling nor the cache of the model that verifies its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Adapters = tuple[tuple[int, float], ...]


class Want(NamedTuple):
    """A request for a draft of at most `n` tokens. `number` names the sequence that runs in `slot`. `tokens`
    are the tokens in the sequence's context; the last one is not computed yet. `history` also contains the
    tokens that context shifts have discarded, so it only grows. Rows of images are not in `history`. They
    have negative ids in `tokens`, but only for a drafter that stores K and V in the sequence's cells.
    `adapters` are the ids and scales of the next token's adapters. After images, RoPE positions may be
    `rope_offset` away from the cells (M-RoPE). The drafter may spend `spend_s` seconds on `tokens` that it
    has not computed."""

    slot: int
    number: int
    tokens: Sequence[int]
    history: Sequence[int]
    n: int
    adapters: Adapters = ()
    rope_offset: int = 0
    spend_s: float = 0.0


class Draft(NamedTuple):
    """`tokens` may be empty. The acceptance of drafts is learned per `source`."""

    tokens: Sequence[int] = ()
    source: str = ""


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Before the first draft, `source` gives the estimate of the acceptance. `seconds` is the time to draft
    one more token for all sequences, or 0 if it is short. `spent_s` is the time of all drafts so far,
    computed from measured times. If `stores` is set, drafting writes to the cells of the drafted positions,
    so the engine reserves them first."""

    source: str
    stores: bool
    spent_s: float

    @property
    def seconds(self) -> float: ...

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        """Return a draft for each `Want`, of at most `n` tokens. Raises the errors of the drafter's
        devices."""

    def source_of(self, want: Want) -> str:
        """Return the source of the next draft. Assume that the drafter spends at most `want.spend_s` seconds
        on the tokens that it has not computed."""

    def owed(self, wants: Sequence[Want]) -> float:
        """Return how many seconds the drafter must compute before it can draft for these sequences. Tokens
        that it can skip do not count."""

    def measure(self) -> bool:
        """Measure `seconds` again, or return False if only a draft can be measured."""

    def took(self, slot: int, n_accepted: int) -> None:
        """The model has accepted the first `n_accepted` tokens of the slot's last draft."""

    def close(self) -> None:
        """Release devices and memory. `close` may be called twice."""
