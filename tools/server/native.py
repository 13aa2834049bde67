"""Endpoints of llama-server and OpenAI that do not generate text."""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.models.arguments import token_ids
from vkbackend.models.llm import LLM
from vkbackend.models.text.chat_template import CHATML
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.front import FINGERPRINT, Json
from vkbackend.tools.server.generations import Tally, token_text, tokenize
from vkbackend.tools.server.llama_results import settings_of
from vkbackend.tools.server.model import State
from vkbackend.tools.server.model_facts import facts_of
from vkbackend.tools.server.service import Service

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
TEXTS = ("stop", "grammar", "dry_sequence_breakers")  # settings that contain a client's text


async def health(service: Service, request: Request) -> Response:
    """Answer without an API key, because the answer reveals nothing about requests."""
    model = service.model
    if model.state is not State.READY or service.is_draining:
        raise model.not_ready()
    return Json({"status": "ok"})


async def models(service: Service, request: Request) -> Response:
    """Answer with OpenAI's list, and with Ollama's `models` as llama-server does."""
    llm = service.ready()
    facts = await asyncio.to_thread(facts_of, service.config.model_path, service.model.n_restarts)
    meta = {"n_vocab": llm.n_vocab, "n_ctx": llm.n_ctx} | facts
    name = service.config.alias
    details = {
        "parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": "",
        "quantization_level": "",
    }  # fmt: skip
    shown = {
        "name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model",
        "description": "", "tags": [""], "capabilities": capabilities_of(llm), "parameters": "",
        "details": details,
    }  # fmt: skip
    entry = _model_entry(service) | {"meta": meta, "architecture": architecture_of(llm.pictures is not None)}
    entries = [entry, *_adapter_entries(service, llm)]
    return Json({"models": [shown], "object": "list", "data": entries})


def capabilities_of(llm: LLM) -> list[str]:
    classifies = ["rerank"] if llm.heads.classifier else []
    sees = ["multimodal"] if llm.pictures is not None else []  # llama-server's word
    return [*(["embedding"] if llm.is_encoder else ["completion"]), *classifies, *sees]


def architecture_of(sees: bool) -> dict[str, list[str]]:
    return {"input_modalities": ["text", *(["image"] if sees else [])], "output_modalities": ["text"]}


async def one_model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name in (service.config.alias, *service.config.other_names):
        return Json(_model_entry(service))
    for entry in _adapter_entries(service, service.ready()):
        if name in (entry["id"], *entry["aliases"]):
            return Json(entry)
    raise Refusal(404, "no such model; /v1/models lists the available ones", code="model_not_found")


def _adapter_entries(service: Service, llm: LLM) -> list[dict[str, Any]]:
    """Return an entry for each adapter, which a request can name as its model."""
    base = service.config.alias
    return [
        _model_entry(service)
        | {"id": f"{base}:{adapter['name']}", "aliases": [adapter["name"]], "parent": base}
        for adapter in llm.adapters
    ]


def _model_entry(service: Service) -> dict[str, Any]:
    config = service.config
    return {
        "id": config.alias, "object": "model", "created": service.started, "owned_by": "vkbackend",
        "aliases": [config.alias, *config.other_names], "tags": list(config.tags),
    }  # fmt: skip


async def props(service: Service, request: Request) -> Response:
    """Answer without waiting for the engine, because the page needs the properties first."""
    llm, config = service.ready(), service.config
    settings = settings_of(config.defaults, config.max_tokens)
    facts = await asyncio.to_thread(facts_of, config.model_path, service.model.n_restarts)
    for_tools = llm.chat_templates.get("tool_use")
    try:
        ends = llm.tokenizer.bos_id, llm.tokenizer.eos_id
        bos, eos = ("" if token is None else token_text(llm, token) for token in ends)
    except UnsupportedModel:
        bos = eos = ""
    return Json(
        {
            "default_generation_settings": {"n_ctx": llm.n_ctx, "params": settings},
            "total_slots": llm.n_slots,
            "model_path": os.path.basename(config.model_path),
            "model_alias": config.alias,
            "model_ftype": facts.get("ftype", ""),
            "endpoint_slots": config.shows_slots,
            "endpoint_props": config.takes_props,
            "endpoint_metrics": config.shows_metrics,
            "ui": config.shows_page,
            "chat_template": config.template or llm.chat_template or CHATML,
            **({"chat_template_tool_use": for_tools} if for_tools else {}),
            "bos_token": bos,
            "eos_token": eos,
            "pooling": config.pooling or llm.heads.pooling,
            "n_embd": llm.heads.n_embd,
            "capabilities": capabilities_of(llm),
            "modalities": {"vision": llm.pictures is not None, "video": False, "audio": False},
            "devices": llm.device_names,
            "build_info": FINGERPRINT,
            "is_sleeping": False,
            "cors_proxy_enabled": False,
        }
    )


