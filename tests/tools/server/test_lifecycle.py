from __future__ import annotations

import json
import re
import socket
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from serving import FakeModel, served, until

from vkbackend.errors import DeviceLost, GGUFError
from vkbackend.meta.load import Progress
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.limits import Limits

pytestmark = pytest.mark.no_vulkan


def config(**limits: float) -> Config:
    return Config("fake.gguf", "fake", limits=Limits(**limits), logs_requests=False, shows_metrics=True)  # type: ignore[arg-type]


def test_503_with_progress_while_loading() -> None:
    half, go = threading.Event(), threading.Event()

    def open_(progress: Progress) -> FakeModel:
        progress(50, 100)
        half.set()
        assert go.wait(30)
        return FakeModel()

    with served(None, config(), open_) as address:
        half.wait(30)
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/completions")):
            status, answer, headers = address.request(
                method, path, {"prompt": "a"} if method == "POST" else None
            )
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert answer["error"]["progress"] == 0.5 and answer["error"]["state"] == "loading"
        assert "vkbackend:ready 0" in address.get("/metrics")[1]
        go.set()
        until(lambda: address.get("/health")[0] == 200)


def test_a_model_that_cannot_be_opened_ends_the_server() -> None:
    def open_(progress: Progress) -> FakeModel:
        raise GGUFError("no such file")

    with served(None, config(), open_) as address:
        server = address.server
        assert server is not None
        until(lambda: server.failed is not None and server.should_exit)
        assert isinstance(server.failed, GGUFError)


def read_to_end(sock: socket.socket) -> list[bytes]:
    pieces = [sock.recv(65536)]
    while not pieces[-1].endswith(b"0\r\n\r\n"):
        pieces.append(sock.recv(65536))
    sock.close()
    lines = b"".join(pieces).splitlines()
    return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


