from __future__ import annotations

import asyncio
import errno
import http.client
import json
import logging
import resource
import socket
import struct

import pytest
from serving import Address, FakeModel, served, until

from vkbackend.errors import PromptTooLong
from vkbackend.tools.server.body import depth_of
from vkbackend.tools.server.descriptors import LEAST, QuietAccepts, connections_of
from vkbackend.tools.server.failures import ANTHROPIC
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.limits import Limits

pytestmark = pytest.mark.no_vulkan


def config(**limits: float) -> Config:
    return Config("fake.gguf", "fake", limits=Limits(**limits), logs_requests=False, shows_metrics=True)  # type: ignore[arg-type]


def answer_of(sock: socket.socket) -> bytes:
    pieces = []
    while piece := sock.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture(scope="module")
def plain() -> object:
    with served(FakeModel(), config()) as address:
        yield address


# ---- file descriptors ----


def test_connections_that_the_limit_of_files_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = []
    for limit in (resource.RLIM_INFINITY, 1 << 20, 300, 8):
        monkeypatch.setattr(resource, "getrlimit", lambda what, limit=limit: (limit, limit))
        numbers.append(connections_of(512))
    assert numbers[:2] == [512, 512] and numbers[2] < 300 - 32 and numbers[3] == LEAST
    assert [record.args[1] for record in caplog.records] == [300, 8]  # type: ignore[index]


def test_failed_accepts_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loop, handler = asyncio.new_event_loop(), QuietAccepts()
    for _ in range(3):
        handler(loop, {"message": "m", "exception": OSError(errno.EMFILE, "Too many"), "socket": None})
    assert [record.name for record in caplog.records] == ["vkbackend.serve"]
    handler(loop, {"message": "m", "exception": ValueError("other")})
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    loop.close()


# ---- sizes ----


def test_body_of_too_many_bytes(plain: Address) -> None:
    body = b'{"content":"' + b"x" * (8 << 20) + b'"}'
    status, answer, _ = plain.post("/tokenize", body)
    assert status == 413 and "8 MiB" in answer["error"]["message"]
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with plain.connect() as sock:  # without Content-Length, the server counts the received bytes
        sock.sendall(head)
        chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            for _ in range(64):
                sock.sendall(chunk)


def test_body_just_small_enough(plain: Address) -> None:
    text = "x" * ((8 << 20) - 14)
    status, answer, _ = plain.post("/detokenize", b'{"tokens":"' + text.encode()[:-1] + b'"}')
    assert status == 400 and answer["error"]["param"] == "tokens"


@pytest.mark.parametrize("deep", [b"[" * 65 + b"]" * 65, b'{"a":' * 65 + b"1" + b"}" * 65])
def test_deep_json(plain: Address, deep: bytes) -> None:
    status, answer, _ = plain.post("/tokenize", b'{"content":"a","x":' + deep + b"}")
    assert status == 400 and "64 levels" in answer["error"]["message"]


def test_depth_does_not_count_strings() -> None:
    assert depth_of(b'{"a":"[[[[{{{{","b":"\\"[[["}') == 1
    assert depth_of(b"[[1],[2,[3]]]") == 3
    assert depth_of(b'{"a":"' + b"[" * 1000 + b'"}') == 1
    assert depth_of(b"[" * 100_000) == 100_000


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b'"a"', b"{", b'{"a":}', b"\xff", b"null", b'{"a":NaN}'])
def test_bodies_that_are_not_objects(plain: Address, body: bytes) -> None:
    status, answer, _ = plain.post("/tokenize", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("n", [1, 100])
def test_headers_of_too_many_bytes(plain: Address, n: int) -> None:
    line = b"X-Long: " + b"y" * (40_000 // n) + b"\r\n"
    with plain.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + n * line + b"\r\n")
        assert answer_of(sock).startswith(b"HTTP/1.1 431 ")


def test_endless_headers(plain: Address) -> None:
    with plain.connect() as sock, pytest.raises(OSError, match=r"reset|Broken pipe"):
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        for _ in range(10_000):
            sock.sendall(b"y" * 1024)


# ---- times ----


def test_slow_headers_and_bodies() -> None:
    with served(FakeModel(), config(header_s=0.2, body_s=0.2)) as address:
        with address.connect() as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
            assert answer_of(sock).startswith(b"HTTP/1.1 408 ")
        with address.connect() as sock:
            assert answer_of(sock).startswith(b"HTTP/1.1 408 ")  # this client sends no bytes
        with address.connect() as sock:
            sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert answer_of(sock).startswith(b"HTTP/1.1 408 ")


def test_a_connection_of_many_requests_may_last_long() -> None:
    with served(FakeModel(pause_s=0.05), config(header_s=0.2)) as address:
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=30)
        for _ in range(6):
            connection.request("POST", "/completions", b'{"prompt":"a","max_tokens":2}')
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
            assert not answer.will_close
        connection.close()


