"""Programs in a pseudo console of Windows, which Wine has too. It needs no window."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import wintypes
from typing import Any

HANDLE, DWORD = wintypes.HANDLE, wintypes.DWORD
WIDTH, HEIGHT = 160, 60
PSEUDOCONSOLE, EXTENDED_STARTUPINFO, USE_STD_HANDLES = 0x20016, 0x80000, 0x100
EVERY_ACCESS, SIGBREAK = 0x1FFFFF, 21
CTRL_C, CTRL_BREAK = 0, 1  # events
HANG_S = 400.0  # A start takes two minutes on a busy machine under Wine.
FORWARD = re.compile(r"\x1b\[(\d+)C")  # used for blanks
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")
# Under Wine a program has no standard streams at first, because the caller has none in this console.
LAUNCH = """
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGBREAK, signal.SIG_IGN)
keys, screen = os.open("CONIN$", os.O_RDWR), os.open("CONOUT$", os.O_RDWR)
program = subprocess.Popen(sys.argv[1:], stdin=keys, stdout=screen, stderr=screen)
os.write(screen, b"process %d.\\r\\n" % program.pid)
sys.exit(program.wait())
"""
# Sends an event to all programs of another console. Of the two, this program can ignore only Ctrl-C.
PRESS = """
import ctypes, sys
kernel, (pid, event) = ctypes.WinDLL("kernel32"), map(int, sys.argv[1:])
kernel.FreeConsole()
sys.exit(not (kernel.AttachConsole(pid) and kernel.SetConsoleCtrlHandler(None, True)
              and kernel.GenerateConsoleCtrlEvent(event, 0)))
"""


class Size(ctypes.Structure):
    _fields_ = (("columns", ctypes.c_short), ("rows", ctypes.c_short))


class StartupInfo(ctypes.Structure):
    """STARTUPINFOEXW"""

    _fields_ = (
        ("size", DWORD), ("reserved", ctypes.c_void_p * 3), ("place", DWORD * 7), ("flags", DWORD),
        ("show", ctypes.c_void_p * 2), ("streams", HANDLE * 3), ("attributes", ctypes.c_void_p),
    )  # fmt: skip


class ProcessInformation(ctypes.Structure):
    _fields_ = (("process", HANDLE), ("thread", HANDLE), ("pid", DWORD), ("tid", DWORD))


def _library(name: str, **results: Any) -> Any:
    library: Any = vars(ctypes)["WinDLL"](name, use_last_error=True)
    for function, result in results.items():
        getattr(library, function).restype = result
    return library


def _check(ok: int) -> None:
    if not ok:
        raise OSError(f"Windows error {vars(ctypes)['get_last_error']()}")


class PseudoConsole:
    """A program in a console of its own. `code` waits for the exit code."""

    def __init__(self, *command: str) -> None:
        import msvcrt

        handle_of: Callable[[int], int] = vars(msvcrt)["get_osfhandle"]
        self._kernel = kernel = _library("kernel32", CreatePseudoConsole=ctypes.c_long)
        keys, self._keys = os.pipe()
        self._screen, screen = os.pipe()
        self._console, size = HANDLE(), ctypes.c_size_t()
        result = kernel.CreatePseudoConsole(
            Size(WIDTH, HEIGHT), HANDLE(handle_of(keys)), HANDLE(handle_of(screen)), 0,
            ctypes.byref(self._console),
        )  # fmt: skip
        _check(result == 0)
        os.close(keys)
        os.close(screen)
        kernel.InitializeProcThreadAttributeList(None, 1, 0, ctypes.byref(size))
        attributes = ctypes.create_string_buffer(size.value)
        _check(kernel.InitializeProcThreadAttributeList(attributes, 1, 0, ctypes.byref(size)))
        _check(
            kernel.UpdateProcThreadAttribute(
                attributes, 0, ctypes.c_size_t(PSEUDOCONSOLE), self._console,
                ctypes.c_size_t(ctypes.sizeof(HANDLE)), None, None,
            )
        )  # fmt: skip
        info, made = StartupInfo(), ProcessInformation()
        info.size, info.flags = ctypes.sizeof(info), USE_STD_HANDLES
        info.attributes = ctypes.addressof(attributes)
        line = ctypes.create_unicode_buffer(subprocess.list2cmdline([sys.executable, "-c", LAUNCH, *command]))
        _check(
            kernel.CreateProcessW(
                None, line, None, None, False, EXTENDED_STARTUPINFO, None, None, ctypes.byref(info),
                ctypes.byref(made),
            )
        )  # fmt: skip
        self._process = HANDLE(made.process)
        self.output = b""
        threading.Thread(target=self._read, daemon=True).start()
        self.pid = int(self.wait_for(r"process (\d+)\.")[1])

    def __enter__(self) -> PseudoConsole:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the console, which ends the programs in it."""
        self._kernel.TerminateProcess(self._process, 1)
        subprocess.run(["taskkill", "/f", "/pid", str(self.pid)], capture_output=True, timeout=HANG_S)
        self._kernel.ClosePseudoConsole(self._console)
        os.close(self._keys)

    def _read(self) -> None:
        while data := os.read(self._screen, 4096):
            self.output += data

    @property
    def text(self) -> str:
        """Everything that appeared, without escape sequences."""
        text = FORWARD.sub(lambda match: " " * int(match[1]), self.output.decode(errors="replace"))
        return ESCAPES.sub("", text)

    def wait_for(self, pattern: str, start: int = 0) -> re.Match[str]:
        """Return the first match in `text` from `start`. Raises TimeoutError."""
        deadline = time.monotonic() + HANG_S
        while (match := re.compile(pattern, re.DOTALL).search(self.text, start)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pattern!r} does not appear in {self.output!r}")
            time.sleep(0.05)
        return match

    def type(self, keys: str) -> None:
        os.write(self._keys, keys.encode())

    def press(self, event: int) -> None:
        """Press Ctrl-C or Ctrl-Break. The character of Ctrl-C would end a pseudo console of Wine.

        At Ctrl-Break, Wine ends each program of a console before its C library learns of the key. There, this
        function does the work of that library: it calls `raise` in a new thread of the program."""
        if event == CTRL_C or not hasattr(_library("ntdll"), "wine_get_version"):
            command = [sys.executable, "-c", PRESS, str(self.pid), str(event)]
            subprocess.run(command, timeout=HANG_S, check=event == CTRL_C)
            return
        functions = "OpenProcess", "GetModuleHandleW", "GetProcAddress", "CreateRemoteThread"
        kernel = _library("kernel32", **dict.fromkeys(functions, HANDLE))
        kernel.GetProcAddress.argtypes = HANDLE, ctypes.c_char_p
        process = HANDLE(kernel.OpenProcess(EVERY_ACCESS, False, self.pid))
        function = HANDLE(kernel.GetProcAddress(kernel.GetModuleHandleW("ucrtbase.dll"), b"raise"))
        thread = kernel.CreateRemoteThread(
            process, None, ctypes.c_size_t(0), function, HANDLE(SIGBREAK), 0, None
        )
        _check(thread is not None)
        for handle in (HANDLE(thread), process):
            kernel.CloseHandle(handle)

    def code(self) -> int:
        """Wait for the end of the program and return its exit code. Raises TimeoutError."""
        if self._kernel.WaitForSingleObject(self._process, int(HANG_S * 1000)):
            raise TimeoutError(f"the program still runs: {self.output!r}")
        code = DWORD()
        self._kernel.GetExitCodeProcess(self._process, ctypes.byref(code))
        return code.value