def test_a_lost_model_is_opened_again() -> None:
    """If the model is lost, its streams continue after their last token. Other requests get 503, and the
    server continues to run."""
    go = threading.Event()
    models = [FakeModel(pause_s=0.01), FakeModel()]
    first, opened = models[0], []

    def open_(progress: Progress) -> FakeModel:
        if opened:
            assert go.wait(30)
        opened.append(models[len(opened)])
        return opened[-1]

    with served(None, config(), open_) as address:
        until(lambda: address.get("/health")[0] == 200)
        stream = address.send("/completions", {"prompt": "a", "max_tokens": 30, "stream": True})
        until(lambda: first.active == 1)
        first.fails = lambda n: DeviceLost("the engine's process ended (exit code -9)") if n > 9 else None
        until(lambda: address.get("/health")[0] == 503)
        status, answer, headers = address.post("/completions", {"prompt": "a"})
        assert status == 503 and answer["error"]["state"] == "restarting" and "retry-after" in headers
        go.set()
        *events, done = read_to_end(stream)
        assert done == b"[DONE]" and "".join(json.loads(event)["content"] for event in events) == 30 * "x"
        until(lambda: address.get("/health")[0] == 200)
        assert address.post("/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert "vkbackend:restarts_total 1" in address.get("/metrics")[1]


def test_an_answer_that_ends_each_engine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines are lost at the same token. The stream ends with an error event."""
    models: list[FakeModel] = []

    def open_(progress: Progress) -> FakeModel:
        models.append(FakeModel(fails=lambda n: DeviceLost("the engine's process ended") if n == 5 else None))
        return models[-1]

    with served(None, config(), open_) as address:
        until(lambda: address.get("/health")[0] == 200)
        stream = address.send("/completions", {"prompt": "a", "max_tokens": 30, "stream": True})
        *events, last = read_to_end(stream)
        assert "".join(json.loads(event)["content"] for event in events) == 5 * "x" and len(models) >= 3
        error = json.loads(last)["error"]
        assert error["type"] == "unavailable_error" and "being reopened" in error["message"]


@dataclass
class FakeJob:
    texts: tuple[str, ...] = ("a",)
    n_tokens: int = 1


def test_embeddings_are_computed_again_by_the_next_engine() -> None:
    models: list[FakeModel] = []

    class Embedder(FakeModel):
        def embed_job(self, *given: Any, **options: Any) -> FakeJob:
            return FakeJob()

        async def arun(self, job: FakeJob) -> np.ndarray:
            if self is models[0]:
                self.lost = DeviceLost("the engine's process ended")
                raise self.lost
            return np.ones(2, np.float32)

    def open_(progress: Progress) -> FakeModel:
        models.append(Embedder())
        return models[-1]

    with served(None, config(), open_) as address:
        until(lambda: address.get("/health")[0] == 200)
        answer = address.post("/v1/embeddings", {"input": "a"})[1]
        assert answer["data"][0]["embedding"] == [1.0, 1.0] and len(models) == 2


def test_a_model_lost_while_idle_is_opened_again() -> None:
    """After a request gets 503, the model is opened again, even if the lost model is still closing."""
    go = threading.Event()

    class Closing(FakeModel):
        def close(self) -> None:
            assert go.wait(30)

    models: list[FakeModel] = []

    def open_(progress: Progress) -> FakeModel:
        models.append(FakeModel() if models else Closing())
        return models[-1]

    with served(None, config(), open_) as address:
        until(lambda: address.get("/health")[0] == 200)
        models[0].lost = DeviceLost("gone")
        until(lambda: address.get("/health")[0] == 503)
        assert address.get("/health")[1]["error"]["state"] == "restarting"
        go.set()
        until(lambda: len(models) == 2)
        until(lambda: address.get("/health")[0] == 200)


def test_scales_of_adapters_remain_when_the_model_is_opened_again() -> None:
    texts = {"name": "a", "path": "a.gguf", "task_name": "", "prompt_prefix": "", "invocation_tokens": []}
    models: list[FakeModel] = []

    def open_(progress: Progress) -> FakeModel:
        models.append(FakeModel(adapters=({"id": 0, "scale": 1.0, **texts},)))
        return models[-1]

    with served(None, config(), open_) as address:
        until(lambda: address.get("/health")[0] == 200)
        for scale in (0.25, 0.0):
            assert address.post("/lora-adapters", [{"id": 0, "scale": scale}])[0] == 200
            n = len(models)
            models[-1].lost = DeviceLost("gone")
            until(lambda n=n: len(models) > n)  # type: ignore[misc]
            until(lambda: address.get("/health")[0] == 200)
            assert [row["scale"] for row in address.get("/lora-adapters")[1]] == [scale]


@pytest.mark.parametrize(("lasted_s", "waits"), [(0.0, ["0.2", "0.2"]), (60.0, ["0.2", "0.5"])])
def test_the_wait_restarts_after_a_model_has_lasted(
    lasted_s: float, waits: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait before opening the model again doubles each time the model fails early."""
    monkeypatch.setattr("vkbackend.tools.server.model.LASTED_S", lasted_s)
    logged: list[str] = []

    def open_(progress: Progress) -> FakeModel:
        logged[:] = re.findall(r"reopening it in (\S+) s", caplog.text)
        return FakeModel(lost=DeviceLost("gone") if len(logged) < len(waits) else None)

    with served(None, config(), open_) as address:
        until(lambda: len(logged) == len(waits))
        until(lambda: address.get("/health")[0] == 200)
    assert logged == waits


def test_an_error_of_one_request_restarts_nothing() -> None:
    model = FakeModel()
    with served(model, config()) as address:
        assert address.post("/completions", {"prompt": "a", "top_p": -1})[0] == 400
        model.fails = lambda n: ValueError("a bug")
        assert address.post("/completions", {"prompt": "a"})[0] == 500
        model.fails = lambda n: None
        assert address.post("/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert address.server is not None and address.server.service.model.n_restarts == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_running_answers_finish_after_a_shutdown(streamed: bool) -> None:
    model = FakeModel(pause_s=0.02)
    with served(model, config()) as address:
        sock = address.send("/completions", {"prompt": "a", "max_tokens": 20, "stream": streamed})
        until(lambda: model.active == 1)
        assert address.server is not None
        address.server.should_exit = True
        pieces = []
        while piece := sock.recv(65536):
            pieces.append(piece)
        text = b"".join(pieces)
        assert text.startswith(b"HTTP/1.1 200 ")
        assert (b"[DONE]" in text) if streamed else (b'"completion_tokens":20' in text)


def test_a_shutdown_has_a_time_limit() -> None:

    class Closing(FakeModel):
        def close(self) -> None:
            self.fails = lambda n: DeviceLost("closed")

    model = Closing(pause_s=0.01, n_ctx=1 << 20)
    with served(model, config(shutdown_s=0.3)) as address:
        sock = address.send("/completions", {"prompt": "a", "stream": True})
        until(lambda: model.active == 1)
        assert address.server is not None
        address.server.should_exit = True
        pieces = []
        while piece := sock.recv(65536):
            pieces.append(piece)
        last = [line for line in b"".join(pieces).splitlines() if line.startswith(b"data: ")][-1]
        assert b"the server is shutting down" in last
