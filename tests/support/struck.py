"""Raises KeyboardInterrupt before a chosen bytecode of a call."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

Where = Callable[[CodeType], bool]
ANYWHERE = ("",)
SIGNALLED = ("CALL", "RESUME", "JUMP_BACKWARD")  # CPython handles signals after these bytecodes


def strike(n: int, call: Callable[[], object], where: Where, after_ops: tuple[str, ...] = ANYWHERE) -> bool:
    """Run `call`, and raise KeyboardInterrupt before bytecode `n` of functions that `where` selects. Only
    bytecodes that follow one of `after_ops` count. Return False if `call` executes fewer than `n` of these
    bytecodes."""
    left, last = n, dict[FrameType, str]()

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "opcode":
            left -= last.get(frame, "").startswith(after_ops)
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if left == -1:
                left -= 1
                last.clear()
                raise KeyboardInterrupt
        return count

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        if not where(frame.f_code):
            frame.f_trace_opcodes = False
            return None
        frame.f_trace = count  # Python 3.13 considers f_trace_opcodes only if a function traces the frame
        frame.f_trace_opcodes = True
        sys.settrace(enter)  # Python 3.12 considers f_trace_opcodes only here
        return count

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        last.clear()
    return left < 0


def interrupt_everywhere(
    call: Callable[[], object],
    after: Callable[[], object],
    where: Where,
    *,
    after_ops: tuple[str, ...] = ANYWHERE,
    stride: int = 1,
    least: int = 20,
) -> None:
    """Interrupt `call` before every `stride`-th bytecode. `strike` counts the bytecodes. Run `after` after
    each interrupt. At least `least` interrupts must occur."""
    n = 0
    while strike(n * stride, call, where, after_ops):
        after()
        n += 1
    assert n >= least, f"{call} was struck {n} times"