def test_comments_are_sent_during_silence() -> None:
    with served(FakeModel(pause_s=0.5), config(ping_s=0.1)) as address:
        status, text, _ = address.post("/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
        assert status == 200 and text.startswith(": ping\n\n") and text.count(": ping\n\n") >= 4
        assert text.count('"text":"x"') == 2
        # a comment may follow the last event
        assert text.replace(": ping\n\n", "").endswith("data: [DONE]\n\n")


def test_a_client_that_does_not_read_is_cancelled() -> None:
    model = FakeModel(n_ctx=1 << 20, letter="x")
    with served(model, config(drain_s=0.2)) as address:
        sock = address.connect()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": "a", "max_tokens": 900_000, "stream": True}).encode()
        sock.sendall(
            b"POST /completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        until(lambda: model.begun == 1)
        until(lambda: model.active == 0)
        sock.close()


# ---- counts ----


def test_queue_then_429() -> None:
    model = FakeModel(pause_s=60, n_slots=2)
    with served(model, config(queue=1, shutdown_s=0)) as address:
        waiting = [address.send("/completions", {"prompt": "a", "stream": i == 0}) for i in range(3)]
        until(lambda: model.begun == 3)
        status, answer, headers = address.post("/completions", {"prompt": "a"})
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        assert 1 <= int(headers["retry-after"]) <= 60
        waiting[0].close()
        until(lambda: model.active == 2)
        waiting.append(address.send("/completions", {"prompt": "a"}))
        until(lambda: model.begun == 4)
        for sock in waiting:
            sock.close()
        until(lambda: model.active == 0)
        assert address.server is not None and address.server.service.admission.n_sequences == 0


def test_streams() -> None:
    model = FakeModel(pause_s=60, n_slots=2)
    with served(model, config(streams=1, shutdown_s=0)) as address:
        with address.send("/completions", {"prompt": "a", "stream": True}):
            until(lambda: model.begun == 1)
            assert address.post("/completions", {"prompt": "a", "stream": True})[0] == 429
        until(lambda: model.active == 0)


def test_connections() -> None:
    with served(FakeModel(), config(connections=3)) as address:
        held = [address.connect() for _ in range(3)]
        with address.connect() as sock:
            assert answer_of(sock).startswith(b"HTTP/1.1 503 ")
        for sock in held:
            sock.close()
        until(lambda: address.get("/health")[0] == 200)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_a_disconnected_client_frees_its_slot(streamed: bool, resets: bool) -> None:
    model = FakeModel(pause_s=0.01, n_ctx=1 << 20)
    with served(model) as address:
        sock = address.send("/completions", {"prompt": "a", "stream": streamed})
        until(lambda: model.active == 1)
        if resets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        until(lambda: model.active == 0)
        metrics = address.get("/metrics")[1]
        assert "vkbackend:requests_cancelled_total 1" in metrics


def test_a_failed_sequence_ends_its_batch() -> None:
    model = FakeModel(pause_s=0.01, n_ctx=1 << 20, n_slots=3)
    model.fails = lambda n: ValueError("a secret text") if n == 3 and model.begun == 3 else None
    with served(model) as address:
        status, answer, _ = address.post("/completions", {"prompt": ["a", "b", "c"]})
        assert status == 500 and "secret" not in json.dumps(answer)
        until(lambda: model.active == 0)


# ---- values ----


WRONG = [
    ("n", 3), ("n", 0), ("n", 1 << 62), ("n", True), ("n", 1.5), ("n", "1"), ("max_tokens", -2),
    ("max_tokens", 1 << 31), ("max_tokens", "a"), ("temperature", "hot"), ("top_k", 1.5), ("top_k", 1 << 63),
    ("top_p", 1.5), ("seed", -2), ("seed", 1 << 64), ("logprobs", 21), ("logprobs", -1), ("stop", [""]),
    ("stop", ["a"] * 33), ("stop", "a" * 1025), ("stop", 1), ("logit_bias", {"a": "b"}), ("logit_bias", 1),
    ("logit_bias", [[1]]), ("logit_bias", {str(i): 0 for i in range(1025)}), ("logit_bias", {"-1": []}),
    ("stream", 1), ("echo", "yes"), ("suffix", "end"), ("best_of", 2), ("samplers", ["no such"]),
    ("samplers", ["top_k"] * 33), ("dry_sequence_breakers", ["a"] * 33), ("stream_options", 1),
    ("prompt", None), ("prompt", 1), ("prompt", {}), ("prompt", []), ("prompt", [-1, "a", None]),
    ("prompt", ["a"] * 129), ("prompt", [1] * 513),
    ("logit_bias", {"a" * 9000: 0, "b" * 9000: 0}), ("prompt", [[1.5]]),
    ("repeat_last_n", -2), ("mirostat", 3), ("prompt", [True]),
    ("prompt", {"prompt_string": "a", "multimodal_data": ["AA=="]}),
]  # fmt: skip


@pytest.mark.parametrize("name,value", WRONG)
def test_wrong_values(plain: Address, name: str, value: object) -> None:
    status, answer, _ = plain.post("/v1/completions", {"prompt": "a", "max_tokens": 1} | {name: value})
    assert status == 400, answer
    error = answer["error"]
    is_long = error["code"] == "context_length_exceeded"
    assert error["type"] == ("exceed_context_size_error" if is_long else "invalid_request_error")
    assert error["message"]
    assert name in (error["param"] or "") or name == "prompt" or name in error["message"]


def test_unknown_fields_are_ignored(plain: Address) -> None:
    body = {"prompt": "a", "max_tokens": 2, "user": "me", "no_such_field": {"a": 1}, "top_k": None}
    assert plain.post("/completions", body)[1]["choices"][0]["text"] == "xx"


def test_prompt_longer_than_the_context(plain: Address) -> None:
    status, answer, _ = plain.post("/completions", {"prompt": "a" * 513})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["n_prompt_tokens"] == 513
    # LiteLLM and Claude Code recognise errors by these messages.
    assert "exceeds the available context size" in answer["error"]["message"]
    error = ANTHROPIC.body(PromptTooLong("...", n_tokens=513, n_ctx=512))["error"]
    assert error["message"] == "prompt is too long: 513 tokens > 512 maximum"
