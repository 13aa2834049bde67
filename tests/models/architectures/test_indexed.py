"""Attention reads only positions that an indexer chooses. Devices with any shares produce the golden logits.
Operations that move K and V move index keys too. Layers without an indexer use an earlier layer's choice.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse, only, product, some
from oracles.fixture import PROMPT, write
from oracles.fixtures import build
from places import GOLDEN
from runners import load_runner
from safetensors import safe_open
from slot_journey import check_slot_journey

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.meta.ops import chosen_attention
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops import attention_tiles
from vkbackend.ops.table import OPS
from vkbackend.recording import Dispatch
from vkbackend.step import Run
from vkbackend.twins.device import NumpyDevice

pytestmark = pytest.mark.no_vulkan

NAMES = ("deepseek32", "glm-dsa", "glm-dsa+shared", "minimax-m3", "glm5-next", "deepseek4", "deepseek4+short")
FULL = [0, 1, 4]
INDEXED = {  # layers with index keys
    "glm-dsa+shared": FULL,
    "deepseek4+short": [1],
    "deepseek32": range(4),
    "deepseek4": [1, 3],
    "glm5-next": [1, 4],
    "minimax-m3": [1, 2, 3],
}
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "reduce_type": "f32", "n_ctx": 96}
N = len(PROMPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexed")


def model(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else write(build(name), path)


def check(runner: Runner, name: str, n_prompt: int = 40) -> None:
    rows = [runner.step(PROMPT[:n_prompt], [Run(0, 0, n_prompt, 0)], range(n_prompt)).copy()]
    rows += [runner.step([PROMPT[i]], [Run(0, 0, 1, i)], [0]).copy() for i in range(n_prompt, N)]
    assert nmse(np.concatenate(rows), np.load(GOLDEN / f"{name}.npz")["logits"]) <= 1e-9


@pytest.mark.parametrize(
    ("name", "shares"),
    only(
        product(NAMES, ([2, 1, 1], [1, 0, 3], [9, 1, 9])), "deepseek32-[2, 1, 1]", "glm-dsa+shared-[1, 0, 3]"
    ),
)
def test_uneven_and_empty_shares(folder: Path, name: str, shares: list[float]) -> None:
    path, options = model(folder, name), F32 | {"n_ubatch": 64, "tensor_split": shares}
    runner = load_runner(path, devices=["numpy"] * 3, **options)
    try:
        check(runner, name)
    finally:
        runner.close()


def test_scores_of_pieces_of_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_attention, "SCORES_NBYTES", 7 * 4 * 96)
    runner = load_runner(model(folder, "glm-dsa"), devices=["numpy"] * 2, n_ubatch=64, **F32)
    try:
        check(runner, "glm-dsa")
        [executable, _] = next(
            s for kind, s in runner.mesh.steps.by_kind.items() if kind.n_rows == 48
        ).executables
        ops = [c.op for c in executable.recording.accesses() if isinstance(c, Dispatch)]
        assert ops.count("index_top_k") == 3 * 7
    finally:
        runner.close()


UNITS = MatrixUnits("khr", 8, 8, 8, 32)  # Matrices of 8 x 8 x 8 divide the models' small heads.


def counting(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> Counter[str]:
    """Give numpy devices these limits. Return a counter of the ops that they run."""
    ran = Counter[str]()

    class Counting(NumpyDevice):
        def execute(self, command: Any) -> None:
            ran[getattr(command, "op", "")] += 1
            super().execute(command)

    device_class = "vkbackend.models.engine.runner.open_devices.NumpyDevice"
    monkeypatch.setattr(device_class, lambda device: Counting(device, limits))
    return ran


@pytest.mark.parametrize("name", only(("glm5-next", "deepseek32"), "glm5-next"))
def test_matrix_units_score_and_attend(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("VKBACKEND_EXACT", raising=False)
    features = frozenset(OPS["attn_chosen_coop"].needs)
    ran = counting(monkeypatch, Limits(1024, 1 << 15, features=features, matrix_units=UNITS))
    runner = load_runner(model(folder, name), devices=["numpy"], n_ubatch=64, **F32)
    try:
        check(runner, name)
        assert ran["index_scores_coop"] and ran["attn_chosen_coop"] and ran["attn_prefill_coop"]
        assert ran["attn_decode_coop"]
        assert not ran["index_scores"] and not ran["attn_chosen"]
    finally:
        runner.close()


def test_matrix_units_attend_to_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows choose two of up to five blocks of 32 positions. Rows of a prompt at positions below 96 share
    tiles."""
    monkeypatch.delenv("VKBACKEND_EXACT", raising=False)
    monkeypatch.setattr(attention_tiles, "MIN_UNIT_GROUP", 2)
    fixture = build("minimax-m3")
    fixture.keys |= {"attention.indexer.block_size": 32, "attention.indexer.top_k": 2}
    path = write(fixture, tmp_path / "blocks.gguf")
    tokens = (PROMPT * 4)[:140]
    features = frozenset(OPS["attn_blocks_coop"].needs)
    logits = []
    for limits in (Limits(), Limits(1024, 1 << 15, features=features, matrix_units=UNITS)):
        ran = counting(monkeypatch, limits)
        runner = load_runner(path, devices=["numpy"], n_ubatch=256, **F32 | {"n_ctx": 160})
        try:
            rows = [runner.step(tokens[:130], [Run(0, 0, 130, 0)], range(130)).copy()]
            rows += [runner.step([tokens[i]], [Run(0, 0, 1, i)], [0]).copy() for i in range(130, 140)]
        finally:
            runner.close()
        logits.append(np.concatenate(rows))
        n_layers = 3
        joint = n_layers * (len(rows) + 1) if limits.features else 0
        maxima = n_layers * len(rows)
        assert (ran["attn_blocks_coop"], ran["attn_chosen"]) == (joint, 0 if joint else maxima), ran
        assert ran["index_maxima_coop" if joint else "index_maxima"] == maxima, ran
    assert nmse(*logits) < 1e-12


