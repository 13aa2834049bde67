from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from vkbackend.errors import DeviceLost
from vkbackend.models.engine.channel import Channel
from vkbackend.models.engine.engine_process import Child, RemoteEngine
from vkbackend.models.hosts.hostfile import read_hostfile
from vkbackend.models.hosts.launch import GroupProcess
from vkbackend.models.options import Options


class GroupEngine(RemoteEngine):
    """An engine in node 0's process, which starts the nodes of `options.hostfile`. Errors name the node."""

    def __init__(self, options: Options, channel: Channel) -> None:
        assert options.hostfile is not None
        self._hostfile = read_hostfile(options.hostfile)
        super().__init__(options, channel)

    def _start(self, options: Options, open_: Any) -> tuple[Child, Connection]:
        vectors = tuple((os.path.abspath(path), scale) for path, scale in options.control_vectors)
        shared = replace(
            options,
            path=os.path.abspath(options.path),
            draft=options.draft and os.path.abspath(options.draft),
            mmproj=options.mmproj and os.path.abspath(options.mmproj),
            control_vectors=vectors,
            devices=self._hostfile.places,
            hostfile=None,
        )
        self._group = GroupProcess(self._hostfile)
        conn = self._group.start()
        conn.send(shared)
        return self._group, conn

    def _death(self, purpose: str) -> DeviceLost:
        self._group.join(1)
        return DeviceLost(
            f"the group of nodes ended while it was expected {purpose}: {self._group.last_words()}; open the "
            "model again, which starts it again"
        )
