"""Test the endpoints of a server of several models, over HTTP, with models that have no engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pools import FakeMachine, entry
from serving import Address, front_served, until

from vkbackend.errors import DeviceLost, GGUFError, InvalidArgument
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.guard import Guard
from vkbackend.tools.server.limits import Limits
from vkbackend.tools.server.router import catalog
from vkbackend.tools.server.router.router import Router

pytestmark = [pytest.mark.no_vulkan, pytest.mark.usefixtures("no_collection")]


@contextmanager
def routed(
    machine: FakeMachine,
    names: str = "abc",
    *,
    ping_s: float = 15.0,
    keys: tuple[str, ...] = (),
    **settings: Any,
) -> Iterator[Address]:
    entries = [entry(name) for name in names]
    config = Config(
        "models", "models", Guard(keys), Limits(ping_s=ping_s), logs_requests=False, shows_metrics=True
    )
    pool = machine.pool(entries, **settings)
    with front_served(Router(config, pool, lambda: ([*entries, entry("new")], []))) as address:
        until(lambda: address.get("/health")[0] == 200)
        yield address


def statuses(address: Address) -> dict[str, Any]:
    return {model["id"]: model["status"]["value"] for model in address.get("/v1/models")[1]["data"]}


def complete(address: Address, **body: Any) -> tuple[int, Any, dict[str, str]]:
    return address.post("/v1/completions", {"prompt": "p", "max_tokens": 3} | body)


def test_a_request_loads_the_model_that_it_names() -> None:
    with routed(FakeMachine()) as address:
        assert statuses(address) == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
        for name in "abca":
            status, answer, _ = complete(address, model=name)
            assert (status, answer["choices"][0]["text"], answer["model"]) == (200, 3 * name, name)
        assert statuses(address) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        shown = address.get("/models/a")[1]
        assert (
            shown["meta"]["n_ctx"] == 512 and shown["memory"] == {"gpu": 1} and shown["devices"] == ["fake"]
        )
        assert complete(address, model="a:adapter")[0] == 200
        metrics = address.get("/metrics")[1]
        assert "vkbackend:loads_total 4\n" in metrics and "vkbackend:evictions_total 2\n" in metrics
        assert 'vkbackend:requests_total{route="/completions",status="200"} 5' in metrics
        assert "llamacpp:tokens_predicted_total 9\n" in address.get("/metrics?model=a")[1]


def test_names_that_are_missing_or_unknown() -> None:
    with routed(FakeMachine()) as address:
        for body, status, code in (({}, 400, "model_missing"), ({"model": "x"}, 404, "model_not_found")):
            refused = complete(address, **body)
            assert (refused[0], refused[1]["error"]["code"]) == (status, code)
        assert complete(address, model=5)[0] == 400
        assert address.get("/props?model=x")[0] == address.get("/models/x")[0] == 404
        assert address.get("/slots")[0] == 400
    with routed(FakeMachine(), "a") as address:
        assert complete(address)[0] == 200 and complete(address, model="x")[0] == 404


def test_endpoints_of_one_model_take_its_name_from_the_query() -> None:
    with routed(FakeMachine()) as address:
        props = address.get("/props")[1]
        assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 4, True)
        refused = address.get("/props?model=a&autoload=false")
        assert (refused[0], refused[1]["error"]["code"]) == (400, "model_not_loaded")
        assert address.get("/props?model=a")[1]["model_alias"] == "a"
        assert len(address.get("/slots?model=a")[1]) == 2
        assert address.get("/stats?model=a")[1]["devices"][0]["name"] == "fake"
        assert address.get("/lora-adapters?model=a")[1] == []
        assert address.post("/tokenize?model=b", {"content": "x"})[1]["tokens"] == [120]
        assert address.post("/tokenize", {"content": "x", "model": "b"})[1]["tokens"] == [120]
        assert address.post("/slots/0?model=a&action=erase", None)[0] == 501
        assert address.post("/models", {})[0] == address.request("DELETE", "/models?model=a")[0] == 501


def test_loading_and_unloading_by_name() -> None:
    with routed(FakeMachine()) as address:
        assert address.post("/models/load", {"model": "a"})[1] == {"success": True}
        until(lambda: statuses(address)["a"] == "loaded")
        assert address.post("/models/load", {"model": "a"})[0] == 400
        assert address.post("/models/unload", {"model": "a"})[1] == {"success": True}
        assert statuses(address)["a"] == "unloaded"
        assert address.post("/models/unload", {"model": "a"})[0] == 400
        for path in ("/models/load", "/models/unload"):
            assert address.post(path, {"model": "x"})[0] == 404 and address.post(path, {})[0] == 400


def test_a_model_that_cannot_be_loaded_shows_why() -> None:
    machine = FakeMachine(errors={"a": [GGUFError("/models/a.gguf is cut")]})
    with routed(machine) as address:
        status, answer, headers = complete(address, model="a")
        assert status == 503 and headers["retry-after"] == "1"
        assert answer["error"]["message"] == "a cannot be loaded: a.gguf is cut"
        state = address.get("/models/a")[1]["status"]
        assert (state["value"], state["failed"], state["message"]) == ("unloaded", True, "a.gguf is cut")
        assert complete(address, model="b")[0] == 200


def test_streams_get_comments_while_their_model_loads() -> None:
    machine = FakeMachine(shut={"a"})
    with routed(machine, ping_s=0.05) as address:
        sock = address.send("/v1/completions", {"prompt": "p", "max_tokens": 2, "model": "a", "stream": True})
        data = b""
        while b": ping" not in data:
            data += sock.recv(65536)
        assert b"200 OK" in data and b"data:" not in data and statuses(address)["a"] == "loading"
        machine.gate.set()
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(65536)
        assert data.count(b'"text":"a"') == 2 and b"data: [DONE]" in data
        sock.close()


def test_a_stream_whose_model_cannot_be_loaded() -> None:
    """An error before the first comment sets the status, and a later error is an event."""
    body = {"messages": [{"role": "user", "content": "p"}], "max_tokens": 2, "model": "a", "stream": True}
    machine = FakeMachine(errors={"a": [GGUFError("it is cut")]})
    with routed(machine) as address:
        assert address.post("/v1/messages", body)[0] == 503
    machine = FakeMachine(shut={"a"}, errors={"a": [GGUFError("it is cut")]})
    with routed(machine, ping_s=0.05) as address:
        sock = address.send("/v1/messages", body)
        data = sock.recv(65536)
        machine.gate.set()
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(65536)
        sock.close()
        assert b"event: error\ndata: " in data and b"a cannot be loaded: it is cut" in data


def test_a_client_that_leaves_while_its_model_loads() -> None:
    machine = FakeMachine(shut={"a"})
    with routed(machine) as address:
        router: Any = address.server and address.server.service
        tenant = router.pool.tenants["a"]
        for streams in (False, True):
            sock = address.send("/v1/completions", {"prompt": "p", "model": "a", "stream": streams})
            until(lambda: bool(tenant.waiters))
            sock.close()
            until(lambda: not tenant.waiters)
        machine.gate.set()
        until(lambda: statuses(address)["a"] == "loaded")
        assert tenant.n_active == 0


def test_a_client_that_leaves_a_stream_ends_its_request() -> None:
    machine = FakeMachine()
    with routed(machine) as address:
        router: Any = address.server and address.server.service
        complete(address, model="a")
        machine.models["a"][0].pause_s = 0.01
        sock = address.send("/v1/completions", {"prompt": "p", "model": "a", "stream": True})
        sock.recv(65536)
        assert router.pool.tenants["a"].n_active == 1
        sock.close()
        until(lambda: router.pool.tenants["a"].n_active == 0)


def test_a_request_to_a_model_that_has_just_died() -> None:
    """The request arrives before the server has noticed the loss, and gets the next engine's answer."""
    machine = FakeMachine()
    with routed(machine) as address:
        complete(address, model="a")
        lost = machine.models["a"][0]

        def tokenize(*given: Any, **options: Any) -> list[int]:
            lost.lost = DeviceLost("the engine's process ended")
            raise lost.lost

        lost.tokenize = tokenize  # type: ignore[method-assign]
        assert complete(address, model="a")[1]["choices"][0]["text"] == "aaa"
        assert len(machine.models["a"]) == 2


