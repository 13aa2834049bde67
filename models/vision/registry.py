"""Finds the family of a `clip.projector_type`. A family is one file with a class `Model`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vkbackend.errors import UnsupportedModel

FAMILIES = {  # projector type -> module
    "idefics3": "idefics3",
    "qwen3vl_merger": "qwen3vl",
    "gemma3": "gemma3",
    "qwen2.5vl_merger": "qwen25vl",
    "qwen2vl_merger": "qwen2vl",
    "pixtral": "pixtral",
    "gemma4v": "gemma4",
    "gemma4uv": "gemma4uv",
    "lfm2": "lfm2",
    "internvl": "internvl",
    "mlp": "llava",
    "resampler": "minicpmv",
    "llama4": "llama4",
    "glm4v": "glm4v",
    "kimivl": "kimivl",
    "kimik25": "kimik25",
}


def family(projector: str, path: str = "") -> Any:
    """Return the class of a projector type. Raises UnsupportedModel, which lists the types."""
    if projector not in FAMILIES:
        raise UnsupportedModel(
            f"{path or 'mmproj'}: the projector type {projector!r} is not supported; "
            f"supported are: {', '.join(FAMILIES)}"
        )
    return import_module(f"vkbackend.models.vision.{FAMILIES[projector]}").Model
