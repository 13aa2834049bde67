"""Blocks that were evicted from the devices are restored from host memory and from files."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from device_sets import wide
from fake_runner import FakeParts, continuation
from scheduling import GREEDY, KINDS, check_sound, events_of, finish, make, prompt, tokens_of

from vkbackend.errors import OutOfDeviceMemory
from vkbackend.models.engine.cache import restoring
from vkbackend.models.engine.cache.block_files import BlockFiles
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Cancel, Event, Generate
from vkbackend.ops import CELL_BLOCK

pytestmark = pytest.mark.no_vulkan


def asked(engine: Engine, id_: int, tokens: tuple[int, ...], n: int = 3) -> int:
    events = finish(engine, [Generate(id_, tokens, n, GREEDY)])[id_]
    assert tokens_of(events) == continuation(tokens, n)
    timings = events[-1].timings
    assert timings is not None
    check_sound(engine)
    return timings.prompt_n


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_prefix_that_left_the_devices_comes_back(kind: str, where: str, tmp_path: Path) -> None:
    how = {"cache_ram": 64} if where == "ram" else {"cache_disk": str(tmp_path / "kv")}
    engine, _ = make(n_slots=1, n_ctx=512, n_ubatch=64, blocks=16, **KINDS[kind], **how)
    first, others = prompt(400, 1), [prompt(450, 2 + i) for i in range(2)]
    assert asked(engine, 0, first) == 400
    for i, tokens in enumerate(others, 1):
        assert asked(engine, i, tokens) == 450
    assert asked(engine, 8, first) <= CELL_BLOCK
    assert engine.stats()["n_blocks_restored"] == 12
    most = 60 + CELL_BLOCK if kind == "all positions" else 260
    assert asked(engine, 9, (*first[:200], *prompt(60, 9))) <= most
    engine.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_prefix_is_found_after_a_restart(kind: str, tmp_path: Path) -> None:
    how = {"n_ctx": 512, "n_ubatch": 64, "cache_disk": str(tmp_path), **KINDS[kind]}
    tokens = prompt(400, 1)
    for i, n_slots in enumerate((1, 3)):
        engine, _ = make(n_slots=n_slots, **how)
        computed = asked(engine, i, tokens)
        assert computed == 400 if i == 0 else computed <= CELL_BLOCK
        engine.close()


def test_a_file_system_that_hangs_delays_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later requests compute their prompts without waiting, until the file system answers again."""
    monkeypatch.setattr(restoring, "READ_S", 0.05)
    back, n_reads, read = threading.Event(), list[str](), BlockFiles._read

    def hangs(files: BlockFiles, name: str, *sizes: int) -> bytes | None:
        n_reads.append(name)
        assert back.wait(30)
        return read(files, name, *sizes)

    engine, _ = make(n_slots=1, n_ctx=512, n_ubatch=64, blocks=16, cache_disk=str(tmp_path / "kv"))
    first, others = prompt(400, 1), [prompt(450, 2 + i) for i in range(2)]
    for i, tokens in enumerate((first, *others)):
        asked(engine, i, tokens)
    assert engine._tier is not None and engine._tier._store.files is not None
    assert engine._tier._store.files.flush(60)
    monkeypatch.setattr(BlockFiles, "_read", hangs)
    assert asked(engine, 3, first) == 400 and len(n_reads) <= 2
    for i, tokens in enumerate((*others, first), 4):
        assert asked(engine, i, tokens) == len(tokens)
    assert len(n_reads) <= 2, "one per thread"
    back.set()
    assert engine._tier._store._hanging is not None
    engine._tier._store._hanging.result(30)
    monkeypatch.setattr(restoring, "READ_S", 30)
    assert asked(engine, 8, others[0]) <= CELL_BLOCK
    engine.close()


