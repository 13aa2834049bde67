"""Ctrl-C and the signals that end a program."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

if sys.platform == "win32":
    END_SIGNALS = signal.SIGINT, signal.SIGBREAK, signal.SIGTERM
    """What ends a server: Ctrl-C, Ctrl-Break, and SIGTERM, which only this process can send to itself."""

    def ignore() -> None:
        """Ignore Ctrl-C, which reaches all programs of a console."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGBREAK, signal.SIG_IGN)

    def catch_break() -> None:
        """Let Ctrl-Break raise KeyboardInterrupt. Otherwise Windows ends the program at once."""
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGBREAK, signal.default_int_handler)

    def block_in_thread() -> None:
        """Python runs handlers of signals only in the main thread, and programs inherit no mask."""

else:
    END_SIGNALS = signal.SIGINT, signal.SIGTERM

    def catch_break() -> None:
        """Terminals have no Ctrl-Break."""

    def ignore() -> None:
        """Ignore Ctrl-C, which reaches all programs of a terminal."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def block_in_thread() -> None:
        """Block Ctrl-C in this thread and in the programs that it starts, which inherit the mask."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def name_of(code: int) -> str:
    """Return how a process ended. `code` is its exit code as in Popen, negative for a signal."""
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    # Windows ends programs with codes such as 0xc0000005 after an access violation.
    return f"exit code {code}" if code < 0x4000_0000 else f"exit code {code:#x}"
