"""Models continue from blocks of the KV cache that an earlier process stored in files."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import random_pairs, write_adapter
from block_damage import DAMAGE, files_of, flip, give
from device_sets import DEVICE_SETS, nmse, wide
from oracles.fixture import N_VOCAB, write
from oracles.fixtures import FIXTURES, build
from tiny_models import Tiny, write_tiny

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.ops import CELL_BLOCK

PROMPT = np.random.default_rng(5).integers(0, N_VOCAB, 138).tolist()
N_FULL = len(PROMPT) // CELL_BLOCK
OPTIONS: dict[str, Any] = {"n_ctx": 160, "n_ubatch": 64, "type_k": "f32", "type_v": "f32"}
Answer = tuple[list[int], np.ndarray, int]  # (tokens, log probabilities, number of computed prompt tokens)


def answer(
    path: Path, folder: Path | None, n: int = 2, use: dict[str, float] | None = None, **how: Any
) -> Answer:
    with LLM(path, devices=["numpy"] * n, cache_disk=folder, **OPTIONS | how) as llm:
        said = llm.generate(PROMPT, max_tokens=3, temperature=0, ignore_eos=True, logprobs=3, lora=use)
    assert said.logprobs is not None
    rows = [[value for _, value in row.top] for row in said.logprobs]
    return said.tokens, np.array(rows), said.timings["prompt_n"]


def same(a: Answer, b: Answer) -> bool:
    return a[0] == b[0] and bool(np.array_equal(a[1], b[1]))


# ---- the same answers ----


@pytest.mark.parametrize("name", [wide(pytest.param(name, id=name)) for name in FIXTURES])
def test_equal_bits_after_a_restart(tmp_path: Path, name: str) -> None:
    """The steps after the restored blocks have the same rows as in a fresh run, so the logits have the same
    bits."""
    path = write(build(name), tmp_path / "model.gguf")
    fresh = answer(path, None)
    stored, again = answer(path, tmp_path / "kv"), answer(path, tmp_path / "kv")
    assert same(stored, fresh) and stored[2] == fresh[2] == len(PROMPT)
    assert same(again, fresh) and again[2] == len(PROMPT) - CELL_BLOCK * N_FULL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(build("llama"), tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def stored(model: Path) -> tuple[Path, Answer]:
    folder = model.parent / "kv"
    return folder, answer(model, folder)


@pytest.fixture
def folder(stored: tuple[Path, Answer], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored[0], tmp_path / "kv", copy_function=shutil.copy2))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_other_numbers_of_devices(model: Path, stored: tuple[Path, Answer], folder: Path, n: int) -> None:
    tokens, logits, computed = answer(model, folder, n)
    assert tokens == stored[1][0] and computed == len(PROMPT) - CELL_BLOCK * N_FULL
    assert nmse(logits, stored[1][1]) <= (0 if n == 2 else 1e-9)


@pytest.mark.wide
def test_a_killed_process_has_stored_its_blocks(
    model: Path, stored: tuple[Path, Answer], tmp_path: Path
) -> None:
    with LLM(model, devices=["numpy"] * 2, cache_disk=tmp_path, process=True, **OPTIONS) as llm:
        llm.generate(PROMPT, max_tokens=1, temperature=0)
        deadline = time.monotonic() + 60
        while len(files_of(tmp_path)) < N_FULL and time.monotonic() < deadline:
            time.sleep(0.01)
        (engine,) = multiprocessing.active_children()
        engine.kill()
    assert same(again := answer(model, tmp_path), stored[1]) and again[2] == len(PROMPT) - CELL_BLOCK * N_FULL


@pytest.mark.wide
@pytest.mark.parametrize("devices", DEVICE_SETS)
@pytest.mark.parametrize("disable", ["", "device_map"])
def test_blocks_in_host_memory(
    model: Path, devices: list[str], disable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds one of three prompts. Without `device_map`, blocks pass through a staging buffer."""
    monkeypatch.setenv("VKBACKEND_DISABLE", disable)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[1:] + PROMPT[:1]]
    how = OPTIONS | {"devices": devices, "kv_cells": 192, "tensor_split": [1] * len(devices)}
    said: dict[int, list[Any]] = {}
    for ram in (0, 1):
        with LLM(model, cache_ram=ram, **how) as llm:
            said[ram] = [
                llm.generate(tokens, max_tokens=3, temperature=0, ignore_eos=True, logprobs=3)
                for tokens in prompts * 2
            ]
    assert [completion.logprobs for completion in said[0]] == [completion.logprobs for completion in said[1]]
    assert [completion.timings["prompt_n"] for completion in said[1]] == [len(PROMPT)] * 3 + [10] * 3


