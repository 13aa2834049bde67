"""From `general.architecture` to the model file of that name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vkbackend.errors import UnsupportedModel
from vkbackend.models.architectures.base import Model
from vkbackend.models.gguf.reader import GGUF

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
    "kimi-linear",
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
    model: Model = model_class(name)(gguf)
    return model


def model_class(name: str) -> Any:
    """The class of an architecture of the list."""
    return _module(name).Model


def described(name: str) -> str:
    """The models that have an architecture, as its file's docstring says."""
    text: str = _module(name).__doc__.partition("(")[2].partition(")")[0]
    return text.replace("\n", " ")


def _module(name: str) -> Any:
    return import_module(f"vkbackend.models.architectures.{name.replace('-', '_')}")
