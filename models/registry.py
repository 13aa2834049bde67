"""From `general.architecture` to the model file of that name."""

from __future__ import annotations

from importlib import import_module

from vkbackend.errors import UnsupportedModel
from vkbackend.models.base import Model
from vkbackend.models.gguf import GGUF

ARCHITECTURES = (
    "llama",
    "mistral3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "qwen3next",
    "qwen35",
    "qwen35moe",
    "phi3",
    "gemma3",
    "gemma4",
    "glm4",
    "glm4moe",
    "gpt-oss",
)


def load_model(gguf: GGUF) -> Model:
    """The model of a file's architecture; raises UnsupportedModel naming it and what is supported."""
    name = gguf.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{gguf.paths[0]}: architecture {name!r} is not supported; "
            f"supported are: {', '.join(ARCHITECTURES)}"
        )
    model: Model = import_module(f"vkbackend.models.{name.replace('-', '_')}").Model(gguf)
    return model
