"""StepParams: everything that changes from token to token, as one uniform block of at most 16 KiB.

The layout is std140 and mirrored by `shaders/lib/step.glsl`. RoPE's cos/sin rows travel beside it in a
storage buffer (f32 [n_rows, n_rot / 2, 2]), because 512 rows of them exceed any guaranteed uniform range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

MAX_ROWS = 512  # rows of one micro-batch
MAX_RUNS = 128  # sequences in one micro-batch
MAX_SNAPSHOTS = 64  # recurrent states kept per slot: cells of all slots are numbered in 16 bits

_HEADER, _RUNS, _ROWS, _OUTPUTS = 0, 4, 4 + 4 * MAX_RUNS, 4 + 4 * MAX_RUNS + 4 * MAX_ROWS
STEP_WORDS = _OUTPUTS + MAX_ROWS
STEP_NBYTES = 4 * STEP_WORDS  # 12,304


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one sequence: rows first_row..first_row+n_rows hold positions first_pos,
    first_pos+1, ...; `states` are the recurrent state cells that it reads (none at position 0) and writes, if
    there is any (None: that of the slot's number)."""

    slot: int
    first_row: int
    n_rows: int
    first_pos: int
    states: tuple[int, int] | None = None


def cut_runs(runs: Sequence[Run], at: int) -> tuple[list[Run], list[Run]]:
    """The runs of the rows before `at`, and those from there on with rows counted from 0; one that crosses is
    in both, and goes on from the state that its first part leaves."""
    front, back = [], []
    for run in runs:
        n = min(max(at - run.first_row, 0), run.n_rows)
        if n:
            front.append(replace(run, n_rows=n))
        if n < run.n_rows:
            first_row, first_pos = max(run.first_row - at, 0), run.first_pos + n
            states = run.states and (run.states[1] if n else run.states[0], run.states[1])
            back.append(Run(run.slot, first_row, run.n_rows - n, first_pos, states))
    return front, back


class StepParams:
    """A numpy view over the words of a StepParams block; `words` is uint32 [STEP_WORDS] (for instance mapped
    memory)."""

    def __init__(self, words: np.ndarray | None = None) -> None:
        self.words = np.zeros(STEP_WORDS, np.uint32) if words is None else words
        self.header = self.words[_HEADER:_RUNS]  # n_rows, n_runs, n_outputs, 0
        self.runs = self.words[_RUNS:_ROWS].reshape(MAX_RUNS, 4)  # slot, first_row, n_rows, first_pos
        self.rows = self.words[_ROWS:_OUTPUTS].reshape(MAX_ROWS, 4)  # position, slot, token, states
        self.outputs = self.words[_OUTPUTS:]  # row index of each output row

    @property
    def n_rows(self) -> int:
        return int(self.header[0])

    @property
    def n_runs(self) -> int:
        return int(self.header[1])

    @property
    def n_outputs(self) -> int:
        return int(self.header[2])

    def fill(self, tokens: Sequence[int] | np.ndarray, runs: Sequence[Run], outputs: Sequence[int]) -> None:
        """Describe one step: `tokens` of all rows, the runs that tile them in order, the rows whose logits
        are wanted."""
        n_rows = len(tokens)
        assert n_rows <= MAX_ROWS and len(runs) <= MAX_RUNS and len(outputs) <= MAX_ROWS, (n_rows, len(runs))
        self.header[:] = n_rows, len(runs), len(outputs), 0
        self.rows[:n_rows, 2] = tokens
        for i, run in enumerate(runs):
            self.runs[i] = run.slot, run.first_row, run.n_rows, run.first_pos
            rows = self.rows[run.first_row : run.first_row + run.n_rows]
            rows[:, 0] = np.arange(run.first_pos, run.first_pos + run.n_rows)
            rows[:, 1] = run.slot
            read, written = run.states or (run.slot, run.slot)
            rows[:, 3] = read | written << 16
        self.outputs[: len(outputs)] = outputs
