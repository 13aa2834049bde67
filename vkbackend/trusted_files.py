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

# O_NONBLOCK prevents a wait if the file is a pipe.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Untrusted(Exception):
    """A file or folder is not trusted."""


def open_folder(path: Path, *, make: bool, tighten: bool = False) -> int | None:
    """Return a folder's file descriptor, or None if the folder is missing and not to be made. `tighten`
    removes the permissions of others from this user's folder. Raises Untrusted and OSError."""
    if make and not os.path.lexists(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process made it
            os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, _OPEN | os.O_DIRECTORY)
    except FileNotFoundError:
        if make:
            raise
        return None
    except OSError:
        if path.is_symlink():
            raise Untrusted("it is a symbolic link") from None
        raise
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and status.st_mode & 0o077 and tighten:
            os.fchmod(descriptor, 0o700)
            status = os.fstat(descriptor)
        _check_owner(status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(folder: int, name: str, kind: bytes, most_nbytes: int) -> bytes:
    """Return a file's content. Raises Untrusted, FileNotFoundError and other OSErrors."""
    descriptor = os.open(name, _OPEN, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted("it is not a regular file")
        _check_owner(status)
        if status.st_size > head_nbytes(kind) + most_nbytes:
            raise Untrusted(f"it has {status.st_size} bytes, more than it can have")
        with open(descriptor, "rb", closefd=False) as file:
            # `read` allocates what it is asked for, so it is asked for the file's size. A file that grew
            # meanwhile has another checksum.
            head, data = file.read(head_nbytes(kind)), file.read(status.st_size)
    finally:
        os.close(descriptor)
    if not head.startswith(kind):
        raise Untrusted("it has no checksum: it is damaged, made by hand or by another version")
    if head != _head(name, kind, data):
        raise Untrusted("it is damaged: its checksum does not match")
    return data


def write(folder: int, name: str, kind: bytes, data: bytes) -> None:
    """Replace a file atomically. Raises OSError."""
    part = f".{name}.{secrets.token_hex(4)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(_head(name, kind, data))
            file.write(data)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def head_nbytes(kind: bytes) -> int:
    return len(kind) + 64 + 1


def why(reason: Exception) -> str:
    return (reason.strerror or str(reason)) if isinstance(reason, OSError) else str(reason)


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"it belongs to another user (id {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(
            f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w ends that)"
        )


def _head(name: str, kind: bytes, data: bytes) -> bytes:
    """Return a file's first line. The checksum covers the name, so a renamed file is refused."""
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(data)
    return kind + digest.hexdigest().encode() + b"\n"