@pytest.mark.parametrize("by_units", [False, True])
def test_a_token_and_a_prompt_in_one_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by_units: bool
) -> None:
    if by_units:
        monkeypatch.delenv("VKBACKEND_EXACT", raising=False)
        features = frozenset(OPS["attn_chosen_coop"].needs)
        counting(monkeypatch, Limits(1024, 1 << 15, features=features, matrix_units=UNITS))
    want = np.load(GOLDEN / "deepseek32.npz")["logits"]
    runner = load_runner(model(folder, "deepseek32"), devices=["numpy"], n_slots=2, n_ubatch=64, **F32)
    try:
        runner.step(PROMPT[:45], [Run(0, 0, 45, 0)], [])
        runs = [Run(0, 0, 1, 45), Run(1, 1, 30, 0)]
        logits = runner.step([PROMPT[45], *PROMPT[:30]], runs, range(31))
        assert nmse(logits, want[[45, *range(30)]]) <= 1e-9
    finally:
        runner.close()


@pytest.mark.parametrize(
    "name",
    some(tuple(INDEXED), 2),
)
def test_slots_return_to_a_prefix_and_are_copied_and_saved(folder: Path, name: str, tmp_path: Path) -> None:
    check_slot_journey(model(folder, name), tmp_path / "state", **F32)
    with safe_open(tmp_path / "state", "numpy") as file:
        names = {f"cache_index_l{il}" for il in INDEXED[name]}
        assert {key for key in file.keys() if "index" in key} == names


