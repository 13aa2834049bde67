"""Runs a group of nodes as threads of one process. Node 0 runs in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vkbackend.meta.transport import TwinTransport
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.hosts.following import follow
from vkbackend.models.hosts.group import Group
from vkbackend.models.options import Options


@contextmanager
def twin_runner(
    path: Any,
    devices: list[str],
    n_hosts: int = 2,
    interleave: bool = False,
    models: list[str | None] | None = None,
    **options: Any,
) -> Iterator[Runner]:
    """Open a runner on devices NODE/DEVICE of several nodes. `models` lists a file per node; by default all
    use `path`. `runner.group.transports` lists the transports of all nodes."""
    transports = TwinTransport.group(n_hosts)
    groups = [Group(transport, pulse=False) for transport in transports]
    groups[0].transports = transports  # type: ignore[attr-defined]
    failed: list[BaseException] = []

    def serve(group: Group) -> None:
        try:
            follow(group, models[group.transport.rank] if models else None)
        except BaseException as error:
            failed.append(error)
            for transport in transports:
                transport.lost = transport.lost or f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=serve, args=(group,), daemon=True) for group in groups[1:]]
    for thread in threads:
        thread.start()
    options = {"tensor_split": [1] * len(devices)} | options
    try:
        runner = Runner(Options.of(path, devices=devices, **options), group=groups[0], interleave=interleave)
        try:
            yield runner
        finally:
            runner.close()
    except BaseException as error:
        for transport in transports:
            transport.lost = transport.lost or str(error)
        raise
    finally:
        for thread in threads:
            thread.join(20)
    assert not failed, failed
