"""llama-server's /lora-adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.tools.server.adapter_fields import scales_of
from vkbackend.tools.server.front import Json
from vkbackend.tools.server.service import Service


async def adapters(service: Service, request: Request) -> Response:
    """Show the default scales. Paths are shown without their folders."""
    shown = []
    for adapter in service.ready().adapters:
        row = {name: adapter[name] for name in ("id", "name", "scale", "task_name", "prompt_prefix")}
        row["path"] = Path(adapter["path"]).name
        if tokens := adapter["invocation_tokens"]:
            row["alora_invocation_tokens"] = tokens
        shown.append(row)
    return Json(shown)


async def set_adapters(service: Service, request: Request) -> Response:
    """Set the default scales, for requests that begin later. Adapters that are not listed get 0."""
    entries = await service.entries(request)
    llm = service.ready()
    scales = scales_of(entries)
    await asyncio.to_thread(llm.set_adapters, scales)
    return Json({"success": True})
