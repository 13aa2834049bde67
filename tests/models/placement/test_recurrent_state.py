from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse, only, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.fixture import N_VOCAB, Fixture, write
from oracles.fixture import PROMPT as GOLDEN_PROMPT
from oracles.fixtures import build
from places import GOLDEN
from random_cases import examples
from runners import load_runner

from vkbackend import LLM
from vkbackend.errors import GGUFError, InvalidArgument, OutOfDeviceMemory, StateError, UnsupportedModel
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.recurrent_state import SlotStates, StatePlan, with_cells
from vkbackend.step import Run
from vkbackend.tools.cli import main

F32 = {"type_k": "f32", "type_v": "f32", "n_ctx": 96}
PROMPT = np.random.default_rng(5).integers(0, N_VOCAB, 30).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(build("qwen35"), tmp_path_factory.mktemp("recurrent") / "qwen35.gguf")


def open_llm(path: Path, n: int = 1, **options: Any) -> LLM:
    return LLM(path, devices=["numpy"] * n, **{**F32, **options})


# ---- cells ----


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.integers(0, 3))
def test_a_run_reads_the_state_of_its_sequence(data: st.DataObject, n_snapshots: int) -> None:
    n_slots = 2
    slots = SlotStates(n_slots, n_snapshots)
    cells: list[tuple[int, ...]] = [(-1,)] * (n_slots * (1 + n_snapshots))
    held: list[tuple[int, ...]] = [()] * n_slots
    for number in range(data.draw(st.integers(1, 25))):
        slot, n = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([1, 1, 1, 2, 5]))
        wanted = data.draw(st.integers(0, len(held[slot])))
        at = slots.resume_at(slot, wanted)
        assert at <= wanted and slots.resume_at(slot, at) == at
        assert slots.resume_at(slot, len(held[slot])) == len(held[slot])
        read, written = slots.advance(Run(slot, 0, n, at))
        if at:
            assert cells[read] == held[slot][:at]
        held[slot] = held[slot][:at] + (number,) * n
        cells[written] = held[slot]
        for other in range(n_slots):
            if held[other]:
                assert cells[slots.cell(other, len(held[other]))] == held[other]


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.integers(0, 2), st.booleans())
def test_a_slot_goes_back_after_rejected_tokens(data: st.DataObject, n_snapshots: int, rows: bool) -> None:
    n_slots = 3
    slots = SlotStates(n_slots, n_snapshots, not rows, 7 if rows else 0)
    cells: dict[int, tuple[int, ...]] = {}
    held: list[tuple[int, ...]] = [()] * n_slots
    for number in range(data.draw(st.integers(1, 25))):
        slot, n_draft = data.draw(st.integers(0, n_slots - 1)), data.draw(st.integers(0, 7))
        at = slots.resume_at(slot, len(held[slot]))
        tokens = (*held[slot][at:], *[number] * (1 + n_draft))
        read, *written = slots.advance(Run(slot, 0, len(tokens), at, undoes=n_draft > 0 and at > 0))
        assert not at or cells[read] == held[slot][:at]
        stored = held[slot][:at] + tokens
        for i, cell in enumerate(reversed(written)):
            cells[cell] = stored[: len(stored) - i]
        n = len(stored) - (data.draw(st.integers(0, n_draft)) if at else 0)
        back = slots.settle(slot, n)
        held[slot] = stored[:n]
        assert back == n if rows and at else back in (at, n)
        for other in range(n_slots):
            last = slots.resume_at(other, len(held[other]))
            assert not last or cells[slots.cell(other, last)] == held[other][:last]
        assert len(slots._row_cells) == (7 if rows else 0)


