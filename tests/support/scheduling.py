"""An engine on a runner without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from fake_runner import FakeRunner

from vkbackend.models.drafting.draft_model import DraftModel
from vkbackend.models.drafting.drafter import Drafter
from vkbackend.models.drafting.heads import HeadDrafter
from vkbackend.models.engine.budget import PrefillBudget
from vkbackend.models.engine.drafters import limits_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import (
    Answer,
    Event,
    News,
    Request,
)
from vkbackend.models.engine.speculation import Speculation
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.tools.studies.speculation import Free, Trusted

GREEDY = SamplingParams(temperature=0)
# Kinds of memory, as options of `make`.
KINDS: dict[str, dict[str, Any]] = {
    "all positions": {},
    "window": {"window": 40},
    "recurrent": {"snapshots": 3},
    "both": {"window": 70, "snapshots": 2},
}


class Everything(PrefillBudget):
    """A budget that assigns all rows to prompts, so no step depends on the clock."""

    def rows(self, n_decode: int, most: int, waiting: Sequence[int]) -> int:
        return most


def make(
    budget: PrefillBudget | None = None, drafter: Drafter | None = None, **options: Any
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(**options, undoes=drafter is not None)
    return Engine(runner, budget or Everything(), drafting(runner, drafter)), runner  # type: ignore[arg-type]


def drafting(runner: Any, *drafters: Drafter | None) -> Speculation | None:
    """Return a speculation that always drafts, or None without drafters."""
    given = [drafter for drafter in drafters if drafter is not None]
    for drafter in given:
        if isinstance(drafter, DraftModel | HeadDrafter):
            drafter._clock = lambda: 0.0  # drafted tokens are free
    return Speculation(given, limits_of(runner), Free(), Trusted()) if given else None


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


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(40) for _ in range(n))


def check_sound(engine: Engine) -> None:
    """Check that every block has one owner. Check that each node of the tree counts the slots that use it."""
    cache = engine.cache
    nodes, stack = [], list(cache.tree.root.children.values())
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += node.children.values()
    for g, group in enumerate(cache.groups):
        owners = list(group.free)
        owners += [node.blocks[g] for node in nodes if node.blocks[g] >= 0]
        owners += [block for span in group.spans for block in span.blocks.values()]
        assert sorted(owners) == list(range(group.pool.n_blocks)), (g, sorted(owners))
        users = {id(node): 0 for node in nodes}
        for span, path in zip(group.spans, cache.nodes, strict=True):
            for index, node in enumerate(path):
                users[id(node)] += node.blocks[g] >= 0 and index >= span.low
        assert all(node.users[g] == users[id(node)] for node in nodes if node.blocks[g] >= 0), g
        unused = {id(node) for node in group.unused}
        assert unused == {id(n) for n in nodes if n.blocks[g] >= 0 and not n.users[g]}, g
