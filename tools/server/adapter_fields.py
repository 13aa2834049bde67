"""The LoRA adapters of a request: llama-server's field `lora`, and adapters named as models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkbackend.models.arguments import MAX_FILES, MAX_SCALE
from vkbackend.models.llm import LLM
from vkbackend.tools.server.body import Fields


def scales_of(entries: Sequence[Fields]) -> list[tuple[int, float]]:
    """Return (id, scale) of each {"id", "scale"}. Raises InvalidArgument."""
    scales = []
    for entry in entries:
        entry.required("id")
        entry.required("scale")
        number = entry.whole("id", 0, MAX_FILES, 0)
        scales.append((number, entry.number("scale", -MAX_SCALE, MAX_SCALE, 0.0)))
    return scales


def adapter_options(fields: Fields, llm: LLM, names: Sequence[str]) -> dict[str, Any]:
    """Return the keyword `lora` of a request, with ids. `names` are the names of the model itself.

    Without the field `lora`, a `model` NAME or MODEL:NAME selects the adapter NAME alone. Otherwise the
    request uses the current default scales.
    """
    if fields.has("lora"):
        return {"lora": scales_of(fields.objects("lora", MAX_FILES))}
    known = llm.adapters
    if not known:
        return {}
    model = fields.get("model")
    for adapter in known:
        name = adapter["name"]
        if model in (name, *(f"{base}:{name}" for base in names)) and model not in names:
            return {"lora": [(adapter["id"], 1.0)]}
    return {"lora": [(adapter["id"], adapter["scale"]) for adapter in known if adapter["scale"]]}
