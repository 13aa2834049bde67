from __future__ import annotations

import random
from pathlib import Path

import pytest
from device_sets import DEVICE_SETS, covering, wide
from oracles.fixture import write
from oracles.fixtures import build
from runners import load_runner
from scheduling import GREEDY, Everything, finish, tokens_of

from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import CopySlot, Generate, Request

N_CTX = 160
# layers that attend to all positions, layers with windows, recurrent layers
MODELS = "llama", "gemma3", "qwen3next", "kimi-linear"
N_VOCAB = 32  # prompts use token ids below this number
SETS = [
    next(p for p in DEVICE_SETS if p.id == "0"),
    pytest.param(["numpy"] * 2, id="numpy,numpy"),
    pytest.param(["numpy"], id="numpy"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def branches(seed: int, n: int) -> list[tuple[tuple[int, ...], int]]:
    """Return prompts that continue parts of earlier prompts, each with its number of tokens to generate."""
    rng = random.Random(seed)

    def some(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(N_VOCAB) for _ in range(n))

    prompts = [(some(rng.randint(70, 100)), 4)]
    while len(prompts) < n:
        base = rng.choice(prompts)[0]
        tokens = base[: rng.randint(34, len(base))] + some(rng.randint(1, 50))
        prompts.append((tokens[: N_CTX - 8], rng.randint(1, 6)))
    return prompts


def engine_of(path: Path, devices: list[str], **options: object) -> Engine:
    how = {"n_ctx": N_CTX, "n_ubatch": 40, "type_k": "f32", "type_v": "f32", "reduce_type": "f32"} | options
    return Engine(load_runner(path, devices=devices, **how), Everything())


@pytest.mark.parametrize(
    ("name", "devices"),
    [p if p.values[0] == "llama" else wide(p) for p in covering(MODELS, SETS)],
)
def test_branches(folder: Path, name: str, devices: list[str]) -> None:
    path = folder / f"{name}.gguf"
    if not path.exists():
        write(build(name), path)
    asked = branches(len(name), 6)
    alone = engine_of(path, devices, prefix_cache=False)
    want = [tokens_of(finish(alone, [Generate(0, tokens, n, GREEDY)])[0]) for tokens, n in asked]
    alone.close()
    # The cache has blocks for little more than one sequence. The engine therefore preempts sequences and
    # evicts shared blocks.
    engine = engine_of(path, devices, n_slots=3, kv_cells=N_CTX + 64)
    requests: list[Request] = [Generate(i, tokens, n, GREEDY) for i, (tokens, n) in enumerate(asked)]
    first = finish(engine, requests[:4])
    engine.submit(CopySlot(90, 0, 2))
    second = finish(engine, requests[4:])
    events = first | second
    got = [tokens_of(events[i]) for i in range(len(asked))]
    stats = engine.stats()
    engine.close()
    assert got == want
    assert stats["prompt_tokens_cached"] > 0, stats
