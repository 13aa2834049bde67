"""Test a server with several models and real engines. Every answer equals the answer that the model gives
when it runs alone."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from device_sets import two_drivers
from random_requests import FLAGS, Load, known_requests, resident_nbytes, tree_of
from rerankers import bert_reranker
from serving import Command

from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.open_device import runtime_of
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.studies.serving_start import tiny

MIB = 1 << 20


def state_of(command: Command) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in command.address.get("/models")[1]["data"]}


def engines_of(command: Command) -> list[int]:
    return [
        pid
        for pid in tree_of(command.process.pid)
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def lay_out(folder: Path, models: Path) -> dict[str, Path]:
    paths = {name: folder / f"{name}.gguf" for name in ("dense", "mixture", "encoder")}
    shutil.copy(demo_model(), paths["dense"])
    shutil.copy(models / "stories-moe8x-Q4_0.gguf", paths["mixture"])
    bert_reranker(paths["encoder"])
    return paths


@pytest.mark.no_vulkan
def test_two_models_with_room_for_one(tmp_path: Path, models: Path) -> None:
    """Requests alternate between the models. Then a model is unloaded, and its memory must be free."""
    folder = tmp_path / "models"
    folder.mkdir()
    paths = lay_out(folder, models)
    paths["mixture"].unlink()
    known = known_requests({name: paths[name] for name in ("dense", "encoder")}, ["numpy"], seed=1, n=1)
    command = Command(
        "--models-dir", str(folder), "--models-max", "1", "--pooling", "mean", "--metrics", *FLAGS
    )
    try:
        base = resident_nbytes(command.process.pid)
        load = Load(command.address.port, known, n=3, seed=1, clients=2)
        load.run()
        assert not load.wrong and sum(load.answered.values()) == 3
        assert command.address.post("/v1/embeddings", {"model": "encoder", "input": "a"})[0] == 200
        body = {"model": "dense", "prompt": "a", "max_tokens": 1}
        assert command.address.post("/v1/completions", body)[0] == 200
        assert state_of(command) == {"dense": "loaded", "encoder": "unloaded"}
        assert len(engines_of(command)) == 1
        loaded = resident_nbytes(command.process.pid)
        assert command.address.post("/models/unload", {"model": "dense"})[1] == {"success": True}
        assert engines_of(command) == []
        # Imported modules, and freed memory that the allocator keeps, still belong to the server's process.
        assert resident_nbytes(command.process.pid) - base < (loaded - base) / 2
    finally:
        assert command.end() == 0, command.log


def n_descriptors(command: Command) -> int:
    return len(list(Path(f"/proc/{command.process.pid}/fd").iterdir()))


@pytest.mark.wide
@pytest.mark.parametrize("word", ["0", pytest.param("1", marks=two_drivers)])
def test_unloading_returns_all_memory(tmp_path: Path, word: str) -> None:
    """The memory of all processes and the device's free memory are the same after each of several loads."""
    path = tmp_path / "large.gguf"
    tiny(str(demo_model()), path, 4, n_embd=1024)
    command = Command(
        "--models-dir", str(tmp_path), "--models-devices", word, "--log-disable", *FLAGS, devices=None
    )
    [opened] = open_devices([word], runtime_of("native"), exact=False, batch_invariant=False)
    loaded, after, free, descriptors = [], [], [], []
    try:
        for _ in range(5):
            body = {"model": "large", "prompt": "a", "max_tokens": 2}
            assert command.address.post("/v1/completions", body)[0] == 200
            loaded.append(resident_nbytes(command.process.pid))
            assert command.address.post("/models/unload", {"model": "large"})[0] == 200
            assert engines_of(command) == []
            after.append(resident_nbytes(command.process.pid))
            free.append(opened.free_nbytes())
            descriptors.append(n_descriptors(command))
        print(json.dumps({"MiB loaded": [n // MIB for n in loaded], "after": [n // MIB for n in after]}))
        assert min(loaded) - max(after) > path.stat().st_size
        assert max(after) - min(after) < 4 * MIB
        assert max(descriptors) - min(descriptors) <= 2
        if not opened.limits.is_cpu:  # A software device has the free memory of the machine.
            assert max(n or 0 for n in free) - min(n or 0 for n in free) < 4 * MIB, free
    finally:
        opened.close()
        assert command.end() == 0, command.log


def run_on_two_devices(folder: Path, models: Path, n: int, seed: int, kill_s: float | None = None) -> None:
    """Three models share two devices with room for one each. An answer may come from either device. Every
    `kill_s` seconds, an engine is killed, which may be loading or answering."""
    paths = lay_out(folder, models)
    known = known_requests(paths, ["0", "1"], seed, n=20)
    command = Command(
        "--models-dir", str(folder), "--models-devices", "0,1", "--models-memory", "7", "--pooling", "mean",
        "--metrics", "--log-disable", *FLAGS, devices=None,
    )  # fmt: skip
    seen: list[dict[str, Any]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            seen.extend(command.address.get("/models")[1]["data"])

    killed: list[int] = []
    load = Load(command.address.port, known, n, seed, clients=24)

    def kill() -> None:
        # A request fails if three engines in turn are lost before it gets a token. So before the next kill,
        # as many requests must be answered as there are clients. On a busy machine this takes long.
        draw, n_before = random.Random(seed), 0
        while not ended.wait(kill_s):
            if (n := sum(load.answered.values())) - n_before >= load.clients:
                n_before = n
                with suppress(OSError, IndexError):
                    os.kill(draw.choice(engines_of(command)), signal.SIGKILL)
                    killed.append(n)

    try:
        base = resident_nbytes(command.process.pid)
        watcher = threading.Thread(target=watch)
        watcher.start()
        killer = threading.Thread(target=kill)
        if kill_s is not None:
            killer.start()
        load.run()
        ended.set()
        watcher.join()
        if kill_s is not None:
            killer.join()
        metrics = command.address.get("/metrics")[1]
        counts = {
            name: int(re.findall(rf"{name}_total (\d+)", metrics)[-1]) for name in ("loads", "evictions")
        }
        loaded = resident_nbytes(command.process.pid)
        for name, state in state_of(command).items():
            if state in ("loaded", "loading"):  # An engine that was killed is loading again.
                assert command.address.post("/models/unload", {"model": name})[0] == 200
        left = engines_of(command)
        after = resident_nbytes(command.process.pid)
        sizes = {"base": base // MIB, "loaded": loaded // MIB, "after": after // MIB}
        print(
            json.dumps(
                {
                    "answered": load.answered,
                    "wrong": len(load.wrong),
                    **counts,
                    "kills": len(killed),
                    "MiB": sizes,
                }
            )
        )
        assert not load.wrong, load.wrong[:3]
        assert kill_s is None or killed
        assert not left, state_of(command)
        assert sum(load.answered.values()) == n and counts["evictions"] > 0
        assert after - base < (loaded - base) / 2
        devices = {model["devices"][0] for model in seen if model.get("devices")}
        assert len(devices) == 2, devices
    finally:
        ended.set()
        assert command.end() == 0, command.log


@pytest.mark.wide
@pytest.mark.timeout(3600)
@two_drivers
def test_random_requests_while_engines_are_killed(tmp_path: Path, models: Path) -> None:
    run_on_two_devices(tmp_path, models, n=150, seed=2, kill_s=20.0)


@pytest.mark.wide
@pytest.mark.timeout(7200)
@two_drivers
def test_a_thousand_random_requests_on_two_devices(tmp_path: Path, models: Path) -> None:
    run_on_two_devices(tmp_path, models, n=1000, seed=3)