def test_rows_get_cells_if_these_take_little_memory(path: Path) -> None:
    def cells(n_slots: int, draft_max: int, weight_nbytes: float, **options: Any) -> tuple[int, int]:
        given = Options.of(path, n_slots=n_slots, n_snapshots=1, draft_max=draft_max, **options)
        [plan] = with_cells(plans, int(weight_nbytes), given)
        return plan.n_cells, plan.n_row_cells

    plans = states_of(path, 1)[:1]
    large, small = 8 * 7 * plans[0].cell_nbytes, 8 * 7 * plans[0].cell_nbytes - 8
    ngram = {"speculation": "ngram"}
    assert cells(1, 7, large) == (2, 0)
    assert cells(1, 7, large, **ngram) == (9, 7) and cells(1, 7, small, **ngram) == (3, 0)
    assert cells(1, 3, small, **ngram) == (5, 3) and cells(1, 0, large, **ngram) == (3, 0)
    assert cells(3, 1, 0, **ngram) == (9, 3), "as many as undo cells"
    assert cells(5, 2, large, **ngram) == (15, 5) and cells(8, 7, 0, **ngram) == (23, 7)
    assert cells(1, 7, large, devices=["0/0", "1/0"], **ngram) == (3, 0)


def test_snapshots_at_the_ends_of_a_prompt_and_its_steps() -> None:
    slots = SlotStates(1, 2)
    at = 0
    for n in (16, 16, 5, 1, 1, 1):
        slots.advance(Run(0, 0, n, at))
        at += n
    assert [slots.resume_at(0, position) for position in (40, 39, 37, 36, 32, 31)] == [40, 37, 37, 32, 32, 0]


# ---- in the engine ----


def test_a_slot_that_goes_back_equals_a_new_slot(path: Path) -> None:
    other = [*PROMPT, 7, 8, 9]
    with open_llm(path) as llm:
        want = llm.generate(other, 10, temperature=0).tokens
        repeated, third = (llm.generate(PROMPT + more, 10, temperature=0).tokens for more in ([], [5]))
    with open_llm(path, n_slots=1, n_ubatch=16) as llm:
        assert llm.generate(PROMPT, 10, temperature=0, slot=0).tokens == repeated
        back = llm.generate(other, 10, temperature=0, slot=0)
        assert back.tokens == want and back.timings["prompt_n"] == len(other) - len(PROMPT)
        again = llm.generate([*PROMPT, 5], 10, temperature=0, slot=0)
        assert again.tokens == third and again.timings["prompt_n"] == 1
        new = llm.generate(PROMPT[:9], 10, temperature=0, slot=0)
        assert new.timings["prompt_n"] == 9


def test_without_snapshots_a_slot_continues_or_restarts(path: Path) -> None:
    with open_llm(path, n_snapshots=0) as llm:
        first = llm.generate(PROMPT, 5, temperature=0, slot=0)
        assert llm.generate(PROMPT + first.tokens, 5, temperature=0, slot=0).timings["prompt_n"] == 1
        assert llm.generate([*PROMPT, 5], 5, temperature=0, slot=0).timings["prompt_n"] == len(PROMPT) + 1
    with pytest.raises(InvalidArgument, match="n_snapshots=-1"):
        open_llm(path, n_snapshots=-1)
    few, many = (states_of(path, n) for n in (0, 2))
    assert [3 * sum(plan.nbytes(0)) for plan in few] == [sum(plan.nbytes(0)) for plan in many]


