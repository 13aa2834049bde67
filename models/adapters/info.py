"""The description of a loaded adapter."""

from __future__ import annotations

from dataclasses import dataclass


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
