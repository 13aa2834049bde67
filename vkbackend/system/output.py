"""The standard streams: their encoding, escape sequences, and errors if their reader has ended."""

import errno
import sys

if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    _OUTPUTS = -11, -12  # STD_OUTPUT_HANDLE, STD_ERROR_HANDLE
    _ESCAPES = 0x4  # ENABLE_VIRTUAL_TERMINAL_PROCESSING
    _kernel = ctypes.WinDLL("kernel32")
    _kernel.GetStdHandle.restype = wintypes.HANDLE
    _kernel.GetConsoleMode.argtypes = wintypes.HANDLE, ctypes.POINTER(wintypes.DWORD)
    _kernel.SetConsoleMode.argtypes = wintypes.HANDLE, wintypes.DWORD

    def enable_escapes() -> None:
        """Let the console interpret escape sequences, as of dimmed text. By default it shows them."""
        for output in _OUTPUTS:
            handle, mode = _kernel.GetStdHandle(output), wintypes.DWORD()
            if _kernel.GetConsoleMode(handle, ctypes.byref(mode)):  # 0 for files and pipes
                _kernel.SetConsoleMode(handle, mode.value | _ESCAPES)

else:

    def enable_escapes() -> None:
        """Terminals interpret escape sequences."""


# On Windows, Python encodes text in pipes with the code page. None keeps the encoding of the locale.
STREAM_ENCODING: str | None = "utf-8" if sys.platform == "win32" else None


def is_closed(error: OSError) -> bool:
    """Return whether an error of stdout means that its reader has ended. Windows says "invalid argument"."""
    return isinstance(error, BrokenPipeError) or (sys.platform == "win32" and error.errno == errno.EINVAL)
