"""The key of a recorded step."""

from __future__ import annotations

from typing import NamedTuple

from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.step import Mix


def bucket(n: int) -> int:
    """Return how many rows to record for n rows. The result is a power of two or, from 12 on, also 1.5 times
    a power of two. Finer steps help software devices, where a padded row takes as long as a real row."""
    power = 1 << max(0, n - 1).bit_length() if n else 0
    return power * 3 // 4 if power >= 16 and n <= power * 3 // 4 else power


def mix_of(n_rows: int, n_single: int = 0, n_runs: int = 1) -> Mix:
    """Return the mix of a step in which the first `n_single` of `n_runs` runs have one row each. Steps of few
    rows also use the decoding kernels, because these kernels read K and V once for all heads of a group."""
    if n_rows == 1 or n_single == n_runs:
        return Mix.DECODE
    if n_rows <= MAX_VEC_ROWS:
        return Mix.FEW
    return Mix.BOTH if n_single else Mix.PREFILL


class Wanted(NamedTuple):
    """The wanted result of each output row: all logits if `top_k` is 0, otherwise the `top_k` best tokens. If
    `summed` is set, the result also includes the row's log(sum(exp(logits))), from which the tokens'
    probabilities follow. If `ahead` is set, the multi-token prediction head computes the result. If `hidden`
    is set, the result is the row's hidden state after the final norm, without logits."""

    top_k: int = 0
    summed: bool = False
    ahead: bool = False
    hidden: bool = False


MAX_ADAPTERS = 4  # of a row


class StepKind(NamedTuple):
    """If `halves` is set, two halves of the rows alternate, and the second half contains the output rows. If
    `masked` is set, a mask limits the candidates. `adapters` is the maximum number of adapters of a row: 0,
    1, 2 or 4. An encoder's `stage` computes one layer for a part of a text (-1: all layers, complete
    texts). If `images` is set, some rows have the embedding of an image's row instead of a token's. If
    `sees_end` is set, rows of some images attend to later rows of their image."""

    n_rows: int
    n_outputs: int
    mix: Mix
    wanted: Wanted = Wanted()
    masked: bool = False
    halves: bool = False
    adapters: int = 0
    stage: int = -1
    images: bool = False
    sees_end: bool = False

    @property
    def adapter_words(self) -> int:
        """Return the number of words of the rows' and output rows' adapter ids and scales."""
        return 2 * self.adapters * (self.n_rows + self.n_outputs)

    @classmethod
    def of_run(cls, n_rows: int, n_outputs: int, top_k: int = 0, halves: bool = False) -> StepKind:
        mix = mix_of(n_rows // 2 if halves else n_rows)
        return cls(n_rows, n_outputs, mix, Wanted(top_k), halves=halves)