def test_a_cache_of_entries_is_compact(folder: Path) -> None:
    """Vectors and the inputs of means are kept for the window. Entries and index keys are kept for blocks."""
    options = F32 | {"n_ctx": 1024, "n_ubatch": 8}
    runner = load_runner(model(folder, "deepseek4+short"), devices=["numpy"] * 2, **options)
    try:
        assert [cache.ring for cache in runner.layout.caches] == [2, 2, 2, 2]
        kinds = {part.name.rpartition("_")[0] for part in runner.kv.parts}
        assert kinds == {"cache_k", "cache_raw", "cache_entries", "cache_index"}
        # per device, in floats: 64 cells of the window, and for 32 positions 8 entries (blocks of 4) or 4
        vectors, raw, entries = 32 * 64, 2 * 64 * 64, 32 * 32
        assert [sum(cache.nbytes(0)) // 4 for cache in runner.layout.caches] == [
            vectors + raw // 2 + 4 * entries,
            vectors + 2 * 2 * (32 + 64) * 64 + 8 * (entries + 64 * 32),
            vectors + raw // 2 + 4 * entries,
            vectors,
        ]
        logits = [runner.step(PROMPT[:8], [Run(0, 0, 8, 0)], range(8)).copy()]
        for i in range(8, N, 8):
            logits.append(runner.step(PROMPT[i : i + 8], [Run(0, 0, 8, i)], range(8)).copy())
        assert nmse(np.concatenate(logits), np.load(GOLDEN / "deepseek4+short.npz")["logits"]) <= 1e-9
    finally:
        runner.close()


@pytest.mark.wide
def test_a_prompt_of_two_long_blocks(tmp_path: Path) -> None:
    """300 positions have two blocks of 128, and 75 blocks of 4, which are all chosen."""
    known, fixture = np.load(GOLDEN / "long_prompts.npz"), build("deepseek4")
    fixture.keys["attention.indexer.top_k"] = 100
    tokens, options = known["tokens"].tolist(), F32 | {"n_ctx": 320, "n_ubatch": 16}
    runner = load_runner(write(fixture, tmp_path / "m.gguf"), devices=["numpy"] * 2, **options)
    try:
        parts = [(i, tokens[i : i + 16]) for i in range(0, len(tokens), 16)]
        logits = [runner.step(part, [Run(0, 0, len(part), i)], range(len(part))).copy() for i, part in parts]
        assert nmse(np.concatenate(logits)[known["rows"]], known["deepseek4"]) <= 1e-9
    finally:
        runner.close()


def test_layers_that_share_a_choice_are_on_one_device(folder: Path) -> None:
    """With -sm layer, layers 2 and 3 run on the device of layer 1, whose choice they use."""
    path = model(folder, "glm-dsa+shared")
    runner = load_runner(path, devices=["numpy"] * 3, split_mode="layer", n_ubatch=64, **F32)
    try:
        heads = [plan.ranges["heads"] for plan in runner.layout.plans]
        assert heads[1] == heads[2] == heads[3] != heads[4]
        assert [plan.layer for plan in runner.layout.caches if len(plan.arrays) == 3] == FULL
        check(runner, "glm-dsa+shared")
    finally:
        runner.close()


def test_indexers_are_found_without_their_key(folder: Path, tmp_path: Path) -> None:
    """In older files of GLM-5.2 only the tensors show which layers have indexers."""
    m = build("glm-dsa+shared")
    del m.keys["attention.indexer.types"]
    runner = load_runner(write(m, tmp_path / "m.gguf"), devices=["numpy"], n_ubatch=64, **F32)
    try:
        check(runner, "glm-dsa+shared")
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("attention.indexer.key_length", 60, UnsupportedModel, "index keys of 60: multiples of 8"),
        ("attention.indexer.key_length", 264, UnsupportedModel, "index keys of 264"),
        ("attention.indexer.key_length", 0, GGUFError, "attention.indexer.key_length is 0"),
        ("attention.indexer.top_k", None, GGUFError, "attention.indexer.top_k"),
        ("attention.indexer.types", [0, 1, 0, 0, 1], GGUFError, "layer 0 has no indexer"),
        ("attention.indexer.types", 1, GGUFError, "indexer.types' is a u32, expected an array of bools"),
        ("attention.indexer.types", [1, 1], GGUFError, "indexer.types has 2 values for 5 layers"),
        ("attention.q_lora_rank", None, GGUFError, "an indexer needs a q from a latent"),
    ],
)
def test_unsupported_files_are_refused(
    tmp_path: Path, key: str, value: Any, error: type, message: str
) -> None:
    m = build("glm-dsa+shared")
    m.keys[key] = value
    if value is None:
        del m.keys[key]
    with GGUF.open(write(m, tmp_path / "m.gguf")) as gguf, pytest.raises(error, match=message):
        load_model(gguf)
