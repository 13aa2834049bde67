from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import device_params, nmse, wide
from fake_runner import FakeRunner, continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from prefills import prefill
from random_cases import examples
from safetensors import safe_open
from safetensors.numpy import load_file
from scheduling import GREEDY, events_of, finish, make, tokens_of
from state_models import PROMPT, TOKENS, open_llm, open_runner

from vkbackend.errors import InvalidArgument, StateError
from vkbackend.meta.gather import gather_rows
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.messages import Cancel, Generate, LoadState, Logits, Request, SaveState
from vkbackend.models.engine.runner import saved_state
from vkbackend.models.engine.runner.runner import Runner

CHOOSES_DEVICES = True

# ---- the same continuation ----


def test_a_state_saved_on_two_devices_continues_on_three(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with open_llm(models, 2, tensor_split=[3, 1]) as llm:
        whole = llm.generate(PROMPT, 20, temperature=0)
        begun = llm.generate(PROMPT, 10, temperature=0, slot=0)
        llm.save_state(path)
        went_on = llm.generate(PROMPT + begun.tokens, 10, temperature=0, slot=0)
    assert begun.tokens + went_on.tokens == whole.tokens
    assert went_on.timings["prompt_n"] == 1  # the saved state lacks only the newest token
    with open_llm(models, 3, tensor_split=[1, 2, 1], n_slots=3, n_ctx=64) as llm:
        tokens = llm.load_state(path, slot=2)
        assert tokens == PROMPT + begun.tokens
        rest = llm.generate(tokens, 10, temperature=0, slot=2)
    assert rest.tokens == went_on.tokens and rest.slot == 2
    assert (rest.timings["prompt_n"], rest.timings["decode_n"]) == (1, 9)


def move_cells(runner: Runner) -> None:
    for cells in runner.kv.tables.values():
        cells.table[:] = np.random.default_rng(3).permutation(cells.table.size).reshape(cells.table.shape)
        cells.update()


def logits_after_moving(
    models: Path, path: Path, after: list[str], name: str = "stories-narrow-Q8_0", **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays with the logits of the last 10 of 50 tokens. For the first array, a state of 40
    positions is saved and then loaded on the devices in `after`. For the second array nothing is saved."""
    runner = open_runner(models, ["numpy"] * 2, name)
    try:
        whole = prefill(runner, TOKENS)[40:]
        saved_state.save(runner, path, 0, SlotContent(TOKENS, 50), 0, 40)
    finally:
        runner.close()
    runner = open_runner(models, after, name, n_slots=2, n_ctx=64, **options)
    try:
        live = [dict(device.counts) for device in runner.mesh.devices]
        move_cells(runner)
        content = SlotContent()
        saved_state.load(runner, path, 1, content)
        assert content == SlotContent(TOKENS[:40], 40)
        assert live == [dict(device.counts) for device in runner.mesh.devices], "transfer buffers were left"
        return prefill(runner, TOKENS[40:], slot=1, first=40), whole
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("name", "n", "options"),
    [
        wide(pytest.param("narrow-F32", 1, {})),
        wide(pytest.param("narrow-F32", 3, {"tensor_split": [2, 1, 1]})),
        ("narrow-Q4_0", 3, {"tensor_split": [1, 0, 3]}),
        ("narrow-Q8_0", 8, {}),  # two devices share each of the 4 kv heads
        ("narrow-Q8_0", 2, {"n_gpu_layers": 3, "kv_offload": False}),
        wide(pytest.param("narrow-Q8_0", 3, {"split_mode": "layer"})),
        wide(pytest.param("moe8x-Q4_0", 3, {})),
    ],
)
def test_logits_after_moving(models: Path, tmp_path: Path, name: str, n: int, options: Any) -> None:
    path = tmp_path / "a"
    got, want = logits_after_moving(models, path, ["numpy"] * n, f"stories-{name}", **options)
    assert nmse(got, want) <= 1e-9


@pytest.mark.parametrize("device", [*device_params()[:1], *map(wide, device_params()[1:])], indirect=True)
def test_logits_after_moving_between_drivers(models: Path, tmp_path: Path, device: Any) -> None:
    """Save on numpy devices. Load on three devices of the first driver, or on one device of another driver,
    which compiles more slowly."""
    index = str(device.info.index)
    after, options = ([index] * 3, {"tensor_split": [2, 1, 1]}) if index == "0" else ([index], {})
    got, want = logits_after_moving(models, tmp_path / "a", after, **options)
    assert nmse(got, want) <= 1e-9


@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f16")])
def test_saved_caches_are_bit_identical(models: Path, tmp_path: Path, types: tuple[str, str]) -> None:
    options = {"type_k": types[0], "type_v": types[1]}
    first, second = open_runner(models, ["numpy"] * 2, **options), open_runner(models, ["numpy"], **options)
    prefill(first, TOKENS)
    saved_state.save(first, tmp_path / "a", 0, SlotContent(TOKENS, 50), 0, None)
    move_cells(second)
    saved_state.load(second, tmp_path / "a", 0, SlotContent())
    stored = load_file(tmp_path / "a")
    for il, (a, b) in enumerate(zip(first.kv.layers, second.kv.layers, strict=True)):
        for ours, theirs, name in ((a.k, b.k, "k"), (a.v, b.v, "v")):
            want = gather_rows(first.mesh.devices, ours, 0, 50)
            [table] = second.kv.tables.values()
            cells = [int(table.table[0][p // 32]) * 32 + p % 32 for p in range(50)]
            got = np.concatenate([gather_rows(second.mesh.devices, theirs, c, c + 1) for c in cells])
            assert np.array_equal(got, want)
            in_file = stored[f"cache_{name}_l{il}"]
            assert in_file.shape == (50, 4, 8) and in_file.tobytes() == want.tobytes()
            assert in_file.dtype == {"f16": np.float16, "f32": np.float32}[ours.dtype]


def test_save_and_load_in_an_engine_process(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_llm(models, 2, process=True) as llm:
        begun = llm.generate(PROMPT, 5, temperature=0, slot=0)
        os.chdir("/")
        llm.save_state(tmp_path / "a")
        with pytest.raises(StateError, match="no-such-folder"):
            llm.save_state("no-such-folder/a")
        assert llm.load_state(tmp_path / "a") == PROMPT + begun.tokens
        assert llm.generate(PROMPT + begun.tokens, 5, temperature=0, slot=0).timings["prompt_n"] == 1


# ---- ranges ----


def test_a_range_continues_the_content_of_the_slot(models: Path, tmp_path: Path) -> None:
    begin, rest, other = tmp_path / "begin", tmp_path / "rest", tmp_path / "other"
    with open_llm(models) as llm:
        done = llm.generate(PROMPT, 30, temperature=0, slot=0)
        tokens = PROMPT + done.tokens
        llm.save_state(begin, last=12)
        llm.save_state(rest, first=12)
        llm.generate([7] * 12, 1, slot=0)
        llm.save_state(other, last=12)
        assert safe_open(rest, "numpy").get_slice("cache_k_l0").get_shape() == [34 - 12, 4, 8]
    with open_llm(models, 2, n_slots=2) as llm:
        with pytest.raises(StateError, match="after its first 12 tokens, and these are not"):
            llm.load_state(rest, slot=1)
        llm.load_state(other, slot=1)
        with pytest.raises(StateError, match="after its first 12 tokens, and these are not"):
            llm.load_state(rest, slot=1)
        assert llm.load_state(begin, slot=1) == tokens[:12]
        assert llm.load_state(rest, slot=1) == tokens
        again = llm.generate(tokens, 8, temperature=0, slot=1)
        assert again.timings["prompt_n"] == 1
        assert again.tokens == llm.generate(tokens, 8, temperature=0).tokens
        # a shorter state replaces the longer state of slot 1
        assert llm.load_state(begin, slot=1) == tokens[:12]


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 3), (5, 3), (0, 11), (10, None)])
def test_ranges_that_the_slot_does_not_hold(
    models: Path, tmp_path: Path, first: int, last: int | None
) -> None:
    with open_llm(models) as llm:
        llm.generate(TOKENS[:10], 1, slot=0)
        with pytest.raises(InvalidArgument, match=r"positions .* of slot 0 cannot be saved: it holds 10"):
            llm.save_state(tmp_path / "a", first=first, last=last)
        assert not list(tmp_path.iterdir())


def test_empty_and_missing_slots(models: Path, tmp_path: Path) -> None:
    with open_llm(models, n_slots=2) as llm:
        with pytest.raises(InvalidArgument, match="it holds 0"):
            llm.save_state(tmp_path / "a", slot=1)
        for call in (
            lambda: llm.save_state(tmp_path / "a", slot=2),
            lambda: llm.load_state(tmp_path / "a", slot=-1),
            lambda: llm.generate(PROMPT, 1, slot=2),
        ):
            with pytest.raises(InvalidArgument, match=r"slot=(2|-1): expected a whole number in 0..1"):
                call()
        with pytest.raises(InvalidArgument, match="last=-1"):
            llm.save_state(tmp_path / "a", last=-1)


def test_save_and_load_during_a_stream(models: Path, tmp_path: Path) -> None:
    with open_llm(models, n_slots=2) as llm:
        stream = llm.stream(PROMPT, 30, temperature=0, slot=0)
        seen = [next(stream).token for _ in range(10)]
        llm.save_state(tmp_path / "a", slot=0)
        with pytest.raises(InvalidArgument, match="slot 0 is busy"):
            llm.load_state(tmp_path / "a", slot=0)
        assert llm.load_state(tmp_path / "a", slot=1) == PROMPT + seen
        rest = [chunk.token for chunk in stream]
        assert llm.generate(PROMPT + seen, 20, temperature=0, slot=1).tokens == rest
        llm.load_state(tmp_path / "a", slot=0)


# ---- what a slot keeps ----


def test_a_slot_computes_only_new_tokens() -> None:
    engine, runner = make(n_slots=2)
    prompt = (5, 6, 7, 8)
    first = tokens_of(finish(engine, [Generate(0, prompt, 6, GREEDY, slot=1)])[0])
    n_rows = sum(r.n_rows for step in runner.steps for r in step)
    assert n_rows == 4 + 5
    longer = (*prompt, *first, 30, 31)
    again = finish(engine, [Generate(1, longer, 3, GREEDY, slot=1)])[1]
    assert tokens_of(again) == continuation(longer, 3) and again[-1].slot == 1
    assert again[-1].timings is not None and again[-1].timings.prompt_n == 3
    branched = (*prompt, 9, 9)
    other = finish(engine, [Generate(2, branched, 3, GREEDY, slot=1)])[2]
    assert tokens_of(other) == continuation(branched, 3)
    assert other[-1].timings is not None and other[-1].timings.prompt_n == 2
    assert other[-1].slot == 1
    anywhere = finish(engine, [Generate(3, branched, 3, GREEDY)])[3]
    assert anywhere[-1].slot == 1 and anywhere[-1].timings is not None and anywhere[-1].timings.prompt_n == 1
    fresh = finish(engine, [Generate(5, (9, 9), 3, GREEDY)])[5]
    assert fresh[-1].slot == 0 and fresh[-1].timings is not None and fresh[-1].timings.prompt_n == 2
    assert finish(engine, [Generate(4, prompt, 1, GREEDY, slot=2)])[4][0].error is not None


def test_a_request_waits_for_its_slot() -> None:
    engine, _ = make(n_slots=2)
    engine.submit(Generate(0, (1, 2), 8, GREEDY, slot=1))
    engine.step()
    later = finish(engine, [Generate(1, (3,), 2, GREEDY, slot=1), Generate(2, (4,), 2, GREEDY)])
    assert [events[-1].slot for _, events in sorted(later.items())] == [1, 1, 0]
    assert tokens_of(later[1]) == continuation((3,), 2) and tokens_of(later[2]) == continuation((4,), 2)


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_reuse_does_not_change_tokens(data: st.DataObject) -> None:
    n_slots, n_ubatch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    engine, _ = make(n_slots=n_slots, n_ubatch=n_ubatch, n_ctx=24)
    alphabet = st.integers(0, 1)  # with only two token ids, common prefixes are frequent
    expected: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    for i in range(data.draw(st.integers(1, 12))):
        tokens = tuple(data.draw(st.lists(alphabet, min_size=1, max_size=12)))
        slot = data.draw(st.one_of(st.none(), st.integers(0, n_slots - 1)))
        request: Request = (
            Logits(i, tokens)
            if data.draw(st.integers(0, 4)) == 0
            else Generate(i, tokens, 5, GREEDY, slot=slot)
        )
        if isinstance(request, Generate):
            expected[i] = continuation(tokens, 5)
        engine.submit(request)
        for _ in range(data.draw(st.integers(0, 6))):
            for event in events_of(engine.step()):
                got.setdefault(event.id, []).extend([] if event.token is None else [event.token])
        if data.draw(st.integers(0, 3)) == 0:
            engine.submit(Cancel(i))
            expected[i] = got.get(i, [])
    for i, events in finish(engine, []).items():
        got.setdefault(i, []).extend(tokens_of(events))
    assert {i: got.get(i, []) for i in expected} == expected


def test_save_and_load_with_invalid_slots() -> None:
    engine, runner = make()
    assert isinstance(runner, FakeRunner)
    events = finish(engine, [SaveState(0, "a", 3), LoadState(1, "a", -1)])
    for id_ in (0, 1):
        [event] = events[id_]
        assert event.done and event.error is not None and event.error.kind == "InvalidArgument"
