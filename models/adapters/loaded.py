"""The adapters of an open model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vkbackend.models.adapters.adapter import Adapter
from vkbackend.models.adapters.gguf_adapter import read_gguf_adapter
from vkbackend.models.adapters.peft import is_peft_folder, read_peft_adapter
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.memory_specs import kv_of


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """`id` counts from 0 in the order of loading. `scale` is the default scale. `digest` is the SHA-256 of
    the content. See `Adapter` for the other fields."""

    id: int
    name: str
    path: str
    scale: float
    rank: int
    digest: str
    task_name: str = ""
    prompt_prefix: str = ""
    invocation: tuple[int, ...] = ()

    @property
    def file(self) -> str:
        """Return the name of the file or folder without its path."""
        return Path(self.path).name


def read_adapters(files: Sequence[tuple[str, str, float]], architecture: str, model: Model) -> list[Adapter]:
    """Read (name, path, scale). Raises GGUFError, AdapterError, UnsupportedModel."""
    caches = [kv_of(model.kv(il)) for il in range(model.n_layer)]
    head_dim = next((cache.head_dim_k for cache in caches if cache), 1)
    stacks = [spec.shape[0] for spec in model.weights() if len(spec.shape) == 3]
    adapters = []
    for _, path, _ in files:
        if is_peft_folder(path):
            sizes = model.n_layer, max(stacks, default=0), head_dim
            adapters.append(read_peft_adapter(path, architecture, *sizes))
        else:
            adapters.append(read_gguf_adapter(path, architecture))
    return adapters


def infos_of(files: Sequence[tuple[str, str, float]], adapters: Sequence[Adapter]) -> tuple[AdapterInfo, ...]:
    return tuple(
        AdapterInfo(i, name, path, scale, a.rank, a.digest, a.task_name, a.prompt_prefix, a.invocation)
        for i, ((name, path, scale), a) in enumerate(zip(files, adapters, strict=True))
    )