def test_devices_are_read_rarely() -> None:
    """While blocks are free, no block is read from the devices. The first eviction reads the next evicted
    blocks as well."""
    engine, runner = make(n_slots=1, n_ctx=512, n_ubatch=64, blocks=16, cache_ram=1)
    asked(engine, 0, prompt(250, 1), 200)
    parts = runner.parts[0]
    assert (parts.n_reads, parts.n_writes) == (0, 0)
    asked(engine, 1, prompt(250, 2), 200)
    assert parts.n_reads == 1 and engine.stats()["n_blocks_kept"] == 14
    asked(engine, 2, prompt(250, 1), 1)
    assert parts.n_writes == 1 and engine.stats()["n_blocks_restored"] == 6


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("call", ["read", "write"])
def test_without_memory_for_a_copy_the_prompt_is_computed(
    kind: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make(n_slots=1, n_ctx=512, n_ubatch=64, blocks=16, cache_ram=64, **KINDS[kind])

    def full(*_: Any) -> None:
        raise OutOfDeviceMemory("no room for a staging buffer")

    monkeypatch.setattr(FakeParts, call, full)
    for i in range(4):
        assert asked(engine, i, prompt(400, i % 2)) > 300
    assert engine.stats()["n_blocks_restored"] == 0


def test_other_requests_go_on_while_a_prompt_is_restored() -> None:
    """While a prompt is restored, another request decodes, and cancelling the prompt loses nothing."""
    engine, _ = make(n_slots=2, n_ctx=512, n_ubatch=64, blocks=20, cache_ram=1)
    first = prompt(400, 1)
    asked(engine, 0, first)
    asked(engine, 1, prompt(450, 2))
    engine.submit(Generate(2, prompt(20, 3), 60, GREEDY))
    for _ in range(4):
        engine.step()
    engine.submit(Generate(3, first, 3, GREEDY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "SLICE_NBYTES", 1)
        patch.setattr(restoring, "BATCH_NBYTES", 1)
        for _ in range(3):
            engine.step()
        assert 0 < engine.stats()["n_blocks_restored"] < 12 and engine.scheduler.restores
        assert engine.scheduler.content(engine.scheduler.running[-1].slot).n_stored == 0
        engine.submit(Cancel(3))
        assert tokens_of(finish(engine, [])[2])[-40:] == continuation(prompt(20, 3), 60)[-40:]
    assert asked(engine, 4, first) <= CELL_BLOCK


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("seed", [0, *(wide(pytest.param(seed, id=str(seed))) for seed in range(1, 100))])
def test_random_prompts_and_restarts(kind: str, tmp_path: Path, seed: int) -> None:
    """Answers are right with few blocks, cancelled requests, restarts and damaged files."""
    rng, folder = random.Random(seed), tmp_path
    prompts: list[tuple[int, ...]] = [prompt(rng.randint(1, 150), rng.randrange(99))]
    for _ in range(2):
        engine, _ = make(
            n_slots=rng.randint(1, 4), n_ctx=192, n_ubatch=rng.choice([8, 33, 64]),
            blocks=rng.choice([None, 6, 9]), cache_ram=rng.choice([0, 1, -1]), cache_disk=str(folder),
            **KINDS[kind],
        )  # fmt: skip
        events: dict[int, list[Event]] = {}
        wanted: dict[int, tuple[tuple[int, ...], int]] = {}
        cancelled: set[int] = set()
        for i in range(rng.randint(4, 12)):
            base = rng.choice(prompts)
            tokens = base[: rng.randint(1, len(base))] + prompt(rng.randint(0, 40), rng.randrange(99))
            tokens = tokens[:170]
            wanted[i] = tokens, rng.randint(1, 20)
            engine.submit(Generate(i, tokens, wanted[i][1], GREEDY))
            prompts.append(tokens)
            for _ in range(rng.randint(0, 12)):
                for event in events_of(engine.step()):
                    events.setdefault(event.id, []).append(event)
            if rng.random() < 0.2:
                cancelled.add(gone := rng.randrange(i + 1))
                engine.submit(Cancel(gone))
            if rng.random() < 0.2:
                engine.idle.advance(lambda: False)
        for id_, more in finish(engine, []).items():
            events.setdefault(id_, []).extend(more)
        for i, (tokens, n) in wanted.items():
            if i not in cancelled:
                assert tokens_of(events[i]) == continuation(tokens, n), i
        check_sound(engine)
        engine.close()
        for path in folder.rglob("*.[0-9]"):
            if rng.random() < 0.2:
                path.write_bytes(rng.choice([b"", path.read_bytes()[:-1], path.read_bytes()[:-1] + b"?"]))
