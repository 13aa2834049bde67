"""States, shared prefixes and context shifts of nodes, which are threads of one process.

A single node computes the expected tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import wide
from groups import OPTIONS, THREE, TOKENS, TWO, here
from oracles.fixture import write
from oracles.fixtures import build
from runners import load_runner
from safetensors import safe_open
from scheduling import events_of

from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import CopySlot, Generate
from vkbackend.models.engine.runner import saved_state
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner

pytestmark = pytest.mark.no_vulkan


@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
@pytest.mark.wide
def test_states_move_from_two_hosts_to_one_and_back(tmp_path: Path, name: str) -> None:
    path = write(build(name), tmp_path / "model.gguf")
    content = SlotContent(TOKENS[:50], 50)
    files = [tmp_path / "hosts", tmp_path / "one"]

    def after_loading(runner: Runner) -> np.ndarray:
        loaded = SlotContent()
        saved_state.load(runner, files[0], 1, loaded)
        assert loaded.tokens == content.tokens
        return runner.step([9], [Run(1, 0, 1, 50)], [0]).copy()

    with twin_runner(path, THREE, **OPTIONS) as runner:
        runner.step(TOKENS[:50], [Run(0, 0, 50, 0)], [49])
        saved_state.save(runner, files[0], 0, content, 0, None)
        want = runner.step([9], [Run(0, 0, 1, 50)], [0]).copy()
    with twin_runner(path, THREE, **OPTIONS) as runner:
        assert np.array_equal(after_loading(runner), want)
    single = load_runner(path, devices=here(THREE), **OPTIONS)
    single.step(TOKENS[:50], [Run(0, 0, 50, 0)], [49])
    saved_state.save(single, files[1], 0, content, 0, None)
    assert np.array_equal(after_loading(single), want)
    single.close()
    with safe_open(files[0], "numpy") as saved, safe_open(files[1], "numpy") as usual:
        assert saved.metadata() == usual.metadata()  # including all checksums


@pytest.mark.parametrize("name", ["llama", *(wide(pytest.param(n, id=n)) for n in ("qwen35", "gpt-oss"))])
@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("layer", id="layer"))])
def test_kept_blocks_of_two_hosts(tmp_path: Path, name: str, split_mode: str) -> None:
    """Node 0 stores the blocks of all nodes' devices. A later group or a single node restores them."""
    path = write(build(name), tmp_path / "model.gguf")
    options = OPTIONS | {"cache_disk": tmp_path / "kv", "split_mode": split_mode}

    def answer(runner: Runner) -> tuple[list[int], int]:
        engine, out = Engine(runner), list[int]()
        engine.submit(Generate(1, tuple(TOKENS[:100]), 6, SamplingParams(temperature=0)))
        while engine.busy:
            for event in events_of(engine.step()):
                assert event.error is None, event.error
                out += [] if event.token is None else [event.token]
        n_restored = engine.stats()["n_blocks_restored"]
        engine.close()
        return out, int(n_restored)

    with twin_runner(path, THREE, **options) as runner:
        tokens, n_restored = answer(runner)
    assert n_restored == 0 and len(tokens) == 6
    with twin_runner(path, THREE, **options) as runner:
        assert answer(runner) == (tokens, 3)
    single = load_runner(path, devices=here(THREE), **options)
    assert answer(single) == (tokens, 3)


def tokens_of(runner: Runner) -> list[list[int]]:
    """Return the tokens of requests that share a prefix, and of a request on a copied slot."""
    engine = Engine(runner)
    out: dict[int, list[int]] = {}

    def run(*requests: Any) -> None:
        for request in requests:
            engine.submit(request)
        while engine.busy:
            for event in events_of(engine.step()):
                assert event.error is None, event.error
                out.setdefault(event.id, []).extend([] if event.token is None else [event.token])

    greedy = SamplingParams(temperature=0)
    run(Generate(1, tuple(TOKENS[:70]), 6, greedy))
    run(Generate(2, (*TOKENS[:66], 5), 6, greedy), Generate(3, tuple(TOKENS[:70]), 6, greedy))
    run(CopySlot(4, 0, 1))
    run(Generate(5, (*TOKENS[:70], 5, 6), 6, greedy, slot=1))
    assert runner.states or engine.stats()["prompt_tokens_cached"] >= 64
    engine.close()
    return [out[id_] for id_ in (1, 2, 3, 5)]


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_shared_prefixes_and_copied_slots(tmp_path: Path, name: str) -> None:
    path = write(build(name), tmp_path / "model.gguf")
    single = load_runner(path, devices=here(TWO), **OPTIONS)
    want = tokens_of(single)
    with twin_runner(path, TWO, **OPTIONS) as runner:
        assert tokens_of(runner) == want


@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("layer", id="layer"))])
def test_context_shifts(tmp_path: Path, split_mode: str) -> None:
    path = write(build("llama"), tmp_path / "model.gguf")
    options = OPTIONS | {"split_mode": split_mode, "context_shift": True, "n_ctx": 40}

    def shifted_tokens(runner: Runner) -> list[int]:
        engine, out = Engine(runner), []
        engine.submit(Generate(1, tuple(TOKENS[:20]), 25, SamplingParams(temperature=0), n_keep=3))
        while engine.busy:
            for event in events_of(engine.step()):
                assert event.error is None, event.error
                out += [event.token]
        assert event.n_discarded
        engine.close()
        return out

    want = shifted_tokens(load_runner(path, devices=here(TWO), **options))
    with twin_runner(path, TWO, **options) as runner:
        assert shifted_tokens(runner) == want and len(want) == 25
