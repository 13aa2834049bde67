"""Gives the sequences of a decoding step drafts, whose tokens the step verifies.

A step computes the rows of all drafted tokens, and the sampler of the sequence chooses a token from each row
in turn. Each choice that equals the drafted token makes the next row valid, so the tokens are the same as
without drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences

from vkbackend.models.drafting.drafter import Drafter, Want
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.sequence import Sequence
from vkbackend.ops import MAX_VEC_ROWS

# The kernels of larger steps add in another order, so the last bits of their logits differ from the logits of
# single rows.
MAX_ROWS = MAX_VEC_ROWS


class Speculation:
    """`max_rows` limits a step with drafts, and `end` is the first position that has no cell. A draft has
    `n_min` to `n_max` tokens."""

    def __init__(self, drafter: Drafter, end: int, max_rows: int, n_max: int, n_min: int) -> None:
        self._drafter, self._end, self._n_max, self._n_min = drafter, end, n_max, n_min
        self._max_rows = min(MAX_ROWS, max_rows)
        self.n_drafts = self.n_drafted = self.n_accepted = 0

    def draft(self, line: Sequences[Sequence], reserve: Callable[[int, int], bool]) -> None:
        """Set `draft` of each sequence. All sequences decode. `reserve` takes free cells for the positions of
        a slot up to an end, or returns False."""
        for sequence in line:
            sequence.draft = ()
        n_left = self._max_rows - sum([sequence.n_wanted for sequence in line])
        if n_left <= 0 or not line:
            return
        share = -(-n_left // len(line))
        drafting: list[Sequence] = []
        wants: list[Want] = []
        for sequence in line:
            n = min(share, self._most(sequence))
            if n > 0 and self._drafter.stores:
                n *= reserve(sequence.slot, sequence.n_stored + sequence.n_wanted + n)
            if n > 0:
                drafting.append(sequence)
                wants.append(Want(sequence.slot, sequence.number, sequence.tokens, sequence.history, n))
        if not wants:
            return
        drafts = [list(draft.tokens) for draft in self._drafter.draft(wants)]
        lengths = [0] * len(drafts)
        for at in range(share):  # share the rows evenly: first tokens, then second tokens
            for i, draft in enumerate(drafts):
                if n_left and at < len(draft):
                    lengths[i], n_left = at + 1, n_left - 1
        for sequence, draft, n in zip(drafting, drafts, lengths, strict=True):
            sequence.draft = draft[:n] if n >= self._n_min else ()

    def _most(self, sequence: Sequence) -> int:
        request = sequence.request
        # Before its first generated token, a sequence may read a state that the prefix cache can evict.
        if not isinstance(request, Generate) or not sequence.n_generated or sequence.served < 0:
            return 0
        if request.structure is not None:
            return 0
        n = min(self._n_max, self._end - sequence.n_stored - sequence.n_wanted)
        if request.max_tokens is not None:
            n = min(n, request.max_tokens - sequence.n_generated - 1)
        return n

    def verified(self, sequence: Sequence) -> None:
        """Count a verified draft and its accepted tokens."""
        self.n_drafts += 1
        self.n_drafted += len(sequence.draft)
        self.n_accepted += sequence.n_matched
        self._drafter.took(sequence.slot, sequence.n_matched)

    def close(self) -> None:
        self._drafter.close()