async def set_props(service: Service, request: Request) -> Response:
    """Answer as llama-server does. llama-server has no properties that can be changed yet."""
    await service.fields(request)
    if not service.config.takes_props:
        raise Refusal(501, "the properties cannot be changed; start the server with --props")
    return Json({"success": True})


async def metrics(service: Service, request: Request) -> Response:
    if not service.config.shows_metrics:
        raise Refusal(501, "metrics are off; start the server with --metrics")
    admission, stats = service.admission, service.model.stats
    waiting = stats.get("n_waiting", 0)
    gauges = {
        "llamacpp:requests_processing": (stats.get("n_running", 0), "Sequences with a slot."),
        "llamacpp:requests_deferred": (waiting, "Sequences waiting for a slot."),
        "vkbackend:streams": (admission.n_streams, "Open streams."),
        "vkbackend:slots": (service.model.n_slots, "Sequences that can run together."),
        "vkbackend:refused_total": (admission.n_refused, "Requests refused with 429."),
        "vkbackend:restarts_total": (service.model.n_restarts, "How often the model was reopened."),
        "vkbackend:ready": (int(service.model.state is State.READY), "1 while the model is open."),
        "vkbackend:reduce_us": (stats.get("reduce_us", 0.0), "Recent host microseconds of an all-reduce."),
        "vkbackend:prompt_hit_rate": (
            stats.get("hit_rate", 0.0),
            "Share of prompt tokens found in the cache.",
        ),
    }
    headers = {"process-start-time-unix": str(service.started)}
    return Response(service.metrics.text(gauges, stats), 200, headers, "text/plain; version=0.0.4")


async def stats(service: Service, request: Request) -> Response:
    llm = service.ready()
    memory = await asyncio.to_thread(llm.memory)
    others = [usage["device"] for usage in memory[len(llm.device_names) :]]  # the projector
    names = [*llm.device_names, *others]
    named = [usage | {"name": name} for usage, name in zip(memory, names, strict=True)]
    return Json({"devices": named, "engine": service.model.stats})


# ---- slots ----


async def slots(service: Service, request: Request) -> Response:
    """Return the counts of each slot, but no texts."""
    _check_slots_shown(service)
    llm = service.ready()
    if "fail_on_no_slot" in request.query_params and len(service.running) >= llm.n_slots:
        raise Refusal(503, f"all {llm.n_slots} slots are busy; retry the request", retry_s=1)
    rows = []
    for i in range(llm.n_slots):
        tally = service.running.get(i)
        row: dict[str, Any] = {
            "id": i, "n_ctx": llm.n_ctx, "speculative": bool(llm.speculation),
            "is_processing": tally is not None,
        }  # fmt: skip
        rows.append(row if tally is None else row | _busy_slot(llm, tally))
    return Json(rows)


def _busy_slot(llm: LLM, tally: Tally) -> dict[str, Any]:
    left = llm.n_ctx - tally.prompt_n if tally.max_tokens is None else tally.max_tokens
    settings = settings_of(tally.options, tally.max_tokens)
    next_token = {
        "has_next_token": True,
        "has_new_line": any("\n" in text for text in tally.text),
        "n_remain": max(-1, left - tally.n_tokens),  # -1: context shifts extend the context
        "n_decoded": tally.n_tokens,
    }
    return {
        "n_prompt_tokens": tally.prompt_n,
        "n_prompt_tokens_processed": tally.prompt_n - tally.cached_n,
        "n_prompt_tokens_cache": tally.cached_n,
        "params": {name: value for name, value in settings.items() if name not in TEXTS},
        "next_token": [next_token],
        "n_decoded": tally.n_tokens,
    }


