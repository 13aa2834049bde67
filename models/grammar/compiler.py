"""Compiles grammars and schemas on a separate thread, so the engine's steps do not wait. A request fails if
its grammar exceeds a limit of size, compilation, or work per mask.
"""

from __future__ import annotations

import atexit
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from vkbackend import forks
from vkbackend.checks import refused
from vkbackend.errors import VkbackendError
from vkbackend.models.grammar.limits import LIMITS
from vkbackend.models.grammar.probe import COMPILE_S, Probe
from vkbackend.models.grammar.structure import Structure
from vkbackend.models.processes.memory_limits import GRAMMAR_MEMORY

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT, MAX_KEPT_NBYTES = 64, 1 << 22
MAX_DRAFTED = 8  # Maximum number of rows of a step with drafts.
MAX_ERROR = 600  # Characters.
EXIT_S = 10.0  # Twice a grammar's limit. `close` kills the process, but cannot stop a library call.


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token, the tokens without text, and the end tokens."""

    pieces: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]


class Matcher:
    """The state of an answer in its grammar. `find` sets one bit of `words` for each token that may come
    next, lowest bit first. Row i of `words` is for the token after the first i drafted tokens."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher, self.words = matcher, np.zeros((1, mask_words(n_vocab)), np.uint32)
        self._row = 0

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_stopped())

    def n_valid(self, draft: Sequence[int]) -> int:
        """Return how many tokens of the draft the grammar allows."""
        return int(self._matcher.validate_tokens(list(draft)))

    def find(self, draft: Sequence[int] = ()) -> None:
        """Compute the rows of `words` for a draft of valid tokens. If a limit is exceeded, all bits are 0,
        and `stuck` returns the reason."""
        n = 1 + len(draft)
        if n > len(self.words):
            self.words = np.zeros((MAX_DRAFTED, self.words.shape[1]), np.uint32)
        address, row_nbytes = self.words.ctypes.data, self.words[0].nbytes
        self._row = 0
        if n == 1:
            self._matcher.unsafe_compute_mask_ptr(address, row_nbytes)
        else:
            self.words[:n] = 0  # llguidance writes no rows after an end token.
            matcher: Any = self._matcher  # The library's stubs lack this method.
            matcher.unsafe_compute_mask_ptr_with_draft_token(address, row_nbytes, list(draft))
        if self._matcher.is_error():
            self.words[:n] = 0

    def allowed(self, n_vocab: int) -> np.ndarray:
        """Return the ids of allowed tokens in ascending order. Raises VkbackendError if no token is
        allowed."""
        bits = np.unpackbits(self.words[self._row].view(np.uint8), bitorder="little")
        ids = np.flatnonzero(bits[:n_vocab])
        if not len(ids):
            raise self.stuck()
        return ids

    def take(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise self.stuck()
        self._row = min(self._row + 1, len(self.words) - 1)

    def stuck(self) -> VkbackendError:
        why = _error_line(self._matcher.get_error()) or "it allows no token of the vocabulary here"
        return VkbackendError(f"the grammar cannot go on: {why}")


class Compiler:
    """Compiles grammars for one vocabulary. Only one thread may call `compile`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ends = vocabulary.stop_ids
        # llguidance needs an end token. If the vocabulary lacks one, append an end token.
        self._stop_ids = ends or (len(vocabulary.pieces),)
        self._pieces = vocabulary.pieces if ends else (*vocabulary.pieces, b"<end>")
        self._special_ids = vocabulary.special_ids if ends else (*vocabulary.special_ids, *self._stop_ids)
        self._n_tokens = len(self._pieces)
        self._probe = Probe()
        self._jobs: SimpleQueue[tuple[Structure, Future[LLMatcher]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._tokenizer: LLTokenizer | None = None  # Used only by `_thread`.
        self._kept: OrderedDict[Structure, Future[LLMatcher]] = OrderedDict()

    def start(self, compiled: LLMatcher) -> Matcher:
        return Matcher(compiled.deep_copy(), self._n_tokens)

    def compile(self, structure: Structure) -> Future[LLMatcher]:
        """The future may raise InvalidArgument."""
        future = self._kept.get(structure)
        if future is None:
            future = self._kept[structure] = Future()
            self._jobs.put((structure, future))
            if self._thread is None:  # A daemon thread does not delay the program's end.
                self._thread = threading.Thread(target=self._work, name="vkbackend-grammar", daemon=True)
                self._thread.start()
                _working.add(self)
            self._drop_old()
        self._kept.move_to_end(structure)
        return future

    def _drop_old(self) -> None:
        nbytes = sum(len(structure.text) for structure in self._kept)
        while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or nbytes > MAX_KEPT_NBYTES):
            nbytes -= len(self._kept.popitem(last=False)[0].text)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            structure, future = job
            try:
                future.set_result(self._compiled(structure))
            except BaseException as error:
                future.set_exception(error)
            del job, future
        _working.discard(self)

    def _compiled(self, structure: Structure) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits, lark = LLParserLimits(**LIMITS), structure.lark()
        if not self._probe.passes(lark):
            most = f"{COMPILE_S:.0f} s or {GRAMMAR_MEMORY >> 20} MiB"
            why = f"it takes more than {most} to compile, or it is nested too deeply; make it simpler"
            raise refused(structure.kind, structure.text, why)
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._of_vocabulary(), grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            # The first mask is the slowest, so computing it here refuses grammars with slow masks.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise refused(structure.kind, structure.text, _error_line(matcher.get_error()))
        return matcher

    def _of_vocabulary(self) -> LLTokenizer:
        """Return llguidance's tokenizer. The first call takes 1 s for 152,000 tokens."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            tokens: Any = _LibraryTokenizer(self._pieces, self._special_ids, self._stop_ids[0])
            ends = list(self._stop_ids)
            self._tokenizer = LLTokenizer(tokens, n_vocab=self._n_tokens, eos_token=ends)
        return self._tokenizer

    def close(self) -> None:
        """Make pending jobs fail, and end the thread without waiting for it."""
        self._jobs.put(None)
        self._probe.close()

    def wait_for_end(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))


_working: set[Compiler] = set()


def _end_all() -> None:
    """Close all compilers before the interpreter ends, because a thread inside llguidance would crash the
    program."""
    deadline = time.monotonic() + EXIT_S
    compilers = list(_working)
    for compiler in compilers:
        compiler.close()
    for compiler in compilers:
        compiler.wait_for_end(deadline - time.monotonic())


atexit.register(_end_all)
forks.forget(_working.clear)


@dataclass(frozen=True, slots=True)
class _LibraryTokenizer:
    """The tokenizer interface that llguidance needs but never calls (see structure.PREAMBLE)."""

    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_id: int
    bos_token_id: None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: Any) -> list[int]:
        raise AssertionError("no grammar forces tokens")


def _error_line(message: str) -> str:
    lines = (line.strip() for line in re.sub(r"^at \d+\(\d+\): ", "", message).splitlines())
    text = " ".join(line for line in lines if line and not _is_source(line))
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."


def _is_source(line: str) -> bool:
    head = line.split("|")[0].strip()
    return ("|" in line and head.isdigit()) or set(line) <= set("^ ~")


def mask_words(n_vocab: int) -> int:
    return -(-n_vocab // 32)
