"""A runner without a model, which asserts that its arguments are valid. The logits of a row depend on all
tokens of its sequence, so a wrong slot changes them. Spawned processes can import this module.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from processes import suspend

from vkbackend.errors import DeviceLost, OutOfDeviceMemory
from vkbackend.meta.load import Progress
from vkbackend.meta.step_kind import Wanted
from vkbackend.models.adapters.info import AdapterInfo
from vkbackend.models.engine.cache.blocks import Copy, Pool
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.recurrent_state import SlotStates
from vkbackend.ops import CELL_BLOCK
from vkbackend.step import Run

N_VOCAB = 50
DEATH, HANG, LOST, NAN, SLOW = 44, 45, 46, 47, 48


def row_of(tokens: Sequence[int]) -> np.ndarray:
    """Return the logits [N_VOCAB] after `tokens`. Special tokens never have the highest logit."""
    rng = np.random.default_rng(hash(tuple(tokens)) & 0xFFFFFFFF)
    logits = rng.normal(0, 2, N_VOCAB).astype(np.float32)
    logits[40:] -= 100
    return logits


def continuation(tokens: Sequence[int], n: int, without: Sequence[int] = ()) -> list[int]:
    out = list(tokens)
    for _ in range(n):
        logits = row_of(out)
        logits[list(without)] = -np.inf
        out.append(int(logits.argmax()))
    return out[len(tokens) :]


class FakeRunner:
    """A runner whose cells store a token instead of K and V. A step reads the tokens of a sequence from its
    cells, so a wrong cell changes the logits. The cells of windows and the recurrent states must contain
    these tokens too. All slots share `blocks` blocks. If `blocks` is None, there are enough for all slots."""

    n_vocab = N_VOCAB
    max_top_k = 0
    prediction = None
    notes: tuple[str, ...] = ()
    adapters: tuple[AdapterInfo, ...] = ()
    default_adapters: tuple[tuple[int, float], ...] = ()
    n_recorded, record_s = 0, 0.0

    def record_ahead(self, is_awaited: Callable[[], bool]) -> bool:
        return False

    def save_due_s(self) -> float | None:
        return None

    n_embd, encodes, n_stages = N_VOCAB, False, 0
    image_width, has_sections = 0, False

    def __init__(
        self,
        *,
        n_ctx: int = 64,
        n_slots: int = 1,
        n_ubatch: int = 16,
        max_outputs: int | None = None,
        blocks: int | None = None,
        window: int = 0,
        snapshots: int | None = None,
        prefix_cache: bool = True,
        n_queue: int = 4096,
        n_in_flight: int = 1,
        context_shift: bool = False,
        undoes: bool = False,
        stores_rows: bool = False,
        speculation: tuple[str, ...] = (),
        cache_ram: int = 0,
        cache_disk: str | None = None,
        cache_disk_mib: int = 1024,
    ) -> None:
        self.n_ctx, self.n_slots, self.n_ubatch = n_ctx or 64, n_slots, n_ubatch
        self.max_outputs = self.max_hidden = max_outputs or n_ubatch
        self.options = SimpleNamespace(
            prefix_cache=prefix_cache,
            n_queue=n_queue,
            context_shift=context_shift,
            speculation=speculation,
            draft_max=7,
            draft_min=0,
            n_slots=n_slots,
            n_ctx=self.n_ctx,
            cache_ram=cache_ram,
            cache_disk=cache_disk,
            cache_disk_mib=cache_disk_mib,
        )
        width = -(-self.n_ctx // CELL_BLOCK)
        self.pools = [Pool(blocks or width * n_slots)]
        ring = min(width, -(-(window + n_ubatch - 2) // CELL_BLOCK) + 1)
        if window and ring < width:
            self.pools.append(Pool(ring * n_slots, window))
        self.parts: list[FakeParts] = []
        self.tables = [np.full((n_slots, width), -1) for _ in self.pools]
        self.cells = [np.full((pool.n_blocks, CELL_BLOCK), -1) for pool in self.pools]
        self.states = None
        if snapshots is not None:
            n_row_cells = 7 * n_in_flight if undoes and stores_rows else 0
            self.states = SlotStates(n_slots, snapshots, undoes and not stores_rows, n_row_cells)
        self.state_cells: dict[int, tuple[int, ...]] = {}
        self.steps: list[list[Run]] = []
        self.n_rows = self.n_copies = self.n_shifts = self.closed = 0
        self.n_in_flight, self.in_flight = n_in_flight, deque[Any]()
        self.most_in_flight = 0

    def tell_of_compiling(self, tell: Callable[[], None]) -> None:
        """Nothing is compiled."""

    def resume_at(self, slot: int, position: int) -> int:
        return self.states.resume_at(slot, position) if self.states else position

    def settle(self, slot: int, position: int) -> int:
        return self.states.settle(slot, position) if self.states else position

    def set_block(self, group: int, slot: int, index: int, block: int) -> None:
        assert 0 <= block < self.pools[group].n_blocks
        self.tables[group][slot, index] = block

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self.cells[copy.group][copy.target] = self.cells[copy.group][copy.source]
            self.n_copies += 1

    def copy_state(self, source: int, target: int, n_stored: int) -> None:
        if self.states and n_stored:
            cell = self.states.cell(source, n_stored)
            self.state_cells[self.states.put(target, n_stored)] = self.state_cells[cell]

    def block_parts(self) -> FakeParts:
        self.parts.append(FakeParts(self))
        return self.parts[-1]

    def shift(self, slot: int, first: int, end: int, distance: int) -> None:
        assert (
            self.options.context_shift and not self.in_flight and 0 < distance <= first <= end <= self.n_ctx
        )
        moved, at = self.held(0, slot, first, end), np.arange(first, end) - distance
        self.cells[0][self.tables[0][slot, at // CELL_BLOCK], at % CELL_BLOCK] = moved
        self.n_shifts += 1

    def held(self, group: int, slot: int, first: int, end: int) -> list[int]:
        at = np.arange(first, end)
        return self.cells[group][self.tables[group][slot, at // CELL_BLOCK], at % CELL_BLOCK].tolist()  # type: ignore[no-any-return]

    def launch(self, batch: MicroBatch, wanted: Wanted) -> Any:
        """Compute steps in launch order, as devices do. The host reads a result only when it collects the
        step."""
        assert not wanted.top_k and batch.masks is None and len(self.in_flight) < self.n_in_flight
        logits = self.step(batch.tokens, batch.runs, batch.outputs)
        self.in_flight.append((logits, len(self.steps)))
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return self.in_flight[-1]

    def collect(self, launched: Any) -> Any:
        first = self.in_flight.popleft()
        assert first is launched
        return None, first[0], None

    def step(self, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]) -> np.ndarray:
        assert not self.closed
        assert 0 < len(tokens) <= self.n_ubatch and len(outputs) <= self.max_outputs
        assert [r.first_row for r in runs] == [sum(r.n_rows for r in runs[:i]) for i in range(len(runs))]
        assert sum(r.n_rows for r in runs) == len(tokens) and all(r.n_rows for r in runs)
        assert len({r.slot for r in runs}) == len(runs)
        self.steps.append(list(runs))
        self.n_rows += len(tokens)
        self._misbehave(tokens)
        for r in runs:
            for i, token in enumerate(tokens[r.first_row : r.first_row + r.n_rows]):
                position = r.first_pos + i
                assert position < self.n_ctx
                for table, cells in zip(self.tables, self.cells, strict=True):
                    cells[table[r.slot, position // CELL_BLOCK], position % CELL_BLOCK] = token
        return self._logits(tokens, runs, outputs)

    def _logits(self, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]) -> np.ndarray:
        rows: list[np.ndarray] = []
        for r in runs:
            stored = self.held(0, r.slot, 0, r.first_pos + r.n_rows)
            for group, pool in enumerate(self.pools[1:], 1):
                first = max(0, r.first_pos - pool.window + 1)
                assert self.held(group, r.slot, first, len(stored)) == stored[first:], "a window's cells"
            if self.states:
                read, *cells, written = self.states.advance(r)
                assert not r.first_pos or self.state_cells[read] == tuple(stored[: r.first_pos]), "a state"
                for end, cell in enumerate(cells, r.first_pos + 1):
                    self.state_cells[cell] = tuple(stored[:end])
                self.state_cells[written] = tuple(stored)
            for n in range(r.first_pos + 1, len(stored) + 1):
                rows.append(
                    np.full(N_VOCAB, np.nan, np.float32) if stored[n - 1] == NAN else row_of(stored[:n])
                )
        return np.array([rows[i] for i in outputs], np.float32).reshape(len(outputs), N_VOCAB)

    def _misbehave(self, tokens: Sequence[int]) -> None:
        if DEATH in tokens:
            os._exit(3)
        if HANG in tokens:
            suspend(os.getpid())
        if LOST in tokens:
            raise DeviceLost("device Vulkan7 was lost")
        if SLOW in tokens:
            time.sleep(0.02)

    def memory(self) -> list[dict[str, Any]]:
        return [{"device": "fake", "weights": 1, "kv": 2, "scratch": 3, "staging": 4}]

    def device_names(self) -> list[str]:
        return ["fake"]

    def expert_stats(self) -> dict[str, int]:
        return {}

    def reduce_stats(self) -> tuple[int, float]:
        return 2 * len(self.steps), 1e-5 * len(self.steps)

    def close(self) -> None:
        self.closed += 1


class FakeParts:
    """Copies of a fake runner's cells and states."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner, self.identity = runner, bytes(32)
        self.n_reads = self.n_writes = 0
        self.nbytes = (*[8 * CELL_BLOCK for _ in runner.pools], 8 * runner.n_ctx if runner.states else 0)

    def read(self, cells: Sequence[tuple[int, int]]) -> list[bytes]:
        assert not self._runner.in_flight
        self.n_reads += 1
        return [self._array(part, cell).tobytes() for part, cell in cells]

    def _array(self, part: int, cell: int) -> np.ndarray:
        if part < len(self._runner.cells):
            return self._runner.cells[part][cell]
        state = np.full(self._runner.n_ctx, -1)
        tokens = self._runner.state_cells[cell]
        state[: len(tokens)] = tokens
        return state

    def write(self, cells: Sequence[tuple[tuple[int, int], bytes]]) -> None:
        assert not self._runner.in_flight
        self.n_writes += 1
        for (part, cell), data in cells:
            values = np.frombuffer(data, np.int64)
            if part < len(self._runner.cells):
                self._runner.cells[part][cell] = values
            else:
                self._runner.state_cells[cell] = tuple(values[values >= 0].tolist())


def fake(options: Options, progress: Progress | None = None, **how_loaded: object) -> FakeRunner:
    sizes = {"n_ctx": options.n_ctx, "n_slots": options.n_slots, "n_ubatch": options.n_ubatch or DEFAULT_ROWS}
    how = {"prefix_cache": options.prefix_cache, "context_shift": options.context_shift}
    return FakeRunner(**sizes, **how, n_queue=options.n_queue, speculation=options.speculation)


MODULE = SimpleNamespace(Runner=fake)  # replaces vkbackend.models.engine.runner.runner


def open_fake(options: Options, progress: Progress | None) -> Engine:
    if options.path == "too big":
        raise OutOfDeviceMemory("needs 9 of 5 bytes", requested=9, budget=5, heap=1)
    if options.path == "bug":
        raise ZeroDivisionError("a bug")
    if progress is not None:
        progress(1, 2)
        progress(2, 2)
    return Engine(FakeRunner(n_ctx=options.n_ctx, n_slots=options.n_slots))  # type: ignore[arg-type]
