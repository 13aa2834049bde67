"""Orders the requests that wait for a slot by age and priority, and ends requests at their deadlines.
Removing one of n requests takes O(log n) time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from vkbackend.errors import DeadlineExceeded
from vkbackend.models.engine.sequence import Sequence

Heap = list[tuple[tuple[float, int], Sequence]]


class Waiting:
    def __init__(self) -> None:
        self._any: Heap = []
        self._by_slot: dict[int, Heap] = {}
        self._n = self._n_dead = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Sequence]:
        for heap in (self._any, *self._by_slot.values()):
            yield from (sequence for _, sequence in heap if not sequence.is_over)

    def add(self, sequence: Sequence) -> None:
        wanted = sequence.wanted_slot
        heap = self._any if wanted is None else self._by_slot.setdefault(wanted, [])
        heappush(heap, (sequence.order, sequence))
        self._n += 1

    def forget(self) -> None:
        """Count a waiting request that has ended (`is_over`). The queue removes the request later."""
        self._n, self._n_dead = self._n - 1, self._n_dead + 1
        if self._n_dead > 64 + self._n:
            for heap in (self._any, *self._by_slot.values()):
                heap[:] = [entry for entry in heap if not entry[1].is_over]
                heapify(heap)
            self._n_dead = 0

    def waits_for(self, slot: int) -> bool:
        return self._first(self._by_slot.get(slot, [])) is not None

    def pop(self, free: Iterable[int]) -> Sequence | None:
        heaps = [self._any, *(self._by_slot[slot] for slot in free if slot in self._by_slot)]
        heads = [(first.order, heap) for heap in heaps if (first := self._first(heap)) is not None]
        if not heads:
            return None
        self._n -= 1
        heap = min(heads, key=lambda head: head[0])[1]
        return heappop(heap)[1]

    def _first(self, heap: Heap) -> Sequence | None:
        while heap and heap[0][1].is_over:
            heappop(heap)
            self._n_dead -= 1
        return heap[0][1] if heap else None


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._most = 64  # At this length, drop finished sequences.

    def add(self, sequence: Sequence, at: float) -> None:
        if len(self._heap) >= self._most:
            self._heap = [entry for entry in self._heap if not entry[2].is_over]
            heapify(self._heap)
            self._most = 64 + 2 * len(self._heap)
        heappush(self._heap, (at, sequence.number, sequence))

    def __bool__(self) -> bool:
        return bool(self._heap)

    def passed(self, now: float) -> Iterator[Sequence]:
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].is_over):
            sequence = heappop(self._heap)[2]
            if not sequence.is_over:
                yield sequence


def late(sequence: Sequence) -> DeadlineExceeded:
    request = sequence.request
    done = f"{sequence.n_generated} tokens were made" if sequence.slot >= 0 else "it still waited for a slot"
    return DeadlineExceeded(
        f"the request was not done within its deadline of {request.deadline_s:g} s: {done}"
    )
