"""A step in flight has begun, but its output rows are not read yet. If nodes form a pipeline, each node has a
step in flight, with different sequences. Otherwise one step is in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vkbackend.meta.step_kind import Wanted
from vkbackend.models.engine.cache.mark import adapters_at
from vkbackend.models.engine.runner.micro_batch import BatchImages, StepHandle
from vkbackend.models.engine.sequence import Batch
from vkbackend.models.engine.step_times import Mark
from vkbackend.step import Run


@dataclass(slots=True)
class StepInFlight:
    batch: Batch
    handle: StepHandle
    composed: Mark
    began: Mark
    n_rows: int
    n_decode: int


def rows_of(batch: Batch) -> tuple[list[int], list[Run], list[int], int]:
    tokens: list[int] = []
    runs: list[Run] = []
    outputs: list[int] = []
    n_decode = 0
    for sequence, n, n_outputs in batch:
        first, start = len(tokens), sequence.n_stored
        draft = sequence.draft
        undoes = bool(draft) or sequence.replays
        runs.append(Run(sequence.slot, first, n, start, undoes=undoes, second=sequence.second))
        if sequence.stage >= 0:
            runs[-1].end = len(sequence.tokens)
        if sequence.mark:
            runs[-1].adapters = adapters_at(sequence.mark, start)
        n_decode += n if sequence.decodes and not sequence.is_embedded else 0
        if n == 1:
            tokens.append(sequence.tokens[start])
        else:
            tokens += sequence.tokens[start : start + n]
            tokens += draft
        if n_outputs == 1 and n > 1 and sequence.takes_first:
            outputs.append(first)
        elif n_outputs:
            outputs += range(first + n - n_outputs, first + n)
    return tokens, runs, outputs, n_decode


def images_of(batch: Batch, tokens: list[int], runs: list[Run]) -> BatchImages | None:
    """Return the images of a batch, if its sequences have any. In `tokens`, ids of images' rows become 0. In
    `runs`, an image whose rows attend to each other gets a run of its own."""
    if not any(sequence.images for sequence, *_ in batch):
        return None
    whole, runs[:] = runs[:], []
    rows: list[tuple[int, np.ndarray]] = []
    positions: list[np.ndarray] = []
    first, has_positions = 0, False
    for (sequence, n, _), run in zip(batch, whole, strict=True):
        start, at = sequence.n_stored, None
        images = sequence.images
        runs += images.runs(run) if images else [run]
        if images:
            at = images.positions(start, n)
            for offset, values in images.rows(start, n):
                begin, end = first + offset, first + offset + len(values)
                tokens[begin:end] = [0] * len(values)
                rows.append((begin, values))
        has_positions |= at is not None
        positions.append(np.repeat(np.arange(start, start + n)[:, None], 3, axis=1) if at is None else at)
        first += n
    sees_end = any(run.end for run in runs)
    return BatchImages(rows, np.concatenate(positions) if has_positions else None, sees_end)


def wanted_of(batch: Batch, most: int) -> Wanted:
    """Return how many candidates are enough for every sequence. If the number exceeds `most`, request
    complete rows. A step outputs hidden states for all sequences or for none."""
    k, summed = 0, False
    if batch[0][0].is_embedded:
        return Wanted(hidden=any(n_outputs for *_, n_outputs in batch))
    for sequence, _, n_outputs in batch:
        sampler = sequence.sampler
        if n_outputs:
            enough = sampler.n_candidates(sequence.history, sequence.draft) if sampler else 0
            if not 0 < enough <= most:
                return Wanted()
            k = max(k, enough)
        summed |= sampler is not None and sampler.params.logprobs is not None
    return Wanted(k, summed and k > 0)
