"""A trained multi-token prediction head drafts stories. Its acceptance is counted, and the text does not
change."""

from __future__ import annotations

from pathlib import Path

import pytest
from derived import as_head, load, store
from device_sets import QUICKEST, wide
from places import DATA
from runners import load_runner
from scheduling import drafting, finish, tokens_of

from vkbackend import LLM
from vkbackend.models.engine.drafters import drafters_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.sampling.params import SamplingParams

PROMPTS = ["Once upon a time", "One day", "Mia was a small girl", "In a mill beside the river"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = as_head(load(DATA / "stories-narrow-F16.gguf"), DATA / "stories-narrow-head.npz")
    return store(tmp_path_factory.mktemp("head") / "stories-narrow-head.gguf", model, "F16")


@pytest.mark.wide
@pytest.mark.parametrize("devices", [QUICKEST, wide(pytest.param(QUICKEST * 2, id="two"))])
@pytest.mark.parametrize("options", [{}, wide(pytest.param({"process": True}, id="process"))])
def test_stories_are_the_same(path: Path, devices: list[str], options: dict[str, bool]) -> None:
    """The number of drafts depends on step times."""
    stories = []
    for speculation in (None, "mtp", "ngram,mtp"):
        with LLM(path, devices=devices, n_ctx=256, exact=True, speculation=speculation, **options) as llm:
            stories.append([llm.generate(prompt, max_tokens=16, seed=7).text for prompt in PROMPTS[:2]])
    assert stories[0] == stories[1] == stories[2]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("n", "tokens", "share"),
    [(3, 3.12, 0.72), (1, 1.79, 0.82), (7, 5.0, 0.58)],
)
def test_most_drafted_tokens_are_accepted(path: Path, n: int, tokens: float, share: float) -> None:
    """The counted values are 1.83, 3.19 and 5.14 tokens per step with 1, 3 and 7 drafted tokens, of which 85,
    74 and 60 % are accepted."""
    with LLM(path, devices=["numpy"]) as llm:
        prompts = [tuple(llm.tokenize(prompt)) for prompt in PROMPTS]
    runner = load_runner(path, devices=["numpy"], n_ctx=256, speculation="mtp", draft_max=n)
    engine = Engine(runner, speculation=drafting(runner, *drafters_of(runner)))
    try:
        requests = [Generate(i, p, 100, SamplingParams(temperature=0.0)) for i, p in enumerate(prompts)]
        n_tokens = sum(len(tokens_of(answers)) - 1 for answers in finish(engine, requests).values())
        drafts = engine._speculation
        assert drafts and n_tokens / (n_tokens - drafts.n_accepted) >= tokens
        assert drafts.n_accepted / drafts.n_drafted >= share
    finally:
        engine.close()
