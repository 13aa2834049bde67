"""An engine on a runner without a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fake_runner import FakeRunner

from vkbackend.models.engine.budget import PrefillBudget
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import (
    Answer,
    Event,
    News,
    Request,
)
from vkbackend.models.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


class Everything(PrefillBudget):
    """A budget that gives all rows to prompts, so no step depends on the clock."""

    def rows(self, n_decode: int, most: int) -> int:
        return most


def make(budget: PrefillBudget | None = None, **options: Any) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(**options)
    return Engine(runner, budget or Everything()), runner  # type: ignore[arg-type]


def finish(engine: Engine, requests: list[Request], limit: int = 5000) -> dict[int, list[Event]]:
    out: dict[int, list[Event]] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(limit):
        if not engine.busy:
            return out
        for event in events_of(engine.step()):
            out.setdefault(event.id, []).append(event)
    raise AssertionError(f"still busy after {limit} steps")


def events_of(news: News) -> list[Event]:
    pairs = zip(news.ids, news.answers, strict=True)
    return [Event(id_, done=False, token=a) if isinstance(a, int) else a for id_, a in pairs]


def tokens_of(answers: Iterable[Answer]) -> list[int]:
    tokens = (answer if isinstance(answer, int) else answer.token for answer in answers)
    return [token for token in tokens if token is not None]
