"""The adapters of an open model and their default scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from vkbackend.errors import InvalidArgument
from vkbackend.models.adapters.info import AdapterInfo
from vkbackend.models.engine.messages import check_adapters

Scales = tuple[tuple[int, float], ...]  # (id, scale)


class ActiveAdapters:
    """`known` are the loaded adapters. Threads may share an instance."""

    def __init__(self, known: Sequence[AdapterInfo]) -> None:
        self.known = tuple(known)
        self._lock, self._defaults = Lock(), {info.id: info.scale for info in known}
        self._check(self._defaults)

    def _check(self, scales: Mapping[int, float]) -> Scales:
        active = tuple((number, scale) for number, scale in scales.items() if scale)
        check_adapters(active, self.known)
        return active

    def resolved(self, wanted: Sequence[tuple[str | int, float]] | None) -> Scales:
        """Return the scale of each adapter that a request names, or the default scales if `wanted` is None.
        Raises InvalidArgument."""
        if wanted is None:
            with self._lock:
                return self._check(self._defaults)
        return self._check(self._by_id(wanted))

    def set_defaults(self, wanted: Sequence[tuple[str | int, float]]) -> None:
        """Set the default scales. Adapters that are not listed get 0. Raises InvalidArgument."""
        scales = dict.fromkeys(range(len(self.known)), 0.0) | self._by_id(wanted)
        self._check(scales)
        with self._lock:
            self._defaults = scales

    def _by_id(self, wanted: Sequence[tuple[str | int, float]]) -> dict[int, float]:
        scales: dict[int, float] = {}
        for adapter, scale in wanted:
            number = self.number(adapter)
            if number in scales:
                raise InvalidArgument(
                    f"lora: adapter {adapter!r} occurs twice; give its scale once", argument="lora"
                )
            scales[number] = scale
        return scales

    def number(self, adapter: str | int) -> int:
        """Return the id of an adapter, given its name or id. Raises InvalidArgument."""
        for info in self.known:
            if adapter in (info.id, info.name):
                return info.id
        listed = ", ".join(f"{info.id} ({info.name})" for info in self.known)
        there = f"the model was opened with: {listed}" if listed else "the model has no adapters (lora)"
        raise InvalidArgument(f"lora: adapter {adapter!r} is unknown; {there}", argument="lora")

    def table(self) -> list[dict[str, Any]]:
        with self._lock:
            defaults = dict(self._defaults)
        return [
            {
                "id": info.id,
                "name": info.name,
                "path": info.path,
                "scale": defaults[info.id],
                "rank": info.rank,
                "task_name": info.task_name,
                "prompt_prefix": info.prompt_prefix,
                "invocation_tokens": list(info.invocation),
            }
            for info in self.known
        ]