def test_snapshots_take_memory(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kv = []
    for n in (0, 1, 2):
        assert main(["plan", "-m", str(path), "-dev", "numpy", "--snapshots", str(n), "--json"]) == 0
        kv.append(json.loads(capsys.readouterr().out)["devices"][0]["kv"])
    assert kv[2] - kv[1] == kv[1] - kv[0] > 0


def states_of(path: Path, n_snapshots: int) -> list[StatePlan]:
    runner = load_runner(path, devices=["numpy"], n_ctx=32, n_snapshots=n_snapshots)
    try:
        assert runner.memory()[0]["kv"] >= sum(sum(plan.nbytes(0)) for plan in runner.layout.memories()) > 0
        return runner.layout.states
    finally:
        runner.close()


def test_two_sequences_share_steps(path: Path) -> None:
    with open_llm(path) as llm:
        want = [llm.generate(PROMPT[i:], 6, temperature=0).tokens for i in range(3)]
    with open_llm(path, n_slots=3, n_ubatch=16) as llm:
        streams = [llm.stream(PROMPT[i:], 6, temperature=0, slot=i) for i in range(3)]
        got: list[list[int]] = [[], [], []]
        while any(len(tokens) < 6 for tokens in got):
            for tokens, stream in zip(got, streams, strict=True):
                chunk = next(stream, None)
                tokens += [] if chunk is None or chunk.token is None else [chunk.token]
    assert got == want


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        ("qwen35", {"ssm.time_step_rank": 10}, GGUFError, "10 value heads of 16 for 4 key heads"),
        ("qwen35", {"ssm.state_size": 24, "ssm.inner_size": 288}, UnsupportedModel, "heads of 24"),
        ("qwen35", {"ssm.conv_kernel": 1}, UnsupportedModel, "convolutions of 1"),
        ("qwen35", {"rope.dimension_sections": [3, 1]}, GGUFError, "expected 3 or 4"),
        ("qwen35", {"attention.recurrent_layers": [1, 0]}, GGUFError, "has 2 values for 5 layers"),
        ("kimi-linear", {"attention.kv_lora_rank": 48}, GGUFError, "not latent size 48"),
        ("kimi-linear", {"kda.head_dim": 256}, UnsupportedModel, "heads of 256"),
        ("qwen3", {"attention.head_count_kv": 0}, GGUFError, "head_count_kv is 0"),
    ],
)
def test_hyper_parameters_that_do_not_fit(
    tmp_path: Path, name: str, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = build(name)
    model.keys |= keys
    with pytest.raises(error, match=message):
        load_runner(write(model, tmp_path / "a.gguf"), devices=["numpy"])


# ---- writing files back ----


@pytest.mark.parametrize(
    "name", only(["qwen35", "qwen3next", "kimi-linear", "nemotron_h"], "kimi-linear", "nemotron_h")
)
def test_export_equals_the_file(tmp_path: Path, name: str) -> None:
    file, copy = write(build(name), tmp_path / "a.gguf", quantize=True), tmp_path / "copy.gguf"
    runner = load_runner(file, devices=["numpy"] * 3, tensor_split=[2, 1, 1])
    try:
        with GGUF.open(file) as source:
            write_gguf(copy, source, runner.mesh.devices, runner.mesh.weights, runner.model.weights())
        assert file.read_bytes() == copy.read_bytes()
    finally:
        runner.close()


def older(fixture: Fixture) -> Fixture:
    """Store q, k, v and the gate in one matrix ssm_in, ordered by key head, as older files do."""
    n_k = fixture.keys["ssm.group_count"]
    for prefix in [name.removesuffix("attn_qkv.weight") for name in fixture.tensors if "attn_qkv" in name]:
        qkv, gate = (fixture.tensors.pop(f"{prefix}attn_{name}.weight") for name in ("qkv", "gate"))
        keys = n_k * fixture.keys["ssm.state_size"]
        parts = [qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], gate]
        heads = [part.reshape(n_k, -1, part.shape[-1]) for part in parts]
        fixture.put(f"{prefix}ssm_in.weight", np.concatenate(heads, axis=1).reshape(-1, qkv.shape[-1]))
    return fixture


@pytest.mark.parametrize(
    ("quantize", "n", "split"),
    [
        pytest.param(True, 3, (2, 1, 1), id="q8_0-3"),
        wide(pytest.param(True, 1, None, id="q8_0-1")),
        wide(pytest.param(False, 3, (2, 1, 1), id="f32-3")),
        wide(pytest.param(False, 1, None, id="f32-1")),
    ],
)
def test_older_files_of_qwen3next(
    tmp_path: Path, quantize: bool, n: int, split: tuple[int, ...] | None
) -> None:
    new = write(build("qwen3next"), tmp_path / "new.gguf", quantize=quantize)
    old = write(older(build("qwen3next")), tmp_path / "old.gguf", quantize=quantize)
    logits = []
    for file in (new, old):
        runner = load_runner(file, devices=["numpy"] * n, tensor_split=split, n_ctx=32, n_ubatch=32)
        try:
            logits.append(runner.step(PROMPT, [Run(0, 0, len(PROMPT), 0)], range(len(PROMPT))).copy())
            with GGUF.open(file) as source:
                copy, specs = tmp_path / "copy.gguf", runner.model.weights()
                write_gguf(copy, source, runner.mesh.devices, runner.mesh.weights, specs)
            assert copy.read_bytes() == file.read_bytes()
        finally:
            runner.close()
    assert np.array_equal(*logits)


