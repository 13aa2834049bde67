"""Files with a checksum in a folder that only this user or root may write to.

A file begins with its kind and the SHA-256 of its name and content. Files are written atomically, with mode
0600. A file that is damaged, foreign, or writable by others raises `Untrusted`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from vkbackend.system.folder import Folder, distrust


class Untrusted(Exception):
    """A file or folder is not trusted."""


def open_folder(path: Path, *, make: bool, tighten: bool = False) -> Folder | None:
    """Return an open folder, or None if the folder is missing and must not be created. `tighten` removes the
    permissions of others from this user's folder. Raises Untrusted and OSError."""
    if make and not os.path.lexists(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process made it
            os.mkdir(path, 0o700)
    try:
        folder = Folder(path)
    except FileNotFoundError:
        if make:
            raise
        return None
    except OSError:
        if path.is_symlink():
            raise Untrusted("it is a symbolic link") from None
        raise
    try:
        if tighten:
            folder.tighten()
        _check(folder.distrust())
    except BaseException:
        folder.close()
        raise
    return folder


def read(folder: Folder, name: str, kind: bytes, most_nbytes: int) -> bytes:
    """Return a file's content. Raises Untrusted, FileNotFoundError and other OSErrors."""
    descriptor = folder.open(name)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted("it is not a regular file")
        _check(distrust(status))
        if status.st_size > head_nbytes(kind) + most_nbytes:
            raise Untrusted(f"it has {status.st_size} bytes, more than it can have")
        with open(descriptor, "rb", closefd=False) as file:
            # Request only the file's size, because `read` allocates the requested size. A file that grew
            # meanwhile has another checksum.
            head, data = file.read(head_nbytes(kind)), file.read(status.st_size)
    finally:
        os.close(descriptor)
    if not head.startswith(kind):
        raise Untrusted("it has no checksum: it is damaged, made by hand or by another version")
    if head != _head(name, kind, data):
        raise Untrusted("it is damaged: its checksum does not match")
    return data


def write(folder: Folder, name: str, kind: bytes, data: bytes) -> None:
    """Replace a file atomically. Raises OSError."""
    part = f".{name}.{secrets.token_hex(4)}"
    try:
        with os.fdopen(folder.create(part), "wb") as file:
            file.write(_head(name, kind, data))
            file.write(data)
        folder.replace(part, name)
    except BaseException:
        with suppress(OSError):
            folder.unlink(part)
        raise


def head_nbytes(kind: bytes) -> int:
    return len(kind) + 64 + 1


def _check(reason: str) -> None:
    if reason:
        raise Untrusted(reason)


def _head(name: str, kind: bytes, data: bytes) -> bytes:
    """Return a file's first line. The checksum covers the name, so a renamed file is refused."""
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(data)
    return kind + digest.hexdigest().encode() + b"\n"
