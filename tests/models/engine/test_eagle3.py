"""Drafts of EAGLE-3 heads do not change the text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from device_sets import DEVICE_SETS, some
from head_drafts import (
    CHAINS,
    NO_HEAD,
    TWO,
    Outcome,
    check_choice_on_devices,
    check_common_beginning,
    check_eight_tokens_a_step,
    check_few_blocks,
    check_least_probability,
    engine_of,
    same,
    same_for_every_chain,
)
from oracles.eagle import eagle3, good_eagle3
from oracles.fixture import PROMPT, write
from oracles.fixtures import build
from scheduling import finish, tokens_of

from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.messages import Cancel, Generate
from vkbackend.models.options import Options
from vkbackend.models.sampling.params import SamplingParams

TARGETS = ("llama", "qwen3moe", "gpt-oss", "gemma4", "qwen35", "lfm2", "nemotron_h")


@dataclass(frozen=True)
class Pair:
    model: Path
    head: Path

    def same(self, devices: list[str], chains: list[dict[str, Any]], **options: Any) -> Outcome:
        return same(self.model, devices, chains, self.drafts, **options)

    @property
    def drafts(self) -> dict[str, Any]:
        return {"draft": self.head}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle3")


def pair(folder: Path, name: str, gain: float | None, n_draft: int = 128) -> Pair:
    """Return a model and a head that is often right. Without a gain, the head is random."""
    files = Pair(*(folder / f"{name}-{gain}-{n_draft}-{of}.gguf" for of in ("model", "head")))
    if not files.head.exists():
        target = build(name)
        made = (target, eagle3(target, states=[0, 1, target.n_layer])) if gain is None else None
        for fixture, path in zip(
            made or good_eagle3(name, gain or 0.0, n_draft), (files.model, files.head), strict=True
        ):
            write(fixture, path)
    return files


# Random heads run on two devices. Heads that are often right run on one device and on two.
HOW = [
    pytest.param(None, TWO, id="random-2"),
    pytest.param(0.1, TWO[:1], id="0.1-1"),
    pytest.param(0.3, TWO, id="0.3-2"),
]


@pytest.mark.wide
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("gain", "devices"), HOW)
def test_every_chain(folder: Path, name: str, gain: float | None, devices: list[str]) -> None:
    files = pair(folder, name, gain)
    drafted = same_for_every_chain(files.model, devices, files.drafts)
    assert drafted.n_accepted > 0 or gain is None


ON_VULKAN = [p for p in DEVICE_SETS if p.id in ("0", "0,0")]


@pytest.mark.wide
@pytest.mark.parametrize("devices", ON_VULKAN)
def test_tokens_on_vulkan(folder: Path, devices: list[str]) -> None:
    pair(folder, "llama", 0.2).same(devices, CHAINS[:1], n=12)


@pytest.mark.parametrize("name", some(TARGETS, 7))
def test_a_right_head_gives_eight_tokens_a_step(folder: Path, name: str) -> None:
    """d2t is a permutation of all tokens."""
    files = pair(folder, name, 0.0)
    check_eight_tokens_a_step(files.model, files.drafts)


@pytest.mark.wide
def test_a_small_draft_vocabulary(folder: Path) -> None:
    """Tokens that d2t lacks are never drafted. Drafts of other tokens are still right."""
    files = pair(folder, "llama", 0.0, n_draft=100)
    drafted = files.same(TWO, CHAINS[2:3])
    assert 0 < drafted.n_accepted < drafted.n_drafted


@pytest.mark.wide
def test_few_blocks_and_random_heads(folder: Path) -> None:
    files = pair(folder, "llama", None)
    check_few_blocks(files.model, files.drafts)


@pytest.mark.wide
def test_sequences_with_a_common_beginning(folder: Path) -> None:
    files = pair(folder, "llama", 0.3)
    check_common_beginning(files.model, files.drafts)


@pytest.mark.wide
def test_a_least_probability_ends_drafts(folder: Path) -> None:
    files = pair(folder, "llama", 0.3)
    check_least_probability(files.model, files.drafts)


@pytest.mark.wide
def test_cancels_and_requests_of_one_prompt(folder: Path) -> None:
    """Requests with one prompt (n > 1) share blocks. Some requests end in the middle of a draft, and later
    requests use their slots."""
    files, texts = pair(folder, "llama", 0.2), []
    for head in (NO_HEAD, files.drafts):
        engine = engine_of(files.model, TWO[:1], head)
        given = [
            Generate(i, tuple(PROMPT[:33]), 14, SamplingParams(seed=i, temperature=0.5)) for i in range(6)
        ]
        for request in given:
            engine.submit(request)
        for _ in range(4):
            engine.step()
        done = finish(
            engine, [Cancel(1), Cancel(4), Generate(9, tuple(PROMPT[:20]), 14, SamplingParams(seed=9))]
        )
        texts.append({i: tokens_of(done[i]) for i in (0, 2, 3, 5, 9) if i in done})
        engine.close()
    assert {i: text[-5:] for i, text in texts[0].items()} == {i: text[-5:] for i, text in texts[1].items()}


@pytest.mark.wide
@pytest.mark.parametrize("devices", [TWO[:1], TWO])
def test_devices_choose_the_drafted_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    """The draft vocabulary has fewer rows than the model's vocabulary."""
    files = pair(folder, "llama", None)
    check_choice_on_devices(files.model, devices, files.drafts, monkeypatch)


@pytest.mark.no_vulkan
def test_options(folder: Path) -> None:
    """A file's architecture decides how it drafts."""
    files = pair(folder, "llama", None)
    assert Options.of(files.model, draft=files.head).speculation == ("eagle3",)
    assert Options.of(files.model, draft=files.model).speculation == ("draft",)
    both = Options.of(files.model, draft=files.head, speculation="ngram,draft-eagle3")
    assert both.speculation == ("ngram", "eagle3") and both.of_draft is None and both.head == str(files.head)
    with pytest.raises(InvalidArgument, match="an EAGLE-3 head needs its file"):
        Options.of(files.model, speculation="draft-eagle3")
    with pytest.raises(InvalidArgument, match="give one of draft and eagle3"):
        Options.of(files.model, draft=files.head, speculation="draft,eagle3")
    with pytest.raises(InvalidArgument, match="an EAGLE-3 head is a layer of the model"):
        Options.of(files.model, draft=files.head, draft_devices="0")
    with pytest.raises(InvalidArgument, match="give one of mtp and eagle3"):
        Options.of(files.model, draft=files.head, speculation="mtp,eagle3")
