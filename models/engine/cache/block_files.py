"""Keeps parts of cache blocks in files, for later processes.

The folder has a sub-folder per model, with one file per part. Threads read and write the files. If the files
of all models exceed the limit, the least recently used are removed. Several processes may use a folder.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Condition

from vkbackend import env, trusted_files
from vkbackend.errors import InvalidArgument
from vkbackend.paths import quoted, why
from vkbackend.system.folder import Folder, is_ours
from vkbackend.trusted_files import Untrusted

KIND = b"vkbackend block 1 "
N_READERS = 2  # SHA-256 takes about 1 s per GB.
QUEUE_NBYTES = 256 << 20  # maximum bytes that may wait to be written
_FOLDER, _FILE = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}\.\d{1,3}")
_PART = re.compile(r"\.[0-9a-f]{64}\.\d{1,3}\.[0-9a-f]{8}")
REPORT_S = 3600.0  # A writing error is reported at most once in this time.
_LEFT_S = 3600.0  # A temporary file of this age belongs to a process that was killed.


class BlockFiles:
    """`most_nbytes` limits the files of all models. Raises InvalidArgument for an unusable folder."""

    def __init__(self, folder: str, identity: bytes, most_nbytes: int) -> None:
        self._top, self._most = Path(folder).absolute(), most_nbytes
        self.folder = self._top / identity.hex()[:32]
        _opened(self._top).close()
        self._directory = _opened(self.folder)
        self._deleted: list[Folder] = []  # deleted folders, which readers may still use
        self._changed = Condition()
        self._known: set[str] = set()
        self._writing: dict[str, bytes] = {}
        self._readers = ThreadPoolExecutor(N_READERS, "vkbackend-blocks")
        self._writer = ThreadPoolExecutor(1, "vkbackend-blocks")
        self._n_waiting = 0  # bytes of `_writing`
        self._next_report = 0.0
        self.counts: Counter[str] = Counter()
        self.nbytes = self._scan(0)

    def __contains__(self, name: str) -> bool:
        return name in self._known or name in self._writing

    def write(self, name: str, data: bytes, used_ns: int) -> bool:
        """Write in another thread. Return False if too many bytes wait to be written."""
        with self._changed:
            if name in self:
                return True
            if self._n_waiting + len(data) > QUEUE_NBYTES:
                return False
            self._writing[name] = data
            self._n_waiting += len(data)
        self._writer.submit(self._write, name, data, used_ns)
        return True

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more bytes may wait to be written."""
        return self._n_waiting + nbytes <= QUEUE_NBYTES

    def begin_read(self, name: str, nbytes: int, used_ns: int) -> Future[bytes | None]:
        """Read `nbytes` in another thread. The result is None if the file is not usable."""
        return self._readers.submit(self._read, name, nbytes, used_ns)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all files are written. Return False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._writing, timeout_s)

    def close(self) -> None:
        for threads in (self._writer, self._readers):
            threads.shutdown(cancel_futures=True)
        for folder in (self._directory, *self._deleted):
            folder.close()

    # ---- in the threads ----

    def _write(self, name: str, data: bytes, used_ns: int) -> None:
        try:
            nbytes = len(data) + trusted_files.head_nbytes(KIND)
            if self.nbytes + nbytes > self._most:
                self.nbytes = self._scan(nbytes)
            if self.nbytes + nbytes <= self._most:
                self._write_file(name, data)
                self._touch(name, used_ns)
                with self._changed:
                    self._known.add(name)
                    self.nbytes += nbytes
                    self.counts["written"] += 1
        except (OSError, InvalidArgument) as reason:
            if time.monotonic() >= self._next_report:
                self._next_report = time.monotonic() + REPORT_S
                env.log(0, f"{quoted(self.folder)}: blocks of the KV cache are not written: {why(reason)}")
        finally:
            with self._changed:
                self._n_waiting -= len(self._writing.pop(name))
                self._changed.notify_all()

    def _write_file(self, name: str, data: bytes) -> None:
        try:
            trusted_files.write(self._directory, name, KIND, data)
        except FileNotFoundError:  # Someone deleted the folder, for example to erase the texts.
            _opened(self._top).close()
            deleted, self._directory = self._directory, _opened(self.folder)
            self._deleted.append(deleted)
            self.nbytes = self._scan(0)
            trusted_files.write(self._directory, name, KIND, data)

    def _read(self, name: str, nbytes: int, used_ns: int) -> bytes | None:
        if (data := self._writing.get(name)) is not None:
            return data
        try:
            data = trusted_files.read(self._directory, name, KIND, nbytes)
            if len(data) != nbytes:
                raise Untrusted(f"it holds {len(data)} bytes, expected {nbytes}")
            self._touch(name, used_ns)
            return data
        except FileNotFoundError:
            pass  # another process removed it
        except (OSError, Untrusted) as reason:
            self.counts["refused"] += 1
            path = quoted(self.folder / name)
            env.log(0, f"{path} is not used, its positions are computed again: {why(reason)}")
        with self._changed:
            self._known.discard(name)
        return None

    def _touch(self, name: str, used_ns: int) -> None:
        with suppress(OSError):
            self._directory.touch(name, used_ns)

    def _scan(self, needed: int) -> int:
        """Find this model's files. If `needed` bytes do not fit, remove the least recently used files of all
        models until a tenth of the limit is free. Return the bytes of all files."""
        files = sorted(self._files())
        total = sum(nbytes for _, nbytes, _ in files)
        most = self._most - needed if total + needed <= self._most else self._most * 9 // 10 - needed
        for _, nbytes, path in files:
            if total > most:
                with suppress(OSError):
                    os.unlink(path)
                    total -= nbytes
        # Unusable files are listed as well, so that a request reports and replaces them.
        known = {entry.name for entry in _entries(self.folder) if _FILE.fullmatch(entry.name)}
        with self._changed:
            self._known = known
        return total

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield (time of last use, bytes, path) of every file of this user. Remove temporary files of
        processes that were killed."""
        now = time.time()
        for folder in [entry.path for entry in _entries(self._top) if _FOLDER.fullmatch(entry.name)]:
            for entry in _entries(folder):
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if not is_ours(status) or not entry.is_file(follow_symlinks=False):
                        continue
                    if _FILE.fullmatch(entry.name):
                        yield status.st_mtime_ns, status.st_size, entry.path
                    elif _PART.fullmatch(entry.name) and now - status.st_mtime > _LEFT_S:
                        os.unlink(entry.path)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _opened(path: Path) -> Folder:
    try:
        folder = trusted_files.open_folder(path, make=True)
        assert folder is not None
        if not folder.is_writable():
            folder.close()
            raise Untrusted("this user may not write to it")
        return folder
    except (OSError, Untrusted) as reason:
        raise InvalidArgument(
            f"cache_disk: {path} cannot hold the prefix cache: {why(reason)}; give a folder that only this "
            "user may write to",
            argument="cache_disk",
        ) from None
