"""The model stories-narrow drafts for stories-w256. Both have the same 512 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, QUICKEST, wide
from scheduling import GREEDY, Everything, drafting, finish, tokens_of

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.drafting.draft_model import Rows
from vkbackend.models.drafting.vocabulary import check_vocabulary
from vkbackend.models.engine.drafters import drafters_of, open_draft
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.draft_runner import DraftRunner
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.sampling.params import SamplingParams

ALONE, PAIR = (p for p in DEVICE_SETS if p.id in ("0", "0,0"))
PROMPT = [1, 403, 407, 261, 378]


def outcome(
    models: Path, devices: list[str], chain: SamplingParams, n: int, **options: Any
) -> tuple[Any, int, int]:
    path = models / "stories-w256-F16.gguf"
    given = Options.of(path, devices=devices, tensor_split=[1] * len(devices), n_ctx=256, n_slots=3,
                       exact=True, **options)  # fmt: skip
    draft = open_draft(given)
    runner = Runner(given)
    engine = Engine(runner, Everything(), drafting(runner, *drafters_of(runner, draft)))
    try:
        done = finish(engine, [Generate(i, (*PROMPT, 300 + i), n, chain) for i in range(3)])
        n_drafted = engine.stats().get("n_drafted", 0)
        return [tokens_of(done[i]) for i in range(3)], engine.stats()["n_steps"], n_drafted
    finally:
        engine.close()


CHAINS = GREEDY, SamplingParams(seed=3), SamplingParams(seed=4, mirostat=2)


@pytest.mark.parametrize(
    ("devices", "chains", "n"),
    [
        pytest.param(["numpy"] * 2, CHAINS[1:2], 24, id="numpy"),
        *(wide(pytest.param(*p.values, CHAINS, 60, id=p.id, marks=p.marks)) for p in (ALONE, PAIR)),
    ],
)
def test_tokens_are_those_of_plain_decoding(
    models: Path, devices: list[str], chains: tuple[SamplingParams, ...], n: int
) -> None:
    draft = models / "stories-narrow-F16.gguf"
    for chain in chains:
        plain = outcome(models, devices, chain, n)
        drafted = outcome(models, devices, chain, n, draft=str(draft))
        assert drafted[0] == plain[0] and drafted[2] > 2 * n // 3 and drafted[1] < 0.75 * plain[1]


@pytest.mark.wide
def test_a_pair_gives_2_8_tokens_a_step(models: Path) -> None:
    """Decode greedily with at most three drafted tokens, independently of this machine's step times."""
    path, draft = (models / f"stories-{name}-F16.gguf" for name in ("w256", "narrow"))
    options = Options.of(path, devices=QUICKEST, n_ctx=512, draft=draft, draft_max=3, exact=True)
    runners = open_draft(options), Runner(options)
    engine = Engine(runners[1], Everything(), drafting(runners[1], *drafters_of(runners[1], runners[0])))
    finish(engine, [Generate(i, (*PROMPT, 300 + 9 * i), 60, GREEDY) for i in range(4)])
    assert engine.stats()["tokens_per_step"] >= 2.8
    engine.close()


def test_cells_of_the_draft_model(models: Path) -> None:
    """After a rewind, the best token is the same as in a fresh slot."""
    options = Options.of(models / "stories-narrow-F16.gguf", devices=QUICKEST, n_ctx=64, n_slots=2)
    follower = DraftRunner(Runner(options))
    rng = np.random.default_rng(1)
    tokens = rng.integers(3, 500, 50).tolist()
    follower.best([Rows(0, 0, tokens[:40], True)], False)
    for n in (40, 33, 20, 3, 0):
        at = follower.rewind(0, n)
        fresh = follower.rewind(1, 0)
        rows = [Rows(0, at, tokens[at : n + 5]), Rows(1, fresh, tokens[: n + 5])]
        ids, chances = follower.best(rows, True)
        assert ids[0] == ids[1] and chances is not None and abs(chances[0] - chances[1]) < 1e-3
        assert 0 < chances[0] <= 1
    follower.close()


def test_llm(models: Path) -> None:
    path, draft = (models / f"stories-{name}-F16.gguf" for name in ("w256", "narrow"))
    with LLM(path, devices=QUICKEST, n_ctx=256, draft=draft) as llm:
        assert llm.speculation == ("draft",)
        done = llm.generate("Once upon a time", 30, temperature=0)
        none = llm.generate("Once upon a time", 30, temperature=0, draft_max=0)
        assert done.tokens == none.tokens and "draft_n" not in none.timings
    with pytest.raises(InvalidArgument, match="give draft"):
        LLM(path, devices=QUICKEST, speculation="draft")


def test_verify_steps_are_recorded_before_the_first_request(models: Path) -> None:
    options = Options.of(models / "stories-w256-F16.gguf", devices=QUICKEST, n_ctx=64, speculation="ngram")
    engine = Engine.of(Runner(options))
    assert {kind.n_rows for kind in engine.runner.mesh.steps.by_kind} >= {1, 2, 4, 8}
    engine.close()


def test_other_vocabularies_are_refused(models: Path, tmp_path: Path) -> None:
    from vkbackend.tools.flags.text import demo_model

    with GGUF.open(models / "stories-w256-F16.gguf") as model, GGUF.open(demo_model()) as other:
        assert check_vocabulary(model, model) == 512
        with pytest.raises(InvalidArgument, match="its vocabulary is not the model's"):
            check_vocabulary(model, other)
