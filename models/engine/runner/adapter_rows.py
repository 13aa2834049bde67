"""The ids and scales of the adapters of a step's rows, as meta/ops/low_rank.py reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.meta.sizing import StepShape
from vkbackend.meta.step_kind import StepKind
from vkbackend.ops import NO_ADAPTER
from vkbackend.step import Run


def width_of(runs: Sequence[Run]) -> int:
    """Return how many adapters a row's entry needs: 0, 1, 2 or 4."""
    most = max([len(run.adapters) for run in runs])
    return 4 if most > 2 else most


class AdapterRows:
    def __init__(self, shape: StepShape) -> None:
        self._words = np.zeros(shape.adapter_words, np.uint32)

    def at(self, kind: StepKind, parts: Sequence[tuple[Sequence[Run], Sequence[int]]]) -> np.ndarray:
        """Return the ids and scales as uint32 words. The next call overwrites them. `parts` holds the runs
        and output rows of the step, or of both halves."""
        n_rows = kind.n_rows // len(parts)
        at = 0
        for i, (runs, outputs) in enumerate(parts):
            n_outputs = kind.n_outputs if i == len(parts) - 1 else 0
            words = 2 * kind.adapters * (n_rows + n_outputs)
            self._fill(self._words[at : at + words], kind.adapters, n_rows, runs, outputs)
            at += words
        return self._words[:at]

    def _fill(
        self, words: np.ndarray, n: int, n_rows: int, runs: Sequence[Run], outputs: Sequence[int]
    ) -> None:
        rows, last = words[: 2 * n * n_rows].reshape(2, n_rows, n), words[2 * n * n_rows :].reshape(2, -1, n)
        ids, scales = rows[0], rows[1].view(np.float32)
        ids[:] = NO_ADAPTER
        for run in runs:
            for term, (adapter, scale) in enumerate(run.adapters):
                ids[run.first_row : run.first_row + run.n_rows, term] = adapter
                scales[run.first_row : run.first_row + run.n_rows, term] = scale
        if outputs:
            last[0, len(outputs) :] = NO_ADAPTER
            last[:, : len(outputs)] = rows[:, outputs]
