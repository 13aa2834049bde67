"""From `general.architecture` to the model file of that name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

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
    model: Model = _module(name).Model(gguf)
    return model


def _module(name: str) -> Any:
    return import_module(f"vkbackend.models.{name.replace('-', '_')}")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a model file says of its architecture. Every one runs split by tensors or by layers on any number
    of devices: model files know neither.
    """

    name: str  # general.architecture
    models: str  # that have it
    experts: bool  # mixtures of them, in place of dense FFNs
    windows: bool  # sliding ones, in attention
    recurrent: bool  # states beside the KV cache


def architectures() -> list[Architecture]:
    """All that is supported, from the model files' docstrings and attributes."""
    found = []
    for name in ARCHITECTURES:
        module = _module(name)
        models = module.__doc__.partition("(")[2].partition(")")[0].replace("\n", " ")
        model = module.Model
        found.append(Architecture(name, models, bool(model.mixture), model.windows, model.recurrent_states))
    return found