@pytest.mark.oracle
def test_older_files_equal_llama_cpp(tmp_path: Path) -> None:
    if find_spec("xllamacpp") is None:
        pytest.skip("not installed: xllamacpp")
    from oracles import llama_cpp

    old = write(older(build("qwen3next")), tmp_path / "old.gguf")
    golden = GOLDEN / "qwen3next.npz"
    want = np.load(golden)["logits"]
    assert nmse(llama_cpp.logits(old, [GOLDEN_PROMPT], N_VOCAB), want) <= 1e-9


# ---- saved slots ----


@pytest.mark.parametrize(
    "options",
    [wide(pytest.param({})), wide(pytest.param({"tensor_split": [1, 0, 3]})), {"split_mode": "layer"}],
)
def test_a_state_of_two_devices_continues_on_three(path: Path, tmp_path: Path, options: Any) -> None:
    file = tmp_path / "state"
    with open_llm(path, 2) as llm:
        begun = llm.generate(PROMPT, 8, temperature=0, slot=0)
        llm.save_state(file)
        want = llm.generate(PROMPT + begun.tokens, 12, temperature=0, slot=0).tokens
    with open_llm(path, 3, n_slots=2, **options) as llm:
        tokens = llm.load_state(file, slot=1)
        rest = llm.generate(tokens, 12, temperature=0, slot=1)
    assert rest.tokens == want and rest.timings["prompt_n"] == 1


def test_a_part_of_a_state_is_refused(path: Path, tmp_path: Path) -> None:
    with open_llm(path) as llm:
        llm.generate(PROMPT, 4, temperature=0, slot=0)
        for part in ({"first": 3}, {"last": 20}):
            with pytest.raises(InvalidArgument, match="recurrent layers, whose state stands for all"):
                llm.save_state(tmp_path / "part", slot=0, **part)


def test_a_file_without_the_state_is_refused(path: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    file = tmp_path / "state"
    with open_llm(path) as llm:
        llm.generate(PROMPT, 4, temperature=0, slot=0)
        llm.save_state(file)
        tensors = load_file(file)
        with safe_open(file, framework="numpy") as kept:
            about = kept.metadata()
        names = [name for name in tensors if name.startswith("state_")]
        assert names
        shorter = {**tensors, names[0]: tensors[names[0]][:-1]}
        missing = {name: values for name, values in tensors.items() if name != names[0]}
        for changed in (shorter, missing):
            save_file(changed, file, about)
            with pytest.raises(StateError, match=names[0]):
                llm.load_state(file)


def test_a_slot_works_after_a_failed_step(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(path, n_slots=2) as llm:
        engine = llm._mailbox.channel.engine._engine  # type: ignore[union-attr]
        run, calls = engine.runner.mesh.run, iter(range(100))

        def failing(step: Any) -> None:
            if next(calls) == 3:
                raise OutOfDeviceMemory("injected", requested=1, budget=0)
            run(step)

        monkeypatch.setattr(engine.runner.mesh, "run", failing)
        with pytest.raises(OutOfDeviceMemory, match="injected"):
            llm.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True, slot=0)
        copied = llm.copy_slot(0, 1)
        if copied:
            llm.save_state(tmp_path / "after.safetensors", slot=0)
        tokens = [
            llm.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True, slot=slot).tokens
            for slot in (0, 1)
        ]
        assert tokens[0] == tokens[1]
