"""With real models, drafts do not change the tokens of any chain of samplers."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafted_models import on_one_and_two, open_runner
from drafts import Guesses
from oracles.fixture import N_VOCAB, PROMPT
from oracles.fixtures import FIXTURES
from scheduling import Everything, drafting, events_of, tokens_of

from vkbackend.models.drafting.drafter import Want
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.sampling.params import SamplingParams

CHAINS = {
    "greedy": SamplingParams(temperature=0),
    "seed": SamplingParams(seed=3),
    "penalties and DRY": SamplingParams(
        seed=4, repeat_penalty=1.3, dry_multiplier=0.5, dry_sequence_breakers=()
    ),
    "Mirostat": SamplingParams(seed=4, mirostat=2),
}
PROMPTS = PROMPT[:9], PROMPT[5:16], PROMPT[20:23], PROMPT[12:18]
N_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafted")


def generate(runner: Runner, drafter: Guesses | None = None) -> list[list[int]]:
    """Each chain samples one sequence. A new engine has an empty prefix cache, so all runs compute the
    prompts in the same steps."""
    engine = Engine(runner, Everything(), drafting(runner, drafter))
    tokens: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    for i, (prompt, params) in enumerate(zip(PROMPTS, CHAINS.values(), strict=True)):
        engine.submit(Generate(i, tuple(prompt), N_TOKENS, params))
    while engine.busy:
        for event in events_of(engine.step()):
            assert event.error is None
            tokens[event.id] += tokens_of([event])
    return list(tokens.values())


@pytest.mark.parametrize(("name", "devices"), on_one_and_two(FIXTURES, "lfm2-0,0"))
def test_tokens_equal_those_of_plain_decoding(
    folder: Path, name: str, devices: list[str], request: pytest.FixtureRequest
) -> None:
    """By default, half of the drafted tokens are right. With --all, most are right in one run, and all are
    random in another."""
    shares = (0.8, 0.0) if request.config.getoption("--all") else (0.5,)
    runner = open_runner(folder, name, devices)
    try:
        plain = generate(runner)

        def truth(want: Want) -> list[int]:
            prompt, text = PROMPTS[want.number], plain[want.number]
            assert [*prompt, *text][: len(want.history)] == want.history
            return text[len(want.history) - len(prompt) :]

        for share in shares:
            drafter = Guesses(truth, share, 1, N_VOCAB)
            assert generate(runner, drafter) == plain, share
            assert drafter.n_drafted > N_TOKENS and (drafter.n_accepted > N_TOKENS or share < 0.8)
    finally:
        runner.close()
