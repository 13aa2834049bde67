"""--log-file copies stderr to a file, without codes for colours and the cursor."""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO

from vkbackend.errors import InvalidArgument
from vkbackend.paths import quoted, why

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?!\n)")


class _Tee:
    def __init__(self, stream: TextIO, file: TextIO, path: str) -> None:
        self._stream, self._file, self.path = stream, file, path

    def write(self, text: str) -> int:
        self._file.write(_CODES.sub("", text))
        return self._stream.write(text)

    def flush(self) -> None:
        self._file.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def log_to(path: str) -> None:
    """Copy stderr to the file from now on. A second call does nothing. Raises InvalidArgument."""
    if isinstance(sys.stderr, _Tee) and sys.stderr.path == path:
        return
    try:
        file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # until the process ends
    except OSError as error:
        raise InvalidArgument(f"--log-file {quoted(path)} cannot be written: {why(error)}") from None
    sys.stderr = _Tee(sys.stderr, file, path)
