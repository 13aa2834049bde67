"""Replaces files atomically."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vkbackend.errors import VkbackendError
from vkbackend.paths import quoted, why
from vkbackend.system import files


def check_target(path: str | os.PathLike[str], error: type[VkbackendError]) -> None:
    """Raise `error` if the folder of `path` is not writable."""
    folder = os.path.dirname(files.real_path(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise error(f"{path}: cannot be written: {folder} is not a folder to write to; give another name")


@contextmanager
def replacing(path: str | os.PathLike[str], error: type[VkbackendError]) -> Iterator[Path]:
    """Yield a temporary file, which replaces `path` if the block succeeds. Raises `error` for OS errors."""
    # A root has no name, and neither have devices of Windows (`nul`).
    if "\0" in os.fsdecode(path) or not (target := Path(files.real_path(path))).name:
        raise error(f"{quoted(path)}: is not a file name; give another")
    part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.part")
    try:
        if target.exists() and not target.is_file():
            raise error(f"{path}: is not a regular file and cannot be replaced by one; give another name")
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield part
        with open(part, "r+b") as file:  # Windows flushes only files that are open for writing.
            os.fsync(file.fileno())
        files.replace(part, target)
    except OSError as cause:
        raise error(f"{path}: cannot be written: {why(cause)}; give a name in a folder with space") from None
    finally:
        with suppress(OSError):
            os.unlink(part)  # after success, the temporary file has been renamed
