"""Requests wait while their grammars are compiled, in parallel with steps. Then each step asks which tokens
may come next."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.engine.messages import ErrorData, Generate
from vkbackend.models.engine.sequence import Batch, Sequence
from vkbackend.models.grammar.compiler import Compiler, Vocabulary, mask_words

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammars:
    def __init__(self, n_vocab: int, max_outputs: int) -> None:
        self._compiler: Compiler | None = None
        self._compiling: dict[int, tuple[Sequence, Future[LLMatcher]]] = {}
        self._shape = max_outputs, mask_words(n_vocab)
        self._masks: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._compiling)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        if self._compiler is not None:
            return
        self._compiler = Compiler(vocabulary)
        self._masks = np.empty(self._shape, np.uint32)

    def compile(self, sequence: Sequence) -> bool:
        """Return True if the request must wait for its grammar. Raises the grammar's error if it is already
        known."""
        request = sequence.request
        if not isinstance(request, Generate) or request.structure is None:
            return False
        if self._compiler is None:
            raise InvalidArgument("a structure needs a vocabulary; send SetVocabulary first")
        compiled = self._compiler.compile(request.structure)
        if compiled.done():
            if wrong := _wrong(compiled):
                raise wrong
            self._start(sequence, compiled)
            return False
        self._compiling[request.id] = sequence, compiled
        return True

    def _start(self, sequence: Sequence, compiled: Future[LLMatcher]) -> None:
        assert self._compiler is not None and sequence.sampler is not None
        sequence.sampler.matcher = matcher = self._compiler.start(compiled.result())
        for token in sequence.request.resumed if isinstance(sequence.request, Generate) else ():
            matcher.take(token)

    def forget(self, sequence: Sequence) -> bool:
        return self._compiling.pop(sequence.request.id, None) is not None

    def compiled(self) -> Iterator[tuple[Sequence, VkbackendError | None]]:
        """Yield requests whose grammars are compiled, with the grammar's error or None."""
        for sequence, compiled in list(self._compiling.values()):
            if compiled.done():
                del self._compiling[sequence.request.id]
                wrong = _wrong(compiled)
                if wrong is None:
                    self._start(sequence, compiled)
                yield sequence, wrong

    def masks(self, batch: Batch) -> np.ndarray | None:
        """Return bit masks of the allowed tokens of each output row, uint32 [n_outputs, words], or None."""
        if self._masks is None or not any(s.sampler.matcher for s, *_ in batch if s.sampler):
            return None
        row = 0
        for sequence, _, n_outputs in batch:
            rows = self._masks[row : row + n_outputs]
            row += n_outputs
            matcher = sequence.sampler.matcher if sequence.sampler else None
            if matcher is None:
                rows[:] = 0xFFFFFFFF
            elif n_outputs:
                matcher.find(sequence.draft)
                n = min(rows.shape[1], matcher.words.shape[1])
                rows[:, :n], rows[:, n:] = matcher.words[:n_outputs, :n], 0
        return self._masks[:row]

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


def _wrong(compiled: Future[LLMatcher]) -> VkbackendError | None:
    """Return a new exception per request, because a shared exception would keep the stack frames of all
    callers."""
    error = compiled.exception()
    return None if error is None else ErrorData.of(error).exception()
