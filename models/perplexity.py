"""Computes the perplexity of a text in windows, as in llama.cpp, and the divergence from another model's
logits.

A window has n_ctx tokens. BOS replaces the first token if the model wants BOS. Only the second half of a
window is scored. Perplexity is exp(mean negative log likelihood) (Jelinek et al. 1977), and divergence is
KL(base || model) (Kullback and Leibler 1951).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import dtype_to_descr, open_memmap, write_array_header_1_0

from vkbackend.atomic_file import replacing
from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.paths import why
from vkbackend.step import Run

LEVELS = 65_535  # highest level of a saved log probability
LogProbs = npt.NDArray[np.float64]


@dataclass(slots=True)
class Score:
    """Each field is a sum over the scored tokens. Names that end in 2 are sums of squares. `rise` is the
    negative log likelihood minus the negative log likelihood of the base model. `dp2` is the squared
    difference between the token's probabilities in both models. `klds` holds the divergence at every
    token."""

    n: int = 0
    nll: float = 0.0
    nll2: float = 0.0
    rise: float = 0.0
    rise2: float = 0.0
    dp2: float = 0.0
    same_top: int = 0
    klds: list[float] = field(default_factory=list)

    @property
    def ppl(self) -> float:
        return math.exp(self.nll / self.n)

    @property
    def ppl_error(self) -> float:
        return self.ppl * _error(self.nll, self.nll2, self.n)

    def divergence_from_base(self) -> dict[str, float]:
        klds, ratio, same = np.array(self.klds), math.exp(self.rise / self.n), self.same_top / self.n
        return {
            "base_ppl": self.ppl / ratio,
            "ppl_ratio": ratio,
            "ppl_ratio_error": ratio * _error(self.rise, self.rise2, self.n),
            "mean_kld": float(klds.mean()),
            "kld_error": _error(float(klds.sum()), float((klds * klds).sum()), self.n),
            "max_kld": float(klds.max()),
            "kld_99_9": float(np.quantile(klds, 0.999)),
            "median_kld": float(np.median(klds)),
            "rms_dp": math.sqrt(self.dp2 / self.n),
            "same_top": same,
            "same_top_error": _error(self.same_top, self.same_top, self.n),
        }

    def add(self, logp: LogProbs, tokens: Sequence[int], base: LogProbs | None = None) -> None:
        rows = np.arange(len(tokens))
        nll = -logp[rows, tokens]
        self.n += len(tokens)
        self.nll += float(nll.sum())
        self.nll2 += float((nll * nll).sum())
        if base is not None:
            rise = nll + base[rows, tokens]
            dp = np.exp(-nll) - np.exp(base[rows, tokens])
            self.rise += float(rise.sum())
            self.rise2 += float((rise * rise).sum())
            self.dp2 += float((dp * dp).sum())
            self.klds += (np.exp(base) * (base - logp)).sum(axis=1).tolist()
            self.same_top += int((base.argmax(axis=1) == logp.argmax(axis=1)).sum())


def _error(total: float, squares: float, n: int) -> float:
    variance = squares / n - (total / n) ** 2
    return math.sqrt(max(variance, 0.0) / (n - 1)) if n > 1 else math.inf


def windows(tokens: Sequence[int], n_ctx: int, bos: int | None, limit: int | None = None) -> list[list[int]]:
    """Return up to `limit` windows. Raises InvalidArgument if the text is too short."""
    if n_ctx < 4:
        raise InvalidArgument(f"a window of {n_ctx} tokens is too short to score; give 4 or more")
    n = len(tokens) // n_ctx
    if not n:
        raise InvalidArgument(
            f"the text has {len(tokens)} tokens, fewer than one window of {n_ctx}; "
            "give more text or a smaller context (-c)"
        )
    cut = [list(tokens[i * n_ctx : (i + 1) * n_ctx]) for i in range(n if limit is None else min(n, limit))]
    for window in cut:
        if bos is not None:
            window[0] = bos
    return cut


def scored(runner: Runner, window: Sequence[int]) -> Iterator[tuple[LogProbs, list[int]]]:
    """Yield (log probabilities float64 [rows, n_vocab], next tokens) of one micro-batch at a time."""
    first_scored, n = len(window) // 2, len(window)
    at = 0
    while at < n - 1:
        size = min(runner.n_ubatch, n - 1 - at)
        if at + size > first_scored:
            size = min(size, max(first_scored - at, runner.max_outputs))
        outputs = [i for i in range(size) if at + i >= first_scored]
        logits = runner.step(
            list(window[at : at + size]), [Run(0, 0, size, at, adapters=runner.default_adapters)], outputs
        )
        if outputs:
            following = [window[at + i + 1] for i in outputs]
            yield log_softmax(logits), following
        at += size


def log_softmax(logits: npt.NDArray[np.floating[Any]]) -> LogProbs:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def perplexity(
    runner: Runner,
    cut: Sequence[Sequence[int]],
    progress: Callable[[int, Score], None] | None = None,
    base: Base | None = None,
    save: Saver | None = None,
) -> Score:
    """Score all windows. `base` adds the divergence. `save` stores the log probabilities. `progress` is
    called with (windows done, score so far).

    Raises InvalidArgument if the base has another text or vocabulary, and the errors of a step.
    """
    score, row = Score(), 0
    for i, window in enumerate(cut):
        for logp, following in scored(runner, window):
            score.add(logp, following, base.rows(row, following) if base else None)
            if save:
                save(logp, following)
            row += len(following)
        if progress:
            progress(i + 1, score)
    return score


def _row_type(n_vocab: int) -> np.dtype:
    fields = [("token", "<i4"), ("least", "<f4"), ("level", "<u2", (n_vocab,))]
    return np.dtype(fields)


Saver = Callable[[LogProbs, Sequence[int]], None]


class Saving:
    """Yields a `Saver` for the .npy file `path`, with one record per token. After an error, `path` is
    unchanged.

    A record contains the next token, the row's lowest log probability, and every log probability as one of
    65,536 levels between the lowest value and 0.
    """

    def __init__(self, path: str | os.PathLike[str], n_rows: int, n_vocab: int) -> None:
        self._path, self._n, self._type = path, n_rows, _row_type(n_vocab)

    def __enter__(self) -> Saver:
        with ExitStack() as stack:
            part = stack.enter_context(replacing(self._path, InvalidArgument))
            # Not memory-mapped, so that a full disk raises an error.
            self._file = stack.enter_context(open(part, "wb"))
            rows = {"descr": dtype_to_descr(self._type), "fortran_order": False, "shape": (self._n,)}
            write_array_header_1_0(self._file, rows)
            self._stack = stack.pop_all()
        return self._save

    def _save(self, logp: LogProbs, following: Sequence[int]) -> None:
        rows, least = np.empty(len(following), self._type), logp.min(axis=1)
        rows["token"], rows["least"] = following, least
        rows["level"] = np.rint(LEVELS * (1 - logp / least[:, None]))
        self._file.write(rows.tobytes())

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]


class Base:
    """Another model's saved log probabilities. Raises InvalidArgument if the file has another format or
    vocabulary."""

    def __init__(self, path: str | os.PathLike[str], n_vocab: int) -> None:
        try:
            self._rows = open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"{path}: cannot be read as saved log-probabilities: {why(error)}"
            ) from None
        if self._rows.dtype != _row_type(n_vocab) or self._rows.ndim != 1:
            raise InvalidArgument(
                f"{path}: was not saved by a model of {n_vocab} tokens; save the base again with "
                "--save-all-logits"
            )
        self.n_rows, self._path = len(self._rows), path

    def rows(self, first: int, following: Sequence[int]) -> LogProbs:
        """Raises InvalidArgument unless the records contain the next tokens `following`."""
        rows = self._rows[first : first + len(following)]
        if rows["token"].tolist() != list(following):
            raise InvalidArgument(f"{self._path}: was saved for another text or context size")
        return log_softmax(rows["least"][:, None].astype(np.float64) * (1 - rows["level"] / LEVELS))
