"""Compiles a grammar in a process with limits of time and memory, before the compiler does. Any client may
send a grammar, and some grammars take minutes and gigabytes. The process uses a vocabulary of 256 bytes.
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Any

from vkbackend import forks
from vkbackend.errors import VkbackendError

COMPILE_S = 5.0  # Seconds per grammar. Schemas of tools take milliseconds.
MEMORY = 1 << 30  # Bytes. An idle process takes 30 MB.
START_S = 30.0
# Limits for one mask: items of the parser and fuel of the lexer. A deliberately slow grammar fails after 0.4
# s per mask, and with llguidance's default of 50,000 items after 3 s.
LIMITS: dict[str, Any] = {"step_max_items": 20_000, "step_lexer_fuel": 200_000, "verbose_errors": False}

# Reads a grammar per line, as hex, and writes "ok" when compilation ends. The compiler reports errors of
# invalid grammars.
PROGRAM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
class Bytes:
    tokens = [bytes([b]) for b in range(256)] + [b"<end>"]
    special_token_ids, eos_token_id, bos_token_id, is_tokenizer_wrapper = [256], 256, None, True
    def __call__(self, text): return []
tokenizer = LLTokenizer(Bytes(), n_vocab=257)
print("ready", flush=True)
for line in sys.stdin:
    grammar = LLMatcher.grammar_from_lark(bytes.fromhex(line).decode())
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**{LIMITS}))
    if not matcher.is_error(): matcher.compute_bitmask()
    print("ok", flush=True)
"""


class Probe:
    """Tests grammars in a process, for one caller at a time. A process that ended is replaced."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closed = False
        forks.own(self)

    def passes(self, lark: str) -> bool:
        """Return whether a grammar is within the limits. Raises VkbackendError after `close`, or if no
        process can be started."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            try:
                process.stdin.write(lark.encode().hex() + "\n")
                process.stdin.flush()
                if _line_arrived(process.stdout, COMPILE_S):
                    return True
            except OSError:
                pass  # it has already ended
            self._end()
            self._check_open()
            return False

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._check_open()
            if not _line_arrived(self._process.stdout, START_S):
                self._end()
                self._check_open()
                raise VkbackendError("the process that tries grammars did not start; try again later")
        return self._process

    def close(self) -> None:
        """End the process, even while it compiles. A running call of `passes` then raises VkbackendError."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def _check_open(self) -> None:
        if self._closed:
            self._end()
            raise VkbackendError("no grammar is compiled any more: the model is being closed")

    def disown(self) -> None:
        self._process, self._closed = None, True

    def _end(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self._end()


def _line_arrived(pipe: IO[str] | None, seconds: float) -> bool:
    assert pipe is not None
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([pipe], [], [], min(left, 0.5))[0]:
            return bool(pipe.readline())
    return False
