"""Threads of one process act as several nodes. A single node computes the expected drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import wide
from drafts import Guesses
from groups import FOUR, OPTIONS, TOKENS, TWO, here
from oracles.eagle import eagle3
from oracles.fixture import write
from oracles.fixtures import build
from oracles.heads import with_head
from runners import load_runner
from scheduling import GREEDY, Everything, drafting, finish
from scheduling import tokens_of as tokens_in

from vkbackend.models.drafting.drafter import Want
from vkbackend.models.engine.drafters import drafters_of, open_draft
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.draft_runner import HeadRunner
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner

pytestmark = pytest.mark.no_vulkan


@pytest.mark.parametrize(
    ("places", "options"),
    [(TWO, {}), wide(pytest.param(FOUR, {"split_mode": "hosts"}))],
    ids=str,
)
def test_a_head_drafts_over_nodes(tmp_path: Path, places: list[str], options: dict[str, Any]) -> None:
    path = write(with_head("glm4moe"), tmp_path / "model.gguf")
    options = OPTIONS | {"speculation": "mtp"} | options
    drafts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Options, "nodes", tuple(place[0] for place in places))
        single = load_runner(path, devices=here(places), **options)
    with twin_runner(path, places, 2, **options) as several:
        for runner in (single, several):
            runner.step(TOKENS[:12], [Run(0, 0, 7, 0), Run(1, 7, 5, 0)], [])
            first = HeadRunner(runner).draft(TOKENS[20:22], [0, 1], [7, 5], summed=True)
            drafts.append((*first, *HeadRunner(runner).draft(first[0].tolist(), [0, 1], [8, 6], summed=True)))
    single.close()
    assert all(np.array_equal(*pair) for pair in zip(*drafts, strict=True))


@pytest.mark.wide
@pytest.mark.parametrize("split_mode", ["tensor", "layer"])
def test_an_eagle3_head(tmp_path: Path, split_mode: str) -> None:
    """Node 1 reads the head from a file next to its copy of the model. Node 0 maps drafted rows to tokens."""
    target = build("llama")
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write(target, folder / "model.gguf")
        write(eagle3(target), folder / "head.gguf")
    path, there = tmp_path / "a" / "model.gguf", str(tmp_path / "b" / "model.gguf")
    options = OPTIONS | {"draft": path.with_name("head.gguf"), "split_mode": split_mode}
    drafts = []
    single = load_runner(path, devices=here(TWO), **options)
    with twin_runner(path, TWO, models=[None, there], **options) as several:
        for runner in (single, several):
            runner.step(TOKENS[:7], [Run(0, 0, 7, 0)], [])
            first = HeadRunner(runner).draft(TOKENS[20:21], [0], [7], summed=True)
            drafts.append((*first, *HeadRunner(runner).draft(first[0].tolist(), [0], [8], summed=True)))
    single.close()
    assert all(np.array_equal(*pair) for pair in zip(*drafts, strict=True))


def test_drafts_over_two_nodes(tmp_path: Path) -> None:
    """Node 0 drafts. Steps that verify drafts are recorded before the other node needs them. The recurrent
    layers of both nodes return to earlier states."""
    write(build("lfm2"), path := tmp_path / "model.gguf")
    requests = [Generate(i, tuple(TOKENS[i : 9 + i]), 20, GREEDY) for i in range(2)]
    texts = []
    with twin_runner(path, TWO, **OPTIONS, speculation="ngram") as runner:
        runner.record_decoding((2, 4, 8))
        for share in (None, 1.0, 0.5):
            done = texts[0] if texts else []
            prompts = [[*r.tokens, *t] for r, t in zip(requests, done, strict=False)]

            def truth(want: Want, prompts: list[list[int]] = prompts) -> list[int]:
                n = len(want.history)
                return next((text[n:] for text in prompts if text[:n] == list(want.history)), [])

            drafter = None if share is None else Guesses(truth, share, 1, 40)
            engine = Engine(runner, Everything(), drafting(runner, drafter))
            answers = finish(engine, requests)
            texts.append([tokens_in(answers[i]) for i in range(2)])
            assert drafter is None or drafter.n_accepted > 6
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.wide
def test_a_draft_model_of_node_0(tmp_path: Path) -> None:
    """The draft model is the same model on one device of node 0, so all drafts are right."""
    write(build("lfm2"), path := tmp_path / "model.gguf")
    request, texts = Generate(0, tuple(TOKENS[:9]), 30, GREEDY), []
    with twin_runner(path, TWO, **OPTIONS, draft=path) as runner:
        wanted = runner.options.of_draft
        assert wanted is not None and wanted.devices == ("numpy",)
        draft = open_draft(runner.options)
        drafters = drafters_of(runner, draft)
        for speculation in (None, drafting(runner, *drafters)):
            engine = Engine(runner, Everything(), speculation)
            texts.append(tokens_in(finish(engine, [request])[0]))
        assert engine.stats()["n_accepted"] == engine.stats()["n_drafted"] > 15
        drafters[0].close()
    assert texts[0] == texts[1]
