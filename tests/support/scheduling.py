"""An engine on a runner without a model, and its requests run to their ends."""

from __future__ import annotations

from typing import Any

from fake_runner import FakeRunner

from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import (
    Event,
    Request,
)
from vkbackend.models.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def make(**options: Any) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(**options)
    return Engine(runner), runner  # type: ignore[arg-type]


def finish(engine: Engine, requests: list[Request], limit: int = 5000) -> dict[int, list[Event]]:
    """Submit, step until nothing is left to do, return the events by request."""
    out: dict[int, list[Event]] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(limit):
        if not engine.busy:
            return out
        for event in engine.step():
            out.setdefault(event.id, []).append(event)
    raise AssertionError(f"still busy after {limit} steps")


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]