def _check_slots_shown(service: Service) -> None:
    if not service.config.shows_slots:
        raise Refusal(501, "slots are hidden; start the server without --no-slots")


async def slot_action(service: Service, request: Request) -> Response:
    _check_slots_shown(service)
    action = request.query_params.get("action")
    if action not in ("save", "restore", "erase"):
        raise Refusal(400, "action: expected one of save, restore, erase", param="action")
    if (folder := service.config.slot_folder) is None:
        raise Refusal(501, "saving slots is off; start the server with --slot-save-path FOLDER")
    word = request.path_params["slot"]
    slot = int(word) if word.isdecimal() and len(word) < 10 else -1
    fields = Fields({}) if action == "erase" else await service.fields(request)
    llm = service.ready()
    if not 0 <= slot < llm.n_slots:
        raise Refusal(400, f"no slot {word[:20]!r}; valid are 0..{llm.n_slots - 1}", param="id_slot")
    if action == "erase":
        erased = await asyncio.to_thread(llm.erase_slot, slot)
        return Json({"id_slot": slot, "n_erased": len(erased)})
    name = fields.text("filename", "")
    path = slot_file(folder, name)
    began = time.perf_counter()
    if action == "save":
        tokens = await asyncio.to_thread(llm.save_state, path, slot)
        words = "n_saved", "n_written", "save_ms"
    else:
        if not os.path.isfile(path):
            raise Refusal(404, f"no saved slot {name!r}", param="filename")
        tokens = await asyncio.to_thread(llm.load_state, path, slot)
        words = "n_restored", "n_read", "restore_ms"
    took_ms = 1e3 * (time.perf_counter() - began)
    counts = {words[0]: len(tokens), words[1]: os.path.getsize(path), "timings": {words[2]: took_ms}}
    return Json({"id_slot": slot, "filename": name} | counts)


def slot_file(folder: str, name: str) -> str:
    """Raises InvalidArgument for a name with a folder, and for a link, because both could lead out of
    `folder`."""
    if not FILE_NAME.fullmatch(name):
        raise InvalidArgument(
            "filename: expected 1..200 letters, digits and . _ - (none of . - first), without a folder",
            argument="filename",
        )
    path = os.path.join(folder, name)
    if os.path.islink(path):
        raise InvalidArgument("filename: it is a link; links are not followed", argument="filename")
    return path


# ---- tokens ----


async def tokens_of(service: Service, request: Request) -> Response:
    fields = await service.fields(request)
    llm = service.ready()
    fields.required("content")
    add_special = fields.switch("add_special")
    parse_special, pieces = fields.switch("parse_special", True), fields.switch("with_pieces")
    content, ids = fields.get("content"), list[int]()
    if not isinstance(content, str | list):
        raise refused("content", content, "expected a string, or a list of strings and token ids")
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        if isinstance(part, str):
            ids += await tokenize(llm, part, add_special=add_special and not i, parse_special=parse_special)
        else:
            ids += token_ids("content", [part], "expected a string, or a list of strings and token ids")
    if not pieces:
        return Json({"tokens": ids})

    def pieces_of() -> list[dict[str, Any]]:
        return [{"id": token, "piece": _piece(llm.tokenizer.piece(token))} for token in ids]

    return Json({"tokens": await asyncio.to_thread(pieces_of)})


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are incomplete characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def text_of(service: Service, request: Request) -> Response:
    fields = await service.fields(request)
    llm = service.ready()
    fields.required("tokens")
    given = fields.items("tokens", service.config.limits.body_nbytes)
    # Four million tokens are possible, so a thread converts them.
    text = await asyncio.to_thread(lambda: llm.detokenize(token_ids("tokens", given), skip_special=False))
    return Json({"content": text})
