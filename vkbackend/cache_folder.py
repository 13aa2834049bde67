"""Reads and writes the cache folder: compiled shaders, pipelines, measured speeds and chosen ops.

A bad entry is ignored and reported once on stderr. An entry must be a regular file with a matching checksum.
The entry and the folder must belong to this user or root, and only their owner may write to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from vkbackend import env, trusted_files
from vkbackend.paths import quoted, why
from vkbackend.system.folder import Folder
from vkbackend.trusted_files import Untrusted

_KIND = b"vkbackend cache 1 "
MOST_NBYTES = 16 << 20  # Per entry.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_reported: set[str] = set()
_report_lock = Lock()


def read(name: str, most_nbytes: int = MOST_NBYTES) -> bytes | None:
    """Return an entry, or None if it is missing or not trusted."""
    with _folder(make=False) as folder:
        if folder is None:
            return None
        try:
            assert _NAME.fullmatch(name), name
            return trusted_files.read(folder, name, _KIND, most_nbytes)
        except FileNotFoundError:
            return None
        except (OSError, Untrusted) as reason:
            _report(_shown(name), f"is not used, and replaced when it is written again: {why(reason)}")
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
        try:
            trusted_files.write(folder, name, _KIND, data)
            return True
        except OSError as reason:
            _report(_shown(), f"{name} is not written, so it is made again next time: {why(reason)}")
            return False


def write_json(name: str, value: Any) -> bool:
    return write(name, json.dumps(value, indent=1).encode() + b"\n")


def writable() -> bool:
    with _folder(make=True) as folder:
        return folder is not None and folder.is_writable()


def remove(name: str) -> None:
    with _folder(make=False) as folder:
        if folder is not None:
            with suppress(OSError):
                folder.unlink(name)


# ---- trust ----


@contextmanager
def _folder(*, make: bool) -> Iterator[Folder | None]:
    """Yield the open folder, or None if the folder is missing or not trusted."""
    path, folder = env.cache_dir(), None
    try:
        if path is not None:
            # Change the mode only of the default folder, because a folder that the user named may be shared.
            tighten = path == env.default_cache_dir()
            folder = trusted_files.open_folder(path, make=make, tighten=tighten)
        elif env.caches():
            _report("cache", "there is no home folder to keep one in; VKBACKEND_CACHE names one, or off")
    except (OSError, Untrusted) as reason:
        _report(str(path), f"is not used as the cache folder: {why(reason)} (VKBACKEND_CACHE names another)")
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


# ---- messages ----


def _shown(name: str = "") -> str:
    return str((env.cache_dir() or Path()) / name)


def _report(subject: str, why: str) -> None:
    with _report_lock:
        if subject in _reported:
            return
        _reported.add(subject)
    env.log(0, f"{quoted(subject)}: {why}")
