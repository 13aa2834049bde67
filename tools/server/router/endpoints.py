"""Endpoints of a server with several models: lists, and loading and unloading by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.models.hub_cache import remove
from vkbackend.tools.server import native
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.front import FINGERPRINT, Endpoint, Json
from vkbackend.tools.server.metrics import lines_of
from vkbackend.tools.server.model_facts import facts_of
from vkbackend.tools.server.router.catalog import Catalog
from vkbackend.tools.server.router.changes import changes, status_of
from vkbackend.tools.server.router.downloads import Downloads
from vkbackend.tools.server.router.registry import CACHE
from vkbackend.tools.server.router.tenant import Tenant


async def health(catalog: Catalog, request: Request) -> Response:
    if catalog.is_draining:
        raise Refusal(503, "the server is shutting down", retry_s=5)
    return Json({"status": "ok"})


async def models(catalog: Catalog, request: Request) -> Response:
    """List the models. With ?reload=1, read the folder and the presets again."""
    if request.query_params.get("reload"):
        await catalog.reload()
    data = [await _shown(catalog, tenant) for tenant in list(catalog.pool.tenants.values())]
    for name, download in catalog.downloads.running.items() if catalog.downloads else ():
        status = {"value": "downloading", "progress": dict(download.files)}
        data.append({"id": name, "object": "model", "status": status, "source": CACHE, "can_remove": False})
    return Json({"object": "list", "data": data})


async def one_model(catalog: Catalog, request: Request) -> Response:
    return Json(await _shown(catalog, catalog.find(request.path_params["name"])))


async def _shown(catalog: Catalog, tenant: Tenant) -> dict[str, Any]:
    entry = tenant.entry
    shown: dict[str, Any] = {
        "id": entry.name, "object": "model", "created": catalog.started, "owned_by": "vkbackend",
        "aliases": list(entry.names), "tags": list(entry.config.tags), "status": status_of(tenant),
        "source": entry.source, "can_remove": entry.source == CACHE,
        "architecture": native.architecture_of(entry.options.mmproj is not None),
    }  # fmt: skip
    if tenant.admits and tenant.model is not None:
        llm = tenant.model.llm
        facts = await asyncio.to_thread(facts_of, entry.options.path, tenant.loaded_at)
        shown["meta"] = {"n_vocab": llm.n_vocab, "n_ctx": llm.n_ctx} | facts
        shown["devices"] = llm.device_names
    if tenant.place is not None:
        shown["memory"] = dict(tenant.place.held)
    return shown


async def load(catalog: Catalog, request: Request) -> Response:
    catalog.pool.load(await _named(catalog, request))
    return Json({"success": True})


async def unload(catalog: Catalog, request: Request) -> Response:
    """Answer when the model's process has ended. A download is cancelled."""
    name = (await catalog.fields(request)).text("model", "")
    if catalog.downloads is None or not catalog.downloads.cancel(name):
        await catalog.pool.unload(await _named(catalog, request))
    return Json({"success": True})


async def download(catalog: Catalog, request: Request) -> Response:
    """Begin to download a model from the Hugging Face Hub. It is then listed."""
    downloads, fields = _downloads(catalog), await catalog.fields(request)
    fields.required("model")
    name = fields.text("model", "")
    if catalog.pool.find(name) is not None:
        raise Refusal(400, f"{name} is listed already", param="model", code="model_exists")
    await downloads.start(name)
    return Json({"success": True})


async def delete(catalog: Catalog, request: Request) -> Response:
    _downloads(catalog)
    tenant = catalog.find(request.query_params.get("model", ""))
    if tenant.entry.source != CACHE:
        text = f"{tenant.entry.name} was not downloaded by name; delete its file on the server's machine"
        raise Refusal(400, text, param="model", code="model_not_removable")
    if tenant.is_open:
        await catalog.pool.unload(tenant)
    await asyncio.to_thread(remove, Path(tenant.entry.options.path))
    await catalog.reload()
    return Json({"success": True})


def _downloads(catalog: Catalog) -> Downloads:
    """Raises Refusal."""
    if catalog.downloads is None:
        raise Refusal(501, "downloads are off; start the server with --models-download")
    return catalog.downloads


async def events(catalog: Catalog, request: Request) -> Response:
    await request.body()  # unread parts of the body would end the stream
    return catalog.stream(changes(catalog))


async def _named(catalog: Catalog, request: Request) -> Tenant:
    fields = await catalog.fields(request)
    fields.required("model")
    return catalog.find(fields.text("model", ""))


async def props(catalog: Catalog, request: Request) -> Response:
    """Answer for the router, with llama-server's fields. With ?model=NAME, the model answers."""
    config, pool = catalog.config, catalog.pool
    return Json(
        {
            "role": "router",
            "max_instances": pool.settings.most,
            "models_autoload": pool.settings.loads,
            "model_alias": "vkbackend",
            "model_path": "none",
            "default_generation_settings": {"n_ctx": 0, "params": {}},
            "ui": config.shows_page,
            "endpoint_metrics": config.shows_metrics,
            "build_info": FINGERPRINT,
            "cors_proxy_enabled": False,
        }
    )


async def metrics(catalog: Catalog, request: Request) -> Response:
    """Answer with the pool's counters. With ?model=NAME, answer with the counters of a model that is or was
    loaded."""
    if not catalog.config.shows_metrics:
        raise Refusal(501, "metrics are off; start the server with --metrics")
    if name := request.query_params.get("model"):
        service = catalog.service_of(tenant := catalog.find(name))
        if service is None:
            raise Refusal(400, f"{tenant.entry.name} was never loaded", code="model_not_loaded")
        return await native.metrics(service, request)
    pool, tenants = catalog.pool, catalog.pool.tenants.values()
    counts = {
        "vkbackend:models": (len(tenants), "Models in the list."),
        "vkbackend:models_open": (sum(tenant.is_open for tenant in tenants), "Models that hold memory."),
        "vkbackend:requests_admitted": (
            sum(tenant.n_active for tenant in tenants),
            "Requests of open models.",
        ),
        "vkbackend:requests_loading": (
            sum(len(t.waiters) for t in tenants),
            "Requests that wait for a model.",
        ),
        "vkbackend:loads_total": (pool.n_loads, "How often a model was loaded."),
        "vkbackend:evictions_total": (pool.n_evictions, "How often a model made room for another."),
        "vkbackend:load_seconds_total": (pool.load_s, "Seconds spent loading."),
    }
    text = "\n".join([*lines_of(counts), *catalog.metrics.request_lines()]) + "\n"
    headers = {"process-start-time-unix": str(catalog.started)}
    return Response(text, 200, headers, "text/plain; version=0.0.4")


def either(of_router: Endpoint, of_model: Endpoint) -> Endpoint:
    """Return the endpoint that answers for the router without ?model=NAME."""

    async def answer(catalog: Catalog, request: Request) -> Response:
        if request.query_params.get("model"):
            return await catalog.forward(of_model, request)
        return await of_router(catalog, request)

    return answer


ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/health", health),
    ("GET", "/models", models),
    ("POST", "/models", download),
    ("DELETE", "/models", delete),
    ("GET", "/models/sse", events),
    ("POST", "/models/load", load),
    ("POST", "/models/unload", unload),
    ("GET", "/models/{name:path}", one_model),
    ("GET", "/props", either(props, native.props)),
    ("GET", "/metrics", metrics),
)