def test_a_new_list() -> None:
    with routed(FakeMachine()) as address:
        complete(address, model="a")
        assert [model["id"] for model in address.get("/models?reload=1")[1]["data"]] == ["a", "b", "c", "new"]
        assert statuses(address)["a"] == "loaded" and complete(address, model="new")[0] == 200


@pytest.mark.parametrize("error", [InvalidArgument("--models-dir '/secret'"), OSError(5, "I/O error")])
def test_a_list_that_cannot_be_read(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The list does not change, and clients do not see the server's folders."""
    with routed(FakeMachine()) as address:
        assert address.server is not None
        complete(address, model="a")

        def fails() -> Any:
            raise error

        address.server.service.relist = fails
        status, answer, headers = address.get("/models?reload=1")
        assert status == 503 and "secret" not in str(answer) and "retry-after" in headers
        assert str(error) in caplog.text
        assert statuses(address) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}


def test_a_folder_that_blocks_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one thread waits for the folder, even if clients request the list often."""
    monkeypatch.setattr(catalog, "RELIST_S", 0.1)
    back, n_read = threading.Event(), []
    with routed(FakeMachine()) as address:
        assert address.server is not None
        service = address.server.service
        relist = service.relist

        def blocks() -> Any:
            n_read.append(1)
            assert back.wait(30)
            return relist()

        service.relist = blocks
        assert [address.get("/models?reload=1")[0] for _ in range(3)] == [503, 503, 503]
        assert len(n_read) == 1 and complete(address, model="a")[0] == 200
        back.set()
        until(lambda: address.get("/models?reload=1")[0] == 200)
        assert "new" in statuses(address) and len(n_read) == 2


def test_keys_guard_all_but_health() -> None:
    with routed(FakeMachine(), keys=("secret",)) as address:
        assert address.post("/models/load", {"model": "a"})[0] == address.get("/models")[0] == 401
        assert address.get("/models", authorization="Bearer secret")[0] == 200


def test_many_clients_of_more_models_than_fit() -> None:
    machine, wrong = FakeMachine(), list[Any]()

    def ask(i: int) -> None:
        name = "abcde"[i % 5]
        if i % 3:
            status, answer, _ = complete(address, model=name, max_tokens=5)
            text = answer["choices"][0]["text"] if status == 200 else answer
        else:
            body = {"prompt": "p", "max_tokens": 5, "model": name, "stream": True}
            events = address.events("/v1/completions", body)
            text = "".join(event["choices"][0]["text"] for event in events if event != "[DONE]")
        if text != 5 * name:
            wrong.append((name, text))

    with routed(machine, "abcde", most=2, turn_s=0.0) as address:
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and machine.most_held == {"gpu": 2}
        json.dumps(statuses(address))
