"""Clients download models from a fake Hub, follow the changes, and delete models."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from fake_hub import FILES, SECRET, Hub, fake_hub
from pools import FakeMachine
from random_requests import tree_of
from serving import Address, front_served, until
from tiny_vision import write_projector

from vkbackend.tools.cli import parse
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.serve import entry_of
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.router import downloads
from vkbackend.tools.server.router.router import Router
from vkbackend.tools.server.router.start import listing_of

pytestmark = [pytest.mark.no_vulkan, pytest.mark.usefixtures("no_collection")]

NAME = "me/demo:Q8_0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of --models-dir. The Hub is fake, and its cache is empty."""
    with fake_hub(tmp_path / "hf") as environment:
        for name in ("HF_ENDPOINT", "HF_HOME", "HF_TOKEN", "HF_HUB_DISABLE_XET", "NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, environment[name])
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "own.gguf").symlink_to(demo_model())
        yield tmp_path / "models"


@contextmanager
def routed(*line: str) -> Iterator[Address]:
    args = parse(["serve", *line], raises=True)[0]
    relist = listing_of(args, entry_of)
    pool = FakeMachine().pool(relist()[0])
    config = Config("models", "models", logs_requests=False)
    with front_served(Router(config, pool, relist, False, args.models_download)) as address:
        until(lambda: address.get("/health")[0] == 200)
        yield address


def models_of(address: Address) -> list[dict[str, Any]]:
    return address.get("/models")[1]["data"]  # type: ignore[no-any-return]


def names(address: Address) -> dict[str, Any]:
    return {row["id"]: (row["status"]["value"], row["can_remove"]) for row in models_of(address)}


class Followed:
    def __init__(self, address: Address) -> None:
        self.events: list[dict[str, Any]] = []
        self._sock = address.connect()
        self._sock.sendall(b"GET /models/sse HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = b""
        while b": ping" not in head:
            head += self._sock.recv(1 << 16)
        assert head.startswith(b"HTTP/1.1 200"), head
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self._sock.makefile("rb") as lines:
            self.events += (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))

    def kinds(self, model: str) -> list[str]:
        return [
            event["data"]["status"] if event["event"] == "model_status" else event["event"]
            for event in self.events
            if event["model"] == model
        ]

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def test_a_model_is_downloaded_used_and_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's projector is downloaded and deleted with the model."""
    projector = write_projector(folder.parent / "mmproj.gguf", 64).read_bytes()
    monkeypatch.setitem(FILES, "mmproj-F16.gguf", projector)
    with routed("--models-dir", str(folder), "--models-download") as address:
        followed = Followed(address)
        assert address.post("/models", {"model": NAME})[1] == {"success": True}
        until(lambda: names(address).get(NAME) == ("unloaded", True))
        inputs = {row["id"]: row["architecture"]["input_modalities"] for row in models_of(address)}
        assert inputs == {"own": ["text"], NAME: ["text", "image"]}
        assert address.post("/models", {"model": NAME})[1]["error"]["code"] == "model_exists"
        body = {"model": NAME, "prompt": "p", "max_tokens": 2}
        assert address.post("/v1/completions", body)[1]["choices"][0]["text"] == "mm"
        until(lambda: "loaded" in followed.kinds(NAME))
        refused = address.request("DELETE", "/models?model=own")
        assert (refused[0], refused[1]["error"]["code"]) == (400, "model_not_removable")
        assert address.request("DELETE", "/models?model=x")[0] == 404
        assert address.request("DELETE", f"/models?model={NAME}")[1] == {"success": True}
        assert names(address) == {"own": ("unloaded", False)} and (folder / "own.gguf").exists()
        assert not list((folder.parent / "hf" / "hub").glob("models--*"))
        until(lambda: "model_remove" in followed.kinds(NAME))
        passing = "download_progress", "loading", "unloading", "unloaded"  # these may be too short to be seen
        kinds = [kind for kind in followed.kinds(NAME) if kind not in passing]
        assert kinds == ["download_finished", "loaded", "model_remove"]
        assert followed.kinds("*") == ["models_reload"]
        followed.close()


def test_downloads_are_off_by_default(folder: Path) -> None:
    with routed("--models-dir", str(folder)) as address:
        assert address.post("/models", {"model": NAME})[0] == 501
        assert address.request("DELETE", "/models?model=own")[0] == 501
        assert names(address) == {"own": ("unloaded", False)}


@pytest.mark.wide
def test_refused_and_cancelled_downloads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "gate", threading.Event())
    with routed("--models-download") as address:
        followed = Followed(address)
        for name, message in (
            ("demo", "expected user/repo"), ("me/nothing", "does not exist or is private"),
            ("me/demo:Q2_K", "has no model 'Q2_K'"), ("", "repository"), ("../x/y", "repository"),
        ):  # fmt: skip
            status, answer, _ = address.post("/models", {"model": name})
            assert status == 400 and message in answer["error"]["message"], answer
            assert SECRET not in str(answer) and str(folder.parent) not in str(answer)
        assert address.post("/models", {})[0] == 400
        assert address.post("/models", {"model": NAME})[0] == 200
        assert address.post("/models", {"model": NAME})[1]["error"]["code"] == "model_downloading"
        (row,) = address.get("/models")[1]["data"]
        assert (
            row["status"]["value"] == "downloading" and row["status"]["progress"]["demo-Q8_0.gguf"]["total"]
        )
        until(lambda: "download_progress" in followed.kinds(NAME))
        assert address.post("/models/unload", {"model": NAME})[1] == {"success": True}
        until(lambda: "download_failed" in followed.kinds(NAME))
        assert (
            names(address) == {} and address.post("/v1/completions", {"model": NAME, "prompt": "p"})[0] == 404
        )
        Hub.gate.set()
        assert address.post("/models", {"model": NAME})[0] == 200
        until(lambda: names(address).get(NAME) == ("unloaded", True))
        followed.close()


@pytest.mark.wide
def test_downloads_that_stop_or_outlive_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "gate", threading.Event())
    monkeypatch.setattr(downloads, "SILENT_S", 15.0)
    with routed("--models-download") as address:
        followed = Followed(address)
        assert address.post("/models", {"model": NAME})[0] in (200, 503)  # 503 if the process starts slowly.
        until(lambda: "download_failed" in followed.kinds(NAME))
        assert "no bytes arrived" in followed.events[-1]["data"]["message"]
        assert address.post("/models", {"model": NAME})[0] == 200
        followed.close()
        assert fetching()
    until(lambda: not fetching())


def fetching() -> list[int]:
    return [pid for pid in tree_of(os.getpid()) if b"fetching" in Path(f"/proc/{pid}/cmdline").read_bytes()]
