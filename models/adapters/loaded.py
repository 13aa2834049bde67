"""Reads the adapters of a model that is being loaded."""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.models.adapters.adapter import Adapter
from vkbackend.models.adapters.gguf_adapter import read_gguf_adapter
from vkbackend.models.adapters.info import AdapterInfo
from vkbackend.models.adapters.peft import is_peft_folder, read_peft_adapter
from vkbackend.models.adapters.stacks import low_rank_specs
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.memory_specs import kv_of
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement.tensors import ahead_tensors


def read_adapters(files: Sequence[tuple[str, str, float]], architecture: str, model: Model) -> list[Adapter]:
    """Read the adapters in `files` (name, path, scale). Raises GGUFError, AdapterError, UnsupportedModel."""
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


def add_adapters(
    model: Model, gguf: GGUF, files: Sequence[tuple[str, str, float]]
) -> tuple[AdapterInfo, ...]:
    """Read the adapters in `files` (name, path, default scale) and load their weights into the model. Raises
    the errors of `read_adapters` and of `low_rank_specs`."""
    adapters = read_adapters(files, gguf.architecture, model)
    unread = {*model.unread(), *ahead_tensors(gguf, model)}
    model.low_rank = low_rank_specs(adapters, model.weights(), unread)
    model.n_adapters = len(adapters)
    return infos_of(files, adapters)


def infos_of(files: Sequence[tuple[str, str, float]], adapters: Sequence[Adapter]) -> tuple[AdapterInfo, ...]:
    return tuple(
        AdapterInfo(i, name, path, scale, a.rank, a.digest, a.task_name, a.prompt_prefix, a.invocation)
        for i, ((name, path, scale), a) in enumerate(zip(files, adapters, strict=True))
    )
