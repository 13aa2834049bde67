"""Files: reading at a position, replacing, and the folders of a user."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

StrPath = str | os.PathLike[str]

if sys.platform == "win32":
    REPLACE_S, RETRY_S = 1.0, 0.005

    def read_at(descriptor: int, n_bytes: int, position: int) -> bytes:
        """Read as os.pread does, and move the file's position. Only one thread may use the descriptor."""
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, n_bytes)

    def replace(source: StrPath, target: StrPath) -> None:
        """Replace a file. Windows fails while another program has the target open, so retry for a second."""
        deadline = time.monotonic() + REPLACE_S
        while True:
            try:
                return os.replace(source, target)
            except PermissionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def real_path(path: StrPath) -> str:
        """Resolve links. Windows cannot do this for devices such as `nul`, and Wine for long paths."""
        try:
            return os.path.realpath(path)
        except OSError:
            return os.path.abspath(path)

    def text_of(data: bytes) -> str:
        """Return the text of a UTF-8 file, without a byte order mark and with CR LF replaced by LF. Raises
        ValueError."""
        return data.decode("utf-8-sig").replace("\r\n", "\n")

    def words_of(line: str) -> list[str]:
        """Split at blanks outside quotes. Backslashes separate folders. Raises ValueError."""
        lexer = shlex.shlex(line, posix=True)
        lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
        return list(lexer)

    def user_cache() -> Path | None:
        """Return the folder for caches, to which only this user, administrators and the system may write."""
        return Path(base) if (base := os.environ.get("LOCALAPPDATA")) else None

else:
    read_at = os.pread
    replace = os.replace
    real_path = os.path.realpath
    words_of = shlex.split

    def text_of(data: bytes) -> str:
        """Return the text of a UTF-8 file without a byte order mark. Raises ValueError."""
        return data.decode("utf-8-sig")

    def user_cache() -> Path | None:
        """Return the folder for caches, or None if no home folder exists."""
        if base := os.environ.get("XDG_CACHE_HOME"):
            return Path(base)
        try:
            return Path.home() / ".cache"
        except RuntimeError:
            return None