@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", DEVICE_SETS[:1])
def test_a_prefix_of_30_000_tokens_after_a_restart(tmp_path: Path, devices: list[str]) -> None:
    """This test takes 110 s of CPU time, nearly all for attention to so many positions."""
    tiny = Tiny("llama", n_layer=2, n_head=1, n_head_kv=1, n_embd=32, n_ff=32)
    path = write_tiny(tmp_path / "model.gguf", tiny)
    # 59 steps, then a step of 16 rows, in both processes
    tokens = np.random.default_rng(5).integers(0, tiny.n_vocab, 59 * 512 + 16).tolist()
    how = OPTIONS | {"n_ctx": len(tokens) + 8, "n_ubatch": 512, "cache_disk": tmp_path / "kv"}
    said = []
    for _ in range(2):
        with LLM(path, devices=devices, **how) as llm:
            said.append(llm.generate(tokens, max_tokens=3, temperature=0, ignore_eos=True, logprobs=3))
    assert [completion.timings["prompt_n"] for completion in said] == [len(tokens), 16]
    assert said[0].tokens == said[1].tokens and said[0].logprobs == said[1].logprobs


# ---- blocks of other models ----


@pytest.mark.wide
def test_other_options_have_other_blocks(model: Path, folder: Path) -> None:
    """Each of `changes` changes K and V, so no blocks are found. The files of the first model remain."""
    n = len(files_of(folder))
    changes: list[dict[str, Any]] = [
        {"type_v": "f16"},
        {"rope_freq_base": 5000.0},
        {"rope_scaling": "linear", "rope_scale": 2.0},
    ]
    for change in changes:
        assert answer(model, folder, **change)[2] == len(PROMPT), change
    assert len({path.parent for path in files_of(folder)}) == 1 + len(changes)
    assert len(files_of(folder)) == n * (1 + len(changes))


@pytest.mark.wide
def test_adapters_and_scales_have_other_blocks(model: Path, folder: Path) -> None:
    pairs = random_pairs(build("llama"), 4)
    lora = {"a": write_adapter(model.parent / "a.gguf", "llama", pairs)}
    for use, computed in (({"a": 1.0}, True), ({"a": 0.5}, True), ({"a": 1.0}, False), ({}, False)):
        n_computed = answer(model, folder, use=use, lora=lora)[2]
        assert n_computed == (len(PROMPT) if computed else len(PROMPT) - CELL_BLOCK * N_FULL), use


# ---- files that are not usable ----


@pytest.mark.parametrize(
    "damage", [flip, *(wide(pytest.param(d, id=d.__name__)) for d in DAMAGE if d is not flip)]
)
def test_damaged_and_foreign_files(
    model: Path, stored: tuple[Path, Answer], folder: Path, damage: Callable[[Path], None], capfd: Any
) -> None:
    """The blocks before the damaged file are used, later blocks are computed, and the file is written
    again."""
    if damage is give and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    by_age = sorted(files_of(folder), key=lambda path: -path.stat().st_mtime_ns)
    damage(by_age[2])  # The first block was used last.
    tokens, _, computed = answer(model, folder)
    assert tokens == stored[1][0] and computed == len(PROMPT) - 2 * CELL_BLOCK
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and DAMAGE[damage] in said and by_age[2].name in said
    assert answer(model, folder)[2] == len(PROMPT) - N_FULL * CELL_BLOCK
    assert capfd.readouterr().err == "" and by_age[2].is_file() and not by_age[2].is_symlink()


def test_refused_options(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"cache_disk.*file cannot hold"):
        answer(model, tmp_path / "file")
    with pytest.raises(InvalidArgument, match="hostfile"):
        LLM(model, hostfile=tmp_path / "file", cache_disk=tmp_path)
