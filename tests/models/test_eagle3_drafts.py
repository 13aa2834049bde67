"""A trained EAGLE-3 head drafts stories. Its acceptance is counted, and the text does not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from derived import eagle3_of, load, store
from device_sets import QUICKEST, wide
from oracles.make_eagle3 import LENGTHS, MODEL, N_TOKENS, NAME, PROMPTS
from places import DATA
from runners import load_runner
from scheduling import drafting, finish

from vkbackend import LLM
from vkbackend.errors import StateError
from vkbackend.models.engine.drafters import drafters_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = eagle3_of(load(MODEL), DATA / f"{NAME}.npz")
    return store(tmp_path_factory.mktemp("eagle3") / f"{NAME}.gguf", model, "F16")


@pytest.mark.wide
@pytest.mark.parametrize("devices", [QUICKEST, QUICKEST * 2])
@pytest.mark.parametrize("options", [{}, {"process": True}])
def test_stories_are_the_same(head: Path, devices: list[str], options: dict[str, bool]) -> None:
    """The number of drafts depends on step times."""
    stories = []
    for given in ({}, {"draft": head}, {"draft": head, "speculation": "ngram,draft-eagle3"}):
        with LLM(MODEL, devices=devices, n_ctx=256, exact=True, **given, **options) as llm:  # type: ignore[arg-type]
            assert ("eagle3" in llm.speculation) == bool(given)
            stories.append([llm.generate(prompt, max_tokens=24, seed=7).text for prompt in PROMPTS[:2]])
    assert stories[0] == stories[1] == stories[2]


@pytest.mark.wide
def test_completions_of_one_prompt_a_cancel_and_a_saved_slot(head: Path, tmp_path: Path) -> None:
    """A saved slot keeps the head's K and V, so only a model with the head can load it."""
    texts = []
    for draft in (None, head):
        path = tmp_path / f"slot-{draft is not None}"
        with LLM(MODEL, devices=QUICKEST, n_ctx=256, n_slots=3, exact=True, draft=draft) as llm:
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
    ("n", "n_prompts"), [(3, 1), *(wide(pytest.param(n, len(PROMPTS), id=str(n))) for n in LENGTHS)]
)
def test_as_many_tokens_are_accepted_as_in_llama_cpp(head: Path, n: int, n_prompts: int) -> None:
    """Decode greedily and without a prefix cache. After a cached prefix, the head would lack the hidden state
    before the first new token."""
    wanted = json.loads((DATA / f"{NAME}.json").read_text(encoding="utf-8"))[str(n)][:n_prompts]
    with LLM(MODEL, devices=["numpy"]) as llm:
        prompts = [tuple(llm.tokenize(prompt)) for prompt in PROMPTS[:n_prompts]]
    counts = []
    runner = load_runner(MODEL, devices=["numpy"], n_ctx=256, draft=head, draft_max=n, prefix_cache=False)
    drafts = drafting(runner, *drafters_of(runner))
    engine = Engine(runner, speculation=drafts)
    try:
        for i, prompt in enumerate(prompts):
            assert drafts
            before = drafts.n_drafted, drafts.n_accepted
            finish(engine, [Generate(i, prompt, N_TOKENS, SamplingParams(temperature=0.0))])
            counts.append([drafts.n_drafted - before[0], drafts.n_accepted - before[1]])
    finally:
        engine.close()
    assert counts == wanted
