"""Images in the tokens of a sequence. Each row of an image has a negative id that depends on the image's key
and on the row. Equal ids mean equal rows, so the prefix cache shares images like text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vkbackend.errors import InvalidArgument
from vkbackend.models.vision.rows import ImageRows
from vkbackend.step import MAX_RUNS, Run

ID_NBYTES = 7  # Ids have 56 bits: among 2^28 rows, two have the same id with a probability of 1/2.


@dataclass(frozen=True, slots=True)
class Span:
    """An image whose first row is token `first` of a prompt."""

    first: int
    image: ImageRows

    @property
    def end(self) -> int:
        return self.first + self.image.n_rows


def row_ids(key: bytes, n_rows: int) -> list[int]:
    """Return the ids of an image's rows, all negative."""
    digest = np.frombuffer(hashlib.shake_256(key).digest(ID_NBYTES * n_rows), np.uint8)
    words = np.zeros((n_rows, 8), np.uint8)
    words[:, :ID_NBYTES] = digest.reshape(n_rows, ID_NBYTES)
    ids: list[int] = (-1 - words.view("<i8")[:, 0]).tolist()
    return ids


def with_row_ids(prompt: Sequence[int | ImageRows]) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """Return the tokens of a prompt with the ids of its images' rows, and the images."""
    tokens: list[int] = []
    spans: list[Span] = []
    for piece in prompt:
        if isinstance(piece, ImageRows):
            spans.append(Span(len(tokens), piece))
            tokens += row_ids(piece.key, piece.n_rows)
        else:
            tokens.append(piece)
    return tuple(tokens), tuple(spans)


def without_images(tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token >= 0]


def check_images(tokens: Sequence[int], spans: Sequence[Span], width: int, n_free: int) -> None:
    """Raises InvalidArgument for images that the model or a step cannot take. `width` is the number of values
    of a row, and `n_free` the rows that a step always has for one sequence."""
    if not width:
        raise InvalidArgument("the model was opened without a projector (mmproj), so it reads no images")
    end = 0
    for span in spans:
        image = span.image
        values, n = image.values, image.n_rows
        if values.ndim != 2 or not n or values.shape[1] != width or values.dtype != np.float32:
            raise InvalidArgument(
                f"an image has rows {values.dtype} {values.shape}; the model takes float32 [n, {width}], as "
                "its projector returns them"
            )
        if not np.isfinite(values).all():
            raise InvalidArgument("the projector returned values that are not finite for an image")
        if min(image.grid) < 1 or image.grid[0] * image.grid[1] != n:
            raise InvalidArgument(f"an image has {n} rows and a grid of {image.grid[0]} x {image.grid[1]}")
        if span.first < end or list(tokens[span.first : span.end]) != row_ids(image.key, n):
            raise InvalidArgument(f"the tokens from {span.first} on are not the rows of their image")
        if image.both_ways and n > n_free:
            raise InvalidArgument(
                f"an image has {n} rows, which attend to each other and need one step, and a step has "
                f"{n_free} rows besides a row of each other slot; open the model with more rows (n_ubatch, "
                "-ub), or limit the image's tokens"
            )
        end = span.end


class SequenceImages:
    """The images of a sequence. If `has_sections`, RoPE positions have three components (M-RoPE): rows of an
    image at position p have (p, p + y, p + x), and the next position is p + max(height, width) (Wang et al.
    2024, arXiv:2409.12191). A step has at most `n_runs` runs of the sequence."""

    def __init__(self, spans: Sequence[Span], has_sections: bool, n_runs: int = MAX_RUNS) -> None:
        self._spans, self._end = spans, spans[-1].end
        self._positions: np.ndarray | None = _positions(spans) if has_sections else None
        self._next = 0 if self._positions is None else int(self._positions.max()) + 1
        self._n_runs, self._whole = n_runs, [span for span in spans if span.image.both_ways]

    @property
    def rope_offset(self) -> int:
        """Return the RoPE position minus the cell of tokens after the images."""
        return 0 if self._positions is None else self._next - self._end

    def rows(self, start: int, n: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (offset from `start`, values) of the images' rows among tokens `start` to `start` + n - 1."""
        for span in self._spans:
            first, end = max(start, span.first), min(start + n, span.end)
            if first < end:
                yield first - start, span.image.values[first - span.first : end - span.first]

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Divide tokens `start` to `end` - 1 into pieces. Yield (first token, end, whether the piece is an
        image whose rows attend to each other)."""
        for span in self._whole:
            if start < min(end, span.first):
                yield start, min(end, span.first), False
            start = max(start, span.first)
            if start < min(end, span.end):
                yield start, min(end, span.end), True
                start = span.end
        if start < end:
            yield start, end, False

    def fitting(self, start: int, n: int, n_free: int) -> int:
        """Return how many of the next `n` tokens a step may compute. If the rows of an image attend to each
        other, a step computes all of them or none. The first image may have up to `n_free` rows."""
        if not self._whole:
            return n
        end = start
        for number, (begin, stop, is_image) in enumerate(self._pieces(start, start + n)):
            if number == self._n_runs:
                break
            if is_image and begin == start:
                stop = next(span.end for span in self._whole if begin < span.end)
                if stop - start > n_free:
                    break
            elif is_image and stop not in {span.end for span in self._whole}:
                break
            end = stop
        return end - start

    def runs(self, run: Run) -> list[Run]:
        """Divide a run of the sequence: an image whose rows attend to each other becomes a separate run."""
        if not self._whole:
            return [run]
        first = run.first_pos
        return [
            replace(
                run,
                first_row=run.first_row + begin - first,
                n_rows=end - begin,
                first_pos=begin,
                end=end if is_image and end - begin > 1 else 0,
            )
            for begin, end, is_image in self._pieces(first, first + run.n_rows)
        ]

    def positions(self, start: int, n: int) -> np.ndarray | None:
        """Return RoPE positions (time, height, width), int64 [n, 3], or None if they are the cells."""
        if self._positions is None:
            return None
        later = np.arange(max(start, self._end), start + n) - self._end + self._next
        return np.concatenate([self._positions[start : start + n], np.repeat(later[:, None], 3, axis=1)])


def _positions(spans: Sequence[Span]) -> np.ndarray:
    parts: list[np.ndarray] = []
    end = at = 0
    for span in spans:
        n = span.first - end
        parts.append(np.repeat(np.arange(at, at + n)[:, None], 3, axis=1))
        at += n
        height, width = span.image.grid
        y, x = np.divmod(np.arange(height * width), width)
        parts.append(at + np.stack([np.zeros_like(y), y, x], axis=1))
        at, end = at + max(height, width), span.end
    return np.concatenate(parts)
