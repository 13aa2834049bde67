"""Compiles grammars under limits with a vocabulary of 256 bytes, for probe.py.

A request is a grammar in Lark's syntax. The reply is empty, because the compiler reports errors of invalid
grammars.
"""

from __future__ import annotations

import os
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from vkbackend.models.grammar.limits import LIMITS
from vkbackend.models.processes import worker
from vkbackend.models.processes.frames import ANSWERED, ASKED, ENDED, HEAD, READY
from vkbackend.models.processes.memory_limits import GRAMMAR_MEMORY
from vkbackend.models.processes.worker import limit_cpu, receive, send

COMPILE_CPU_S = 10.0  # The parent's limit of wall time, probe.COMPILE_S, comes first.


class Bytes:
    tokens = [bytes([b]) for b in range(256)] + [b"<end>"]
    special_token_ids = [256]  # noqa: RUF012
    eos_token_id = 256
    bos_token_id = None
    is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        return []


def main() -> None:
    worker.run(serve, GRAMMAR_MEMORY)


def serve() -> None:
    vocabulary: Any = Bytes()
    tokenizer = LLTokenizer(vocabulary, n_vocab=257)
    send(READY, b"")
    while True:
        n_bytes, _, kind = HEAD.unpack(receive(HEAD.size))
        assert kind == ASKED
        lark = receive(n_bytes).decode()
        limit_cpu(COMPILE_CPU_S)
        try:
            grammar = LLMatcher.grammar_from_lark(lark)
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
            if not matcher.is_error():
                matcher.compute_bitmask()
        except MemoryError:
            send(ENDED, b"")
            os._exit(1)  # The state of the process is unknown.
        send(ANSWERED, b"")


if __name__ == "__main__":
    main()
