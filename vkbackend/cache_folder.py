"""Reads and writes the cache folder: compiled shaders, pipelines, measured speeds and chosen ops.

A bad entry is ignored and reported once on stderr. An entry must be a regular file with a matching checksum.
The entry and the folder must belong to this user or root, and only their owner may write to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from vkbackend import env

_MAGIC = b"vkbackend cache 1 "
_HEAD_NBYTES = len(_MAGIC) + 64 + 1
MOST_NBYTES = 16 << 20  # Per entry.
# O_NONBLOCK prevents a wait if the file is a pipe.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_reported: set[str] = set()
_report_lock = Lock()


class _Refused(Exception):
    """An entry or the cache folder is not trusted."""


def read(name: str, most_nbytes: int = MOST_NBYTES) -> bytes | None:
    """Return an entry, or None if it is missing or not trusted."""
    with _folder(make=False) as folder:
        if folder is None:
            return None
        try:
            return _content(name, _blob(folder, name, most_nbytes))
        except FileNotFoundError:
            return None
        except (OSError, _Refused) as reason:
            _report(_shown(name), f"is not used, and replaced when it is written again: {_why(reason)}")
            return None


def read_json(name: str) -> Any:
    """Return an entry's value, or None if the entry is missing, not trusted or invalid JSON."""
    if (data := read(name)) is None:
        return None
    try:
        return json.loads(data)
    # json raises ValueError also for numbers with too many digits
    except (ValueError, RecursionError) as error:
        _report(_shown(name), f"is not used, and replaced when it is written again: {type(error).__name__}")
        return None


def write(name: str, data: bytes) -> bool:
    """Replace an entry atomically. On failure, return False and print the reason once per folder."""
    with _folder(make=True) as folder:
        if folder is None:
            return False
        part = f".{name}.{secrets.token_hex(4)}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o600, dir_fd=folder), "wb") as file:
                file.write(_head(name, data))
                file.write(data)
            os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            return True
        except OSError as reason:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
            _report(_shown(), f"{name} is not written, so it is made again next time: {_why(reason)}")
            return False


def write_json(name: str, value: Any) -> bool:
    return write(name, json.dumps(value, indent=1).encode() + b"\n")


def writable() -> bool:
    with _folder(make=True) as folder:
        return folder is not None and os.access(".", os.W_OK | os.X_OK, dir_fd=folder)


def remove(name: str) -> None:
    with _folder(make=False) as folder:
        if folder is not None:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


# ---- trust ----


@contextmanager
def _folder(*, make: bool) -> Iterator[int | None]:
    """Yield the folder's file descriptor, or None if the folder is missing or not trusted."""
    path, descriptor = env.cache_dir(), None
    try:
        if path is not None:
            descriptor = _open_folder(path, make)
        elif env.caches():
            _report("cache", "there is no home folder to keep one in; VKBACKEND_CACHE names one, or off")
    except (OSError, _Refused) as reason:
        _report(str(path), f"is not used as the cache folder: {_why(reason)} (VKBACKEND_CACHE names another)")
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_folder(path: Path, make: bool) -> int | None:
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
            raise _Refused("it is a symbolic link") from None
        raise
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and status.st_mode & 0o077 and path == env.default_cache_dir():
            # Change the mode of the default folder only. A folder that the user named may be shared.
            os.fchmod(descriptor, 0o700)
            status = os.fstat(descriptor)
        _check_owner(status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _blob(folder: int, name: str, most_nbytes: int) -> bytes:
    assert _NAME.fullmatch(name), name
    descriptor = os.open(name, _OPEN, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _Refused("it is not a regular file")
        _check_owner(status)
        if status.st_size > _HEAD_NBYTES + most_nbytes:
            raise _Refused(f"it has {status.st_size} bytes, more than it can have")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(descriptor)


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise _Refused(f"it belongs to another user (id {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Refused(
            f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w ends that)"
        )


def _head(name: str, data: bytes) -> bytes:
    """Return an entry's first line. The checksum covers the name, so a renamed entry is refused."""
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(data)
    return _MAGIC + digest.hexdigest().encode() + b"\n"


def _content(name: str, blob: bytes) -> bytes:
    if not blob.startswith(_MAGIC):
        raise _Refused("it has no checksum: it is damaged, made by hand or by another version")
    data = blob[_HEAD_NBYTES:]
    if blob[:_HEAD_NBYTES] != _head(name, data):
        raise _Refused("it is damaged: its checksum does not match")
    return data


# ---- messages ----


def _why(reason: Exception) -> str:
    return (reason.strerror or str(reason)) if isinstance(reason, OSError) else str(reason)


def _shown(name: str = "") -> str:
    return str((env.cache_dir() or Path()) / name)


def _report(subject: str, why: str) -> None:
    with _report_lock:
        if subject in _reported:
            return
        _reported.add(subject)
    env.log(0, f"{subject!r}: {why}")
