"""The events of `GET /models/sse`: changes of the models' states, and downloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from vkbackend.tools.server import streams
from vkbackend.tools.server.router.catalog import Catalog
from vkbackend.tools.server.router.pool import TICK_S
from vkbackend.tools.server.router.tenant import Status, Tenant

UNLOADED: dict[str, Any] = {"value": Status.UNLOADED.value, "args": []}
STAGE = "text_model"


def status_of(tenant: Tenant) -> dict[str, Any]:
    status: dict[str, Any] = {"value": tenant.status.value, "args": []}
    if tenant.status is Status.LOADING:
        status["progress"] = round(tenant.progress, 4)
    if tenant.status is Status.LOADED and not tenant.admits:
        status["value"] = Status.LOADING.value  # The model was lost and is being reopened.
    if tenant.failure is not None:
        status |= {"failed": True, "exit_code": 1, "message": tenant.message}
    return status


async def changes(catalog: Catalog) -> AsyncGenerator[bytes, None]:
    """Yield events until the server ends. A state that lasts less than TICK_S may be left out."""
    downloads = catalog.downloads
    n_ended = downloads.n_ended if downloads else 0
    before, fetched = _states(catalog), _fetched(catalog)
    yield streams.PING  # Without this line, the answer would begin only at the first change.
    while not catalog.is_draining:
        await asyncio.sleep(TICK_S)
        now, arrived = _states(catalog), _fetched(catalog)
        for ended in downloads.ended if downloads else ():
            if ended.number > n_ended:
                n_ended = ended.number
                kind = "download_failed" if ended.failure else "download_finished"
                yield _event(ended.name, kind, {"message": ended.failure} if ended.failure else None)
        if now.keys() - before.keys():
            yield _event("*", "models_reload")
        for name in before.keys() - now.keys():
            yield _event(name, "model_remove")
        for name, status in now.items():
            if status != before.get(name, UNLOADED):
                yield _event(name, "model_status", _shown(status))
        for name, files in arrived.items():
            if files != fetched.get(name):
                yield _event(name, "download_progress", files)
        before, fetched = now, arrived


def _states(catalog: Catalog) -> dict[str, dict[str, Any]]:
    return {name: status_of(tenant) for name, tenant in catalog.pool.tenants.items()}


def _fetched(catalog: Catalog) -> dict[str, dict[str, dict[str, int]]]:
    running = catalog.downloads.running if catalog.downloads else {}
    return {name: dict(download.files) for name, download in running.items() if download.files}


def _shown(status: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in status.items() if key not in ("value", "args", "progress")}
    if "progress" in status:
        rest["progress"] = {"stages": [STAGE], "current": STAGE, "value": status["progress"]}
    return {"status": status["value"], **rest}


def _event(name: str, kind: str, data: Any = None) -> bytes:
    return streams.event({"model": name, "event": kind} | ({} if data is None else {"data": data}))
