"""A trained EAGLE-3 head drafts stories. Its acceptance is counted, and the text does not change."""

from __future__ import annotations

from pathlib import Path

import pytest
from derived import eagle3_of, load, store
from device_sets import QUICKEST, wide
from places import DATA
from runners import load_runner
from scheduling import drafting, finish, tokens_of

from vkbackend import LLM
from vkbackend.errors import StateError
from vkbackend.models.engine.drafters import drafters_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.sampling.params import SamplingParams

PATH = DATA / "stories-narrow-F16.gguf"
PROMPTS = ["Once upon a time", "One day", "Mia was a small girl", "In a mill beside the river"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = eagle3_of(load(PATH), DATA / "stories-narrow-eagle3.npz")
    return store(tmp_path_factory.mktemp("eagle3") / "stories-narrow-eagle3.gguf", model, "F16")


@pytest.mark.wide
@pytest.mark.parametrize("devices", [QUICKEST, QUICKEST * 2])
@pytest.mark.parametrize("options", [{}, {"process": True}])
def test_stories_are_the_same(head: Path, devices: list[str], options: dict[str, bool]) -> None:
    """The number of drafts depends on step times."""
    stories = []
    for given in ({}, {"draft": head}, {"draft": head, "speculation": "ngram,draft-eagle3"}):
        with LLM(PATH, devices=devices, n_ctx=256, exact=True, **given, **options) as llm:  # type: ignore[arg-type]
            assert ("eagle3" in llm.speculation) == bool(given)
            stories.append([llm.generate(prompt, max_tokens=24, seed=7).text for prompt in PROMPTS[:2]])
    assert stories[0] == stories[1] == stories[2]


@pytest.mark.wide
def test_completions_of_one_prompt_a_cancel_and_a_saved_slot(head: Path, tmp_path: Path) -> None:
    """A saved slot keeps the head's K and V, so only a model with the head can load it."""
    texts = []
    for draft in (None, head):
        path = tmp_path / f"slot-{draft is not None}"
        with LLM(PATH, devices=QUICKEST, n_ctx=256, n_slots=3, exact=True, draft=draft) as llm:
            several = llm.generate(PROMPTS[0], max_tokens=10, n=3, seed=5)
            stream = llm.stream(PROMPTS[1], max_tokens=40, temperature=0.0, slot=0)
            begun = [next(stream).text for _ in range(3)]
            stream.close()
            llm.save_state(path, 0)
            llm.load_state(path, 1)
            after = llm.generate(PROMPTS[1], max_tokens=10, temperature=0.0, slot=1).text
            texts.append(([done.text for done in several], begun[0], after))
            if draft is not None:
                with pytest.raises(StateError):
                    llm.load_state(tmp_path / "slot-False", 1)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("n", "tokens", "share"),
    [(3, 3.0, 0.6), wide(pytest.param(1, 1.7, 0.7, id="1")), wide(pytest.param(7, 4.0, 0.5, id="7"))],
)
def test_most_drafted_tokens_are_accepted(head: Path, n: int, tokens: float, share: float) -> None:
    assert accepted(head, n)


def accepted(head: Path, n: int) -> tuple[int, int, int]:
    """Decode greedily, and return the numbers of tokens, drafted and accepted tokens."""
    with LLM(PATH, devices=["numpy"]) as llm:
        prompts = [tuple(llm.tokenize(prompt)) for prompt in PROMPTS]
    runner = load_runner(PATH, devices=["numpy"], n_ctx=256, draft=head, draft_max=n)
    engine = Engine(runner, speculation=drafting(runner, *drafters_of(runner)))
    try:
        requests = [Generate(i, p, 100, SamplingParams(temperature=0.0)) for i, p in enumerate(prompts)]
        n_tokens = sum(len(tokens_of(answers)) - 1 for answers in finish(engine, requests).values())
        drafts = engine._speculation
        assert drafts
        return n_tokens, drafts.n_drafted, drafts.n_accepted
    finally:
        engine.close()
