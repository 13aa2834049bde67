"""Downloads of models from the Hugging Face Hub, for `POST /models`."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from vkbackend.errors import VkbackendError
from vkbackend.models.hub import is_name
from vkbackend.system.process_tree import APART
from vkbackend.tools.server.failures import Refusal

MOST = 4
SILENT_S = 120.0  # A download without progress for this time has failed.
N_ENDED = 64
COMMAND = (sys.executable, "-m", "vkbackend.tools.server.router.fetching")
KEPT = "the part that was fetched is kept: try again"

log = logging.getLogger("vkbackend.serve")


@dataclass(eq=False, slots=True)
class Download:
    """`files` maps each file to its number of bytes."""

    process: asyncio.subprocess.Process
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a download. `number` counts all downloads."""

    number: int
    name: str
    failure: str


class Downloads:
    """`finished` makes a downloaded model part of the list. Only the event loop changes the attributes."""

    def __init__(self, finished: Callable[[], Awaitable[None]]) -> None:
        self._finished = finished
        self.running: dict[str, Download] = {}
        self.ended: deque[Ended] = deque(maxlen=N_ENDED)
        self.n_ended = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, name: str) -> None:
        """Begin a download, and return when its size is known. Raises Refusal."""
        if not is_name(name):
            raise Refusal(
                400,
                f"{name[:200]!r} is not a repository; expected user/repo or user/repo:Q4_K_M",
                param="model",
            )
        if name in self.running:
            raise Refusal(400, f"{name} is being downloaded already", code="model_downloading")
        if len(self.running) >= MOST:
            raise Refusal(429, f"{MOST} models are being downloaded, which is the limit", retry_s=60)
        process = await asyncio.create_subprocess_exec(
            *COMMAND, name, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, **APART
        )
        self.running[name] = Download(process)
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._follow(name, begun))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(begun)

    def cancel(self, name: str) -> bool:
        download = self.running.get(name)
        if download is not None:
            download.is_cancelled = True
            _kill(download.process)
        return download is not None

    def close(self) -> None:
        for name in list(self.running):
            self.cancel(name)

    async def _follow(self, name: str, begun: asyncio.Future[None]) -> None:
        download = self.running[name]
        failure, is_wrong = "", False
        try:
            result = await self._result(download, begun)
            failure, is_wrong = result.get("error", ""), result.get("is_wrong", False)
        except TimeoutError:
            failure = f"no bytes arrived for {SILENT_S:g} s; {KEPT}"
        finally:
            _kill(download.process)
            await download.process.wait()
            del self.running[name]
        if download.is_cancelled:
            failure = f"the download was cancelled; {KEPT}"
        self.n_ended += 1
        self.ended.append(Ended(self.n_ended, name, failure))
        log.info("%s %s", name, f"was not downloaded: {failure}" if failure else "was downloaded")
        if not failure:
            try:
                await self._finished()
            except VkbackendError as error:
                log.error("the list of models cannot be read: %s", error)
        if begun.done():
            return
        if failure:
            begun.set_exception(
                Refusal(400 if is_wrong else 503, failure, param="model" if is_wrong else None)
            )
        else:
            begun.set_result(None)

    async def _result(self, download: Download, begun: asyncio.Future[None]) -> dict[str, Any]:
        assert download.process.stdout is not None
        while line := await asyncio.wait_for(download.process.stdout.readline(), SILENT_S):
            shown: dict[str, Any] = json.loads(line)
            if "file" not in shown:
                return shown
            download.files[shown["file"]] = {"done": shown["done"], "total": shown["total"]}
            if not begun.done():
                begun.set_result(None)
        return {"error": f"the download's process ended; {KEPT}"}


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
