"""Parts of blocks in host memory, and in files if there is a folder."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future

from vkbackend import env
from vkbackend.models.engine.cache.block_files import BlockFiles
from vkbackend.paths import quoted


class BlockStore:
    """At most `ram_nbytes` are in host memory, or any number if it is None. The least recently used part
    leaves the memory first, and remains in its file."""

    def __init__(self, ram_nbytes: int | None, files: BlockFiles | None) -> None:
        self._most, self.files = ram_nbytes, files
        self._ram: OrderedDict[str, tuple[bytes, int]] = OrderedDict()  # name -> (bytes, time of last use)
        self.ram_nbytes = 0
        self._hanging: Future[bytes | None] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._ram or (self._readable is not None and name in self._readable)

    @property
    def _readable(self) -> BlockFiles | None:
        """Return the files, or None while the file system does not answer."""
        if self._hanging is not None and self._hanging.done():
            self._hanging = None
        return self.files if self._hanging is None else None

    def wait_for(self, read: Future[bytes | None]) -> None:
        """Read no files until `read` ends, because the file system does not answer. Otherwise each request
        would wait for the file system, and delay all other requests."""
        if self.files is not None and self._hanging is None:
            self._hanging = read
            folder = quoted(self.files.folder)
            env.log(0, f"{folder}: the file system does not answer; until it does, prompts are computed")

    def put(self, name: str, data: bytes, used_ns: int) -> None:
        if self.files is not None:
            self.files.write(name, data, used_ns)
        if name in self._ram or (self._most is not None and len(data) > self._most):
            return
        self._ram[name] = data, used_ns
        self.ram_nbytes += len(data)
        while self._most is not None and self.ram_nbytes > self._most:
            oldest, (old, used_ns) = self._ram.popitem(last=False)
            self.ram_nbytes -= len(old)
            if self.files is not None:  # the first write may have been refused
                self.files.write(oldest, old, used_ns)

    def begin_read(self, name: str, nbytes: int, used_ns: int) -> Future[bytes | None]:
        """Return the part's bytes, or None if it has no usable file."""
        if name in self._ram:
            data, _ = self._ram[name]
            self._ram[name] = data, used_ns
            self._ram.move_to_end(name)
            ready: Future[bytes | None] = Future()
            ready.set_result(data)
            return ready
        if (files := self._readable) is not None:
            return files.begin_read(name, nbytes, used_ns)
        ready = Future()
        ready.set_result(None)
        return ready

    def stats(self) -> dict[str, int]:
        files = self.files
        counts = files.counts if files else {}
        return {
            "cache_ram_bytes": self.ram_nbytes,
            "cache_disk_bytes": files.nbytes if files else 0,
            "n_blocks_refused": counts.get("refused", 0),
        }

    def close(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s` seconds until the files are written."""
        if self.files is not None:
            deadline = time.monotonic() + timeout_s
            for name, (data, used_ns) in self._ram.items():
                if not self.files.write(name, data, used_ns):
                    if not self.files.flush(deadline - time.monotonic()):
                        break
                    self.files.write(name, data, used_ns)
            self.files.flush(deadline - time.monotonic())
            self.files.close()
        self._ram.clear()
        self.ram_nbytes = 0
