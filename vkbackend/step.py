"""StepParams, the values that change with every token.

Counts and runs are a uniform block, which matches `shaders/lib/step.glsl`. The rows follow the block in the
same buffer, and shaders read them as a storage buffer (`shaders/lib/step_rows.glsl`), because Vulkan
guarantees only 16 KiB of a uniform block. RoPE's cos and sin are in another storage buffer, f32 [n_rows,
n_rot / 2, 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

MAX_ROWS = 4096  # per micro-batch.
MAX_RUNS = 128  # per micro-batch.
FEW_ROWS = 8  # maximum number of rows of a step of Mix.FEW
FEW_RUNS = 5  # For fewer runs, a Python loop is faster than numpy.
NEVER = (1 << 32) - 1
MAX_SNAPSHOTS = 64  # Recurrent states per slot.

_HEADER, _RUNS, _STATES, _ROWS = 0, 4, 4 + 4 * MAX_RUNS, 4 + 8 * MAX_RUNS
BLOCK_NBYTES = 4 * _ROWS  # of the uniform block: 4,112


def step_words(n_rows: int) -> int:
    """Return the number of words of the block and `n_rows` rows."""
    return _ROWS + 4 * n_rows


@dataclass(slots=True)
class Run:
    """Consecutive rows of one sequence. Row `first_row + i` has position `first_pos + i`. A run at position 0
    reads no state. After a run with `undoes` set, the slot can continue from the run's beginning or from one
    of its rows. `adapters` are the ids and scales of the rows' adapters. In an encoder, positions from
    `second` on belong to the second text of a pair (0: no pair).

    `states` lists cells of the recurrent state: the cell that the run reads, then the cell for the state
    after the last row. By default, both are the cell with the slot's number. In a step of Mix.FEW, the second
    may be replaced by a cell for each row, for the state after the row.
    """

    slot: int
    first_row: int
    n_rows: int
    first_pos: int
    states: tuple[int, ...] | None = None
    undoes: bool = False
    adapters: tuple[tuple[int, float], ...] = ()
    second: int = 0
    # If the run is a part of an encoder's text or picture, the end position of the text or picture (0: the
    # run is complete). In a causal step, rows attend to later rows up to this position.
    end: int = 0
    begin: int = 0  # For an encoder with windows, the first position to which the run's rows attend.


class Mix(IntEnum):
    """The kind of rows in a step, which selects the kernels. An IntEnum hashes three times as fast as an
    Enum."""

    DECODE = 1  # Only runs of one row.
    PREFILL = 2  # Only longer runs.
    BOTH = 3  # Runs of one row, then longer runs.
    FEW = 4  # Few rows, and a run of several rows. DECODE's kernels; attention reads K and V once per run.

    @property
    def decodes(self) -> bool:
        """Whether the kernels for decoding compute all rows."""
        return self in (Mix.DECODE, Mix.FEW)


def n_single(runs: Sequence[Run]) -> int:
    return next((i for i, run in enumerate(runs) if run.n_rows > 1), len(runs))


def cut_runs(runs: Sequence[Run], at: int) -> tuple[list[Run], list[Run]]:
    """Divide the runs at row `at` into two lists whose rows begin at 0. If a run crosses `at`, the second
    part continues from the recurrent state of the first part."""
    front, back = [], []
    for run in runs:
        n = min(max(at - run.first_row, 0), run.n_rows)
        if n:
            front.append(replace(run, n_rows=n))
        if n < run.n_rows:
            first_row, first_pos = max(run.first_row - at, 0), run.first_pos + n
            states = run.states and (run.states[-1] if n else run.states[0], run.states[-1])
            n_rows = run.n_rows - n
            back.append(replace(run, first_row=first_row, n_rows=n_rows, first_pos=first_pos, states=states))
    return front, back


def _cells_after(run: Run) -> Sequence[int]:
    """Return, for each row, the cell for the state after it."""
    states = run.states or (run.slot, run.slot)
    return states[1:] if len(states) == 1 + run.n_rows else states[1:] * run.n_rows


class StepParams:
    """Numpy views of the uniform block and the rows. `words` is uint32 [step_words(n_rows)], and may be
    mapped device memory. The default is new memory for MAX_ROWS rows."""

    def __init__(self, words: np.ndarray | None = None) -> None:
        self.words = np.zeros(step_words(MAX_ROWS), np.uint32) if words is None else words
        self.header = self.words[_HEADER:_RUNS]  # `n_rows`, `n_runs`, `n_outputs`, `n_decode`.
        # `slot`, `first_row`, `n_rows`, `first_pos`.
        self.runs = self.words[_RUNS:_STATES].reshape(MAX_RUNS, 4)
        self.states = self.words[_STATES:_ROWS].reshape(
            MAX_RUNS, 4
        )  # State cells to read and to write; end and beginning of the text.
        # In a step of Mix.FEW, the cell for the state after each row. Such a step has fewer runs, so no run
        # uses these entries.
        self.cells_after = self.states[FEW_ROWS : 2 * FEW_ROWS, 0]
        self.rows = self.words[_ROWS:].reshape(-1, 4)  # Position, slot, token, and two halves:
        self.outputs = self.rows.view(np.uint16)[:, 6]  # the row index of each output, and
        self.types = self.rows.view(np.uint16)[:, 7]  # each row's type.

    @property
    def used(self) -> np.ndarray:
        return self.words[: step_words(self.n_rows)]

    @property
    def n_rows(self) -> int:
        return int(self.header[0])

    @property
    def n_runs(self) -> int:
        return int(self.header[1])

    @property
    def n_outputs(self) -> int:
        return int(self.header[2])

    @property
    def n_decode(self) -> int:
        return int(self.header[3])

    def fill(
        self,
        tokens: Sequence[int] | np.ndarray,
        runs: Sequence[Run],
        outputs: Sequence[int],
        mix: Mix = Mix.DECODE,
        typed: bool = False,
        ends: bool = False,
    ) -> None:
        """`tokens` lists a token per row, `runs` covers the rows in order, and `outputs` lists the rows that
        need logits. If `mix` is Mix.BOTH, the decode kernels compute the leading runs of one row. If `typed`,
        a row has type 1 in the second text of a pair and 0 otherwise, and each run stores the beginning and
        the end of its text. If `ends`, the attention of the step is causal, and runs store their `end`."""
        n_rows, n_runs = len(tokens), len(runs)
        assert len(outputs) <= n_rows <= len(self.rows) and n_runs <= MAX_RUNS, (n_rows, n_runs, len(outputs))
        n_decode = n_rows if mix.decodes else n_single(runs) if mix is Mix.BOTH else 0
        self.header[:] = n_rows, n_runs, len(outputs), n_decode
        if n_rows == n_runs < FEW_RUNS and not typed and not ends:
            for i, run in enumerate(runs):
                read, *_, written = run.states or (run.slot, run.slot)
                self.runs[i] = run.slot, run.first_row, 1, run.first_pos
                self.states[i, :2] = read, written
                self.rows[i, :3] = run.first_pos, run.slot, tokens[i]
            self.outputs[: len(outputs)] = outputs
            return
        table = np.array([(run.slot, run.first_row, run.n_rows, run.first_pos) for run in runs], np.uint32)
        if any(run.states for run in runs):
            self.states[:n_runs, 0] = [run.states[0] if run.states else run.slot for run in runs]
            self.states[:n_runs, 1] = [run.states[-1] if run.states else run.slot for run in runs]
        else:
            self.states[:n_runs, :2] = table[:, :1]
        self.runs[:n_runs] = table
        rows = self.rows[:n_rows]
        if n_rows > n_runs:
            table = table.repeat(table[:, 2], axis=0)
            rows[:, 0] = table[:, 3] + np.arange(n_rows, dtype=np.uint32) - table[:, 1]
        else:
            rows[:, 0] = table[:, 3]
        rows[:, 1], rows[:, 2] = table[:, 0], tokens
        if mix is Mix.FEW:
            cells = [cell for run in runs for cell in _cells_after(run)]
            self.cells_after[:n_rows] = cells
        if typed:
            seconds = np.array([run.second or NEVER for run in runs], np.uint32)
            self.types[:n_rows] = rows[:, 0] >= seconds.repeat([run.n_rows for run in runs])
            self.states[:n_runs, 2] = [run.end or run.first_pos + run.n_rows for run in runs]
            self.states[:n_runs, 3] = [run.begin for run in runs]
        elif ends:
            self.states[:n_runs, 2] = [run.end for run in runs]
        self.outputs[: len(outputs)] = outputs
