"""An open folder, whose files are opened, replaced and removed by name.

On Linux, names are resolved in the open folder, so another user cannot replace the folder by a link
meanwhile.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from pathlib import Path

from vkbackend.system import files

if sys.platform == "win32":
    REPARSE = 0x400  # FILE_ATTRIBUTE_REPARSE_POINT: links and junctions

    class Folder:
        """Raises OSError: FileNotFoundError, NotADirectoryError, or ELOOP for a link."""

        def __init__(self, path: Path) -> None:
            status = os.lstat(path)
            _refuse_link(status, path)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            self._path = path

        def open(self, name: str) -> int:
            """Open a file for reading and return its descriptor. Raises OSError, with ELOOP for a link."""
            path = self._path / name
            _refuse_link(os.lstat(path), path)
            return os.open(path, os.O_RDONLY | os.O_BINARY | os.O_NOINHERIT)

        def create(self, name: str) -> int:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_BINARY | os.O_NOINHERIT
            return os.open(self._path / name, flags, 0o600)

        def replace(self, source: str, target: str) -> None:
            files.replace(self._path / source, self._path / target)

        def unlink(self, name: str) -> None:
            os.unlink(self._path / name)

        def touch(self, name: str, used_ns: int) -> None:
            os.utime(self._path / name, ns=(used_ns, used_ns))

        def is_writable(self) -> bool:
            """Create a file, because os.access ignores the access lists of folders."""
            name = f".{secrets.token_hex(4)}"
            try:
                os.close(self.create(name))
                self.unlink(name)
            except OSError:
                return False
            return True

        def tighten(self) -> None:
            pass

        def distrust(self) -> str:
            return distrust(os.lstat(self._path))

        def close(self) -> None:
            pass

    def is_ours(status: os.stat_result) -> bool:
        return True

    def distrust(status: os.stat_result) -> str:
        """A folder below %LOCALAPPDATA% inherits its access list, which allows no other user."""
        return ""

    def _refuse_link(status: os.stat_result, path: Path) -> None:
        if status.st_file_attributes & REPARSE:
            raise OSError(errno.ELOOP, "it is a link or a junction", str(path))

else:
    # O_NONBLOCK prevents a wait if the file is a pipe.
    _OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

    class Folder:
        """Raises OSError: FileNotFoundError, NotADirectoryError, or ELOOP for a link."""

        def __init__(self, path: Path) -> None:
            self._descriptor = os.open(path, _OPEN | os.O_DIRECTORY)

        def open(self, name: str) -> int:
            """Open a file for reading and return its descriptor. Raises OSError, with ELOOP for a link."""
            return os.open(name, _OPEN, dir_fd=self._descriptor)

        def create(self, name: str) -> int:
            """Create a file for its owner only, and return its descriptor. Raises FileExistsError."""
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, 0o600, dir_fd=self._descriptor)

        def replace(self, source: str, target: str) -> None:
            os.replace(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

        def unlink(self, name: str) -> None:
            os.unlink(name, dir_fd=self._descriptor)

        def touch(self, name: str, used_ns: int) -> None:
            os.utime(name, ns=(used_ns, used_ns), dir_fd=self._descriptor, follow_symlinks=False)

        def is_writable(self) -> bool:
            return os.access(".", os.W_OK | os.X_OK, dir_fd=self._descriptor)

        def tighten(self) -> None:
            """Remove other users' permissions from this user's folder."""
            status = os.fstat(self._descriptor)
            if status.st_uid == os.geteuid() and status.st_mode & 0o077:
                os.fchmod(self._descriptor, 0o700)

        def distrust(self) -> str:
            return distrust(os.fstat(self._descriptor))

        def close(self) -> None:
            os.close(self._descriptor)

    def is_ours(status: os.stat_result) -> bool:
        return status.st_uid == os.geteuid()

    def distrust(status: os.stat_result) -> str:
        """Return why a file or folder may have been changed by another user, or ""."""
        if status.st_uid not in (os.geteuid(), 0):
            return f"it belongs to another user (id {status.st_uid})"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w ends that)"
        return ""
