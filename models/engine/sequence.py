"""A request in work: its tokens, where they are stored, and the time of the steps that it took part in."""

from __future__ import annotations

from dataclasses import dataclass, field

from vkbackend.models.engine.messages import Generate, Logits, Timings
from vkbackend.models.sampling.sampler import Sampler

PRIORITY_S = 10.0  # a priority lower by one counts as having come this much earlier


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens[:n_stored]` are in the cache of its slot, which has room for `room` positions."""

    request: Generate | Logits
    number: int  # order of submission
    born: float  # time.monotonic() of submission
    tokens: list[int]
    sampler: Sampler | None
    slot: int = -1
    n_stored: int = 0
    room: int = 0
    served: int = -1  # number of the last step it had rows in
    told: int = -1  # the slot that its caller knows of
    n_given: int = 0  # rows of logits that its caller has
    is_over: bool = False
    is_paused: bool = False  # its caller does not read what it gets
    in_flight: bool = False  # a step with rows of it is on its way
    prompt_n: int = 0
    prompt_s: float = 0.0
    decode_n: int = 0
    decode_s: float = 0.0
    n_reduces: int = 0
    reduce_s: float = 0.0
    order: tuple[float, int] = field(init=False)  # who goes first

    def __post_init__(self) -> None:
        self.order = self.born + PRIORITY_S * self.request.priority, self.number

    @property
    def n_wanted(self) -> int:
        """Rows not computed yet: 1 while decoding."""
        return len(self.tokens) - self.n_stored

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.request.tokens)

    @property
    def wanted_slot(self) -> int | None:
        return self.request.slot if isinstance(self.request, Generate) else None

    @property
    def sharable(self) -> int:
        """How many positions from the beginning need not be computed again. The last one must run; for a
        `Logits` request so must all whose logits the caller has not got."""
        return len(self.tokens) - 1 if isinstance(self.request, Generate) else self.n_given

    def n_outputs(self, n: int) -> int:
        """How many output rows its next `n` rows have. `Logits`: every row that the caller has not got.
        `Generate`: 1 if they include the last row."""
        if isinstance(self.request, Logits):
            return max(0, self.n_stored + n - max(self.n_stored, self.n_given))
        return int(n == self.n_wanted)

    def timings(self) -> Timings:
        return Timings(
            self.prompt_n, self.prompt_s, self.decode_n, self.decode_s, self.n_reduces, self.reduce_s
        )


Batch = list[tuple[Sequence, int, int]]  # sequences, their rows, and how many of these give logits
